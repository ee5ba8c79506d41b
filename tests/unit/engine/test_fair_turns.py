"""Turns of a few at a time: no tenant keeps the others from theirs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

import pytest

from kvferry.engine import fair_turns
from kvferry.engine.fair_turns import FairTurns
from kvferry.errors import Overloaded


def line_of(turns: FairTurns, order: list[str], *names: str) -> list[asyncio.Task[None]]:
    """Tasks that wait for a turn and note it. A name's first letter is its tenant."""

    async def wait(name: str) -> None:
        await turns.begin(name[0])
        order.append(name)

    return [asyncio.create_task(wait(name)) for name in names]


async def end_all(
    turns: FairTurns,
    order: list[str],
    waiting: Sequence[asyncio.Task[None]],
    *,
    took_s: Mapping[str, float] = {},
    held: bool = True,
) -> None:
    """End the turn of `d`, if `held`, then each turn of those that wait, one after the other."""
    await asyncio.sleep(0)
    if held:
        turns.end("d", 0.0)
    for number in range(len(waiting)):
        await asyncio.sleep(0)
        tenant = order[number][0]
        turns.end(tenant, took_s.get(tenant, 0.0))
    await asyncio.gather(*waiting)


async def test_tenants_take_turns_and_each_keeps_its_order() -> None:
    turns, order = FairTurns(1, 10, "full"), []
    await turns.begin("d")
    waiting = line_of(turns, order, "a1", "a2", "a3", "b1", "b2", "c1")
    await end_all(turns, order, waiting)
    assert order == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert (turns.num_free, turns.num_waiting) == (1, 0)


async def test_a_tenant_whose_turns_take_long_waits_for_those_that_had_less_time() -> None:
    turns, order = FairTurns(1, 20, "full"), []
    await turns.begin("d")
    waiting = line_of(turns, order, "a1", "a2", "b1", "b2", "b3", "b4", "b5")
    await end_all(turns, order, waiting, took_s={"a": 0.04, "b": 0.01})
    assert order == ["a1", "b1", "b2", "b3", "b4", "a2", "b5"]


async def test_a_tenant_gets_no_credit_for_the_time_it_was_away() -> None:
    turns, order = FairTurns(1, 20, "full"), []
    for _ in range(3):
        await turns.begin("a")
        turns.end("a", 10.0)
    await turns.begin("a")
    waiting = line_of(turns, order, "a1", "a2", "b1", "b2", "b3")
    await asyncio.sleep(0)
    turns.end("a", 0.01)
    await end_all(turns, order, waiting, took_s={"a": 0.01, "b": 0.01}, held=False)
    assert order == ["b1", "a1", "b2", "a2", "b3"]


async def test_the_last_turn_is_kept_free_for_others_that_came_lately(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, order = FairTurns(3, 10, "full"), []
    for _ in range(3):
        await turns.begin("a")
    (other,) = line_of(turns, order, "b1")
    waiting = line_of(turns, order, "a1", "a2")
    await asyncio.sleep(0)
    assert order == []
    turns.end("a", 5.0)
    await other
    turns.end("b", 0.01)
    turns.end("a", 5.0)
    await asyncio.sleep(0)
    assert order == ["b1", "a1"], "two of three are a's"
    await asyncio.wait_for(turns.begin("b"), 10)
    turns.end("b", 0.01)
    monkeypatch.setattr(fair_turns, "_SEEN_S", 0.0)
    turns.end("a", 5.0)
    await asyncio.gather(*waiting)
    assert turns.num_free == 1
    await asyncio.wait_for(turns.begin("a"), 10)
    assert turns.num_free == 0, "alone it has all"


async def test_tenants_that_came_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_turns, "_SEEN_S", 0.0)
    turns = FairTurns(2, 10, "full")
    for name in ("a", "b", "c"):
        await turns.begin(name)
        turns.end(name, 0.01)
    assert not turns._tenants


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
    turns.end("a", 0.0)
    await end_all(turns, order, [first, other, second], held=False)
    assert order == ["b1", "a1", "a2"]


async def test_without_a_line_a_full_one_refuses() -> None:
    turns = FairTurns(1, 0, "full")
    await turns.begin("a")
    with pytest.raises(Overloaded, match="full"):
        await turns.begin("b")
    turns.end("a", 0.0)
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
            turns.end(tenant, 0.001)

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
    assert (turns.num_free, turns.num_waiting, turns._waiting) == (3, 0, {})


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


async def test_a_tenant_that_always_has_a_turn_saves_no_credit() -> None:
    turns = FairTurns(3, 10, "full")
    await turns.begin("a")
    for _ in range(3):
        await turns.begin("d")
        turns.end("d", 10.0)
    await turns.begin("a")
    assert turns._tenants["a"].had_s >= 20.0, "as much as had the tenant of the last turn before it"
    turns.end("a", 0.0)
    turns.end("a", 30.0)
    assert turns.num_free == 3
