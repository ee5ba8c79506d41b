"""What a request passes before a worker's engine gets it: room for its images, and first outputs of other requests."""

from __future__ import annotations

import asyncio
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


class FirstOutputs:
    """Requests of all gateways that one engine computes and that never had an output.

    An engine that dies is counted against them, so a suspect is computed when it is the only one. Belongs to one event
    loop.
    """

    def __init__(self) -> None:
        self._awaited: set[object] = set()
        self._suspect: object = None  # also while it waits for the others' first outputs
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<FirstOutputs {len(self._awaited)} awaited{'' if self._suspect is None else ', one suspect'}>"

    def __contains__(self, owner: object) -> bool:
        return owner in self._awaited

    def __bool__(self) -> bool:
        return bool(self._awaited)

    async def begin(self, owner: object, *, is_suspect: bool) -> None:
        """Return when the engine may have the request. `end` must follow, also where this is cancelled.

        A suspect begins after the first outputs of all others, and the others after that of the suspect.
        """
        while self._suspect not in (None, owner):
            await self._changed.wait()
        if is_suspect:
            self._suspect = owner
            while self._awaited:
                await self._changed.wait()
        self._awaited.add(owner)

    def end(self, owner: object) -> None:
        """The request has an output, or has left the engine. Idempotent."""
        if owner in self._awaited or owner == self._suspect:
            self._awaited.discard(owner)
            if owner == self._suspect:
                self._suspect = None
            self._changed.set()
            self._changed = asyncio.Event()
