"""Limits the images of requests that wait for a worker's engine."""

from __future__ import annotations

from typing import Final

from kvferry.engine.base import EngineRequest
from kvferry.errors import Overloaded

MAX_IMAGE_BYTES: Final = 1 << 30  # of all gateways, encoded; an engine holds as much again


class ImageRoom:
    """Counts a request's bytes until the engine has computed its prompt."""

    def __init__(self, max_bytes: int = MAX_IMAGE_BYTES) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def refusal(self, request: EngineRequest) -> Overloaded | None:
        """A request that finds no other one is never refused."""
        num_bytes = request.num_image_bytes
        if not (num_bytes and self.num_bytes) or self.num_bytes + num_bytes <= self._max_bytes:
            return None
        return Overloaded(
            f"a worker has no room for {num_bytes} bytes of images of this request now; the limit is {self._max_bytes}"
        )


class WaitingImages:
    """A request's images, which are in the room until `leave`."""

    def __init__(self, room: ImageRoom, request: EngineRequest) -> None:
        self._room = room
        self._num_bytes = request.num_image_bytes
        room.num_bytes += self._num_bytes

    def leave(self) -> None:
        """Idempotent."""
        self._room.num_bytes -= self._num_bytes
        self._num_bytes = 0
