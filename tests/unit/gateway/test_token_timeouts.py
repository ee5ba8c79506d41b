"""Limits on the time between tokens: one timer for all answers, and no cancel of others taken for its own."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import DeadlineExceeded
from kvferry.gateway.choices import Choice
from kvferry.gateway.timeouts import TokenTimeouts
from support.waiting import until


async def wait_watched(timeouts: TokenTimeouts, choice: Choice, entered: list[Choice]) -> None:
    async with timeouts.watch([choice]):
        entered.append(choice)
        await asyncio.Event().wait()


async def test_many_answers_have_one_timer_that_ends_with_them() -> None:
    timeouts = TokenTimeouts(0.04, 60)
    before = asyncio.get_running_loop().time()
    entered: list[Choice] = []
    tasks = [asyncio.create_task(wait_watched(timeouts, Choice(), entered)) for _ in range(20)]
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(error, DeadlineExceeded) and "first_token_timeout_s" in error.message for error in ended)
    assert asyncio.get_running_loop().time() - before >= 0.04
    assert repr(timeouts) == "<TokenTimeouts of 0 answers>"
    await until(lambda: timeouts._timer is None)  # it looks once more and finds none
    # The next answer has a timer again.
    with pytest.raises(DeadlineExceeded):
        await wait_watched(timeouts, Choice(), entered)


async def test_tokens_of_one_answer_do_not_save_another_one() -> None:
    timeouts = TokenTimeouts(60, 0.04)
    alive, silent = Choice(), Choice()
    alive.num_tokens = silent.num_tokens = 1
    entered: list[Choice] = []
    tasks = [asyncio.create_task(wait_watched(timeouts, choice, entered)) for choice in (alive, silent)]
    while not tasks[1].done():
        alive.num_tokens += 1
        await asyncio.sleep(0.002)
    with pytest.raises(DeadlineExceeded, match="inter_token_timeout_s"):
        tasks[1].result()
    assert not tasks[0].done()
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert repr(timeouts) == "<TokenTimeouts of 0 answers>"


async def test_a_cancel_from_elsewhere_stays_one() -> None:
    timeouts = TokenTimeouts(0.02, 60)
    entered: list[Choice] = []
    reasons: list[str] = []

    async def wait() -> None:
        try:
            async with timeouts.watch([Choice()]):
                entered.append(Choice())
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    # Somebody else cancels the task while the limit's own cancel is on its way.
                    task.cancel()
                    await asyncio.sleep(0)
                    raise
        except DeadlineExceeded:
            reasons.append("deadline")

    task = asyncio.create_task(wait())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reasons == []
    assert entered
