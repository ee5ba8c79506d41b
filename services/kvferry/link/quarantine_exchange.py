"""A gateway's side of the messages about requests in quarantine, for one worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from kvferry.link.identity.protocol import QUARANTINE, QUARANTINE_KNOWN
from kvferry.wire.v1 import worker_pb2 as pb


class QuarantineExchange:
    def __init__(
        self,
        send: Callable[[pb.Downward], None],
        features: Callable[[], frozenset[str]],
        on_learned: Callable[[pb.Quarantined], None],
    ) -> None:
        # `features` are the worker's, none while the link is down.
        self._on_learned = on_learned
        self._send = send
        self._features = features
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        return f"<QuarantineExchange {len(self._asked)} asked>"

    def tell(self, message: pb.Quarantined) -> None:
        if QUARANTINE in self._features():
            self._send(pb.Downward(quarantined=message))

    async def tell_and_wait(self, message: pb.Quarantined) -> None:
        """Return when the worker's other gateways know, or the link is down."""
        if QUARANTINE_KNOWN not in self._features():
            self.tell(message)
            return
        number = next(self._numbers)
        known = self._asked[number] = asyncio.get_running_loop().create_future()
        self.tell(pb.Quarantined(requests=message.requests, number=number))
        try:
            await known
        finally:
            del self._asked[number]

    def receive(self, message: pb.Upward) -> None:
        if message.HasField("quarantine_known"):
            self._note_known(message.quarantine_known.number)
            return
        self._on_learned(message.quarantined)
        if number := message.quarantined.number:
            self._send(pb.Downward(quarantine_known=pb.QuarantineKnown(number=number)))

    def disconnected(self) -> None:
        for number in self._asked:
            self._note_known(number)

    def _note_known(self, number: int) -> None:
        known = self._asked.get(number)
        if known is not None and not known.done():
            known.set_result(None)
