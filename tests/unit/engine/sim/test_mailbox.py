from __future__ import annotations

import asyncio

import pytest

from kvferry.engine.sim.mailbox import Mailbox

DEADLINE_S = 10.0


async def test_items_come_in_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.put(2)
    assert len(mailbox) == 2
    assert [await mailbox.get(), await mailbox.get()] == [1, 2]


async def test_a_sleeping_reader_is_woken() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.put(1)
    mailbox.put(2)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader == 1
    assert await mailbox.get() == 2


async def test_an_error_comes_after_the_items_and_stays() -> None:
    mailbox: Mailbox[int] = Mailbox()
    mailbox.put(1)
    mailbox.fail(ValueError("first"))
    mailbox.fail(ValueError("second"))
    assert await mailbox.get() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await mailbox.get()


async def test_an_error_wakes_the_reader() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    mailbox.fail(ValueError("over"))
    with pytest.raises(ValueError, match="over"):
        await asyncio.wait_for(reader, DEADLINE_S)


async def test_a_cancelled_reader_takes_nothing() -> None:
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.get())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    mailbox.put(1)
    assert await mailbox.get() == 1
