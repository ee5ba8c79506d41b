"""An engine's side of its keeper: submissions that never wait, and a mirror of what can be loaded.

One thread of its own talks to the keeper. Whoever calls, such as a scheduler between two steps, takes a lock that is
held for microseconds, and looks chunks up in a set of this process.

A job's rows belong to the keeper until the job has ended, and it ends in one of four ways: the keeper says so; the
keeper says Bye; the keeper's process has ended with all its threads (seen on a pidfd, not on the socket); or it was
never sent. The end of the stream alone ends no job that was sent.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import random
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.keeper import messages
from kvferry.keeper.messages import ProtocolError
from kvferry.keeper.peer_process import PeerProcess
from kvferry.store.layout import CHUNK_KEY_BYTES, ChunkKey, ChunkLayout
from kvferry.tenancy.namespace import Namespace
from kvferry.tracing import TraceContext

log = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 512 << 20

_MIN_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
_CONNECT_TIMEOUT_S = 1.0
_WELCOME_TIMEOUT_S = 10.0
_GOODBYE_TIMEOUT_S = 1.0
_TICK_S = 1.0
_READ_BYTES = 256 << 10
# What is encoded ahead of a keeper that reads slowly. Jobs beyond it are not sent, and can be failed at once.
_MAX_UNSENT_BYTES = 1 << 20
# Touches are hints: beyond this many waiting messages they are dropped.
_MAX_WAITING_TOUCHES = 256

# Why chunks of a job failed without the keeper having said so.
AWAY = "keeper_away"
SKIPPED = "skipped"

_NOTHING: frozenset[ChunkKey] = frozenset()


class Region(NamedTuple):
    """An engine's CPU tier: a shared-memory file of `num_rows` rows of `row_bytes`."""

    fd: int
    num_rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class JobDone:
    """A job that ended. Every chunk is in `succeeded` or in `failed`, with its cause.

    A store's chunk that was there already has succeeded. A load's row holds the chunk, verified, or may hold anything.
    """

    job: int
    is_load: bool
    succeeded: frozenset[ChunkKey]
    failed: Mapping[ChunkKey, str]
    num_bytes: int  # moved
    seconds: float  # from submission to end


@dataclass(slots=True)
class ClientStats:
    """Totals since the client was made. Chunks, unless the name says otherwise."""

    hits: int = 0
    misses: int = 0
    load_jobs: int = 0
    loaded: int = 0
    failed_loads: int = 0
    store_jobs: int = 0
    stored: int = 0
    failed_stores: int = 0  # those that were skipped are not in it
    skipped_stores: int = 0  # the queue was full
    bytes_loaded: int = 0
    bytes_stored: int = 0
    connects: int = 0
    losses: int = 0  # connections that ended, or fell silent
    failures: dict[str, int] = field(default_factory=dict)  # of chunks, by cause

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)


class _Job:
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


class _State(enum.Enum):
    GREETING = enum.auto()  # Hello is sent
    SERVING = enum.auto()
    LEAVING = enum.auto()  # we send no more, and wait until nothing of ours is touched


