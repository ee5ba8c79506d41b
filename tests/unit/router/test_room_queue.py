"""Lines for room, one for each tenant."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.engine.base import Turn
from kvferry.errors import Overloaded
from kvferry.router import room_queue
from kvferry.router.room_queue import RoomQueue, RoomQueues

NOISE, GOLD = Turn("noise", 1.0), Turn("gold", 4.0)


def test_the_first_of_each_tenants_line_tries() -> None:
    queue = RoomQueue(16, lambda: 0.0)
    noise = [queue.enter(10.0, NOISE, is_resumed=False) for _ in range(3)]
    gold = [queue.enter(10.0, GOLD, is_resumed=False) for _ in range(2)]
    assert [queue.is_first(each) for each in (*noise, *gold)] == [True, False, False, True, False]
    assert (queue.num_before(NOISE), queue.num_before(GOLD), queue.num_before(Turn("t", 1.0))) == (3, 2, 0)
    resumed = queue.enter(10.0, NOISE, is_resumed=True)
    assert queue.is_first(resumed)
    assert [queue.is_first(each) for each in (*noise, *gold)] == [True, False, False, True, False]
    assert (queue.num_before(NOISE), queue.num_before(GOLD)) == (4, 2), "it goes before its own tenant's alone"
    resumed.leave()
    resumed.leave()
    noise[0].leave()
    assert queue.is_first(noise[1])
    for each in (*noise, *gold):
        each.leave()
    assert len(queue) == 0
    assert not queue._lines


def test_one_tenant_does_not_fill_the_line_and_without_shares_it_may() -> None:
    queue = RoomQueue(16, lambda: 0.0)
    for _ in range(8):
        queue.enter(10.0, NOISE, is_resumed=False)
    with pytest.raises(Overloaded, match="of this tenant"):
        queue.enter(10.0, NOISE, is_resumed=False)
    for _ in range(4):
        queue.enter(10.0, GOLD, is_resumed=False)
    for _ in range(4):
        queue.enter(10.0, None, is_resumed=False)
    with pytest.raises(Overloaded, match="no place left"):
        queue.enter(10.0, None, is_resumed=False)


def test_a_wait_is_expected_by_share() -> None:
    now_s = [0.0]
    queue = RoomQueue(100, lambda: now_s[0])
    for _ in range(40):
        queue.enter(100.0, NOISE, is_resumed=False)
    for _ in range(20):  # one a second
        now_s[0] += 1.0
        queue.completions.add(now_s[0])
    with pytest.raises(Overloaded, match="no room is expected within the"):
        queue.enter(now_s[0] + 10.0, NOISE, is_resumed=False)
    assert queue.enter(now_s[0] + 10.0, GOLD, is_resumed=False)
    refused = queue.refusal("full", turn=GOLD)
    assert refused.retry_after_s is not None
    assert refused.retry_after_s < 10


async def test_room_wakes_the_first_of_every_line() -> None:
    queue = RoomQueue(16, lambda: 0.0)
    waiters = [queue.enter(10.0, turn, is_resumed=False) for turn in (NOISE, GOLD, NOISE)]
    woken = [asyncio.create_task(waiter.turn()) for waiter in waiters]
    await asyncio.sleep(0)
    queue.note_room()
    done, left = await asyncio.wait(woken, timeout=0.05)
    assert done == {woken[0], woken[1]}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def test_news_of_room_goes_round_among_many_tenants() -> None:
    queue = RoomQueue(1000, lambda: 0.0)
    waiters = [queue.enter(10.0, Turn(f"t{number}", 1.0), is_resumed=False) for number in range(40)]
    resumed = queue.enter(10.0, NOISE, is_resumed=True)
    woken = []
    for _ in range(3):
        queue.note_room()
        woken.append([waiter for waiter in (resumed, *waiters) if waiter._turn.is_set()])
        for waiter in woken[-1]:
            waiter._turn.clear()
    assert all(len(each) == room_queue.WOKEN_AT_ONCE for each in woken)
    assert all(resumed in each for each in woken), "it waits for its own place only"
    assert {id(waiter) for each in woken for waiter in each} == {id(waiter) for waiter in (resumed, *waiters)}
    assert queue.ask_again_s == pytest.approx(room_queue.ASK_AGAIN_S * 41 / 16)


async def test_the_lines_of_pools_are_apart() -> None:
    queues = RoomQueues(2, lambda: 0.0)
    for _ in range(2):
        queues.of("").enter(10.0, None, is_resumed=False)
    with pytest.raises(Overloaded, match="max_queued_requests is 2 choices"):
        queues.of("").enter(10.0, None, is_resumed=False)
    waiter = queues.of("a").enter(10.0, None, is_resumed=False)
    assert (len(queues), len(queues.of("a")), queues.of("b").num_before(None)) == (3, 1, 0)
    turn = asyncio.create_task(waiter.turn())
    await asyncio.sleep(0)
    queues.note_room("")
    await asyncio.sleep(0)
    assert not waiter._turn.is_set(), "room elsewhere is none"
    queues.note_room("a")
    await turn
    turn = asyncio.create_task(waiter.turn())
    queues.note_room()
    await turn
    waiter.leave()
    assert len(queues) == 2
