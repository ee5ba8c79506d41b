"""What an engine and the keeper of its node say to each other, on a Unix stream socket.

A frame is 4 bytes of length, little-endian, then one of these structs in msgpack. The engine begins with Hello; its
first bytes carry the descriptor of its region (SCM_RIGHTS). The keeper answers Welcome, the keys it holds in parts, and
from then on numbered changes and one Done for each job. Nothing is ever unpickled.

A job owns its rows from the moment it is sent: the keeper may read and write them until it says Done for that job, or
Bye for all of them, or until its process has ended. The end of the stream alone says nothing: the kernel closes a dead
process's sockets while its other threads may still be within a read.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from kvferry.store.layout import CHUNK_KEY_BYTES, ChunkKey

# Raised with every change of what is said here: both ends come from one wheel, and a difference is a half-done upgrade.
PROTOCOL = 2

# A snapshot of a million keys is 36 MB; nothing else comes near a megabyte.
MAX_FRAME_BYTES = 8 << 20
# 144 KiB a part: whoever else wants the interpreter waits a fraction of a millisecond.
MAX_PART_KEYS = 4096

# The keeper says something at least this often; an engine that hears nothing for SILENCE_S takes it for hung.
PULSE_S = 1.0
SILENCE_S = 5.0

_LENGTH_BYTES = 4


class ProtocolError(ValueError):
    """The other end does not keep to this; its connection ends."""


# From the engine.


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Who connects, and the region whose descriptor comes with it: `num_rows` rows of `row_bytes`, from offset 0."""

    protocol: int
    engine_id: str
    layout: bytes  # ChunkLayout as JSON
    num_rows: int
    row_bytes: int


class Store(msgspec.Struct, frozen=True, array_like=True, tag="store"):
    """Keep the chunks in these rows. Entry i of keys, route keys and rows speaks of one chunk."""

    job: int  # chosen by the engine, never used again on this connection
    tenant: str
    epoch: int
    keys: bytes  # packed
    route_keys: list[int]
    rows: list[int]


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Bring these chunks into these rows."""

    job: int
    tenant: str
    epoch: int
    keys: bytes  # packed
    rows: list[int]
    volumes: dict[str, list[int]] = {}  # volume id -> indices of chunks that are said to lie there
    traceparent: str = ""  # W3C trace context, of requests that are traced
    tracestate: str = ""


class Touch(msgspec.Struct, frozen=True, array_like=True, tag="touch"):
    """These were used again, without a load."""

    keys: bytes  # packed


# From the keeper.


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    keeper_id: str
    protocol: int


class SnapshotKeys(msgspec.Struct, frozen=True, array_like=True, tag="part"):
    """Part `part` of `num_parts`, from 0, of all keys that can be loaded, after change `sequence`."""

    sequence: int
    part: int
    num_parts: int
    keys: bytes  # packed


class ChangedKeys(msgspec.Struct, frozen=True, array_like=True, tag="change"):
    """Change `sequence`, the one after the last: no key is in both."""

    sequence: int
    added: bytes  # packed
    removed: bytes  # packed


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A job has ended: none of its rows is touched any more."""

    job: int
    failed: dict[int, str]  # index of a chunk -> why; a row of a load that failed may hold anything
    num_bytes: int  # moved, for chunks that did not fail


class Pulse(msgspec.Struct, frozen=True, array_like=True, tag="pulse"):
    """The keeper lives."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag="bye"):
    """The last message: no row is touched any more, and what was not Done has failed."""

    reason: str


ToKeeper = Hello | Store | Load | Touch
ToEngine = Welcome | SnapshotKeys | ChangedKeys | Done | Pulse | Bye

_encoder = msgspec.msgpack.Encoder()
_to_keeper: msgspec.msgpack.Decoder[ToKeeper] = msgspec.msgpack.Decoder(ToKeeper)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


def encode(message: ToKeeper | ToEngine) -> bytes:
    """A whole frame."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(_LENGTH_BYTES, "little") + payload


def decode_to_keeper(payload: bytes) -> ToKeeper:
    """Raises ProtocolError for what is no message of an engine."""
    try:
        return _to_keeper.decode(payload)
    except ValueError as error:  # msgspec's own, and text that is no UTF-8
        raise ProtocolError(f"a message that cannot be read: {error}") from None


def decode_to_engine(payload: bytes) -> ToEngine:
    """Raises ProtocolError for what is no message of a keeper."""
    try:
        return _to_engine.decode(payload)
    except ValueError as error:  # msgspec's own, and text that is no UTF-8
        raise ProtocolError(f"a message that cannot be read: {error}") from None


class FrameReader:
    """Cuts a byte stream into payloads."""

    __slots__ = ("_buffer", "_num_wanted")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._num_wanted = _LENGTH_BYTES  # bytes without which nothing can be cut off

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every payload that is complete with `data`, which is taken whole even if not all are asked for.

        Raises ProtocolError, while iterating, for a frame beyond MAX_FRAME_BYTES.
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
    """Keys one after another: their form in a frame."""
    return b"".join(keys)


def unpack_chunk_keys(packed: bytes) -> Sequence[ChunkKey]:
    """What `pack_chunk_keys` packed. Raises ProtocolError when the length is no multiple of CHUNK_KEY_BYTES."""
    num_keys, rest = divmod(len(packed), CHUNK_KEY_BYTES)
    if rest:
        raise ProtocolError(f"{len(packed)} bytes of keys; a key has {CHUNK_KEY_BYTES}")
    return _cut(num_keys).unpack(packed)


@functools.lru_cache(maxsize=256)
def _cut(num_keys: int) -> struct.Struct:
    return struct.Struct(f"{CHUNK_KEY_BYTES}s" * num_keys)
