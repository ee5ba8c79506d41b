"""Digests that gateways refuse, how workers pass them on, and the wait until other gateways know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvferry.link.identity import QUARANTINE, QUARANTINE_KNOWN
from kvferry.link.quarantine import DIGEST_BYTES, MAX_QUARANTINED, QUARANTINE_S, Quarantine, QuarantineExchange, to_wire
from kvferry.wire.v1 import worker_pb2 as pb


def digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "little")


def test_an_entry_ends() -> None:
    quarantine = Quarantine()
    assert not quarantine.contains(digest(1), 0.0)
    quarantine.add(digest(1), 0.0)
    assert quarantine.contains(digest(1), QUARANTINE_S - 1)
    quarantine.add(digest(1), 10.0)
    assert quarantine.contains(digest(1), QUARANTINE_S + 1)
    assert not quarantine.contains(digest(1), QUARANTINE_S + 10)
    assert not quarantine.is_empty(10.0)
    assert quarantine.is_empty(QUARANTINE_S + 10)
    assert len(quarantine) == 0


@pytest.mark.parametrize("surplus", [0, 1])
def test_it_has_a_limit(surplus: int) -> None:
    quarantine = Quarantine()
    for i in range(MAX_QUARANTINED + surplus):
        quarantine.add(digest(i), 0.0)
    assert len(quarantine) == MAX_QUARANTINED
    assert quarantine.contains(digest(0), 1.0) == (not surplus)


def test_entries_pass_from_one_to_another_with_the_time_that_is_left() -> None:
    one, other = Quarantine(), Quarantine()
    assert one.to_wire(0.0) is None
    one.add(digest(1), 0.0)
    message = one.to_wire(100.0)
    assert message is not None
    new = other.add_from_wire(message, 5000.0)
    assert new is not None
    assert [(entry.digest, entry.left_ms) for entry in new.requests] == [(digest(1), 200_000)]
    assert other.contains(digest(1), 5000.0 + QUARANTINE_S - 100.1)
    assert not other.contains(digest(1), 5000.0 + QUARANTINE_S - 100)
    last = one.to_wire(QUARANTINE_S - 0.0005)
    assert last is not None
    assert [entry.left_ms for entry in last.requests] == [1], "less than a millisecond is some time, too"
    assert other.add_from_wire(message, 5001.0) is None, "known: it is not passed on again"


def test_a_peer_can_neither_add_more_nor_longer_than_the_limits() -> None:
    quarantine = Quarantine()
    message = to_wire({digest(i): 1e6 for i in range(MAX_QUARANTINED + 5)}, 0.0)
    message.requests.insert(0, pb.QuarantinedRequest(digest=b"short", left_ms=1000))
    quarantine.add_from_wire(message, 0.0)
    assert len(quarantine) == MAX_QUARANTINED - 1
    assert not quarantine.contains(b"short", 0.0)
    assert not quarantine.contains(digest(3), QUARANTINE_S)


NEWS = pb.Quarantined(requests=[pb.QuarantinedRequest(digest=bytes(32), left_ms=1000)])


def exchange_with(
    *features: str, on_learned: Callable[[pb.Quarantined], None] = lambda message: None
) -> tuple[QuarantineExchange, list[pb.Downward]]:
    sent: list[pb.Downward] = []
    return QuarantineExchange(sent.append, lambda: frozenset(features), on_learned), sent


def known(number: int) -> pb.Upward:
    return pb.Upward(quarantine_known=pb.QuarantineKnown(number=number))


async def test_the_wait_ends_with_the_answer_to_its_number() -> None:
    exchange, sent = exchange_with(QUARANTINE, QUARANTINE_KNOWN)
    waiting = [asyncio.create_task(exchange.tell_and_wait(NEWS)) for _ in range(2)]
    await asyncio.sleep(0)
    first, second = [message.quarantined for message in sent]
    assert (first.requests, second.requests) == (NEWS.requests, NEWS.requests)
    assert first.number != second.number
    exchange.receive(known(second.number))
    exchange.receive(known(second.number))
    exchange.receive(known(first.number + second.number))
    await waiting[1]
    assert not waiting[0].done()
    exchange.receive(known(first.number))
    await waiting[0]


async def test_the_wait_ends_with_the_link() -> None:
    exchange, sent = exchange_with(QUARANTINE, QUARANTINE_KNOWN)
    waiting = [asyncio.create_task(exchange.tell_and_wait(NEWS)) for _ in range(2)]
    await asyncio.sleep(0)
    assert len(sent) == 2
    exchange.disconnected()
    await asyncio.gather(*waiting)


async def test_a_worker_of_an_earlier_release_is_told_and_not_waited_for() -> None:
    exchange, sent = exchange_with(QUARANTINE)
    await exchange.tell_and_wait(NEWS)
    assert sent == [pb.Downward(quarantined=NEWS)]


async def test_nothing_is_sent_where_the_link_is_down() -> None:
    exchange, sent = exchange_with()
    exchange.tell(NEWS)
    await exchange.tell_and_wait(NEWS)
    assert sent == []


def test_a_gateway_answers_after_it_has_learned() -> None:
    learned: list[tuple[pb.Quarantined, int]] = []
    exchange, sent = exchange_with(
        QUARANTINE, QUARANTINE_KNOWN, on_learned=lambda message: learned.append((message, len(sent)))
    )
    asked = pb.Quarantined(requests=NEWS.requests, number=3)
    for message in (NEWS, asked):
        exchange.receive(pb.Upward(quarantined=message))
    assert learned == [(NEWS, 0), (asked, 0)]
    assert sent == [pb.Downward(quarantine_known=pb.QuarantineKnown(number=3))]
