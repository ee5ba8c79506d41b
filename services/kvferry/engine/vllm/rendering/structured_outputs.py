"""vLLM's structured outputs: one backend for all requests, and validation off the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from kvferry.engine.deep_threads import DeepThreads

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams


def structured_outputs_config() -> Any:
    """Return the configuration of engines."""
    from vllm.config import StructuredOutputsConfig

    # Not "auto": a vLLM engine compiles every grammar by the backend that its first request chose, so that a later one,
    # validated for another backend, fails or is enforced in part. What llguidance does not enforce it refuses; of 35
    # ordinary schemas xgrammar 0.2 gave answers for 12 that did not fit.
    return StructuredOutputsConfig(backend="guidance")


def use_no_xgrammar() -> None:
    """Keep vLLM from compiling grammars by xgrammar where it reads a request. Idempotent."""
    # That may take minutes, or end the process.
    from vllm.entrypoints.generate.base import protocol
    from vllm.parser import abstract_parser

    # A grammar in EBNF would be parsed by xgrammar too.
    abstract_parser._xgrammar_supports = lambda structured_outputs: structured_outputs.grammar is None
    # `structural_tags.lark_of` looks at what a tag is.
    protocol.validate_structural_tag_payload = lambda payload, *, parameter: None


class StructuredOutputValidator:
    """Runs the validation that vLLM's input processor would run on the event loop.

    A schema that the gateways accept takes up to some hundred milliseconds; the library releases the GIL.
    """

    def __init__(self, llm: Any) -> None:
        processor = llm.input_processor
        self._model_config = processor.model_config
        self._config = processor.structured_outputs_config
        self._tokenizer = processor.tokenizer
        # Without a configuration the processor leaves structured outputs alone.
        processor.structured_outputs_config = None
        self._thread = DeepThreads(1, thread_name_prefix="structured-outputs")

    async def validate(self, params: SamplingParams) -> None:
        """Validate, and write what the engine needs into `params`. Raises VLLMClientError or ValueError."""
        if params.structured_outputs is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._validate, params)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _validate(self, params: SamplingParams) -> None:
        params._validate_structured_outputs(self._model_config, self._config, self._tokenizer)
