"""vLLM's CPU tier, also on the CPU device, where vLLM 0.32 refuses it.

A thread that runs jobs in order replaces CUDA streams there.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

log = logging.getLogger(__name__)


class CpuTierSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """A `spec_module_path` for vLLM."""

    _worker: Any

    def get_manager(self) -> Any:
        begun = not self._manager
        manager = super().get_manager()
        if begun:
            unlink_region(self._scheduler_mmap)
        return manager

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if not self._worker:
            if self.config.canonical_layout:
                raise ValueError("canonical_layout is not supported on the CPU device")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        worker: OffloadingWorker = self._worker
        return worker


def unlink_region(region: Any) -> None:
    """Unlink the region's name, so that a kill leaves nothing in /dev/shm.

    vLLM's workers have mapped it by then (ADR 11); otherwise the name stays.
    """
    path = Path(region.mmap_path)
    if region._creator:
        log.warning("the CPU tier's workers have not mapped %s yet: its name stays", path)
    elif path.exists() and path.stat().st_ino == os.fstat(region.fd).st_ino:
        path.unlink()


def refuse_second_region(region: Any) -> None:
    """Raises RuntimeError if a worker came late and made its own region."""
    path = Path(region.mmap_path)
    if not region._creator and path.exists():
        raise RuntimeError(
            f"{path} was made anew after the scheduler had mapped it: not all workers share the CPU tier"
        )


class CpuCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies pages between engine and CPU tier, in order, on its own thread. Owns the region.

    At 0.4 ms a page, a long prompt would else hold up streams for 0.1 s. vLLM calls `wait` before it reuses pages.
    """

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: Any) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._pages = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._jobs: queue.SimpleQueue[tuple[int, Any, Any, bool] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._unfinished: set[int] = set()
        self._finished: list[TransferResult] = []
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-cpu-tier", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec, src_spec, is_store=False)

    def _submit(self, job_id: int, engine: Any, tier: Any, *, is_store: bool) -> bool:
        with self._changed:
            self._unfinished.add(job_id)
        self._jobs.put((job_id, engine, tier, is_store))
        return True

    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            self._check()
            finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._unfinished.isdisjoint(job_ids) or self._failure is not None)
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            # vLLM has no failed copies: requests would wait for this one for ever.
            raise RuntimeError("the CPU tier cannot copy pages any more") from self._failure

    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._pages.clear()
        self._rows.clear()
        if not Path(self._region.mmap_path).exists():
            # `unlink_region` was here: cleanup must not unlink it again.
            self._region._creator = False
        self._region.cleanup()

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job_id, engine, tier, is_store = job
                begun_s, num_bytes = time.perf_counter(), 0
                for page, row, size in self._pairs(engine, tier):
                    to, origin = (row, page) if is_store else (page, row)
                    ctypes.memmove(to, origin, size)  # releases the GIL
                    num_bytes += size
                result = TransferResult(job_id, True, num_bytes, time.perf_counter() - begun_s)
                with self._changed:
                    self._finished.append(result)
                    self._unfinished.remove(job_id)
                    self._changed.notify_all()
        except Exception as error:
            log.exception("the CPU tier's thread ended")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _pairs(self, engine: Any, tier: Any) -> Iterator[tuple[int, int, int]]:
        """Engine address, tier address and size in bytes per page."""
        per_chunk = self._blocks_per_chunk
        engine_at = tier_at = 0
        for group, (num_blocks, first) in enumerate(zip(engine.group_sizes, engine.block_indices, strict=True)):
            if not num_blocks:
                continue
            skipped = first % per_chunk
            num_chunks = math.ceil((num_blocks + skipped) / per_chunk)
            blocks = engine.block_ids[engine_at : engine_at + num_blocks]
            chunks = tier.block_ids[tier_at : tier_at + num_chunks]
            engine_at, tier_at = engine_at + num_blocks, tier_at + num_chunks
            for ref in self._refs[group]:
                pages, rows = np.empty(num_blocks, np.uint64), np.empty(num_blocks, np.uint64)
                compute_sub_block_ptrs(blocks, 1, pages, self._pages[ref.tensor_idx])
                compute_sub_block_ptrs(chunks, per_chunk, rows, self._rows[ref.tensor_idx], skip_count=skipped)
                for page, row in zip(pages.tolist(), rows.tolist(), strict=True):
                    yield page, row, ref.page_size_bytes
