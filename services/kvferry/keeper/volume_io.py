"""The I/O of one volume: its threads, what waits for them, deadlines, and whether the volume is to be trusted.

Each volume has threads of its own, so that one that hangs holds up no other. A system call that hangs cannot be
cancelled: its operation is *overdue*, its thread is written off and replaced, and whatever memory it was given stays
its own until it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.config import TierConfig, VolumeConfig
from kvferry.errors import TierError
from kvferry.keeper.breaker import Breaker, BreakerState, WriteBudget
from kvferry.store import folder
from kvferry.store.direct_io import aligned_buffer
from kvferry.store.layout import ChunkId, ChunkLayout, LayoutDigest
from kvferry.store.outcome import Outcome
from kvferry.store.volume import Volume

log = logging.getLogger(__name__)

# Threads that may hang at once before no more are started: whoever mounts a dead server with `hard` has this many.
_MAX_LOST_THREADS = 16
# Seconds between looks at what other nodes did to a shared volume.
_RESCAN_PERIOD_S = 30.0
# A task such as a look at a whole folder may take its time; one that hangs must not keep its thread for good.
_TASK_TIMEOUT_S = 600.0
# How much the last second counts in the rate of a volume.
_RATE_WEIGHT = 0.3
# A rate is forgotten after so long without reads: nobody loads from what was slow, and it would stay so for ever.
_RATE_KEPT_S = 5.0


class Cause(enum.StrEnum):
    """Why a chunk failed without its volume having said so; labels, beside those of Outcome."""

    TIMEOUT = "timeout"  # waited for its turn, or ran, for longer than the deadline
    UNAVAILABLE = "unavailable"  # its volume is left alone, or unknown
    QUEUE_FULL = "queue_full"
    ENGINE_GONE = "engine_gone"
    FAULT = "fault"  # of ours, with a traceback in the log


class Kind(enum.StrEnum):
    """What an operation does. In this order they get a thread, except for probes, which go first."""

    READ = "read"
    TASK = "task"
    WRITE = "write"


class Operation:
    """One thing for an I/O thread. `run` is called there, `done` in the event loop, once, whatever happens.

    `done` is given an Outcome or a Cause, and is not called before `run` has returned, if it ever began.
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


@dataclass(frozen=True, slots=True)
class VolumeIoState:
    """A volume as the rest of the world needs to know it."""

    volume_id: str
    path: str
    is_shared: bool
    is_direct: bool
    breaker: BreakerState  # of reads; while it is not closed the volume's chunks are misses
    write_breaker: BreakerState
    num_trips: int
    is_full: bool  # its drive had no room for the last write
    capacity_bytes: int
    bytes_used: int
    num_chunks: int
    chunk_bytes: int  # of a chunk's file, on average
    stride: int  # chunks of an engine in one chunk, in the layout that was used last
    read_bytes_per_s: float  # while it reads, in the last seconds; 0 where it did not
    queued_read_bytes: int  # waiting or being read
    queued_write_bytes: int
    num_running: int
    num_overdue: int  # hang
    outcomes: dict[tuple[str, str], int]  # (read | write, outcome or cause) -> chunks
    read_s: float  # spent in reads, summed over threads
    write_s: float
    bytes_read: int
    bytes_written: int
    evicted: int
    quarantined: int


