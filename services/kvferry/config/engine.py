"""Section `engine`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from kvferry.arguments import vllm_arguments
from kvferry.arguments.argument_values import why_not_expected
from kvferry.config.section import AbsolutePath, Section

_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
_4_BIT_FLOATS = (
    "4-bit floats are computed by NVIDIA's Blackwell GPUs, not by CPUs, and on earlier GPUs in software at most; pages "
    "with scales of their own are untested between engines, tiers and volumes"
)
_SCALED_INTEGERS = (
    "vLLM's CPU attention accepts it in silence and returns garbage, and on GPUs pages with scales for each token and "
    "head are untested between engines, tiers and volumes"
)
# Beginnings of names of vLLM's, and why pages of that kind are refused.
_REFUSED_KV_CACHE_DTYPES = {"nvfp4": _4_BIT_FLOATS, "int8": _SCALED_INTEGERS, "int4": _SCALED_INTEGERS}
_ALLOWED_KV_CACHE_DTYPES = (
    "allowed are auto; float16 or bfloat16, where the model is computed in it; fp8, fp8_e4m3 or fp8_e5m2"
)


def _why_no_kv_cache_dtype(value: Any) -> Any:
    if value is None or value in _KV_CACHE_DTYPES:
        return value
    for beginning, why in _REFUSED_KV_CACHE_DTYPES.items():
        if str(value).startswith(beginning):
            raise ValueError(f"{why}; {_ALLOWED_KV_CACHE_DTYPES}")
    raise ValueError(_ALLOWED_KV_CACHE_DTYPES)


KvCacheDtype = Annotated[
    Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"], BeforeValidator(_why_no_kv_cache_dtype)
]


Proof = Literal["required", "report", "off"]
_OFF = BeforeValidator(lambda value: "off" if value is False else value)  # as YAML reads it


class EngineConfig(Section):
    """Engine settings that prefill and decode workers share, because they determine the bytes of pages."""

    kind: Literal["vllm", "sim"] = "vllm"
    device: Literal["cpu", "gpu"] = "cpu"  # that engines compute on
    block_size: int = Field(32, ge=1, le=1024)  # tokens per KV page
    # Type of KV pages. auto: what the checkpoint declares, or the type that the model is computed in. Answers of fp8
    # pages are never exactly those of others; `kvferry quality` measures what they cost.
    kv_cache_dtype: KvCacheDtype = "auto"
    # Result file of `kvferry quality`. An engine starts only if it passes up to the engine's longest context, against
    # pages that are not quantized, and is of the engine's model, revision, types, device and vLLM.
    quality_report: AbsolutePath | None = None
    kv_cache_gib: int = Field(1, ge=1)  # CPU device: memory for KV pages per engine, whole GiB (vLLM takes no less)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)  # GPU device: share of its memory for an engine
    max_num_seqs: int = Field(64, ge=1)  # requests that an engine computes at once
    # Tokens of one step, prompts and answers together. Empty: vLLM's own number, which depends on the device and on the
    # engine's use; a prompt that is longer takes several steps.
    max_num_batched_tokens: int | None = Field(None, ge=64)
    tensor_parallel_size: int = Field(1, ge=1)
    enforce_eager: bool | None = None  # empty: yes on a CPU, no on a GPU
    threads: int | None = Field(None, ge=1)  # CPU device: compute threads per engine; empty: the machine's share
    side_channel_host: str = "127.0.0.1"  # where an engine answers NIXL handshakes; auto: this node's address
    start_timeout_s: float = Field(900, gt=0)
    # Whether prompts are computed by prefill workers before it is proven that pages of these very engines survive the
    # transfer. required: until then, decode workers compute them; report: pages are transferred at once, and the result
    # is only reported; off: nothing is proven.
    proof: Annotated[Proof, _OFF] = "required"
    # Further arguments of vLLM's engine, by vLLM's names: docs/operator/engine-arguments.md has those that are refused.
    args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)  # variables of vLLM, as VLLM_LOGGING_LEVEL

    @property
    def needed_proof(self) -> Proof:  # simulated engines have no real pages
        return "off" if self.kind == "sim" else self.proof

    @model_validator(mode="after")
    def _block_size_fits_cpu_attention(self) -> EngineConfig:
        if self.kind == "vllm" and self.device == "cpu" and self.block_size % 32:
            raise ValueError(f"block_size {self.block_size} must be a multiple of 32 on the CPU device")
        return self

    @field_validator("args")
    @classmethod
    def _arguments_are_taken(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        check_arguments(args, role="", device=info.data.get("device", "cpu"))
        return args

    @field_validator("env")
    @classmethod
    def _variables_are_taken(cls, env: dict[str, str]) -> dict[str, str]:
        if len(env) > vllm_arguments.MAX_ARGUMENTS:
            raise ValueError(f"{len(env)} variables; {vllm_arguments.MAX_ARGUMENTS} is the limit")
        for name, value in env.items():
            if reason := vllm_arguments.why_no_variable(name, value):
                raise ValueError(f"{name[:80]}: {reason}")
        return env


class RoleEngineConfig(Section):
    """Engine settings of one role that leave pages alike; absent ones are those of `engine`."""

    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=64)
    # One role's a multiple of the other's; without `tier.volumes`, whose chunks are those of one size.
    tensor_parallel_size: int | None = Field(None, ge=1)
    # As `engine.args`, for this role: those that engines need not have in common. They replace those of `engine`; null
    # removes one.
    args: dict[str, Any] = Field(default_factory=dict)


def check_arguments(
    args: Mapping[str, Any], *, role: str, device: str, of_both: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Raises ValueError for the first argument of vLLM that is not accepted. `role`, `of_both`: see `why_refused`."""
    if len(args) > vllm_arguments.MAX_ARGUMENTS:
        raise ValueError(f"{len(args)} arguments; {vllm_arguments.MAX_ARGUMENTS} is the limit")
    for name, value in args.items():
        reason = vllm_arguments.why_no_name(name, role=role) or vllm_arguments.why_no_value(value)
        if device == "cpu" and name == "kv_cache_memory_bytes":
            reason = "without effect on the CPU device: use engine.kv_cache_gib"
        reason = reason or vllm_arguments.why_refused(name, args, role=role, of_both=of_both)
        if reason := reason or why_not_expected(name, value):
            raise ValueError(f"{name[:80]}: {reason}")


def check_removed(args: Mapping[str, Any], of_both: Mapping[str, Any], *, role: str = "") -> dict[str, Any]:
    """Return those that are not None. Raises ValueError for one that cannot be removed; see `why_not_removed`."""
    for name, value in args.items():
        if value is None and (reason := vllm_arguments.why_not_removed(name, of_both, role=role)):
            raise ValueError(f"{name[:80]}: {reason}")
    return vllm_arguments.replaced({}, args)
