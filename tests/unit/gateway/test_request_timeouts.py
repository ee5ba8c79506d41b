"""The time of whole requests: one timer for all, exact, and no cancel of others taken for its own."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.gateway.timeouts import RequestTimeout, RequestTimeouts
from support.waiting import until


async def wait_limited(timeouts: RequestTimeouts, entered: list[RequestTimeout]) -> None:
    with timeouts.limit() as limit:
        entered.append(limit)
        await asyncio.Event().wait()


async def test_each_request_ends_at_its_own_time_with_one_timer() -> None:
    timeouts = RequestTimeouts(0.05)
    loop = asyncio.get_running_loop()
    took_s: list[float] = []

    async def run() -> None:
        begun_s = loop.time()
        with pytest.raises(TimeoutError):
            await wait_limited(timeouts, [])
        took_s.append(loop.time() - begun_s)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(10):
            tasks.create_task(run())
            await asyncio.sleep(0.003)
        assert timeouts._timer is not None
    assert len(took_s) == 10
    assert min(took_s) >= 0.05
    assert repr(timeouts) == "<RequestTimeouts of 0 requests>"
    assert timeouts._timer is None
    with pytest.raises(TimeoutError):  # the next request has a timer again
        await wait_limited(timeouts, [])


async def test_a_request_that_ends_in_time_leaves_nothing_but_the_timer_of_the_oldest() -> None:
    timeouts = RequestTimeouts(0.02)
    with timeouts.limit():
        pass
    assert repr(timeouts) == "<RequestTimeouts of 0 requests>"
    await until(lambda: timeouts._timer is None)
    with timeouts.limit():
        await asyncio.sleep(0)


async def test_a_request_may_end_before_its_time_and_only_once() -> None:
    timeouts = RequestTimeouts(60)
    entered: list[RequestTimeout] = []
    task = asyncio.create_task(wait_limited(timeouts, entered))
    await until(lambda: bool(entered))
    entered[0].expire()
    entered[0].expire()
    with pytest.raises(TimeoutError):
        await task
    assert task.cancelling() == 0


@pytest.mark.parametrize("expires", [False, True])
async def test_a_cancel_from_elsewhere_stays_one(expires: bool) -> None:
    timeouts = RequestTimeouts(60)
    entered: list[RequestTimeout] = []
    task = asyncio.create_task(wait_limited(timeouts, entered))
    await until(lambda: bool(entered))
    if expires:
        entered[0].expire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert repr(timeouts) == "<RequestTimeouts of 0 requests>"


async def test_another_error_of_the_block_is_not_hidden() -> None:
    timeouts = RequestTimeouts(0.01)

    async def fail_at_the_end() -> None:
        with timeouts.limit():
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError("of the block")

    task = asyncio.create_task(fail_at_the_end())
    with pytest.raises(KeyError, match="of the block"):
        await task
    assert task.cancelling() == 0
