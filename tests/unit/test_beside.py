from __future__ import annotations

import asyncio

import httpx
import pytest

from support.beside import answered, beside
from support.waiting import until


async def answer(status: int) -> httpx.Response:
    return httpx.Response(status, text="an answer")


async def never() -> None:
    await asyncio.Event().wait()


async def fail(error: Exception) -> None:
    await asyncio.sleep(0)
    raise error


async def test_a_client_that_fails_ends_a_body_that_waits_and_the_other_clients() -> None:
    with pytest.raises(AssertionError, match="429 instead of 200: an answer") as failed:
        async with beside(never(), answered(answer(429))) as tasks:
            await until(lambda: False)
    assert isinstance(failed.value.__context__, asyncio.CancelledError), "where the body waited"
    assert tasks[0].cancelled()
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


async def test_a_client_that_fails_while_the_body_awaits_it_raises_its_error_alone() -> None:
    with pytest.raises(AssertionError, match="200 instead of 503"):
        async with beside(answered(answer(200), 503)) as (asked,):
            await asked


async def test_an_error_of_the_body_is_raised_as_it_is_and_ends_the_clients() -> None:
    with pytest.raises(KeyError, match="of the body"):
        async with beside(never()) as clients:
            await fail(KeyError("of the body"))
    assert clients[0].cancelled()


async def test_the_body_gets_results_and_its_end_cancels_what_still_runs() -> None:
    async with beside(answered(answer(503), 503), never()) as (asked, client):
        assert (await asked).text == "an answer"
    assert client.cancelled()


async def test_a_client_that_the_body_cancels_has_not_failed() -> None:
    async with beside(never()) as (client,):
        await asyncio.sleep(0)
        client.cancel()
        await until(client.done)


@pytest.mark.parametrize("is_outer", [True, False])
async def test_a_client_ends_all_bodies_around_the_one_that_waits(is_outer: bool) -> None:
    failing, other = answered(answer(429)), never()
    with pytest.raises(AssertionError, match="429 instead of 200"):
        async with beside(failing if is_outer else other), beside(other if is_outer else failing):
            await never()
