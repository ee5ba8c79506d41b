"""Turns of a few at a time: no tenant keeps the others from theirs."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvferry.engine.fair_turns import FairTurns
from kvferry.errors import Overloaded


def line_of(turns: FairTurns, order: list[str], *names: str) -> list[asyncio.Task[None]]:
    """Tasks that wait for a turn and note it. A name's first letter is its tenant."""

    async def wait(name: str) -> None:
        await turns.begin(name[0])
        order.append(name)

    return [asyncio.create_task(wait(name)) for name in names]


async def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    turns, order = FairTurns(2, 10, "full"), []
    for _ in range(2):
        await turns.begin("a")
    waiting = line_of(turns, order, "a1", "a2", "a3", "b1", "b2", "c1")
    await asyncio.sleep(0)
    for _ in waiting:
        turns.end()
    await asyncio.gather(*waiting)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    for _ in range(2):
        turns.end()
    assert (turns.num_free, turns.num_waiting) == (2, 0)


async def test_where_too_many_wait_the_last_of_the_longest_line_leaves() -> None:
    turns, order = FairTurns(1, 3, "full"), []
    await turns.begin("a")
    first, second, third = line_of(turns, order, "a1", "a2", "a3")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="full"):
        await turns.begin("a")
    (other,) = line_of(turns, order, "b1")
    with pytest.raises(Overloaded, match="full"):
        await third
    # Now a has two in line and b one: another one of b would only change places.
    with pytest.raises(Overloaded, match="full"):
        await turns.begin("b")
    for _ in range(4):
        turns.end()
    await asyncio.gather(first, second, other)
    assert order == ["a1", "b1", "a2"]


async def test_without_a_line_a_full_one_refuses() -> None:
    turns = FairTurns(1, 0, "full")
    await turns.begin("a")
    with pytest.raises(Overloaded, match="full"):
        await turns.begin("b")
    turns.end()
    await turns.begin("b")


@pytest.mark.parametrize("seed", range(20))
async def test_no_turn_is_lost_whoever_leaves(seed: int) -> None:
    dice = random.Random(seed)
    turns, order, held = FairTurns(3, 8, "full"), [], []

    async def work(tenant: str) -> None:
        await turns.begin(tenant)
        try:
            order.append(tenant)
            held.append(tenant)
            assert len(held) <= 3
            await asyncio.sleep(dice.choice((0, 0, 0.001)))
        finally:
            held.remove(tenant)
            turns.end()

    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        tasks.append(asyncio.create_task(work(dice.choice("aaaabc"))))
        if dice.random() < 0.4:
            dice.choice(tasks).cancel()
        if dice.random() < 0.5:
            await asyncio.sleep(0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, Overloaded | asyncio.CancelledError | None) for each in results)
    assert {"b", "c"} <= set(order)
    assert (turns.num_free, turns.num_waiting, turns._lines) == (3, 0, {})


async def test_work_whose_client_left_keeps_its_turn_until_it_ends() -> None:
    turns, began, may_end = FairTurns(1, 10, "full"), asyncio.Event(), asyncio.Event()

    async def work() -> bool:
        began.set()
        return await may_end.wait()

    left = asyncio.create_task(turns.run("a", work))
    await began.wait()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert turns.num_free == 0
    may_end.set()
    assert await asyncio.wait_for(turns.run("b", work), 10)
    assert turns.num_free == 1
