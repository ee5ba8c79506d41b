"""Requests under which engines were lost: their digests, for a time, and how gateways and workers exchange them.

The digests are pure, with passed time.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping

from kvferry.link.identity import QUARANTINE, QUARANTINE_KNOWN
from kvferry.wire.v1 import worker_pb2 as pb

# Gateways refuse them. Each gateway tells its workers, which tell their other gateways: that needs no registry, and
# both ends of a link have the same few entries.

QUARANTINE_S = 300.0
MAX_QUARANTINED = 1024  # the latest are kept
DIGEST_BYTES = 32


class Quarantine:
    """The latest MAX_QUARANTINED digests, each for at most QUARANTINE_S."""

    def __init__(self) -> None:
        self._digest_to_end_s: OrderedDict[bytes, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Quarantine of {len(self._digest_to_end_s)}>"

    def __len__(self) -> int:
        return len(self._digest_to_end_s)

    def add(self, digest: bytes, now_s: float, left_s: float = QUARANTINE_S) -> None:
        self._digest_to_end_s[digest] = now_s + min(left_s, QUARANTINE_S)
        self._digest_to_end_s.move_to_end(digest)
        while len(self._digest_to_end_s) > MAX_QUARANTINED:
            self._digest_to_end_s.popitem(last=False)

    def contains(self, digest: bytes, now_s: float) -> bool:
        end_s = self._digest_to_end_s.get(digest)
        return end_s is not None and end_s > now_s

    def is_empty(self, now_s: float) -> bool:
        """Forget what ended, and return whether nothing is left."""
        for digest in [digest for digest, end_s in self._digest_to_end_s.items() if end_s <= now_s]:
            del self._digest_to_end_s[digest]
        return not self._digest_to_end_s

    def to_wire(self, now_s: float) -> pb.Quarantined | None:
        """Return all entries, or None without any."""
        if self.is_empty(now_s):
            return None
        return to_wire(self._digest_to_end_s, now_s)

    def add_from_wire(self, message: pb.Quarantined, now_s: float) -> pb.Quarantined | None:
        """Add entries. Return those that were not known, or None. Digests of another length are passed over."""
        new: dict[bytes, float] = {}
        for request in message.requests[:MAX_QUARANTINED]:
            if len(request.digest) == DIGEST_BYTES and not self.contains(request.digest, now_s):
                self.add(request.digest, now_s, request.left_ms / 1000.0)
                new[request.digest] = self._digest_to_end_s[request.digest]
        return to_wire(new, now_s) if new else None


def to_wire(digest_to_end_s: Mapping[bytes, float], now_s: float) -> pb.Quarantined:
    return pb.Quarantined(
        requests=[
            pb.QuarantinedRequest(digest=digest, left_ms=max(1, int((end_s - now_s) * 1000.0)))
            for digest, end_s in digest_to_end_s.items()
        ]
    )


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
