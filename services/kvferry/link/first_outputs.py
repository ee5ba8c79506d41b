"""Requests of all gateways that one engine computes and that never had an output. Belongs to one event loop."""

from __future__ import annotations

import asyncio


class FirstOutputs:
    """An engine that dies is counted against these requests, so a suspect is computed when it is the only one."""

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
