"""An engine's side of its keeper: jobs, and a copy of the loadable keys.

One thread does all I/O, so that the engine never waits. An unfinished job's rows belong to the keeper.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvferry.keeper import messages
from kvferry.keeper.client_jobs import AWAY as AWAY
from kvferry.keeper.client_jobs import SKIPPED as SKIPPED
from kvferry.keeper.client_jobs import ClientJob, ClientJobs
from kvferry.keeper.client_jobs import ClientStats as ClientStats
from kvferry.keeper.client_jobs import JobDone as JobDone
from kvferry.keeper.client_thread import ClientThread
from kvferry.keeper.layout import CHUNK_KEY_BYTES, ChunkKey, ChunkLayout
from kvferry.observability.tracing import TraceContext
from kvferry.tenancy.namespace import Namespace


class Region(NamedTuple):
    """A shared-memory file of `num_rows` rows of `row_bytes`, the engine's CPU tier."""

    fd: int
    num_rows: int
    row_bytes: int


class KeeperClient:
    """Thread-safe. All methods but `stop` and `wait_idle` return at once, with or without a keeper.

    Duplicates `region.fd`. A job's number is free once `finished` returned it. `on_lost` is called on the client's
    thread when the keeper goes away.
    """

    def __init__(
        self,
        socket_path: str,
        region: Region,
        layout: ChunkLayout,
        *,
        engine_id: str,
        pool: str = "",
        on_lost: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use volumes of `pool` alone.

        Raises ValueError unless a row has the payload size of `layout`.
        """
        if region.row_bytes != layout.payload_bytes:
            raise ValueError(f"rows of {region.row_bytes} bytes for chunks of {layout.payload_bytes}")
        self._region = region._replace(fd=os.dup(region.fd))
        self._engine_id = engine_id
        self._clock = clock
        self._jobs = ClientJobs(clock)
        hello = messages.Hello(messages.PROTOCOL, engine_id, layout.to_json(), region.num_rows, region.row_bytes, pool)
        self._thread = ClientThread(socket_path, hello, self._region.fd, self._jobs, on_lost=on_lost, clock=clock)
        self._is_stopped = False

    def __repr__(self) -> str:
        return (
            f"<KeeperClient {self._engine_id} {'connected' if self.connected else 'away'} "
            f"{len(self._thread.keys)} keys, {self._jobs.num_unfinished} jobs>"
        )

    @property
    def connected(self) -> bool:
        return self._jobs.is_open

    @property
    def has_unfinished(self) -> bool:
        return self._jobs.has_unfinished

    @property
    def stats(self) -> ClientStats:
        """Live, not a copy."""
        return self._jobs.stats

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Leave the keeper, within about a second. Idempotent.

        Jobs whose rows may be in use stay unfinished.
        """
        self._thread.stop()
        if not self._is_stopped:
            self._is_stopped = True
            os.close(self._region.fd)

    def contains(self, key: ChunkKey) -> bool:
        """O(1), without a lock."""
        if key in self._thread.keys:
            self._jobs.stats.hits += 1
            return True
        self._jobs.stats.misses += 1
        return False

    def store(
        self,
        job: int,
        namespace: Namespace,
        chunks: Sequence[tuple[ChunkKey, int, int]],
        wanted_s: float | None = None,
    ) -> None:
        """Store chunks: (key, route key, row) each. `wanted_s`: as in `TierHints`.

        Raises ValueError for an unfinished job's number, a row outside the region, or an invalid key.
        """
        keys = [key for key, _, _ in chunks]
        rows = [row for _, _, row in chunks]
        self._validate(keys, rows)
        route_keys = [route_key for _, route_key, _ in chunks]
        self._submit(
            messages.Store(
                job,
                namespace.tenant,
                namespace.epoch,
                messages.pack_chunk_keys(keys),
                route_keys,
                rows,
                wanted_s,
            ),
            keys,
        )

    def load(
        self,
        job: int,
        namespace: Namespace,
        chunks: Sequence[tuple[ChunkKey, int]],
        volumes: Mapping[ChunkKey, str] | None = None,
        trace: TraceContext | None = None,
    ) -> None:
        """Load chunks: (key, row) each. Raises ValueError like `store`.

        `volumes` names the volumes of other nodes' chunks.
        """
        keys = [key for key, _ in chunks]
        rows = [row for _, row in chunks]
        self._validate(keys, rows)
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
        self._submit(message, keys)

    def touch(self, keys: Iterable[ChunkKey], wanted_s: float | None = None) -> None:
        """A hint, which may be lost. With `wanted_s` in the order of the prompt."""
        if self._jobs.submit_touch(messages.Touch(messages.pack_chunk_keys(keys), wanted_s)):
            self._thread.wake()

    def finished(self) -> list[JobDone]:
        """Return each ended job exactly once."""
        return self._jobs.pop_done()

    def wait_idle(self, timeout_s: float) -> bool:
        """False after `timeout_s`."""
        return self._jobs.wait_until_all_ended(timeout_s)

    def _validate(self, keys: Sequence[ChunkKey], rows: Sequence[int]) -> None:
        for row in rows:
            if not 0 <= row < self._region.num_rows:
                raise ValueError(f"row {row} of a region of {self._region.num_rows} rows")
        for key in keys:
            if len(key) != CHUNK_KEY_BYTES:
                raise ValueError(f"a key of {len(key)} bytes; keys have {CHUNK_KEY_BYTES}")

    def _submit(self, message: messages.Store | messages.Load, keys: Sequence[ChunkKey]) -> None:
        num_bytes = len(keys) * self._region.row_bytes
        if self._jobs.submit(ClientJob(message.job, keys, message, num_bytes, self._clock())):
            self._thread.wake()
