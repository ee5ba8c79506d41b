"""What a chunk on disk is called and what its bytes mean.

Two engines may exchange a chunk only when every field of their `ChunkLayout` is the same: the bytes of a chunk carry no
shape of their own, so a chunk of another model, dtype or block size is as wrong as a flipped bit and looks just as
good. The digest of the layout stands in every chunk's header and in its path.
"""

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
# What O_DIRECT wants of addresses, offsets and lengths, on every drive there is.
ALIGNMENT = 4096

ChunkKey = NewType("ChunkKey", bytes)
LayoutDigest = NewType("LayoutDigest", bytes)

_U64_END = 1 << 64


@dataclass(frozen=True, slots=True)
class ChunkId:
    """Everything that names one chunk of one layout.

    `key` tells it from all other chunks of the layout, of any tenant; `route_key` (chunks/keys.py) travels with it so
    that gateways can be told of it, and 0 means that nobody knows it. Raises ValueError for a key of another length,
    which a header's fixed field would cut or fill up to another chunk's key.
    """

    key: ChunkKey
    route_key: int = 0
    namespace: Namespace = DEFAULT_NAMESPACE

    def __post_init__(self) -> None:
        if len(self.key) != CHUNK_KEY_BYTES:
            raise ValueError(f"a page key of {len(self.key)} bytes instead of {CHUNK_KEY_BYTES}")
        if not 0 <= self.route_key < _U64_END:
            raise ValueError(f"route key {self.route_key} is no unsigned 64-bit number")


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """What the bytes of a chunk mean; chunks of equal layouts are interchangeable between engines.

    `payload_bytes` is the row of the engine's CPU tier, a multiple of ALIGNMENT. `isa` is there because CPU engines lay
    chunks out by the instructions they found (AVX-512 and AMX tiles differ).
    """

    model: str
    weights_revision: str
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
        digest = hashlib.blake2b(self.to_json(), digest_size=LAYOUT_DIGEST_BYTES).digest()
        object.__setattr__(self, "_digest", LayoutDigest(digest))

    @property
    def digest(self) -> LayoutDigest:
        """blake2b-128 of `to_json`."""
        return self._digest

    def to_json(self) -> bytes:
        """Canonical: sorted keys, no spaces, ASCII; the same layout is the same bytes everywhere."""
        fields = {name: getattr(self, name) for name in _TEXTS | _NUMBERS}
        return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    @classmethod
    def from_json(cls, text: bytes | str) -> ChunkLayout:
        """Raises ValueError for anything but the fields of this class."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, str | int])
        except msgspec.MsgspecError as error:
            raise ValueError(f"no page layout: {error}") from None
        if fields.keys() != _TEXTS | _NUMBERS:
            raise ValueError(f"no page layout: missing or unknown {sorted(fields.keys() ^ (_TEXTS | _NUMBERS))}")
        for name, value in fields.items():
            if not isinstance(value, str if name in _TEXTS else int):
                raise ValueError(f"no page layout: {name} is {value!r}")
        return cls(**fields)  # type: ignore[arg-type]


def validate_payload_bytes(payload_bytes: int) -> None:
    """Raises ValueError for what O_DIRECT could not move."""
    if payload_bytes < ALIGNMENT or payload_bytes % ALIGNMENT:
        raise ValueError(f"a payload of {payload_bytes} bytes is no multiple of {ALIGNMENT}")


_TEXTS = frozenset({"model", "weights_revision", "dtype", "kv_cache_dtype", "isa", "kv_layout"})
_NUMBERS = frozenset(ChunkLayout.__dataclass_fields__) - _TEXTS - {"_digest"}
