"""I/O threads of one volume, with priorities and deadlines.

A hanging system call cannot be cancelled: the *overdue* operation's thread is replaced, and its memory stays in use
until the call returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import threading
from collections import deque
from collections.abc import Callable

from kvferry.keeper.volume_state import ReadRate
from kvferry_keeper.volumes.breaker import Cause

log = logging.getLogger(__name__)

# Once this many threads hang, no more are started. A hard mount of a dead server loses this many.
_MAX_LOST_THREADS = 16
# A task such as a scan of the whole folder may take long, but a hanging one must not occupy its thread forever.
_TASK_TIMEOUT_S = 600.0


class Kind(enum.StrEnum):
    """By falling priority."""

    READ = "read"
    TASK = "task"
    WRITE = "write"


class Operation:
    """Calls `run` on an I/O thread, then `done` once in the event loop, with an Outcome or a Cause.

    A started `run` always returns before `done`.
    """

    __slots__ = ("done", "is_overdue", "is_probe", "kind", "num_bytes", "owner", "queued_s", "run", "started_s")

    def __init__(
        self,
        kind: Kind,
        num_bytes: int,
        run: Callable[[], str],
        done: Callable[[str], None],
        *,
        owner: object = None,
        is_probe: bool = False,
    ) -> None:
        self.kind = kind
        self.num_bytes = num_bytes
        self.run = run
        self.done = done
        self.owner = owner
        self.is_probe = is_probe
        self.queued_s = 0.0
        self.started_s = 0.0
        self.is_overdue = False


class IoThreads:
    """Belongs to one event loop, where `on_ended(operation, outcome, seconds)` follows each `run`."""

    def __init__(
        self,
        volume_id: str,
        num_threads: int,
        read_rate: ReadRate,
        on_ended: Callable[[Operation, str, float], None],
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Callable[[], float],
    ) -> None:
        self._volume_id = volume_id
        self._num_threads = num_threads
        self._read_rate = read_rate
        self._on_ended = on_ended
        self._loop = loop
        self._clock = clock
        # The condition's lock guards the rest, and is held for microseconds.
        self._work = threading.Condition()
        self._queues: dict[Kind, deque[Operation]] = {kind: deque() for kind in Kind}
        self._kind_to_bytes = dict.fromkeys(Kind, 0)  # waiting and running
        self._running: dict[Operation, None] = {}
        self._num_live = 0  # threads that are not lost
        self._num_lost = 0
        self._is_closing = False

    def __repr__(self) -> str:
        waiting = {kind.value: len(queue) for kind, queue in self._queues.items() if queue}
        return f"<IoThreads: {waiting or 'nothing'} waits, {len(self._running)} running, {self._num_lost} lost>"

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_overdue(self) -> int:
        return self._num_lost

    def queued_bytes(self, kind: Kind | None = None) -> int:
        """Bytes of operations that wait or run, of one kind or of all."""
        return sum(self._kind_to_bytes.values()) if kind is None else self._kind_to_bytes[kind]

    def submit(self, operation: Operation) -> None:
        operation.queued_s = self._clock()
        with self._work:
            queue = self._queues[operation.kind]
            if operation.is_probe:
                queue.appendleft(operation)
            else:
                queue.append(operation)
            self._kind_to_bytes[operation.kind] += operation.num_bytes
            self._work.notify()

    def withdraw(self, is_chosen: Callable[[Operation], bool]) -> list[Operation]:
        withdrawn: list[Operation] = []
        with self._work:
            for kind, queue in self._queues.items():
                if any(map(is_chosen, queue)):
                    leaving = [operation for operation in queue if is_chosen(operation)]
                    self._queues[kind] = deque(operation for operation in queue if not is_chosen(operation))
                    self._kind_to_bytes[kind] -= sum(operation.num_bytes for operation in leaving)
                    withdrawn += leaving
        return withdrawn

    def mark_overdue(self, now_s: float, timeout_s: float) -> list[Operation]:
        kind_to_timeout_s = dict.fromkeys(Kind, timeout_s) | {Kind.TASK: max(timeout_s, _TASK_TIMEOUT_S)}
        with self._work:
            overdue = [
                operation
                for operation in self._running
                if not operation.is_overdue and now_s - operation.started_s > kind_to_timeout_s[operation.kind]
            ]
            for operation in overdue:
                operation.is_overdue = True
                self._num_lost += 1
                self._num_live -= 1
        return overdue

    def start(self) -> None:
        with self._work:
            while self._num_live < self._num_threads and self._num_lost <= _MAX_LOST_THREADS:
                try:
                    threading.Thread(target=self._serve, name=f"volume-{self._volume_id}", daemon=True).start()
                except RuntimeError as error:  # the machine has no thread left; the next call tries again
                    log.error("volume %s: %s", self._volume_id, error)
                    return
                self._num_live += 1

    def close(self) -> None:
        with self._work:
            self._is_closing = True
            self._work.notify_all()

    # On the threads

    def _serve(self) -> None:
        while (operation := self._next()) is not None:
            begin_s = operation.started_s
            try:
                outcome = operation.run()
            except Exception:
                log.exception("volume %s: unexpected failure of a %s", self._volume_id, operation.kind.value)
                outcome = Cause.FAULT
            end_s = self._clock()
            is_surplus = self._end(operation, end_s)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_ended, operation, outcome, end_s - begin_s)
            del operation
            if is_surplus:
                return

    def _next(self) -> Operation | None:
        """None: the thread has to end."""
        with self._work:
            while True:
                for queue in self._queues.values():
                    if queue:
                        operation = queue.popleft()
                        operation.started_s = self._clock()
                        self._running[operation] = None
                        if operation.kind is Kind.READ:
                            self._read_rate.begin_read(operation.started_s)
                        return operation
                if self._is_closing:
                    self._num_live -= 1
                    return None
                self._work.wait()

    def _end(self, operation: Operation, end_s: float) -> bool:
        with self._work:
            del self._running[operation]
            self._kind_to_bytes[operation.kind] -= operation.num_bytes
            if operation.kind is Kind.READ:
                self._read_rate.end_read(operation.num_bytes, end_s)
            if not operation.is_overdue:
                return False
            self._num_lost -= 1
            is_surplus = self._num_live >= self._num_threads
            self._num_live += not is_surplus
            return is_surplus
