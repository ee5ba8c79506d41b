"""engine/vllm/rendering/structured_outputs.py"""

from __future__ import annotations

import inspect
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import model_folder

pytestmark = pytest.mark.vllm


def processor() -> Any:
    """A vLLM input processor, as far as validation goes."""
    from transformers import AutoTokenizer
    from vllm.v1.engine.input_processor import InputProcessor

    from kvferry.engine.vllm.rendering.structured_outputs import structured_outputs_config

    made = InputProcessor.__new__(InputProcessor)
    made.model_config = SimpleNamespace(is_diffusion=False)
    made.structured_outputs_config = structured_outputs_config()
    made.renderer = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(str(model_folder.resolve("default"))))
    return made


class TestStructuredOutputs:
    async def test_validation_runs_in_a_thread_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        from kvferry.engine.vllm.rendering.structured_outputs import StructuredOutputValidator

        threads: list[str] = []
        validate = SamplingParams._validate_structured_outputs

        def recorded(*arguments: Any) -> None:
            threads.append(threading.current_thread().name)
            validate(*arguments)

        monkeypatch.setattr(SamplingParams, "_validate_structured_outputs", recorded)
        llm = SimpleNamespace(input_processor=processor())
        validator = StructuredOutputValidator(llm)
        params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"]))
        await validator.validate(params)
        assert threads == ["structured-outputs_0"]
        assert params.structured_outputs is not None
        assert params.structured_outputs._backend == "guidance"
        assert llm.input_processor.structured_outputs_config is None
        params._validate_structured_outputs(llm.input_processor.model_config, None, object())
        await validator.validate(SamplingParams())
        validator.close()

    def test_vllm_still_has_what_compiles_by_xgrammar_where_it_reads_a_request(self) -> None:
        from vllm.entrypoints.generate.base import protocol
        from vllm.parser import abstract_parser

        source = inspect.getsource(abstract_parser)
        assert "if not _xgrammar_supports(structured_outputs):" in source
        assert source.count("validate_xgrammar_grammar(") == 1
        source = inspect.getsource(protocol)
        assert source.count("validate_xgrammar_grammar(") == 1
        assert source.count("validate_structural_tag_payload(") == 3, "itself and its two callers"

    def test_the_processor_reads_the_configuration_for_each_request(self) -> None:
        from vllm.v1.engine.input_processor import InputProcessor

        assert "self.structured_outputs_config," in inspect.getsource(InputProcessor._validate_params)

    def test_an_engine_has_one_backend(self) -> None:
        """Why it is not "auto"."""
        from vllm.v1.structured_output import StructuredOutputManager

        assert "if self.backend is None:" in inspect.getsource(StructuredOutputManager.grammar_init)
