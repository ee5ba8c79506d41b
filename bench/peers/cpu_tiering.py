"""vLLM's own tiering on the CPU device, for the comparison: what it ships copies pages with CUDA streams only.

Everything but the copy between an engine's pages and the CPU tier is vLLM's. The seam is `TieringOffloadingSpec` with
`get_worker` replaced, named to vLLM by `spec_module_path` (vLLM 0.32).
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemoryCopies(OffloadingWorker):
    """Copies within `submit_*`: on one machine's memory there is nothing to wait for."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._pages = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in kv_caches.tensors]
        self._rows = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, ((row, page, size) for page, row, size in self._pairs(src_spec, dst_spec)))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._pairs(dst_spec, src_spec))

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pages.clear()
        self._rows.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, moves: Iterator[tuple[int, int, int]]) -> bool:
        """Moves are (to, from, bytes)."""
        begun_s, num_bytes = time.perf_counter(), 0
        for to, origin, size in moves:
            ctypes.memmove(to, origin, size)
            num_bytes += size
        self._finished.append(TransferResult(job_id, True, num_bytes, time.perf_counter() - begun_s))
        return True

    def _pairs(self, engine: Any, tier: Any) -> Iterator[tuple[int, int, int]]:
        """Addresses of pages in the engine and in the tier that belong together, with their size in bytes."""
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


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemoryCopies(kv_caches, self.blocks_per_chunk, region)
        return self._worker
