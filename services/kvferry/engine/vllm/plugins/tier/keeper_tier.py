"""The keeper's volumes as a SecondaryTierManager of vLLM's tiers.

It never waits in vLLM's scheduler: later steps poll jobs. Without a keeper everything is a miss. A failed page stays a
miss for its request, which might else retry for ever.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState
from kvferry.keeper.client import JobDone, KeeperClient, Region
from kvferry.keeper.layout import ChunkKey, ChunkLayout

log = logging.getLogger(__name__)

_DRAIN_SAYS_EVERY_S = 10.0


class KeeperTier(SecondaryTierManager):  # type: ignore[misc]
    """Made in vLLM's scheduler, once all workers have mapped the region."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        socket_path: str,
        pool: str,
        layout: dict[str, Any],
    ) -> None:
        """`layout` is a ChunkLayout without `payload_bytes`, the region's row."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        assert primary_kv_view.shape is not None
        region = Region(
            fd=offloading_spec._scheduler_mmap.fd,
            num_rows=primary_kv_view.shape[0],
            row_bytes=self.block_size_bytes,
        )
        self._client = KeeperClient(
            socket_path,
            region,
            ChunkLayout(**layout, payload_bytes=self.block_size_bytes),
            engine_id=offloading_spec._engine_id,
            pool=pool,
        )
        self._id_to_job: dict[int, Any] = {}
        self._done: list[JobResult] = []  # jobs that needed no work
        self._client.start()

    def lookup(self, key: Any, req_context: Any) -> LookupResult:
        state: RequestTierState | None = req_context.get_state(RequestTierState)
        if state is None or not state.hints.load or (state.failed is not None and key in state.failed):
            return LookupResult.MISS
        if self._client.contains(key):
            return LookupResult.HIT
        if (
            state.hints.volumes
            and self._client.connected
            and state.volume_of(req_context.get_offload_key_position(key)) is not None
        ):
            return LookupResult.HIT
        return LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        context = job_metadata.req_context
        state: RequestTierState | None = context.get_state(RequestTierState)
        new: list[tuple[Any, int]] = []
        ends = {key: context.get_offload_key_position(key) or 0 for key in job_metadata.keys}
        if state is not None:  # else their namespace is unknown
            rows = zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)
            # The prefill engine's keeper stores transferred pages.
            new = [
                (key, row)
                for key, row in rows
                if ends[key] > state.num_transferred_tokens and not self._client.contains(key)
            ]
        if state is None or not new:
            self._done.append(JobResult(job_metadata.job_id, success=True, transfer_bytes=0))
            return
        # In prompt order: if the keeper drops some, a prefix is still of use.
        new.sort(key=lambda page: ends[page[0]])
        self._id_to_job[job_metadata.job_id] = job_metadata
        self._client.store(
            job_metadata.job_id,
            state.hints.namespace,
            [(ChunkKey(key), state.route_key(ends[key]), row) for key, row in new],
            state.hints.wanted_s,
        )

    def submit_load(self, job_metadata: Any) -> None:
        context = job_metadata.req_context
        state: RequestTierState = context.get_state(RequestTierState)
        volumes: dict[ChunkKey, str] = {}
        if state.hints.volumes:
            for key in job_metadata.keys:
                volume_id = state.volume_of(context.get_offload_key_position(key))
                if volume_id is not None and not self._client.contains(key):
                    volumes[key] = volume_id
        self._id_to_job[job_metadata.job_id] = job_metadata
        rows = zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True)
        self._client.load(job_metadata.job_id, state.hints.namespace, list(rows), volumes, state.trace)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._done = self._done, []
        for done in self._client.finished():
            results.append(self._result(done))
        return results

    def _result(self, done: JobDone) -> JobResult:
        job = self._id_to_job.pop(done.job)
        if not done.is_load:
            return JobResult(
                done.job, success=not done.failed, transfer_time=done.seconds, transfer_bytes=done.num_bytes
            )
        succeeded = frozenset(done.succeeded)
        failed = [key for key in job.keys if key not in succeeded]
        if failed:
            state: RequestTierState = job.req_context.get_state(RequestTierState)
            state.failed = (state.failed or set()) | set(failed)
        return JobResult(
            done.job,
            success=not failed,
            successful_keys=tuple(succeeded) if failed else None,
            transfer_time=done.seconds,
            transfer_bytes=done.num_bytes,
        )

    def touch(self, keys: Collection[Any], req_context: Any) -> None:
        if known := [key for key in keys if self._client.contains(key)]:
            self._client.touch(known)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        # Engines do not read what they have in memory: without this, volumes would evict the most used chunks first.
        positions: dict[Any, int] = req_context._offload_key_positions
        state: RequestTierState | None = req_context.get_state(RequestTierState)
        known = [key for key in sorted(positions, key=positions.__getitem__) if self._client.contains(key)]
        if known:
            self._client.touch(known, None if state is None else state.hints.wanted_s)

    def wait_for_jobs(self, longest_s: float) -> None:
        if self._client.has_unfinished:
            self._client.wait_idle(longest_s)

    def drain_jobs(self) -> None:
        while not self._client.wait_idle(_DRAIN_SAYS_EVERY_S):
            log.warning("waiting for the keeper to end %d jobs", len(self._id_to_job))

    def shutdown(self) -> None:
        self._client.stop()
