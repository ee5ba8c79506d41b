from __future__ import annotations

import asyncio

import pytest

from kvferry_sim.event_stream import SingleReaderQueue
from support.waiting import SOON_S


async def test_items_come_in_order() -> None:
    single_reader_queue: SingleReaderQueue[int] = SingleReaderQueue()
    single_reader_queue.put(1)
    single_reader_queue.put(2)
    assert len(single_reader_queue) == 2
    assert [await single_reader_queue.get(), await single_reader_queue.get()] == [1, 2]


async def test_a_sleeping_reader_is_woken() -> None:
    single_reader_queue: SingleReaderQueue[int] = SingleReaderQueue()
    reader = asyncio.create_task(single_reader_queue.get())
    await asyncio.sleep(0)
    single_reader_queue.put(1)
    single_reader_queue.put(2)
    async with asyncio.timeout(SOON_S):
        assert await reader == 1
    assert await single_reader_queue.get() == 2


async def test_an_error_comes_after_the_items_and_stays() -> None:
    single_reader_queue: SingleReaderQueue[int] = SingleReaderQueue()
    single_reader_queue.put(1)
    single_reader_queue.fail(ValueError("first"))
    single_reader_queue.fail(ValueError("second"))
    assert await single_reader_queue.get() == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="first"):
            await single_reader_queue.get()


async def test_an_error_wakes_the_reader() -> None:
    single_reader_queue: SingleReaderQueue[int] = SingleReaderQueue()
    reader = asyncio.create_task(single_reader_queue.get())
    await asyncio.sleep(0)
    single_reader_queue.fail(ValueError("over"))
    with pytest.raises(ValueError, match="over"):
        await asyncio.wait_for(reader, SOON_S)


async def test_a_cancelled_reader_takes_nothing() -> None:
    single_reader_queue: SingleReaderQueue[int] = SingleReaderQueue()
    reader = asyncio.create_task(single_reader_queue.get())
    await asyncio.sleep(0)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    single_reader_queue.put(1)
    assert await single_reader_queue.get() == 1
