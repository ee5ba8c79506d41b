"""Background tasks that their owner keeps until they end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class TaskSet:
    """Strong references to background tasks, since asyncio has only weak ones. Exceptions stay in the tasks."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<TaskSet of {len(self._tasks)}>"

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.add(task)
        return task

    def add(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        """Cancel every task without waiting."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait for the tasks that run at the call, however they end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_until_empty(self) -> None:
        """Wait until no task runs, including new ones."""
        while self._tasks:
            await self.wait()

    async def ended_within(self, timeout_s: float) -> bool:
        """Return whether the tasks running at the call end within `timeout_s`. Cancels none."""
        if not self._tasks:
            return True
        _, running = await asyncio.wait(self._tasks, timeout=timeout_s)
        return not running
