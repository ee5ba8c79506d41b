"""vLLM's SamplingParams to kvferry's Sampling and back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from msgspec import structs
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from kvferry.engine.base import Sampling
from kvferry.errors import InvalidRequest

# In SamplingParams.extra_args: how many of the prompt's last tokens belong to the answer.
NUM_GIVEN = "kvferry_num_given"

# Fields with the same name on both sides and, except containers, the same type.
CARRIED = tuple(field.name for field in structs.fields(Sampling) if field.name != "structured_outputs")

# Set by kvferry on the engine's side, or without effect on the answer.
OURS = frozenset(
    {
        "n", "detokenize", "output_kind", "stream_interval", "skip_clone", "flat_logprobs", "extra_args",
        "watermarking", "output_text_buffer_length", "skip_reading_prefix_cache", "routed_experts_prompt_start",
    }
)  # fmt: skip

# Would change the answer and is not carried, so requests with another value than this are refused.
REFUSED: dict[str, Any] = {
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
}


def from_vllm(params: SamplingParams) -> Sampling:
    """Raises InvalidRequest for a parameter that kvferry does not carry."""
    for name, unset in REFUSED.items():
        value = getattr(params, name, unset)
        if value != unset:
            raise InvalidRequest(f"{name} is not supported", param=name)
    values: dict[str, Any] = {}
    for name in CARRIED:
        value = getattr(params, name)
        if name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            value = (value,) if isinstance(value, str) else tuple(value or ())
        elif name == "logit_bias":
            value = dict(value or {})
        values[name] = value
    return Sampling(structured_outputs=_structured_to_json(params.structured_outputs), **values)


def check_allowed_tokens(params: SamplingParams, model_config: Any, renderer: Any) -> None:
    """Raises InvalidRequest where other fields exclude all of `allowed_token_ids`: vLLM would answer with others."""
    params = params.clone()
    params.update_from_generation_config(model_config.try_get_generation_config(), renderer.get_eos_token_id())
    params.update_from_tokenizer(renderer.get_tokenizer())
    excluded = {token_ids[0] for token_ids in params.bad_words_token_ids or () if len(token_ids) == 1}
    left = set(params.allowed_token_ids or ()) - excluded
    if not left:
        raise InvalidRequest("allowed_token_ids: bad_words exclude all of them", param="allowed_token_ids")
    if params.min_tokens and not left - params.all_stop_token_ids:
        raise InvalidRequest(
            "allowed_token_ids: all of them end the answer, which min_tokens does not allow", param="allowed_token_ids"
        )


def to_vllm(sampling: Sampling, *, transfer_params: dict[str, Any] | None, num_given: int = 0) -> SamplingParams:
    """`num_given` of the prompt's tokens belong to the answer. Raises InvalidRequest for values that vLLM refuses."""
    extra_args: dict[str, Any] = {"kv_transfer_params": transfer_params} if transfer_params else {}
    if num_given:
        extra_args[NUM_GIVEN] = num_given
    values: dict[str, Any] = {name: getattr(sampling, name) for name in CARRIED}
    for name in ("stop", "stop_token_ids", "bad_words"):
        values[name] = list(values[name])
    values["allowed_token_ids"] = list(sampling.allowed_token_ids) or None
    values["logit_bias"] = dict(sampling.logit_bias) or None
    try:
        return SamplingParams(
            **values,
            structured_outputs=structured_from_json(sampling.structured_outputs),
            output_kind=RequestOutputKind.DELTA,
            extra_args=extra_args or None,
        )
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def _structured_to_json(params: StructuredOutputsParams | None) -> str:
    if params is None:
        return ""
    values = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(params)
        if not field.name.startswith("_") and getattr(params, field.name) not in (None, False)
    }
    return json.dumps(values)


def structured_from_json(text: str) -> StructuredOutputsParams | None:
    return StructuredOutputsParams(**json.loads(text)) if text else None