class VolumeIo:
    """Owned by one event loop: every method is called there, and so are `done` and the two callbacks.

    `on_visible` is told when the volume's chunks can be loaded from now on, or no more.
    """

    def __init__(
        self,
        volume: Volume,
        config: TierConfig,
        volume_config: VolumeConfig,
        loop: asyncio.AbstractEventLoop,
        *,
        on_visible: Callable[[VolumeIo], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.volume = volume
        self.volume_id = volume.volume_id
        self.is_shared = volume_config.shared
        self._num_threads = config.io_threads
        self._timeout_s = config.io_timeout_s
        self._retry_s = config.breaker_retry_s
        self._loop = loop
        self._on_visible = on_visible
        self._clock = clock
        now_s = clock()
        gib_per_day = volume_config.write_gib_per_day
        self.budget = WriteBudget(None if gib_per_day is None else gib_per_day * (1 << 30), now_s)
        self.reading = Breaker(config.breaker_failures, config.breaker_retry_s)
        self.writing = Breaker(config.breaker_failures, config.breaker_retry_s)
        self._no_space_until_s = now_s
        self._is_full = False
        self._rescan_at_s = now_s + _RESCAN_PERIOD_S
        self._suspects: list[tuple[LayoutDigest, ChunkId]] = []
        self._outcomes: Counter[tuple[str, str]] = Counter()
        self._read_s = 0.0
        self._write_s = 0.0
        self._read_bytes_per_s = 0.0
        self._rate_at_s = now_s
        self._probes = random.Random(volume.volume_id)
        self.layout_to_payload_bytes: dict[LayoutDigest, int] = {}
        self._stride = 1

        # Guarded by the condition's lock, which is held for microseconds.
        self._work = threading.Condition()
        self._queues: dict[Kind, deque[Operation]] = {kind: deque() for kind in Kind}
        self._queued_bytes = dict.fromkeys(Kind, 0)  # waiting and running
        self._running: dict[Operation, None] = {}
        self._num_live = 0  # threads that are not lost
        self._num_lost = 0
        self._num_reading = 0
        self._reading_since_s = 0.0
        self._reading_s = 0.0  # of the time since the rate was last looked at
        self._read_bytes = 0
        self._is_closing = False

        self._num_unfinished = 0
        self._quiet = asyncio.Event()

    def __repr__(self) -> str:
        waiting = {kind.value: len(queue) for kind, queue in self._queues.items() if queue}
        return (
            f"<Lane of {self.volume_id}: {waiting or 'nothing'} waits, {len(self._running)} running, "
            f"{self._num_lost} lost, reads {self.reading.state.value}, writes {self.writing.state.value}>"
        )

    # The loop's side

    @property
    def is_visible(self) -> bool:
        """Whether chunks can be loaded from it."""
        return self.reading.is_closed

    @property
    def queued_bytes(self) -> int:
        """Waiting for it or being moved."""
        return sum(self._queued_bytes.values())

    @property
    def queued_write_bytes(self) -> int:
        return self._queued_bytes[Kind.WRITE]

    def learn(self) -> None:
        """Which layouts the folder knows. Blocks; before `start`, on any thread."""
        for digest, layout in folder.load_layouts(self.volume.path).items():
            self.layout_to_payload_bytes[digest] = layout.payload_bytes
            self._stride = layout.blocks_per_chunk

    def start(self) -> None:
        """Begin to work."""
        with self._work:
            while self._num_live < self._num_threads:
                self._start_thread()

    def submit(self, operation: Operation) -> None:
        """Have it done, in its turn."""
        operation.queued_s = self._clock()
        self._num_unfinished += 1
        with self._work:
            queue = self._queues[operation.kind]
            if operation.is_probe:
                queue.appendleft(operation)
            else:
                queue.append(operation)
            self._queued_bytes[operation.kind] += operation.num_bytes
            self._work.notify()

    def drop(self, owner: object, cause: Cause) -> None:
        """End what waits for this owner; what runs goes on."""
        self._drop(lambda operation: operation.owner is owner, cause)

    def add_layout(self, layout: ChunkLayout) -> None:
        """Engines use this layout here."""
        self._stride = layout.blocks_per_chunk
        if self.layout_to_payload_bytes.get(layout.digest) == layout.payload_bytes:
            return
        self.layout_to_payload_bytes[layout.digest] = layout.payload_bytes

        def run() -> str:
            try:
                self.volume.add_layout(layout)
            except OSError as error:
                log.warning("volume %s: the layout of its pages is not written down: %s", self.volume_id, error)
                return Outcome.IO_ERROR
            return Outcome.OK

        self.submit(Operation(Kind.TASK, 0, run, _nobody_cares))

    def takes_writes(self, now_s: float) -> bool:
        """Whether a chunk may be sent to it, the budget aside."""
        return (
            self.is_visible
            and now_s >= self._no_space_until_s
            and (self.writing.is_closed or self.writing.is_ripe(now_s))
        )

    def fill(self, num_bytes: int) -> float:
        """How full it would be with this many bytes more and all that waits; above 1 something is evicted."""
        stats = self.volume.stats
        return (stats.bytes_used + self.queued_write_bytes + num_bytes) / max(1, stats.capacity_bytes)

    def begin_write(self) -> None:
        """The next write goes here: it may be the one that decides about the breaker."""
        if not self.writing.is_closed:
            self.writing.begin_trial()

    def check(self, now_s: float) -> None:
        """To be called several times a second: deadlines, probes, rescans."""
        with self._work:
            newly_overdue = [
                operation
                for operation in self._running
                if not operation.is_overdue
                and now_s - operation.started_s
                > (self._timeout_s if operation.kind is not Kind.TASK else max(self._timeout_s, _TASK_TIMEOUT_S))
            ]
            for operation in newly_overdue:
                operation.is_overdue = True
                self._num_lost += 1
                self._num_live -= 1
        for operation in newly_overdue:
            # Its row stays its own: `done` is for when it returns.
            self._outcomes[operation.kind.value, Cause.TIMEOUT] += 1
        if any(operation.kind is not Kind.TASK for operation in newly_overdue):
            log.error(
                "volume %s: nothing from %d operations for %g s; it is left alone",
                self.volume_id,
                len(newly_overdue),
                self._timeout_s,
            )
            self.writing.trip(now_s)
            if self.reading.trip(now_s):
                self._hide()
        self._drop(lambda operation: now_s - operation.queued_s > self._timeout_s, Cause.TIMEOUT)
        with self._work:
            # Only now that nothing waits: whatever they began would hang as well.
            while self._num_live < self._num_threads and self._num_lost <= _MAX_LOST_THREADS:
                self._start_thread()
        if self.reading.is_ripe(now_s):
            self.reading.begin_trial()
            self.submit(Operation(Kind.READ, 0, self._probe, _nobody_cares, is_probe=True))
        if self.is_shared and self.is_visible and now_s >= self._rescan_at_s:
            self._rescan(now_s)

    def measure(self) -> None:
        """To be called every second or so: how fast it reads."""
        now_s = self._clock()
        with self._work:
            reading_s, num_bytes = self._reading_s, self._read_bytes
            if self._num_reading:
                reading_s += now_s - self._reading_since_s
                self._reading_since_s = now_s
            self._reading_s, self._read_bytes = 0.0, 0
        if num_bytes and reading_s > 0:
            rate = num_bytes / reading_s
            weight = _RATE_WEIGHT if self._read_bytes_per_s else 1.0
            self._read_bytes_per_s += weight * (rate - self._read_bytes_per_s)
            self._rate_at_s = now_s
        elif now_s - self._rate_at_s > _RATE_KEPT_S:
            self._read_bytes_per_s = 0.0

    def state(self) -> VolumeIoState:
        """A copy."""
        stats = self.volume.stats
        return VolumeIoState(
            volume_id=self.volume_id,
            path=str(self.volume.path),
            is_shared=self.is_shared,
            is_direct=stats.is_direct,
            breaker=self.reading.state,
            write_breaker=self.writing.state,
            num_trips=self.reading.num_trips + self.writing.num_trips,
            is_full=self._is_full,
            capacity_bytes=stats.capacity_bytes,
            bytes_used=stats.bytes_used,
            num_chunks=stats.num_chunks,
            chunk_bytes=stats.bytes_used // stats.num_chunks if stats.num_chunks else 0,
            stride=self._stride,
            read_bytes_per_s=self._read_bytes_per_s,
            queued_read_bytes=self._queued_bytes[Kind.READ],
            queued_write_bytes=self._queued_bytes[Kind.WRITE],
            num_running=len(self._running),
            num_overdue=self._num_lost,
            outcomes=dict(self._outcomes),
            read_s=self._read_s,
            write_s=self._write_s,
            bytes_read=stats.bytes_read,
            bytes_written=stats.bytes_written,
            evicted=stats.evicted,
            quarantined=stats.quarantined,
        )

    async def stop(self, grace_s: float) -> bool:
        """Take nothing more, and wait for what runs. False where something hangs: its memory is still its own."""
        with self._work:
            self._is_closing = True
            self._work.notify_all()
        self._drop(lambda operation: True, Cause.UNAVAILABLE)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self._num_unfinished:
                    self._quiet.clear()
                    await self._quiet.wait()
        return not self._num_unfinished

    def _hide(self) -> None:
        self._suspects.clear()  # the volume is, not they
        self._drop(lambda operation: operation.kind is not Kind.TASK and not operation.is_probe, Cause.UNAVAILABLE)
        self._on_visible(self)

    def _drop(self, chosen: Callable[[Operation], bool], cause: Cause | Outcome) -> None:
        """End those that wait and are chosen."""
        dropped: list[Operation] = []
        with self._work:
            for kind, queue in self._queues.items():
                if any(map(chosen, queue)):
                    leaving = [operation for operation in queue if chosen(operation)]
                    staying = [operation for operation in queue if not chosen(operation)]
                    self._queues[kind] = deque(staying)
                    self._queued_bytes[kind] -= sum(operation.num_bytes for operation in leaving)
                    dropped += leaving
        for operation in dropped:
            if operation.kind is not Kind.TASK and not operation.is_probe:
                self._outcomes[operation.kind.value, cause] += 1
            if operation.is_probe or self._is_on_trial(operation):
                self._breaker_of(operation).trip(self._clock())
            self._end(operation, cause)

    def _end(self, operation: Operation, outcome: str) -> None:
        self._num_unfinished -= 1
        if not self._num_unfinished:
            self._quiet.set()
        operation.done(outcome)

    def _is_on_trial(self, operation: Operation) -> bool:
        return operation.kind is Kind.WRITE and self.writing.state is BreakerState.HALF_OPEN

    def _breaker_of(self, operation: Operation) -> Breaker:
        return self.writing if operation.kind is Kind.WRITE else self.reading

    def _finish(self, operation: Operation, outcome: str, seconds: float) -> None:
        """Something that ran has ended."""
        if operation.kind is Kind.TASK:
            self._end(operation, outcome)
            return
        now_s = self._clock()
        if operation.kind is Kind.READ:
            self._read_s += seconds
        else:
            self._write_s += seconds
        if not operation.is_overdue:
            if not operation.is_probe:
                self._outcomes[operation.kind.value, outcome] += 1
            self._judge(operation, outcome, now_s)
        self._end(operation, outcome)

    def _judge(self, operation: Operation, outcome: str, now_s: float) -> None:
        """What this says about the volume. Whatever it answered but an error shows that it lives."""
        breaker = self._breaker_of(operation)
        if outcome == Outcome.NO_SPACE:
            # Each write that the drive has no room for may cost a chunk that would have been recycled for it.
            self._no_space_until_s = now_s + self._retry_s
            self._is_full = True
            self._drop(lambda other: other.kind is Kind.WRITE, Outcome.NO_SPACE)
        if operation.kind is Kind.WRITE and outcome == Outcome.OK:
            self._is_full = False
        if outcome != Outcome.IO_ERROR:
            if breaker.succeeded() and breaker is self.reading:
                log.warning("volume %s answers again", self.volume_id)
                self._rescan(now_s)
                self._on_visible(self)
            if operation.kind is Kind.READ and outcome == Outcome.OK:
                self._remove_suspects()
            return
        if breaker.failed(now_s):
            log.error("volume %s: too many failed %ss; it is left alone", self.volume_id, operation.kind.value)
            if breaker is self.reading:
                self._hide()
            else:
                self._drop(lambda other: other.kind is Kind.WRITE, Cause.UNAVAILABLE)

    def suspect(self, layout: LayoutDigest, chunk: ChunkId) -> None:
        """It could not be read. If the next one can, the fault is the chunk's, and it is removed."""
        if self.is_visible:
            self._suspects.append((layout, chunk))

    def _remove_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        for layout, chunk in suspects:

            def run(layout: LayoutDigest = layout, chunk: ChunkId = chunk) -> str:
                self.volume.remove(layout, chunk)
                return Outcome.OK

            self.submit(Operation(Kind.TASK, 0, run, _nobody_cares))

    def _rescan(self, now_s: float) -> None:
        self._rescan_at_s = now_s + _RESCAN_PERIOD_S

        def run() -> str:
            try:
                self.volume.rescan()
            except TierError as error:
                log.warning("%s", error.message)
                return Outcome.IO_ERROR
            return Outcome.OK

        self.submit(Operation(Kind.TASK, 0, run, _nobody_cares))

    # The threads' side

    def _probe(self) -> str:
        """Read some chunk; without any, look at the folder."""
        for layout in self.volume.layouts():
            num_bytes = self.layout_to_payload_bytes.get(layout)
            chunks = self.volume.keys(layout) if num_bytes else []
            if num_bytes and chunks:
                return self.volume.read(layout, self._probes.choice(chunks), aligned_buffer(num_bytes))
        try:
            self.volume.rescan()
        except TierError:
            return Outcome.IO_ERROR
        return Outcome.OK

    def _start_thread(self) -> None:
        self._num_live += 1
        threading.Thread(target=self._serve, name=f"volume-{self.volume_id}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._work:
                operation = self._next()
                while operation is None:
                    if self._is_closing:
                        self._num_live -= 1
                        return
                    self._work.wait()
                    operation = self._next()
                operation.started_s = begin_s = self._clock()
                self._running[operation] = None
                if operation.kind is Kind.READ:
                    if not self._num_reading:
                        self._reading_since_s = begin_s
                    self._num_reading += 1
            try:
                outcome = operation.run()
            except Exception:
                log.exception("volume %s: a %s failed in a way of its own", self.volume_id, operation.kind.value)
                outcome = Cause.FAULT
            end_s = self._clock()
            with self._work:
                del self._running[operation]
                self._queued_bytes[operation.kind] -= operation.num_bytes
                if operation.kind is Kind.READ:
                    self._num_reading -= 1
                    self._read_bytes += operation.num_bytes
                    if not self._num_reading:
                        self._reading_s += end_s - self._reading_since_s
                is_surplus = False
                if operation.is_overdue:
                    self._num_lost -= 1
                    is_surplus = self._num_live >= self._num_threads
                    self._num_live += not is_surplus
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody wants to know
                self._loop.call_soon_threadsafe(self._finish, operation, outcome, end_s - begin_s)
            del operation
            if is_surplus:
                return

    def _next(self) -> Operation | None:
        for kind in Kind:
            if queue := self._queues[kind]:
                return queue.popleft()
        return None


def _nobody_cares(outcome: str) -> None:
    pass
