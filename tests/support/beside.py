"""Clients that run beside a test's body, which waits for what they cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx


@asynccontextmanager
async def beside(*clients: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run clients while the body runs; the first that fails ends the body with its error, no group around it.

    The body may await the tasks. Those that have not ended with it are cancelled.
    """
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client) for client in clients]
            yield tasks
            for task in tasks:
                task.cancel()
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    # Raised here, the error does not have the group that contains it as its context.
    if failure is not None:
        raise failure


async def answered(asking: Awaitable[httpx.Response], status: int = 200) -> httpx.Response:
    """Await an answer that must have this status, or it is the client's failure."""
    answer = await asking
    assert answer.status_code == status, f"{answer.status_code} instead of {status}: {answer.text}"
    return answer
