"""Sends what one gateway says of requests in quarantine to the worker's other gateways. Pure, with passed time."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import NamedTuple

from kvferry.link.gateway_session import GatewaySession
from kvferry.link.identity import QUARANTINE_KNOWN
from kvferry.link.quarantine import Quarantine
from kvferry.wire.v1 import worker_pb2 as pb

MAX_ASKED = 1024  # messages that wait for confirmations; older ones are never answered


class _Asked(NamedTuple):
    source: GatewaySession
    number: int  # of the source
    awaited: set[GatewaySession]


class QuarantineRelay:
    """Sends news of one gateway to all others, and answers that gateway when they have confirmed."""

    def __init__(self) -> None:
        self._quarantine = Quarantine()
        self._sessions: set[GatewaySession] = set()
        self._numbers = itertools.count(1)
        self._asked: OrderedDict[int, _Asked] = OrderedDict()

    def __repr__(self) -> str:
        return f"<QuarantineRelay {self._quarantine!r} {len(self._asked)} asked>"

    def attach(self, session: GatewaySession, now_s: float) -> None:
        self._sessions.add(session)
        if known := self._quarantine.to_wire(now_s):
            session.send_quarantine(pb.Upward(quarantined=known))

    def detach(self, session: GatewaySession) -> None:
        """Idempotent."""
        self._sessions.discard(session)
        for number, asked in list(self._asked.items()):
            if asked.source is session:
                del self._asked[number]
            else:
                self.note_known(number, session)

    def receive(self, message: pb.Downward, source: GatewaySession, now_s: float) -> None:
        if message.HasField("quarantine_known"):
            self.note_known(message.quarantine_known.number, source)
        else:
            self._add(message.quarantined, source, now_s)

    def _add(self, message: pb.Quarantined, source: GatewaySession, now_s: float) -> None:
        new = self._quarantine.add_from_wire(message, now_s)
        others = self._sessions - {source}
        if not message.number:
            if new is not None:
                for session in others:
                    session.send_quarantine(pb.Upward(quarantined=new))
            return
        # Also requests that this worker knows already: its gateways may not have read that yet.
        number = next(self._numbers)
        asking = pb.Upward(quarantined=pb.Quarantined(requests=message.requests, number=number))
        for session in others:
            session.send_quarantine(asking)
        awaited = {session for session in others if QUARANTINE_KNOWN in session.features}
        self._asked[number] = _Asked(source, message.number, awaited)
        if len(self._asked) > MAX_ASKED:
            self._asked.popitem(last=False)
        self._answer(number)

    def note_known(self, number: int, session: GatewaySession) -> None:
        if (asked := self._asked.get(number)) is not None:
            asked.awaited.discard(session)
            self._answer(number)

    def _answer(self, number: int) -> None:
        asked = self._asked[number]
        if not asked.awaited:
            del self._asked[number]
            asked.source.send_quarantine(pb.Upward(quarantine_known=pb.QuarantineKnown(number=asked.number)))
