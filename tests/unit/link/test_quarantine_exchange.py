"""A gateway tells a worker which requests are in quarantine, and waits until the worker's other gateways know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.link.identity.protocol import QUARANTINE, QUARANTINE_KNOWN
from kvferry.link.quarantine_exchange import QuarantineExchange
from kvferry.wire.v1 import worker_pb2 as pb

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
