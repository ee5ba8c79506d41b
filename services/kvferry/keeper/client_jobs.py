"""Submitted jobs of an engine."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvferry.keeper import messages
from kvferry.keeper.layout import ChunkKey

# Touches are hints: if this many messages wait, further ones are dropped.
_MAX_WAITING_TOUCHES = 256

# Limits an engine's unfinished stores: further ones are skipped, and their pages computed again if they are asked for.
MAX_QUEUED_BYTES = 512 << 20

# Causes of failed chunks that the keeper did not report.
AWAY = "keeper_away"
SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class JobDone:
    """Every chunk is in `succeeded`, or in `failed` with its cause.

    Chunks stored before succeed. A failed load's row is undefined.
    """

    job: int
    is_load: bool
    succeeded: frozenset[ChunkKey]
    failed: Mapping[ChunkKey, str]
    num_bytes: int  # moved
    seconds: float  # from submission to end


@dataclass(slots=True)
class ClientStats:
    hits: int = 0
    misses: int = 0
    load_jobs: int = 0
    loaded: int = 0
    failed_loads: int = 0
    store_jobs: int = 0
    stored: int = 0
    failed_stores: int = 0  # without skipped ones
    skipped_stores: int = 0  # the queue was full
    bytes_loaded: int = 0
    bytes_stored: int = 0
    connects: int = 0
    losses: int = 0  # connections that ended, or became silent
    failures: dict[str, int] = field(default_factory=dict)  # of chunks, by cause

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)


class ClientJob:
    __slots__ = ("is_load", "keys", "message", "num_bytes", "number", "submitted_s")

    def __init__(
        self,
        number: int,
        keys: Sequence[ChunkKey],
        message: messages.Store | messages.Load,
        num_bytes: int,
        submitted_s: float,
    ) -> None:
        self.number = number
        self.is_load = isinstance(message, messages.Load)
        self.keys = keys
        self.message = message
        self.num_bytes = num_bytes  # of all its rows
        self.submitted_s = submitted_s


class ClientJobs:
    """Thread-safe; the lock is held for microseconds. Accepts jobs while open; `close` is final."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._all_ended = threading.Condition(self._lock)
        self.is_open = False
        self._is_closed = False
        self._waiting: deque[ClientJob | messages.Touch] = deque()
        self._num_waiting_touches = 0
        self._unfinished: dict[int, ClientJob] = {}
        self._unfinished_store_bytes = 0
        self._done: deque[JobDone] = deque()
        self.stats = ClientStats()

    def __repr__(self) -> str:
        return f"<ClientJobs {len(self._unfinished)} unfinished, {len(self._done)} done>"

    @property
    def has_unfinished(self) -> bool:
        return bool(self._unfinished) or bool(self._done)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def submit(self, job: ClientJob) -> bool:
        """Return False if the job has ended already. Raises ValueError for a number in use."""
        with self._lock:
            if job.number in self._unfinished:
                raise ValueError(f"job {job.number} has not ended")
            if job.is_load:
                self.stats.load_jobs += 1
            else:
                self.stats.store_jobs += 1
            if not job.keys:
                self._end(job, {}, 0)
                return False
            if not self.is_open:
                self._fail(job, AWAY)
                return False
            if not job.is_load:
                if self._unfinished_store_bytes + job.num_bytes > MAX_QUEUED_BYTES:
                    self._fail(job, SKIPPED)
                    return False
                self._unfinished_store_bytes += job.num_bytes
            self._unfinished[job.number] = job
            self._waiting.append(job)
            return True

    def submit_touch(self, touch: messages.Touch) -> bool:
        with self._lock:
            if not touch.keys or not self.is_open or self._num_waiting_touches >= _MAX_WAITING_TOUCHES:
                return False
            self._num_waiting_touches += 1
            self._waiting.append(touch)
            return True

    def pop_waiting(self, sent: dict[int, ClientJob]) -> messages.ToKeeper | None:
        with self._lock:
            if not self._waiting:
                return None
            waiting = self._waiting.popleft()
            if isinstance(waiting, ClientJob):
                sent[waiting.number] = waiting
                return waiting.message
            self._num_waiting_touches -= 1
            return waiting

    def pop_done(self) -> list[JobDone]:
        if not self._done:
            return []
        with self._lock:
            done = list(self._done)
            self._done.clear()
        return done

    def wait_until_all_ended(self, timeout_s: float) -> bool:
        with self._lock:
            return self._all_ended.wait_for(lambda: not self._unfinished, timeout_s)

    def open(self) -> None:
        """Accept jobs, unless closed."""
        with self._lock:
            self.is_open = not self._is_closed

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            self._is_closed = True

    def fail_waiting(self) -> None:
        """Fail the jobs that were not sent, and accept none until `open`."""
        with self._lock:
            self.is_open = False
            waiting = [job for job in self._waiting if isinstance(job, ClientJob)]
            self._waiting.clear()
            self._num_waiting_touches = 0
            for job in waiting:
                self._fail(job, AWAY)

    def fail(self, jobs: Iterable[ClientJob]) -> None:
        """Fail jobs whose keeper is gone."""
        with self._lock:
            for job in jobs:
                self._fail(job, AWAY)

    def end(self, job: ClientJob, index_to_cause: Mapping[int, str], num_bytes: int) -> None:
        """`index_to_cause` has the chunks that failed."""
        with self._lock:
            self._end(job, index_to_cause, num_bytes)

    def count_connect(self) -> None:
        with self._lock:
            self.stats.connects += 1

    def count_loss(self) -> None:
        with self._lock:
            self.stats.losses += 1

    # With the lock held

    def _fail(self, job: ClientJob, cause: str) -> None:
        self._end(job, dict.fromkeys(range(len(job.keys)), cause), 0)

    def _end(self, job: ClientJob, index_to_cause: Mapping[int, str], num_bytes: int) -> None:
        keys = job.keys
        failed = {keys[i]: cause for i, cause in index_to_cause.items()}
        # A key that occurs twice in a job has failed if one occurrence has.
        succeeded = frozenset(keys).difference(failed) if failed else frozenset(keys)
        stats = self.stats
        for cause in failed.values():
            stats.failures[cause] = stats.failures.get(cause, 0) + 1
        if job.is_load:
            stats.loaded += len(succeeded)
            stats.failed_loads += len(failed)
            stats.bytes_loaded += num_bytes
        else:
            num_skipped = sum(cause == SKIPPED for cause in failed.values())
            stats.stored += len(succeeded)
            stats.skipped_stores += num_skipped
            stats.failed_stores += len(failed) - num_skipped
            stats.bytes_stored += num_bytes
        if self._unfinished.pop(job.number, None) is not None and not job.is_load:
            self._unfinished_store_bytes -= job.num_bytes
        seconds = self._clock() - job.submitted_s
        self._done.append(JobDone(job.number, job.is_load, succeeded, failed, num_bytes, seconds))
        if not self._unfinished:
            self._all_ended.notify_all()
