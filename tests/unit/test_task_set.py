from __future__ import annotations

import asyncio

from kvferry.util.task_set import TaskSet


async def test_tasks_are_kept_until_they_end() -> None:
    tasks, gate = TaskSet(), asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    tasks.spawn(wait())
    assert len(tasks) == 1
    assert not await tasks.ended_within(0.01)
    gate.set()
    await tasks.wait()
    assert not len(tasks)
    assert await tasks.ended_within(0.01)


async def test_a_failure_stays_in_its_task() -> None:
    tasks = TaskSet()

    async def fail() -> None:
        raise ValueError("no")

    task = tasks.spawn(fail())
    await tasks.wait()
    assert isinstance(task.exception(), ValueError)


async def test_cancelled_tasks_end() -> None:
    tasks = TaskSet()
    task = tasks.spawn(asyncio.Event().wait())  # type: ignore[arg-type]
    await asyncio.sleep(0)
    tasks.cancel()
    await tasks.wait()
    assert task.cancelled()


async def test_tasks_that_start_meanwhile_are_waited_for() -> None:
    tasks, ended = TaskSet(), []

    async def second() -> None:
        await asyncio.sleep(0)
        ended.append(2)

    async def first() -> None:
        await asyncio.sleep(0)
        tasks.spawn(second())

    tasks.spawn(first())
    await tasks.wait_until_empty()
    assert ended == [2]
