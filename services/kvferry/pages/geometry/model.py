"""Geometry of a model: the sizes that decide its KV bytes."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.pages.geometry.allocation import KvPool, kv_pool
from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry.pages.geometry.layers import LayerGroup, LayerKind, StateLayers

DEFAULT_BLOCK_SIZE = 16  # tokens, of vLLM on GPUs


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """Sizes of one model. Where a method takes `tensor_parallel_size`, bytes are those of one rank."""

    # Pipeline stages are not modelled: a stage holds the share of its layers.
    name: str
    model_type: str
    architecture: str  # the first of `architectures`; empty if the configuration names none
    groups: tuple[LayerGroup, ...]  # layers that keep something of a sequence, by kind
    num_layers: int  # all layers, also those that store nothing of their own
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    context_length: int  # tokens
    dtype: str  # of the weights and activations: bfloat16, float16 or float32
    not_compared: str = ""  # why the sizes were not compared with those of vLLM's own layers; empty: they were
    quantization: str = ""  # of the weights: quant_method with bits or algorithm ("gptq 8 bits"), or empty
    checkpoint_kv_dtype: str = ""  # type of KV pages that the checkpoint declares: vLLM's `auto`; empty: none
    num_experts: int = 0
    num_experts_per_token: int = 0
    num_parameters: int | None = None  # None: not known
    num_active_parameters: int | None = None  # of one token, in mixtures of experts

    def bytes_per_token(self, kv_cache_dtype: str, tensor_parallel_size: int = 1) -> int:
        """Return what a token adds while no window is full. Raises ConfigError for an impossible type or size."""
        self.check_tensor_parallel(tensor_parallel_size)
        dtype = kv_dtype(kv_cache_dtype)
        return sum(group.num_layers * group.token_bytes(dtype, tensor_parallel_size) for group in self.groups)

    def lasting_bytes_per_token(self, kv_cache_dtype: str, tensor_parallel_size: int = 1) -> int:
        """Return what a token adds once all windows and chunks are full."""
        self.check_tensor_parallel(tensor_parallel_size)
        dtype = kv_dtype(kv_cache_dtype)
        return sum(
            group.num_layers * group.token_bytes(dtype, tensor_parallel_size)
            for group in self.groups
            if group.kind in (LayerKind.FULL, LayerKind.LATENT)
        )

    def state_bytes(self, tensor_parallel_size: int = 1) -> int:
        """Return the bytes of one sequence's states, without padding."""
        return sum(
            group.num_layers * group.state_bytes(self.dtype, tensor_parallel_size)
            for group in self.groups
            if isinstance(group, StateLayers)
        )

    def pool(
        self,
        kv_cache_dtype: str,
        *,
        block_size: int = DEFAULT_BLOCK_SIZE,
        tensor_parallel_size: int = 1,
        max_in_flight_tokens: int = 0,
        prefix_caching: bool = True,
    ) -> KvPool:
        """Return how vLLM divides the memory of one rank into pages of `block_size` tokens."""
        # Tokens in flight are scheduled at once for a sequence (chunked prefill): windows keep them too.
        self.check_tensor_parallel(tensor_parallel_size)
        return kv_pool(
            self.groups,
            kv_dtype(kv_cache_dtype),
            block_size=block_size,
            tensor_parallel_size=tensor_parallel_size,
            model_dtype=self.dtype,
            max_in_flight_tokens=max_in_flight_tokens,
            prefix_caching=prefix_caching,
        )

    def check_tensor_parallel(self, tensor_parallel_size: int) -> None:
        """Raises ConfigError where vLLM cannot divide the query heads."""
        if tensor_parallel_size < 1:
            raise ConfigError(f"tensor parallel size {tensor_parallel_size}: at least 1 is needed")
        if self.num_attention_heads % tensor_parallel_size:
            raise ConfigError(
                f"{self.name}: {self.num_attention_heads} attention heads cannot be divided among "
                f"{tensor_parallel_size} tensor-parallel ranks"
            )
