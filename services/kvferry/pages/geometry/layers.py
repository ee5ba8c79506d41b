"""Kinds of layers by what they keep; bytes of one layer on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

from kvferry.errors import ConfigError
from kvferry.pages.geometry.kv_dtypes import KvDtype

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class LayerKind(StrEnum):
    FULL = "full"  # keeps every token
    WINDOW = "window"  # keeps the last tokens
    CHUNK = "chunk"  # keeps the tokens of the present chunk (chunked local attention)
    LATENT = "latent"  # keeps one latent of every token (MLA)
    STATE = "state"  # keeps a state of fixed size (Mamba, linear attention)


@dataclass(frozen=True, slots=True)
class KvLayers:
    """Layers that store K and V. Readers of other layers' pages are not counted."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of K
    head_dim_v: int
    window: int | None = None  # tokens that a layer attends to, the present one included
    chunk: int | None = None  # tokens of a chunk, of chunked local attention

    @property
    def kind(self) -> LayerKind:
        if self.window is not None:
            return LayerKind.WINDOW
        return LayerKind.FULL if self.chunk is None else LayerKind.CHUNK

    def rank_heads(self, tensor_parallel_size: int) -> int:
        """Ranks beyond the KV heads hold copies, as in vLLM."""
        if tensor_parallel_size > self.num_kv_heads:
            if tensor_parallel_size % self.num_kv_heads:
                raise _not_divisible(f"{self.num_kv_heads} KV heads", tensor_parallel_size)
            return 1
        if self.num_kv_heads % tensor_parallel_size:
            raise _not_divisible(f"{self.num_kv_heads} KV heads", tensor_parallel_size)
        return self.num_kv_heads // tensor_parallel_size

    def token_bytes(self, dtype: KvDtype, tensor_parallel_size: int = 1) -> int:
        side_bytes = dtype.head_bytes(self.head_dim) + dtype.head_bytes(self.head_dim_v)
        return self.rank_heads(tensor_parallel_size) * side_bytes


@dataclass(frozen=True, slots=True)
class LatentLayers:
    """Multi-head latent attention: every rank has the one latent of all heads."""

    num_layers: int
    latent_dim: int  # kv_lora_rank
    rope_dim: int  # qk_rope_head_dim
    # Bytes of the index of sparse attention (DeepSeek V3.2), which vLLM stores in a type of its own.
    index_bytes: int = 0
    # Values of K without the rotated ones, and of V, of one head: of prompts, heads are unfolded from latents. 0: they
    # are computed over latents (sparse attention).
    nope_dim: int = 0
    value_dim: int = 0

    @property
    def kind(self) -> LayerKind:
        return LayerKind.LATENT

    def token_bytes(self, dtype: KvDtype, tensor_parallel_size: int = 1) -> int:
        return dtype.latent_bytes(self.latent_dim, self.rope_dim) + self.index_bytes


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state."""

    shape: tuple[int, ...]
    dtype: str = ""  # empty: the model's
    sharded_dim: int = 0  # divided among ranks
    # Groups of Mamba 2, which ranks that share one hold copies of: (groups, values of each that the dimension counts).
    groups: tuple[int, int] = (0, 0)

    def rank_bytes(self, model_dtype: str, tensor_parallel_size: int) -> int:
        sizes = list(self.shape)
        num_groups, group_values = self.groups
        if num_groups and num_groups % tensor_parallel_size:
            sizes[self.sharded_dim] += (tensor_parallel_size - num_groups) * group_values
        if sizes[self.sharded_dim] % tensor_parallel_size:
            raise _not_divisible(f"a state of {sizes[self.sharded_dim]} channels or heads", tensor_parallel_size)
        return prod(sizes) // tensor_parallel_size * _DTYPE_BYTES[self.dtype or model_dtype]


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers with a state of fixed size: Mamba, linear attention, convolutions."""

    num_layers: int
    tensors: tuple[StateTensor, ...]
    num_checkpoints: int = 0  # further states that vLLM keeps of a sequence for prefix caching: 1 of Mamba 2

    @property
    def kind(self) -> LayerKind:
        return LayerKind.STATE

    def token_bytes(self, dtype: KvDtype, tensor_parallel_size: int = 1) -> int:
        return 0

    def num_blocks(self, *, prefix_caching: bool) -> int:
        """Return the states of one sequence, with prefix caching also that of its last full block."""
        return 2 + self.num_checkpoints if prefix_caching else 1

    def state_bytes(self, model_dtype: str, tensor_parallel_size: int = 1) -> int:
        return sum(tensor.rank_bytes(model_dtype, tensor_parallel_size) for tensor in self.tensors)


LayerGroup = KvLayers | LatentLayers | StateLayers


def _not_divisible(what: str, tensor_parallel_size: int) -> ConfigError:
    return ConfigError(f"{what} cannot be divided among {tensor_parallel_size} tensor-parallel ranks")
