"""Which KV dtypes of vLLM 0.32 run on which GPU, with which checkpoint, and by which attention backend."""

# Read in vLLM 0.32's sources (`v1/attention/backends`, `config/cache.py`), not run on GPUs.

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvferry_plan.planner.gpu_catalogue import Gpu

FP8: Final = ("fp8", "fp8_e4m3")
_FP8_CHECKPOINTS: Final = ("fp8", "modelopt", "fbgemm_fp8", "float-quantized")
_PER_TOKEN_HEAD: Final = ("fp8_per_token_head", "int8_per_token_head", "int4_per_token_head")
KNOWN: Final = ("auto", "bfloat16", "float16", "float32", *FP8, "fp8_e5m2", *_PER_TOKEN_HEAD, "nvfp4", "nvfp4_4over6",
                "fp8_ds_mla", "nvfp4_ds_mla")  # fmt: skip
# Quantized KV without its scales, as published figures count it; no dtype of an engine.
PAYLOADS: Final = {"4-bit payload": 0.5, "8-bit payload": 1.0}


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a KV dtype runs. `refusal` is empty where it does; `warning` says what is not settled."""

    backends: tuple[str, ...]
    refusal: str = ""
    warning: str = ""

    @property
    def runs(self) -> bool:
        return not self.refusal


def support(kv_cache_dtype: str, gpu: Gpu, *, weights: str = "bfloat16", head_dim: int | None = None) -> Support:
    """Return whether `kv_cache_dtype` runs on `gpu` with a checkpoint whose weights are `weights`."""
    if kv_cache_dtype not in KNOWN:
        return _refused(f"vLLM 0.32 has no KV cache dtype {kv_cache_dtype!r}; it has {', '.join(KNOWN)}")
    if gpu.is_cpu:
        return _on_cpu(kv_cache_dtype, head_dim)
    if gpu.compute_capability.startswith("gfx"):
        return _on_rocm(kv_cache_dtype)
    return _on_cuda(kv_cache_dtype, float(gpu.compute_capability), weights, head_dim)


def _refused(why: str) -> Support:
    return Support((), refusal=why)


def _on_cpu(dtype: str, head_dim: int | None) -> Support:
    if dtype in ("auto", "bfloat16", "float16", "float32"):
        return Support(("CPU_ATTN",))
    if dtype in (*FP8, "fp8_e5m2"):
        if head_dim is not None and head_dim % 32:
            return _refused(f"{dtype} on a CPU needs a head size that 32 divides, not {head_dim}")
        return Support(
            ("CPU_ATTN",),
            warning=f"{dtype} on a CPU needs AVX-512 or AMX, and drifts from the exact answer: it has no scales",
        )
    return _refused(f"vLLM's CPU attention has no {dtype}: it takes some names in silence and returns garbage")


def _on_rocm(dtype: str) -> Support:
    if dtype in ("auto", "bfloat16", "float16", *FP8, "fp8_e5m2"):
        return Support(("ROCM_AITER_FA", "TRITON_ATTN"), warning="" if dtype not in FP8 else "not run by this project")
    return _refused(f"{dtype} has no attention backend on ROCm in vLLM 0.32")


def _on_cuda(dtype: str, capability: float, weights: str, head_dim: int | None) -> Support:
    if dtype in ("auto", "bfloat16", "float16"):
        if dtype == "bfloat16" and capability < 8:
            return _refused("bfloat16 needs compute capability 8.0")
        return Support(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"))
    if dtype == "float32":
        return _refused("float32 KV pages are for CPUs only")
    if dtype in FP8:
        return _fp8_on_cuda(capability)
    if dtype == "fp8_e5m2":
        if weights in _FP8_CHECKPOINTS:
            return _refused(f"vLLM 0.32 refuses fp8_e5m2 with a checkpoint of {weights} weights; use fp8 (e4m3)")
        if capability < 8.9:
            return Support(("FLASHINFER",), warning="not settled below compute capability 8.9")
        return Support(("FLASHINFER", "TRITON_ATTN"))
    if dtype in _PER_TOKEN_HEAD:
        if dtype == "fp8_per_token_head" and capability < 8.9:
            return _refused("fp8_per_token_head needs compute capability 8.9; int8_per_token_head needs none")
        return Support(("TRITON_ATTN",))
    if dtype == "nvfp4":
        if capability >= 10 and capability < 12:
            return Support(("FLASHINFER",))
        if head_dim == 64:
            return _refused("nvfp4 by FlashInfer's FA2 has no head size 64")
        return Support(("FLASHINFER",), warning="outside compute capability 10.x without FP4 hardware")
    if dtype == "nvfp4_4over6":
        return (
            Support(("FLASHINFER",))
            if 10 <= capability < 12
            else _refused("nvfp4_4over6 needs compute capability 10.x")
        )
    if dtype == "nvfp4_ds_mla" and not 10 <= capability < 11:
        return _refused("nvfp4_ds_mla needs compute capability 10.0")
    return Support(("FLASHMLA_SPARSE",), warning="for DeepSeek V3.2's sparse attention alone")


def _fp8_on_cuda(capability: float) -> Support:
    if capability < 8.9:
        return Support(
            ("FLASHINFER",),
            warning="fp8 KV below compute capability 8.9 is not settled in vLLM 0.32: FlashInfer's check admits it, "
            "Triton refuses it; int8_per_token_head runs",
        )
    backends: tuple[str, ...] = ("FLASHINFER", "TRITON_ATTN")
    # FlashAttention 3 and 4 serve e4m3; both are built for these two architectures.
    if 9 <= capability < 11:
        backends = ("FLASH_ATTN", *backends)
    return Support(backends, warning="scales are 1.0 unless the checkpoint has its own")


# Elements that a scale of vLLM 0.32's quantized KV pages covers. Per head: calibrated checkpoints with FlashAttention.
SCALE_GRANULARITIES: Final = ("per tensor", "per head", "per token and head", "per 16 values")
