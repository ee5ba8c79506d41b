"""How messages of worker.proto move over TCP: both ends of a link use this.

A connection begins with PREAMBLE from the gateway, answered with PREAMBLE by the worker. From then on frames go both
ways: 4 bytes of length, little-endian, then a serialized Downward or Upward. The first Downward is Hello.

Whatever breaks these rules costs its own connection and nothing else. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Iterator

from kvferry.grpc_options import MAX_MESSAGE_BYTES

# A peer that speaks something else, or another version of this, is refused at its first bytes.
PREAMBLE = b"KVFERRY\x01"

MAX_FRAME_BYTES = MAX_MESSAGE_BYTES
# Nobody has said yet who they are: what a stranger can make us hold is small.
MAX_FIRST_FRAME_BYTES = 4096

# From a connection to its preamble and Hello.
GREETING_TIMEOUT_S = 10.0

_LENGTH_BYTES = 4


class FrameError(ValueError):
    """The peer does not speak frames, or not ours; its connection ends."""


def encode_frames(payloads: Iterable[bytes]) -> bytes:
    """Frames for one write."""
    pieces = []
    for payload in payloads:
        pieces.append(len(payload).to_bytes(_LENGTH_BYTES, "little"))
        pieces.append(payload)
    return b"".join(pieces)


class FrameDecoder:
    """Cuts a byte stream into payloads, after its preamble."""

    __slots__ = ("_buffer", "_num_wanted", "greeted", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes  # may be changed between payloads
        self.greeted = False  # the preamble was read
        self._buffer = bytearray()
        self._num_wanted = len(PREAMBLE)  # bytes without which nothing can be cut off

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Every payload that is complete with `data`, which is taken whole even if not all are asked for.

        Raises FrameError, while iterating, for what is not our format.
        """
        buffer = self._buffer
        buffer += data
        if not self.greeted:
            if not PREAMBLE.startswith(bytes(buffer[: len(PREAMBLE)])):
                raise FrameError(f"it begins with {bytes(buffer[:16])!r}")
            if len(buffer) < len(PREAMBLE):
                return
            del buffer[: len(PREAMBLE)]
            self.greeted = True
            self._num_wanted = _LENGTH_BYTES
        start = 0
        try:
            while len(buffer) - start >= self._num_wanted:
                body = start + _LENGTH_BYTES
                end = body + int.from_bytes(buffer[start:body], "little")
                if end - body > self.max_frame_bytes:
                    raise FrameError(f"a frame of {end - body} bytes; at most {self.max_frame_bytes} are allowed")
                if end > len(buffer):
                    self._num_wanted = end - start
                    break
                self._num_wanted = _LENGTH_BYTES
                start = end
                yield bytes(buffer[body:end])
        finally:
            if start:
                del buffer[:start]


def send_at_once(transport: asyncio.BaseTransport) -> None:
    """Keep a step from waiting for the acknowledgement of the one before.

    asyncio does so only for sockets that name their protocol, which those of `socket.create_server` do not.
    """
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # gone already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
