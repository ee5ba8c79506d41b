"""Processors that vLLM's CPU backend distinguishes; tests imitate each of them on any machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock


@dataclass(frozen=True)
class Processor:
    """The answers of `torch.cpu` on one kind of x86-64 processor."""

    name: str
    has_avx512: bool = False
    has_avx512_bf16: bool = False
    has_amx: bool = False

    def __str__(self) -> str:
        return self.name

    def mla_block_size(self, block_size: int) -> int:
        """Return the tokens per block that vLLM takes for MLA where `block_size` is asked for (docs/user/models.md)."""
        return block_size if self.has_amx else 16


AVX2 = Processor("avx2")
AVX512 = Processor("avx512", has_avx512=True)
AVX512_BF16 = Processor("avx512-bf16", has_avx512=True, has_avx512_bf16=True)
AMX = Processor("amx", has_avx512=True, has_avx512_bf16=True, has_amx=True)
PROCESSORS = (AVX2, AVX512, AVX512_BF16, AMX)


@contextmanager
def imitated(processor: Processor) -> Iterator[None]:
    """Let the Python code of vLLM and kvferry decide as on this processor; kernels stay those of the machine."""
    import torch
    import vllm._custom_ops  # noqa: F401  loads the machine's kernels
    from vllm.platforms import CpuArchEnum, current_platform
    from vllm.v1.attention.selector import _cached_get_attn_backend

    answers = {
        "_is_avx2_supported": True,
        "_is_avx512_supported": processor.has_avx512,
        "_is_avx512_bf16_supported": processor.has_avx512_bf16,
        "_is_amx_tile_supported": processor.has_amx,
    }
    _cached_get_attn_backend.cache_clear()
    with (
        mock.patch.multiple(torch.cpu, **{name: mock.Mock(return_value=value) for name, value in answers.items()}),
        mock.patch.object(type(current_platform), "get_cpu_architecture", return_value=CpuArchEnum.X86),
        mock.patch("platform.machine", return_value="x86_64"),
        # Modules of vLLM load kernels when they are imported: those of a better processor end this process.
        mock.patch.object(type(current_platform), "import_kernels"),
    ):
        try:
            yield
        finally:
            _cached_get_attn_backend.cache_clear()
