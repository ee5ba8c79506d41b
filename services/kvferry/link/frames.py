"""The frame protocol of links over TCP, for both ends.

Both ends begin with PREAMBLE. Each frame is a length (4 bytes, little-endian) and a serialized Downward or Upward, at
first Hello. A violation ends only that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Generator, Iterable

from kvferry.util.grpc_options import MAX_MESSAGE_BYTES

# A peer with another protocol, or another version of this one, is refused at its first bytes.
PREAMBLE = b"KVFERRY\x01"

MAX_FRAME_BYTES = MAX_MESSAGE_BYTES
# Before Hello the peer is unknown: it can make this process buffer little.
MAX_FIRST_FRAME_BYTES = 4096

# From a connection to its preamble and Hello.
GREETING_TIMEOUT_S = 10.0

TURN_S = 0.002  # after this time, payloads that were received at once wait for the loop's next turn

_LENGTH_BYTES = 4


class FrameError(ValueError):
    pass


def encode_frames(payloads: Iterable[bytes]) -> bytes:
    pieces = []
    for payload in payloads:
        pieces.append(len(payload).to_bytes(_LENGTH_BYTES, "little"))
        pieces.append(payload)
    return b"".join(pieces)


class FrameDecoder:
    __slots__ = ("_buffer", "_num_wanted", "greeted", "max_frame_bytes")

    def __init__(self, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_frame_bytes = max_frame_bytes  # may be changed between payloads
        self.greeted = False  # the preamble was read
        self._buffer = bytearray()
        self._num_wanted = len(PREAMBLE)  # bytes that the next payload needs at least

    def feed(self, data: bytes) -> Generator[bytes, None, None]:
        """Yield the payloads that are complete with `data`. Those that a closed iteration leaves come in the next one.

        Raises FrameError, while iterating, for invalid data.
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
    # asyncio sets it only for sockets that name their protocol, which those of `socket.create_server` do not.
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # gone already
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class FrameProtocol(asyncio.Protocol):
    # `data_received` is called again, without data, for payloads that wait for another turn.

    def __init__(self, decoder: FrameDecoder) -> None:
        self.decoder = decoder
        self.transport: asyncio.Transport | None = None
        self.turn_s = TURN_S
        self._is_behind = False  # payloads wait for the next turn, and nothing is read

    def must_wait(self, turn_began_s: float) -> bool:
        """Return whether further payloads come in the next turn."""
        if time.perf_counter() <= turn_began_s + self.turn_s:
            return False
        if not self._is_behind and self.transport is not None:
            self._is_behind = True
            self.transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)
        return True

    def _go_on(self) -> None:
        self._is_behind = False
        self.data_received(b"")
        if not self._is_behind and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
