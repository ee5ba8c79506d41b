"""A gateway's handle for one request on a worker."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from kvferry.engine.base import EngineOutput, PromptSources, Turn
from kvferry.errors import EngineError, KvferryError
from kvferry.membership.base import MemberId

log = logging.getLogger(__name__)

OnOutput = Callable[[EngineOutput], None]
# Called with token ids and text, for an output that is nothing else, as nearly all are.
OnText = Callable[[Sequence[int], str], None]
# Called with the last output of a request that finished before its cancel reached the worker.
OnOrphan = Callable[[EngineOutput], None]


class RemoteRequest:
    """Callbacks run while the link reads: they must be quick. One that raises ends its own request."""

    __slots__ = (
        "_cancel",
        "_is_ended",
        "_number",
        "_on_output",
        "_result",
        "_waiter",
        "_worker",
        "on_text",
        "sources",
        "turn",
    )

    def __init__(
        self,
        worker: MemberId,
        number: int,
        on_output: OnOutput,
        on_text: OnText | None,
        cancel: Callable[[int, OnOrphan | None], None],
        turn: Turn | None = None,
    ) -> None:
        self.turn = turn
        self.sources: PromptSources | None = None  # of its prompt; known with the first output, of recent workers
        self._worker = worker
        self._number = number
        self._cancel = cancel
        self._on_output = on_output
        # The link calls it for every token, without a method between. Its exceptions go to `fail`.
        self.on_text = on_text if on_text is not None else as_on_text(on_output)
        self._result: EngineOutput | KvferryError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_ended = False  # waited for or cancelled: no more callbacks

    async def wait(self) -> EngineOutput:
        """Return the last output, also passed to `on_output`. Raises the request's KvferryError."""
        if self._result is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_ended = True
        if isinstance(self._result, KvferryError):
            raise self._result
        assert self._result is not None
        return self._result

    def deliver(self, item: EngineOutput | KvferryError) -> bool:
        """Returns whether the item is the last."""
        if isinstance(item, KvferryError):
            self._end(item)
            return True
        try:
            self._on_output(item)
        except Exception as error:
            self.fail(error)
            return True
        if item.finish_reason is None:
            return False
        self._end(item)
        return True

    def fail(self, error: Exception) -> None:
        if not isinstance(error, KvferryError):
            log.error("the reader of request %d of worker %s failed", self._number, self._worker, exc_info=error)
            error = EngineError("the gateway failed on this request; its log says why")
        self._end(error)
        self._cancel(self._number, None)

    def cancel(self, on_orphan: OnOrphan | None = None) -> None:
        """Stop the request on the worker and release its pages. Idempotent.

        If it finishes first, `on_orphan` gets its last output, which may name pages kept for a KV transfer.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._on_output = _ignore_output
        self.on_text = _ignore_text
        if on_orphan is not None and isinstance(self._result, EngineOutput):
            on_orphan(self._result)
        self._cancel(self._number, on_orphan)

    def _end(self, result: EngineOutput | KvferryError) -> None:
        self._result = result
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def as_on_text(on_output: OnOutput) -> OnText:
    return lambda token_ids, text: on_output(EngineOutput(token_ids, text))


def _ignore_output(output: EngineOutput) -> None:
    pass


def _ignore_text(token_ids: Sequence[int], text: str) -> None:
    pass


def transferred_pages(last: EngineOutput, block_size: int) -> int:
    """A last partial page counts."""
    return -(-last.cached.kv_transfer // block_size) if last.cached is not None else 0
