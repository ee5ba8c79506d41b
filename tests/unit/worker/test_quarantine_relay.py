"""Gateways are told of requests in quarantine, and the one that asks hears when all others know."""

from __future__ import annotations

from typing import Any, cast

from kvferry.link.gateway_session import GatewaySession
from kvferry.link.identity import QUARANTINE, QUARANTINE_KNOWN
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker import quarantine_relay
from kvferry.worker.quarantine_relay import QuarantineRelay

DIGEST = bytes(range(32))


class Session:
    """What the relay uses of a GatewaySession."""

    def __init__(self, *features: str) -> None:
        self.features = features or (QUARANTINE, QUARANTINE_KNOWN)
        self.told: list[pb.Quarantined] = []
        self.known: list[int] = []

    def send_quarantine(self, message: pb.Upward) -> None:
        if message.HasField("quarantined"):
            self.told.append(message.quarantined)
        else:
            self.known.append(message.quarantine_known.number)

    @property
    def wire(self) -> GatewaySession:
        return cast(Any, self)


def news(number: int = 0) -> pb.Downward:
    requests = [pb.QuarantinedRequest(digest=DIGEST, left_ms=1000)]
    return pb.Downward(quarantined=pb.Quarantined(requests=requests, number=number))


def relay_of(*sessions: Session) -> QuarantineRelay:
    relay = QuarantineRelay()
    for session in sessions:
        relay.attach(session.wire, 0.0)
    return relay


def test_the_source_hears_once_all_others_know() -> None:
    source, one, other = Session(), Session(), Session()
    relay = relay_of(source, one, other)
    relay.receive(news(7), source.wire, 0.0)
    assert source.told == []
    (to_one,), (to_other,) = one.told, other.told
    assert [request.digest for request in to_one.requests] == [DIGEST]
    relay.note_known(to_one.number, one.wire)
    relay.note_known(to_one.number, one.wire)
    relay.note_known(to_one.number + 1, other.wire)
    assert source.known == []
    relay.note_known(to_other.number, other.wire)
    assert source.known == [7]
    relay.note_known(to_other.number, other.wire)
    assert source.known == [7]


def test_without_other_gateways_the_answer_comes_at_once() -> None:
    source = Session()
    relay_of(source).receive(news(3), source.wire, 0.0)
    assert (source.known, source.told) == ([3], [])


def test_gateways_of_an_earlier_release_are_told_and_not_waited_for() -> None:
    source, old = Session(), Session(QUARANTINE)
    relay_of(source, old).receive(news(3), source.wire, 0.0)
    assert len(old.told) == 1
    assert source.known == [3]


def test_a_gateway_that_leaves_is_not_waited_for_and_not_answered() -> None:
    source, asker, other = Session(), Session(), Session()
    relay = relay_of(source, asker, other)
    relay.receive(news(1), source.wire, 0.0)
    relay.receive(news(2), asker.wire, 0.0)
    relay.note_known(other.told[0].number, other.wire)
    relay.detach(asker.wire)
    relay.detach(asker.wire)
    assert source.known == [1]
    relay.note_known(other.told[1].number, other.wire)
    assert asker.known == []


def test_what_is_known_already_is_passed_on_to_those_that_ask_alone() -> None:
    source, other = Session(), Session()
    relay = relay_of(source, other)
    relay.receive(news(), source.wire, 0.0)
    relay.receive(news(), source.wire, 0.0)
    assert len(other.told) == 1
    relay.receive(news(4), source.wire, 0.0)
    assert len(other.told) == 2
    assert source.known == []


def test_a_gateway_that_comes_later_is_told_what_has_not_ended() -> None:
    source, late, later = Session(), Session(), Session()
    relay = relay_of(source)
    relay.receive(news(), source.wire, 0.0)
    relay.attach(late.wire, 0.5)
    assert [request.digest for request in late.told[0].requests] == [DIGEST]
    relay.attach(later.wire, 2.0)
    assert later.told == []


def test_the_oldest_questions_beyond_the_limit_are_never_answered(monkeypatch: Any) -> None:
    monkeypatch.setattr(quarantine_relay, "MAX_ASKED", 2)
    source, other = Session(), Session()
    relay = relay_of(source, other)
    for number in (1, 2, 3):
        relay.receive(news(number), source.wire, 0.0)
    for told in other.told:
        relay.note_known(told.number, other.wire)
    assert source.known == [2, 3]
