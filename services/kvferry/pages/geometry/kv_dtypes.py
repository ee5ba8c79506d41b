"""Types of KV pages by vLLM's names, and the bytes of a head in each, scales included."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import ConfigError

# vLLM's blobs of a token, for a latent of 512 values beside 64 rotated ones: packed values, scales and rotated values.
_DS_MLA_LATENT, _DS_MLA_ROPE = 512, 64


@dataclass(frozen=True, slots=True)
class KvDtype:
    name: str
    bits: int  # of one stored value
    scale_bytes: int = 0  # of one side (K or V) of a head, for each token
    values_per_scale: int = 0  # values that share a scale of one byte; 0: no such scales
    ds_mla_bytes: int = 0  # of a token and layer, for types of DeepSeek's latent alone

    def head_bytes(self, head_dim: int) -> int:
        """Return the bytes of a token's K, or V. Raises ConfigError if the type has no such head."""
        if self.ds_mla_bytes:
            raise ConfigError(f"KV pages of type {self.name} hold latents (MLA); this model has heads of K and V")
        unit = self.values_per_scale or max(1, 8 // self.bits)
        if head_dim % unit:
            raise ConfigError(f"KV pages of type {self.name} need a head size that {unit} divides, not {head_dim}")
        packed = head_dim * self.bits // 8
        return packed + self.scale_bytes + (head_dim // self.values_per_scale if self.values_per_scale else 0)

    def latent_bytes(self, latent_dim: int, rope_dim: int) -> int:
        """Return the bytes of a token's latent. Raises ConfigError if the type has none."""
        if self.ds_mla_bytes:
            if (latent_dim, rope_dim) != (_DS_MLA_LATENT, _DS_MLA_ROPE):
                raise ConfigError(
                    f"KV pages of type {self.name} hold latents of {_DS_MLA_LATENT} and {_DS_MLA_ROPE} values, "
                    f"not of {latent_dim} and {rope_dim}"
                )
            return self.ds_mla_bytes
        if self.values_per_scale:
            raise ConfigError(f"KV pages of type {self.name} hold heads of K and V; this model has latents (MLA)")
        # vLLM reserves the scales of both sides, though a latent has one.
        return (latent_dim + rope_dim) * self.bits // 8 + 2 * self.scale_bytes


_FP32_SCALE_BYTES = 4
KV_DTYPES = {
    dtype.name: dtype
    for dtype in (
        KvDtype("float32", 32),
        KvDtype("bfloat16", 16),
        KvDtype("float16", 16),
        # One scale for each layer, or for each head of it: no bytes in a page.
        KvDtype("fp8_e4m3", 8),
        KvDtype("fp8_e5m2", 8),
        KvDtype("fp8_per_token_head", 8, scale_bytes=_FP32_SCALE_BYTES),
        KvDtype("int8_per_token_head", 8, scale_bytes=_FP32_SCALE_BYTES),
        KvDtype("int4_per_token_head", 4, scale_bytes=_FP32_SCALE_BYTES),
        KvDtype("nvfp4", 4, values_per_scale=16),
        KvDtype("nvfp4_4over6", 4, values_per_scale=16),
        KvDtype("fp8_ds_mla", 8, ds_mla_bytes=656),
        KvDtype("nvfp4_ds_mla", 4, ds_mla_bytes=352),
    )
}
_ALIASES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
}


def kv_dtype(name: str) -> KvDtype:
    """Accept vLLM's names and short ones. Raises ConfigError for others."""
    found = KV_DTYPES.get(_ALIASES.get(name, name))
    if found is None:
        known = ", ".join((*KV_DTYPES, *_ALIASES))
        raise ConfigError(f"KV cache dtype {name[:80]!r} is not known; known are {known}")
    return found
