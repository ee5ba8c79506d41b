"""Names of chunks, and the meaning of their bytes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import NewType

import msgspec

from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace

# 32 bytes of the engine's block hash and 4 of its KV cache group: vLLM's OffloadKey.
CHUNK_KEY_BYTES = 36
LAYOUT_DIGEST_BYTES = 16
# O_DIRECT needs multiples of this as addresses, offsets and lengths, on every drive.
ALIGNMENT = 4096

ChunkKey = NewType("ChunkKey", bytes)
LayoutDigest = NewType("LayoutDigest", bytes)

_U64_END = 1 << 64


@dataclass(frozen=True, slots=True)
class ChunkId:
    """`key` is unique within the layout, over all tenants; `route_key` 0 means unknown."""

    key: ChunkKey
    route_key: int = 0
    namespace: Namespace = DEFAULT_NAMESPACE

    def __post_init__(self) -> None:
        # The header's fixed field would turn a key of another length into another chunk's key.
        if len(self.key) != CHUNK_KEY_BYTES:
            raise ValueError(f"a chunk key of {len(self.key)} bytes instead of {CHUNK_KEY_BYTES}")
        if not 0 <= self.route_key < _U64_END:
            raise ValueError(f"route key {self.route_key} is no unsigned 64-bit number")


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Meaning of a chunk's bytes; engines exchange chunks only if all fields are equal.

    `payload_bytes` is the CPU tier's row size, a multiple of ALIGNMENT. CPU engines order bytes by `isa`.
    """

    model: str
    weights_revision: str
    exchange: str  # digest of what else decides the meaning of bytes
    dtype: str
    kv_cache_dtype: str
    tokens_per_block: int
    blocks_per_chunk: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    isa: str
    tensor_parallel: int
    pipeline_parallel: int
    kv_layout: str
    payload_bytes: int
    _digest: LayoutDigest = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        validate_payload_bytes(self.payload_bytes)
        for name in _NUMBERS:
            if not 0 <= getattr(self, name) <= (MAX_PAYLOAD_BYTES if name == "payload_bytes" else MAX_NUMBER):
                raise ValueError(f"no chunk layout: {name} is {getattr(self, name)}")
        digest = hashlib.blake2b(self.to_json(), digest_size=LAYOUT_DIGEST_BYTES).digest()
        object.__setattr__(self, "_digest", LayoutDigest(digest))

    @property
    def digest(self) -> LayoutDigest:
        return self._digest

    def to_json(self) -> bytes:
        """Return canonical JSON, equal for equal layouts."""
        fields = {name: getattr(self, name) for name in _TEXTS | _NUMBERS}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> ChunkLayout:
        """Raises ValueError for missing or unknown fields."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, str | int])
        except msgspec.MsgspecError as error:
            raise ValueError(f"no chunk layout: {error}") from None
        if fields.keys() != _TEXTS | _NUMBERS:
            raise ValueError(f"no chunk layout: missing or unknown {sorted(fields.keys() ^ (_TEXTS | _NUMBERS))}")
        for name, value in fields.items():
            if not isinstance(value, str if name in _TEXTS else int):
                raise ValueError(f"no chunk layout: {name} is {value!r}")
        return cls(**fields)  # type: ignore[arg-type]


MAX_NUMBER = (1 << 31) - 1
MAX_PAYLOAD_BYTES = 1 << 40


def validate_payload_bytes(payload_bytes: int) -> None:
    """Raises ValueError for sizes that O_DIRECT cannot move."""
    if payload_bytes < ALIGNMENT or payload_bytes % ALIGNMENT:
        raise ValueError(f"a payload of {payload_bytes} bytes is no multiple of {ALIGNMENT}")


_TEXTS = frozenset({"model", "weights_revision", "exchange", "dtype", "kv_cache_dtype", "isa", "kv_layout"})
_NUMBERS = frozenset(ChunkLayout.__dataclass_fields__) - _TEXTS - {"_digest"}
