"""The protocol between an engine and its node's keeper, on a Unix stream socket.

A frame is 4 bytes of length, little-endian, then a msgpack struct. The engine's Hello carries its region's descriptor
(SCM_RIGHTS). The keeper sends Welcome, its keys in parts, then numbered changes and one Done per job.

A job owns its rows until Done, Bye, or the end of the keeper's process; not of the stream, whose sockets the kernel
closes while other threads of a dying process may still read.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvferry.keeper.layout import CHUNK_KEY_BYTES, ChunkKey
from kvferry.tenancy.terms import MAX_WANTED_S

# Increased with every change that an older end reads wrongly; it skips fields that were added at a message's end. Both
# ends come from one wheel; a difference is an unfinished upgrade.
PROTOCOL = 3

# A snapshot of a million keys is 36 MB; nothing else comes near a megabyte.
MAX_FRAME_BYTES = 8 << 20
# 144 KiB per part: encoding it holds the interpreter for a fraction of a millisecond.
MAX_PART_KEYS = 4096

# The keeper sends something at least this often. After SILENCE_S without a message, the engine assumes that it hangs.
PULSE_S = 1.0
SILENCE_S = 5.0

_LENGTH_BYTES = 4


class ProtocolError(ValueError):
    """The peer violates the protocol; its connection ends."""


# From the engine


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Introduces an engine and its region, from offset 0 of the attached file."""

    protocol: int
    engine_id: str
    layout: bytes  # ChunkLayout as JSON
    num_rows: int
    row_bytes: int
    pool: str = ""  # whose volumes it uses; empty: those of the default pool


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Store chunks from rows. Entry i of each list belongs to chunk i."""

    job: int  # chosen by the engine, never used again on this connection
    tenant: str
    epoch: int
    keys: bytes  # packed
    route_keys: list[int]
    rows: list[int]
    wanted_s: float | None = None  # for which the client wants them; 0: its session ends


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    job: int
    tenant: str
    epoch: int
    keys: bytes  # packed
    rows: list[int]
    volumes: dict[str, list[int]] = {}  # volume id -> indices of chunks reported there
    traceparent: str = ""  # W3C trace context of a traced request
    tracestate: str = ""


class Touch(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    keys: bytes  # packed, in the order of the prompt
    wanted_s: float | None = None  # as in Store


# From the keeper


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    keeper_id: str
    protocol: int


class SnapshotKeys(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Part `part` of `num_parts`, from 0, of all loadable keys after change `sequence`."""

    sequence: int
    part: int
    num_parts: int
    keys: bytes  # packed


class ChangedKeys(msgspec.Struct, frozen=True, array_like=True, tag="change"):
    """Consecutively numbered. No key is both added and removed."""

    sequence: int
    added: bytes  # packed
    removed: bytes  # packed


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    job: int
    failed: dict[int, str]  # index of a chunk -> cause; the row of a failed load has undefined content
    num_bytes: int  # moved, for chunks that did not fail


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    pass


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The last message: rows are unused, and jobs without Done failed."""

    reason: str


ToKeeper = Hello | Store | Load | Touch
ToEngine = Welcome | SnapshotKeys | ChangedKeys | Done | Pulse | Bye

_encoder = msgspec.msgpack.Encoder()
_to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode(message: ToKeeper | ToEngine) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def decode_to_keeper(payload: bytes) -> ToKeeper:
    """Raises ProtocolError for a message that is no engine's."""
    try:
        return _to_keeper.decode(payload)
    except ValueError as error:  # msgspec's, or UnicodeDecodeError
        raise ProtocolError(f"a message that cannot be read: {error}") from None


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises ProtocolError for a message that is no keeper's."""
    try:
        return _to_engine.decode(payload)
    except ValueError as error:  # msgspec's, or UnicodeDecodeError
        raise ProtocolError(f"a message that cannot be read: {error}") from None


def check_wanted(message: Store | Load | Touch) -> None:
    """Raises ProtocolError for a time that no client may name."""
    wanted_s = None if isinstance(message, Load) else message.wanted_s
    if wanted_s is not None and not 0 <= wanted_s <= MAX_WANTED_S:
        raise ProtocolError(f"chunks that are wanted for {wanted_s} s; from 0 to {MAX_WANTED_S:g} s are allowed")


class FrameReader:
    __slots__ = ("_buffer", "_num_wanted")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._num_wanted = _LENGTH_BYTES  # bytes needed for the next payload

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the payloads that are complete with `data`, which is buffered even without iterating.

        Raises ProtocolError for a frame over MAX_FRAME_BYTES.
        """
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= self._num_wanted:
                body = start + _LENGTH_BYTES
                end = body + int.from_bytes(buffer[start:body], "little")
                if end - body > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {end - body} bytes; at most {MAX_FRAME_BYTES} are allowed")
                if end > len(buffer):
                    self._num_wanted = end - start
                    break
                self._num_wanted = _LENGTH_BYTES
                start = end
                yield bytes(memoryview(buffer)[body:end])
        finally:
            if start:
                del buffer[:start]


def pack_chunk_keys(keys: Iterable[ChunkKey]) -> bytes:
    return b"".join(keys)


def unpack_chunk_keys(packed: bytes) -> Sequence[ChunkKey]:
    """Raises ProtocolError for a length that is no multiple of CHUNK_KEY_BYTES."""
    num_keys, rest = divmod(len(packed), CHUNK_KEY_BYTES)
    if rest:
        raise ProtocolError(f"{len(packed)} bytes of keys; a key has {CHUNK_KEY_BYTES}")
    return _cut(num_keys).unpack(packed)


@functools.lru_cache(maxsize=256)
def _cut(num_keys: int) -> struct.Struct:
    return struct.Struct(f"{CHUNK_KEY_BYTES}s" * num_keys)
