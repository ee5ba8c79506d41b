"""A volume as the keeper uses it: operations, breakers, write budget and figures."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.config import TierConfig, VolumeConfig
from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkId, ChunkLayout, LayoutDigest
from kvferry.keeper.volume_state import ReadRate, VolumeState
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry_keeper.store import folder
from kvferry_keeper.store.direct_io import aligned_buffer
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volumes.breaker import Breaker, BreakerState, Cause, WriteBudget
from kvferry_keeper.volumes.io_threads import IoThreads, Kind, Operation

log = logging.getLogger(__name__)

NUM_IO_THREADS = 4  # of each volume
# How often the changes of other nodes to a shared volume are looked for.
_RESCAN_PERIOD_S = 30.0
_ALIVE_PERIOD_S = 60.0  # during a rescan
BREAKER_FAILURES = 3  # in a row, until a volume is left alone
BREAKER_RETRY_S = 5.0
_PURGE_PERIOD_S = 1.0  # between looks for purges by others
# Outcomes that say nothing of the drive.
_NEUTRAL = frozenset(
    {
        Outcome.NO_RESOURCES,
        Outcome.EXISTS,
        Outcome.REFUSED,
        Outcome.MISSING,
        Outcome.GONE,
        Outcome.UNREADABLE,
        Outcome.WRONG_NAMESPACE,
        Outcome.UNDECRYPTABLE,
        Cause.FAULT,
        Cause.ENGINE_GONE,
    }
)


@dataclass(frozen=True, slots=True)
class VolumeIoStats:
    state: VolumeState
    breaker: BreakerState  # of reads; the volume's chunks are misses unless it is closed
    write_breaker: BreakerState
    queued_write_bytes: int
    num_running: int
    num_overdue: int
    outcomes: dict[tuple[str, str], int]  # (read | write, outcome or cause) -> chunks
    read_s: float  # summed over threads
    write_s: float
    bytes_read: int
    bytes_written: int
    evicted: int
    quarantined: int
    tenants: Mapping[str, TenantUsage]


class VolumeIo:
    """Belongs to one event loop. `on_readable_changed` reports chunks becoming loadable, or ceasing to be."""

    def __init__(
        self,
        volume: Volume,
        config: TierConfig,
        volume_config: VolumeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_readable_changed: Callable[[VolumeIo], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.volume = volume
        self.volume_id = volume.volume_id
        self.pool = volume_config.pool  # whose engines alone use it
        self._is_shared = volume_config.shared
        self._timeout_s = config.io_timeout_s
        self._queue_timeout_s = config.io_timeout_s
        self._retry_s = BREAKER_RETRY_S
        self._on_readable_changed = on_readable_changed
        self._clock = clock
        now_s = clock()
        gib_per_day = volume_config.write_gib_per_day
        self.budget = WriteBudget(None if gib_per_day is None else gib_per_day * (1 << 30), now_s)
        self._read_breaker = Breaker(BREAKER_FAILURES, BREAKER_RETRY_S)
        self._write_breaker = Breaker(BREAKER_FAILURES, BREAKER_RETRY_S)
        self._no_space_until_s = now_s
        self._is_full = False
        self._rescan_at_s = now_s + _RESCAN_PERIOD_S
        self._alive_at_s = math.inf
        self._purge_at_s = now_s
        self._needs_rescan = self._is_shared
        self._loop = loop
        self._is_rescanning = False
        self._unreadable: list[tuple[LayoutDigest, ChunkId]] = []
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._read_s = 0.0
        self._write_s = 0.0
        self._probe_random = random.Random(volume.volume_id)
        self.layout_to_payload_bytes: dict[LayoutDigest, int] = {}
        self._blocks_per_chunk = 1
        self._read_rate = ReadRate(now_s)
        self._threads = IoThreads(
            self.volume_id, NUM_IO_THREADS, self._read_rate, self._on_ended, loop=loop, clock=clock
        )
        self._num_unfinished = 0
        self._all_finished = asyncio.Event()

    def __repr__(self) -> str:
        return (
            f"<VolumeIo of {self.volume_id}: {self._threads!r}, reads {self._read_breaker.state.value}, "
            f"writes {self._write_breaker.state.value}>"
        )

    @property
    def is_readable(self) -> bool:
        return self._read_breaker.is_closed

    @property
    def queued_bytes(self) -> int:
        return self._threads.queued_bytes()

    @property
    def queued_write_bytes(self) -> int:
        return self._threads.queued_bytes(Kind.WRITE)

    def load_layouts(self) -> None:
        """Read the folder's layouts. Blocks; call before `start`, on any thread."""
        for digest, layout in folder.load_layouts(self.volume.path).items():
            self.layout_to_payload_bytes[digest] = layout.payload_bytes
            self._blocks_per_chunk = layout.blocks_per_chunk

    def start(self) -> None:
        self._threads.start()

    async def stop(self, grace_s: float) -> bool:
        """False if an operation hangs: its memory is still in use."""
        self._threads.close()
        self._drop(lambda operation: True, Cause.UNAVAILABLE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._num_unfinished:
                    self._all_finished.clear()
                    await self._all_finished.wait()
        return not self._num_unfinished

    def submit(self, operation: Operation) -> None:
        self._num_unfinished += 1
        self._threads.submit(operation)

    def drop_operations_of(self, owner: object, cause: Cause) -> None:
        """Running operations go on."""
        self._drop(lambda operation: operation.owner is owner, cause)

    def add_layout(self, layout: ChunkLayout) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        if self.layout_to_payload_bytes.get(layout.digest) == layout.payload_bytes:
            return
        self.layout_to_payload_bytes[layout.digest] = layout.payload_bytes

        def run() -> str:
            try:
                self.volume.add_layout(layout)
            except OSError as error:
                log.warning("volume %s: the layout of its chunks is not written down: %s", self.volume_id, error)
                return Outcome.IO_ERROR
            return Outcome.OK

        self._submit_task(run)

    def accepts_writes(self, now_s: float) -> bool:
        return (
            self.is_readable
            and now_s >= self._no_space_until_s
            and (self._write_breaker.is_closed or self._write_breaker.is_retry_due(now_s))
        )

    def begin_write(self) -> None:
        """Announce a write: if the breaker is open, it is the trial."""
        if not self._write_breaker.is_closed:
            self._write_breaker.begin_trial()

    def fill_level(self, num_bytes: int) -> float:
        """Return used, queued and `num_bytes` bytes relative to capacity; above 1 evicts."""
        stats = self.volume.stats
        return (stats.bytes_used + self.queued_write_bytes + num_bytes) / max(1, stats.capacity_bytes)

    def mark_unreadable(self, layout: LayoutDigest, chunk: ChunkId) -> None:
        """Record an I/O error. A successful next read blames the chunk: it goes."""
        if self.is_readable:
            self._unreadable.append((layout, chunk))

    def maintain(self, now_s: float) -> None:
        """Apply deadlines, probe and rescan. Call several times a second."""
        overdue = self._threads.mark_overdue(now_s, self._timeout_s)
        for operation in overdue:
            # Its row stays in use: `done` is called when it returns.
            self._outcomes[operation.kind.value, Cause.TIMEOUT] += 1
        if any(operation.kind is not Kind.TASK for operation in overdue):
            log.error(
                "volume %s at %s: %d operations hang for %g s; the volume is not used",
                self.volume_id,
                self.volume.path,
                len(overdue),
                self._timeout_s,
            )
            self._write_breaker.trip(now_s)
            if self._read_breaker.trip(now_s):
                self._hide()
        self._drop(lambda operation: now_s - operation.queued_s > self._queue_timeout_s, Cause.TIMEOUT)
        # After the drop: operations that waited would make new threads hang as well.
        self._threads.start()
        if self._read_breaker.is_retry_due(now_s):
            self._read_breaker.begin_trial()
            self.submit(Operation(Kind.READ, 0, self._probe, _ignore, is_probe=True))
        if self._is_rescanning and now_s >= self._alive_at_s:
            # Others would take over the chunks of a writer whose rescan is long.
            self._alive_at_s = now_s + _ALIVE_PERIOD_S
            self._submit_task(self._say_alive)
        if now_s >= self._purge_at_s and self.is_readable:
            self._purge_at_s = math.inf
            self.submit(Operation(Kind.TASK, 0, self._look_for_purge, self._end_look_for_purge))
        if now_s >= self._rescan_at_s and not self._is_rescanning:
            self._alive_at_s = now_s + _ALIVE_PERIOD_S
            self._rescan()

    def measure(self) -> None:
        """Update the read rate; call about every second."""
        self._read_rate.measure(self._clock())

    def state(self) -> VolumeState:
        stats = self.volume.stats
        return VolumeState(
            volume_id=self.volume_id,
            read_bytes_per_s=self._read_rate.bytes_per_s,
            queue_bytes=self._threads.queued_bytes(Kind.READ),
            chunk_bytes=stats.bytes_used // stats.num_chunks if stats.num_chunks else 0,
            blocks_per_chunk=self._blocks_per_chunk,
            breaker_open=not self._read_breaker.is_closed,
            capacity_bytes=stats.capacity_bytes,
            used_bytes=stats.bytes_used,
            num_chunks=stats.num_chunks,
            shared=self._is_shared,
            write_breaker_open=not self._write_breaker.is_closed,
            full=self._is_full,
            trips=self._read_breaker.num_trips + self._write_breaker.num_trips,
            pool=self.pool,
        )

    def stats(self) -> VolumeIoStats:
        stats = self.volume.stats
        return VolumeIoStats(
            state=self.state(),
            breaker=self._read_breaker.state,
            write_breaker=self._write_breaker.state,
            queued_write_bytes=self.queued_write_bytes,
            num_running=self._threads.num_running,
            num_overdue=self._threads.num_overdue,
            outcomes=dict(self._outcomes),
            read_s=self._read_s,
            write_s=self._write_s,
            bytes_read=stats.bytes_read,
            bytes_written=stats.bytes_written,
            evicted=stats.evicted,
            quarantined=stats.quarantined,
            tenants=self.volume.usages(),
        )

    # Ends of operations

    def _drop(self, is_chosen: Callable[[Operation], bool], cause: Cause | Outcome) -> None:
        for operation in self._threads.withdraw(is_chosen):
            if operation.kind is not Kind.TASK and not operation.is_probe:
                self._outcomes[operation.kind.value, cause] += 1
            breaker = self._breaker_of(operation)
            if operation.is_probe or (
                operation.kind is Kind.WRITE and self._write_breaker.state is BreakerState.HALF_OPEN
            ):
                breaker.trip(self._clock())
            self._end(operation, cause)

    def _end(self, operation: Operation, outcome: str) -> None:
        self._count_finished()
        operation.done(outcome)

    def _count_finished(self) -> None:
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._all_finished.set()

    def _on_ended(self, operation: Operation, outcome: str, seconds: float) -> None:
        if operation.kind is not Kind.TASK:
            if operation.kind is Kind.READ:
                self._read_s += seconds
            else:
                self._write_s += seconds
            if not operation.is_overdue:
                if not operation.is_probe:
                    self._outcomes[operation.kind.value, outcome] += 1
                self._update_breakers(operation, outcome, self._clock())
        self._end(operation, outcome)

    def _breaker_of(self, operation: Operation) -> Breaker:
        return self._write_breaker if operation.kind is Kind.WRITE else self._read_breaker

    def _update_breakers(self, operation: Operation, outcome: str, now_s: float) -> None:
        breaker = self._breaker_of(operation)
        if outcome == Outcome.NO_SPACE:
            # Each further write on the full drive might evict a chunk only to recycle its file.
            self._no_space_until_s = now_s + self._retry_s
            if not self._is_full:
                log.warning("volume %s at %s: the drive is full", self.volume_id, self.volume.path)
            self._is_full = True
            self._drop(lambda other: other.kind is Kind.WRITE, Outcome.NO_SPACE)
        if operation.kind is Kind.WRITE and outcome == Outcome.OK and self._is_full and now_s >= self._no_space_until_s:
            log.warning("volume %s at %s: the drive has room again", self.volume_id, self.volume.path)
            self._is_full = False
        if outcome in _NEUTRAL:
            # It tells nothing of the drive, which perhaps was not asked. A trial is repeated.
            if breaker.state is BreakerState.HALF_OPEN:
                breaker.trip(now_s)
        elif outcome != Outcome.IO_ERROR:
            if breaker.succeeded() and breaker is self._read_breaker:
                log.warning("volume %s at %s is used again", self.volume_id, self.volume.path)
                self._rescan_at_s, self._needs_rescan = now_s, True
                self._on_readable_changed(self)
            if operation.kind is Kind.READ and outcome == Outcome.OK:
                self._remove_unreadable()
        elif breaker.failed(now_s):
            log.error(
                "volume %s at %s: too many failed %ss; it is not used: %s",
                self.volume_id,
                self.volume.path,
                operation.kind.value,
                self.volume.last_error or "cause unknown",
            )
            if breaker is self._read_breaker:
                self._hide()
            else:
                self._drop(lambda other: other.kind is Kind.WRITE, Cause.UNAVAILABLE)

    def _hide(self) -> None:
        self._unreadable.clear()  # the volume is at fault, not these chunks
        self._drop(lambda operation: operation.kind is not Kind.TASK and not operation.is_probe, Cause.UNAVAILABLE)
        self._on_readable_changed(self)

    # Tasks and probes

    def _submit_task(self, run: Callable[[], str]) -> None:
        self.submit(Operation(Kind.TASK, 0, run, _ignore))

    def _say_alive(self) -> str:
        self.volume.say_alive()
        return Outcome.OK

    def _look_for_purge(self) -> str:
        with contextlib.suppress(OSError):
            return Outcome.GONE if self.volume.was_purged() else Outcome.OK
        return Outcome.IO_ERROR

    def _end_look_for_purge(self, outcome: str) -> None:
        self._purge_at_s = self._clock() + _PURGE_PERIOD_S
        if outcome == Outcome.GONE:
            self._rescan_at_s, self._needs_rescan = self._clock(), True

    def _remove_unreadable(self) -> None:
        unreadable, self._unreadable = self._unreadable, []
        for layout, chunk in unreadable:

            def run(layout: LayoutDigest = layout, chunk: ChunkId = chunk) -> str:
                # This node's path to the folder may have failed: another writer's file is its own to judge.
                self.volume.remove(layout, chunk, only_ours=True)
                return Outcome.OK

            self._submit_task(run)

    def _rescan(self) -> None:
        # In a thread of its own, one at a time: rescans take seconds, and would take the threads of reads and writes.
        # While the read breaker is open, the writer only says that it lives: others would take over its chunks.
        is_readable, needs_rescan = self.is_readable, self._needs_rescan

        def run() -> None:
            is_needed_still = is_readable and needs_rescan
            try:
                if is_readable:
                    self.volume.record()
                else:
                    self.volume.say_alive()
                if is_readable and needs_rescan:
                    self.volume.rescan()
                is_needed_still = False
            except TierError as error:
                log.warning("%s", error.message)
            except Exception:
                log.exception("volume %s: a rescan failed", self.volume_id)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._end_rescan, is_needed_still)

        try:
            threading.Thread(target=run, name=f"rescan-{self.volume_id}", daemon=True).start()
        except RuntimeError as error:  # the machine has no thread left
            log.error("volume %s: no rescan now: %s", self.volume_id, error)
            self._rescan_at_s = self._clock() + _RESCAN_PERIOD_S
            return
        self._needs_rescan = self._is_shared or (needs_rescan and not is_readable)
        self._is_rescanning = True
        self._rescan_at_s = math.inf
        self._num_unfinished += 1

    def _end_rescan(self, is_needed_still: bool) -> None:
        self._is_rescanning = False
        self._needs_rescan |= is_needed_still
        self._rescan_at_s = min(self._rescan_at_s, self._clock() + _RESCAN_PERIOD_S)
        self._count_finished()

    def _probe(self) -> str:
        """On an I/O thread: read some chunk, else scan the folder."""
        for layout in self.volume.layouts():
            num_bytes = self.layout_to_payload_bytes.get(layout)
            chunks = self.volume.keys(layout) if num_bytes else []
            if num_bytes and chunks:
                return self.volume.read(layout, self._probe_random.choice(chunks), aligned_buffer(num_bytes))
        try:
            self.volume.rescan()
        except TierError:
            return Outcome.IO_ERROR
        return Outcome.OK


def _ignore(outcome: str) -> None:
    pass
