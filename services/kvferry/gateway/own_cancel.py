"""Cancels of a task that are told from those of others."""

from __future__ import annotations

import asyncio


class OwnCancel:
    """Base of a context that may cancel the task of its block, as asyncio.Timeout does: another cancel stays one."""

    __slots__ = ("_has_cancelled", "_num_cancels", "_task")

    def _enter(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._num_cancels, self._has_cancelled = task, task.cancelling(), False

    def _cancel(self) -> None:
        self._has_cancelled = True
        self._task.cancel()

    def _takes_back(self, kind: type[BaseException] | None) -> bool:
        """Take the own cancel back, at the end of the block. Return whether the block ended by it alone."""
        if not self._has_cancelled:
            return False
        return self._task.uncancel() <= self._num_cancels and kind is asyncio.CancelledError