class _Link:
    """One connection and the jobs that went over it; outlives its socket while the keeper may touch their rows."""

    def __init__(self, connection: socket.socket, peer: PeerProcess, now_s: float) -> None:
        self.connection: socket.socket | None = connection
        self.peer = peer
        self.state = _State.GREETING
        self.reader = messages.FrameReader()
        self.unsent = bytearray()
        self.jobs: dict[int, _Job] = {}
        self.began_s = now_s
        self.heard_s = now_s
        self.sequence = 0
        self.next_part = 0
        self.keys: set[ChunkKey] = set()  # the mirror, or what has arrived of the next one
        self.complete = False
        self.silent = False

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class KeeperClient:
    """Engine-neutral. Its methods return at once, whether or not a keeper is there, and may be called by any thread.

    `region.fd` is duplicated; the caller may close its own. Job numbers are the caller's, and may be used again once
    `finished` has returned them. `on_lost` is called, from the client's thread, whenever the keeper goes away.
    """

    def __init__(
        self,
        socket_path: str,
        region: Region,
        layout: ChunkLayout,
        *,
        engine_id: str,
        on_lost: Callable[[], None] | None = None,
        max_queued_bytes: int = MAX_QUEUED_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_queued_bytes` bounds the rows of stores that have not ended; more are skipped.

        Raises ValueError when a row is not the payload of `layout`.
        """
        if region.row_bytes != layout.payload_bytes:
            raise ValueError(f"rows of {region.row_bytes} bytes for pages of {layout.payload_bytes}")
        self._socket_path = socket_path
        self._region = region._replace(fd=os.dup(region.fd))
        self._layout = layout
        self._engine_id = engine_id
        self._on_lost = on_lost
        self._max_queued_bytes = max_queued_bytes
        self._clock = clock
        self._random = random.Random(engine_id)

        # What a lookup reads; replaced as a whole, never None.
        self._held: set[ChunkKey] | frozenset[ChunkKey] = _NOTHING

        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._open = False  # jobs are taken
        self._waiting: deque[_Job | messages.Touch] = deque()
        self._num_waiting_touches = 0
        self._unfinished: dict[int, _Job] = {}
        self._stored_bytes = 0  # rows of stores that have not ended
        self._done: deque[JobDone] = deque()
        self._stats = ClientStats()
        self._woken = False
        self._stopping = False

        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None

        # Of the thread alone.
        self._selector = selectors.DefaultSelector()
        self._link: _Link | None = None
        self._orphans: list[_Link] = []  # lost, with jobs whose rows the keeper may still touch
        self._backoff_s = _MIN_BACKOFF_S
        self._dial_s = 0.0
        self._complaint = ""  # what was logged last, so that it is not said every two seconds

    def __repr__(self) -> str:
        return (
            f"<KeeperClient {self._engine_id} {'connected' if self.connected else 'away'} "
            f"{len(self._held)} keys, {len(self._unfinished)} jobs>"
        )

    # For any thread.

    @property
    def connected(self) -> bool:
        """Whether a keeper has welcomed this engine and is heard from."""
        return self._open

    @property
    def has_unfinished(self) -> bool:
        """Whether there are jobs that `finished` has not returned yet."""
        return bool(self._unfinished) or bool(self._done)

    @property
    def stats(self) -> ClientStats:
        """Live; read it, do not keep it."""
        return self._stats

    def start(self) -> None:
        """Begin to look for the keeper."""
        self._thread = threading.Thread(target=self._run, name=f"keeper-client-{self._engine_id}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the keeper; takes at most about a second. May be repeated.

        Jobs whose rows the keeper may still touch stay unfinished.
        """
        with self._lock:
            self._stopping = True
            self._open = False
        self._poke()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._wake >= 0:
            self._selector.close()
            os.close(self._wake)
            os.close(self._region.fd)
            self._wake = -1

    def contains(self, key: ChunkKey) -> bool:
        """Whether the keeper has said that it can load this chunk. False while it is away. O(1), no lock."""
        if key in self._held:
            self._stats.hits += 1
            return True
        self._stats.misses += 1
        return False

    def store(self, job: int, namespace: Namespace, chunks: Sequence[tuple[ChunkKey, int, int]]) -> None:
        """Keep chunks: (key, route key, row) each. The rows may not change until the job has ended.

        Raises ValueError for a job that has not ended, a row outside the region or a key that is none.
        """
        keys = [key for key, _, _ in chunks]
        rows = [row for _, _, row in chunks]
        self._check(keys, rows)
        message = messages.Store(
            job,
            namespace.tenant,
            namespace.epoch,
            messages.pack_chunk_keys(keys),
            [route_key for _, route_key, _ in chunks],
            rows,
        )
        self._submit(_Job(job, keys, message, len(keys) * self._region.row_bytes, self._clock()))

    def load(
        self,
        job: int,
        namespace: Namespace,
        chunks: Sequence[tuple[ChunkKey, int]],
        volumes: Mapping[ChunkKey, str] | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        """Bring chunks: (key, row) each. The rows belong to the keeper until the job has ended.

        `volumes` says where chunks lie that are not in the mirror; `trace` whose part this is. Raises ValueError as
        `store` does.
        """
        keys = [key for key, _ in chunks]
        rows = [row for _, row in chunks]
        self._check(keys, rows)
        volume_to_indices: dict[str, list[int]] = {}
        if volumes:
            for i, key in enumerate(keys):
                volume_id = volumes.get(key)
                if volume_id is not None:
                    volume_to_indices.setdefault(volume_id, []).append(i)
        message = messages.Load(
            job,
            namespace.tenant,
            namespace.epoch,
            messages.pack_chunk_keys(keys),
            rows,
            volume_to_indices,
            *((trace.traceparent, trace.tracestate) if trace is not None else ()),
        )
        self._submit(_Job(job, keys, message, len(keys) * self._region.row_bytes, self._clock()))

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Say that chunks were used again. A hint: it may be lost."""
        packed = messages.pack_chunk_keys(keys)
        with self._lock:
            if not packed or not self._open or self._num_waiting_touches >= _MAX_WAITING_TOUCHES:
                return
            self._num_waiting_touches += 1
            self._waiting.append(messages.Touch(packed))
        self._poke()

    def finished(self) -> list[JobDone]:
        """Jobs that ended since the last call, each exactly once."""
        if not self._done:
            return []
        with self._lock:
            done = list(self._done)
            self._done.clear()
        return done

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every job has ended; `finished` has the last ones then. False when some have not in time."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._unfinished, timeout_s)

    def _check(self, keys: Sequence[ChunkKey], rows: Sequence[int]) -> None:
        for row in rows:
            if not 0 <= row < self._region.num_rows:
                raise ValueError(f"row {row} of a region of {self._region.num_rows} rows")
        for key in keys:
            if len(key) != CHUNK_KEY_BYTES:
                raise ValueError(f"a key of {len(key)} bytes; keys have {CHUNK_KEY_BYTES}")

    def _submit(self, job: _Job) -> None:
        with self._lock:
            if job.number in self._unfinished:
                raise ValueError(f"job {job.number} has not ended")
            if job.is_load:
                self._stats.load_jobs += 1
            else:
                self._stats.store_jobs += 1
            if not job.keys:
                self._end(job, {}, 0)
                return
            if not self._open:
                self._end_whole(job, AWAY)
                return
            if not job.is_load:
                if self._stored_bytes + job.num_bytes > self._max_queued_bytes:
                    self._end_whole(job, SKIPPED)
                    return
                self._stored_bytes += job.num_bytes
            self._unfinished[job.number] = job
            self._waiting.append(job)
        self._poke()

    def _poke(self) -> None:
        if not self._woken and self._wake >= 0:
            self._woken = True
            os.eventfd_write(self._wake, 1)

    # With the lock held.

    def _end_whole(self, job: _Job, cause: str) -> None:
        self._end(job, dict.fromkeys(range(len(job.keys)), cause), 0)

    def _end(self, job: _Job, index_to_cause: Mapping[int, str], num_bytes: int) -> None:
        """`index_to_cause` names the chunks that failed."""
        keys = job.keys
        failed = {keys[i]: cause for i, cause in index_to_cause.items()}
        # A key that is twice in a job has failed when one of them has.
        succeeded = frozenset(keys).difference(failed) if failed else frozenset(keys)
        stats = self._stats
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
            self._stored_bytes -= job.num_bytes
        seconds = self._clock() - job.submitted_s
        self._done.append(JobDone(job.number, job.is_load, succeeded, failed, num_bytes, seconds))
        if not self._unfinished:
            self._idle.notify_all()

    # Of the thread.

    def _run(self) -> None:
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._dial_s = self._clock()
        try:
            while not self._stopping:
                self._step(self._timeout_s())
            self._leave_for_good()
        except Exception:
            log.exception("the keeper's client of engine %s fails; its pages are misses from now on", self._engine_id)
            self._hide()
        finally:
            for link in [self._link, *self._orphans]:
                if link is not None:
                    link.close()
                    link.peer.close()

    def _timeout_s(self) -> float:
        if self._link is not None:
            return _TICK_S
        return min(_TICK_S, max(0.0, self._dial_s - self._clock()))

    def _step(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fileobj == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                # Only now, and before looking at what waits: whoever submits from here on pokes again.
                self._woken = False
                continue
            link: _Link = key.data
            if key.fileobj == link.peer.pidfd:
                self._ended(link)
            elif link.connection is not None and events & selectors.EVENT_READ:
                self._receive(link)
        self._bury()
        link_now = self._link
        if link_now is None:
            if self._clock() >= self._dial_s and not self._stopping:
                self._dial()
            return
        self._look_at_the_clock(link_now)
        if link_now.state is _State.SERVING:
            self._send(link_now)
        else:
            self._flush(link_now)

    def _dial(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer = None
        try:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(self._socket_path)
            peer = PeerProcess(connection)
            if peer.uid not in (0, os.geteuid()):
                raise PermissionError(f"{peer} may not have this engine's pages")
            hello = messages.encode(
                messages.Hello(
                    messages.PROTOCOL,
                    self._engine_id,
                    self._layout.to_json(),
                    self._region.num_rows,
                    self._region.row_bytes,
                )
            )
            num_sent = socket.send_fds(connection, [hello], [self._region.fd])
            connection.setblocking(False)
        except OSError as error:
            connection.close()
            if peer is not None:
                peer.close()
            self._complain(f"no keeper at {self._socket_path} yet: {error}")
            self._back_off()
            return
        link = self._link = _Link(connection, peer, self._clock())
        link.unsent += hello[num_sent:]
        self._selector.register(connection, selectors.EVENT_READ, link)
        # At all times: a child of the keeper's could hold its sockets open.
        self._selector.register(peer.pidfd, selectors.EVENT_READ, link)

    def _receive(self, link: _Link) -> bool:
        """Take what has arrived, a bounded amount of it. False when there was nothing."""
        assert link.connection is not None
        try:
            data = link.connection.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._lose(link, str(error))
            return False
        if not data:
            self._lose(link, "it has closed the connection")
            return False
        link.heard_s = self._clock()
        if link.silent and link is self._link:
            log.info("the keeper is heard from again")
            link.silent = False
            self._show(link)
        try:
            for payload in link.reader.feed(data):
                self._take(link, messages.decode_to_engine(payload))
                if link.connection is None:
                    return False
        except ProtocolError as error:
            if link.state is _State.LEAVING:
                self._lose(link, str(error))  # nothing it says can be read any more
            else:
                self._leave(link, f"it says what it should not: {error}")
        return True

    def _take(self, link: _Link, message: messages.ToEngine) -> None:
        match message:
            case messages.Done():
                self._take_done(link, message)
            case messages.Bye():
                self._said_bye(link, message.reason)
            case messages.ChangedKeys() if link is self._link:
                self._take_change(link, message)
            case messages.SnapshotKeys() if link is self._link:
                self._take_part(link, message)
            case messages.Welcome() if link.state is _State.GREETING:
                self._welcomed(link, message)
            case _:
                pass  # a pulse, or what no longer matters

    def _welcomed(self, link: _Link, message: messages.Welcome) -> None:
        link.state = _State.SERVING
        self._complaint = ""
        with self._lock:
            self._stats.connects += 1
        self._show(link)
        log.info("connected to keeper %s (process %d)", message.keeper_id, link.peer.pid)

    def _take_part(self, link: _Link, message: messages.SnapshotKeys) -> None:
        if message.part == 0:
            link.keys, link.complete = set(), False
        elif link.complete or (message.sequence, message.part) != (link.sequence, link.next_part):
            raise ProtocolError(f"part {message.part} of keys after change {message.sequence}")
        link.sequence, link.next_part = message.sequence, message.part + 1
        link.keys.update(messages.unpack_chunk_keys(message.keys))
        if message.part + 1 == message.num_parts:
            link.complete = True
            self._show(link)

    def _take_change(self, link: _Link, message: messages.ChangedKeys) -> None:
        if message.sequence != link.sequence + 1 or not link.complete:
            raise ProtocolError(f"change {message.sequence} after {link.sequence}")
        link.sequence = message.sequence
        link.keys.difference_update(messages.unpack_chunk_keys(message.removed))
        link.keys.update(messages.unpack_chunk_keys(message.added))

    def _take_done(self, link: _Link, message: messages.Done) -> None:
        job = link.jobs.pop(message.job, None)
        if job is None:
            raise ProtocolError(f"the end of job {message.job}, which it was not given")
        # A cause that names no chunk of this job: better all of them failed than one too few.
        failed = message.failed
        if any(not 0 <= i < len(job.keys) for i in failed):
            failed = dict.fromkeys(range(len(job.keys)), "unknown")
        if job.is_load and failed:
            # Before anybody hears of it: a chunk that is looked up, found and not loaded would be tried for ever.
            keys = [job.keys[i] for i in failed]
            link.keys.difference_update(keys)
            if isinstance(self._held, set):
                self._held.difference_update(keys)  # another set while a new snapshot arrives
        with self._lock:
            self._end(job, failed, message.num_bytes)

    def _send(self, link: _Link) -> None:
        """Encode what waits, as far as the keeper reads."""
        while len(link.unsent) < _MAX_UNSENT_BYTES:
            with self._lock:
                if not self._waiting:
                    break
                each = self._waiting.popleft()
                if isinstance(each, _Job):
                    link.jobs[each.number] = each
                else:
                    self._num_waiting_touches -= 1
            link.unsent += messages.encode(each.message if isinstance(each, _Job) else each)
        self._flush(link)

    def _flush(self, link: _Link) -> None:
        connection = link.connection
        if connection is None:
            return
        try:
            while link.unsent:
                del link.unsent[: connection.send(link.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            # What it said before it went is still to be read.
            link.unsent.clear()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        if self._selector.get_key(connection).events != wanted:
            self._selector.modify(connection, wanted, link)

    def _look_at_the_clock(self, link: _Link) -> None:
        silent_s = self._clock() - link.heard_s
        if link.state is _State.GREETING:
            if silent_s > _WELCOME_TIMEOUT_S:
                self._lose(link, "it does not answer")
        elif link.state is _State.SERVING and silent_s > messages.SILENCE_S and not link.silent:
            log.warning("nothing is heard from the keeper; its pages are misses until it speaks again")
            link.silent = True
            self._hide()
            with self._lock:
                self._stats.losses += 1
            self._tell_lost()

    def _show(self, link: _Link) -> None:
        """Take jobs, and find what the keeper holds once all of it is known."""
        if link.complete:
            self._held = link.keys
        with self._lock:
            self._open = not self._stopping

    def _hide(self) -> None:
        """From now on everything is a miss, and what has not been sent has failed."""
        self._held = _NOTHING
        with self._lock:
            self._open = False
            waiting = [each for each in self._waiting if isinstance(each, _Job)]
            self._waiting.clear()
            self._num_waiting_touches = 0
            for job in waiting:
                self._end_whole(job, AWAY)

    def _leave(self, link: _Link, why: str) -> None:
        """Say no more to this keeper, and wait until it touches nothing of ours."""
        if link.connection is None or link.state is _State.LEAVING:
            return
        log.warning("leaving the keeper: %s", why)
        link.state = _State.LEAVING
        link.unsent.clear()
        self._gone(link)
        self._orphans.append(link)
        with contextlib.suppress(OSError):
            link.connection.shutdown(socket.SHUT_WR)

    def _lose(self, link: _Link, why: str) -> None:
        """The stream has ended. Jobs that were sent have not."""
        if link.connection is not None:
            self._selector.unregister(link.connection)
            link.close()
        if link is self._link:
            self._complain(f"the keeper is lost: {why}")
            self._gone(link)
            self._orphans.append(link)

    def _said_bye(self, link: _Link, reason: str) -> None:
        self._end_all(link)
        self._lose(link, f"it said {reason!r}" if reason else "it left")

    def _ended(self, link: _Link) -> None:
        """Its process is no more. What it had said by then counts."""
        while link.connection is not None and self._receive(link):
            pass
        self._end_all(link)
        self._lose(link, "its process has ended")

    def _end_all(self, link: _Link) -> None:
        jobs, link.jobs = link.jobs, {}
        with self._lock:
            for job in jobs.values():
                self._end_whole(job, AWAY)

    def _gone(self, link: _Link) -> None:
        """It is not the keeper we talk to any more."""
        if link is not self._link:
            return
        self._link = None
        was_open = self._open
        self._hide()
        if self._clock() - link.began_s > _MAX_BACKOFF_S:
            self._backoff_s = _MIN_BACKOFF_S
        self._back_off()
        if was_open:
            with self._lock:
                self._stats.losses += 1
            self._tell_lost()

    def _bury(self) -> None:
        """Forget connections that own no row any more."""
        for link in self._orphans[:]:
            if not link.jobs:
                self._orphans.remove(link)
                if link.connection is not None:
                    self._selector.unregister(link.connection)
                    link.close()
                self._selector.unregister(link.peer.pidfd)
                link.peer.close()

    def _back_off(self) -> None:
        self._dial_s = self._clock() + self._backoff_s * self._random.uniform(0.5, 1.0)
        self._backoff_s = min(_MAX_BACKOFF_S, 2 * self._backoff_s)

    def _tell_lost(self) -> None:
        if self._on_lost is not None:
            self._on_lost()

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            log.warning("%s", complaint)

    def _leave_for_good(self) -> None:
        self._hide()
        if self._link is not None:
            self._leave(self._link, "this engine stops")
        end_s = self._clock() + _GOODBYE_TIMEOUT_S
        self._bury()
        while self._orphans and (left_s := end_s - self._clock()) > 0:
            self._step(left_s)
