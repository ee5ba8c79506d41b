"""engine/vllm/plugins/tier/cpu_tier.py"""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestCpuTier:
    """engine/vllm/plugins/tier/cpu_tier.py"""

    def test_vllm_still_refuses_the_cpu_device_in_the_one_place_we_replace(self) -> None:
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        assert "only supported on CUDA-alike" in inspect.getsource(CPUOffloadingSpec.get_worker)
        assert parameters(TieringOffloadingSpec.get_worker) == ["self", "kv_caches"]
        assert "get_worker" not in vars(TieringOffloadingSpec)
        source = inspect.getsource(TieringOffloadingSpec)
        assert "self._scheduler_mmap = scheduler_mmap" in source
        assert "if not self._manager:" in inspect.getsource(TieringOffloadingSpec.get_manager)

    def test_a_worker_is_asked_for_what_ours_does(self) -> None:
        from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

        from kvferry.engine.vllm.plugins.tier.cpu_tier import CpuCopyWorker

        assert OffloadingWorker.__abstractmethods__ == {"submit_store", "submit_load", "get_finished", "wait"}
        assert not CpuCopyWorker.__abstractmethods__
        assert [field.name for field in dataclasses.fields(TransferResult)] == [
            "job_id", "success", "transfer_size", "transfer_time",
        ]  # fmt: skip

    def test_the_region_has_what_we_use(self, region: Callable[..., Any]) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        assert parameters(SharedOffloadRegion.__init__)[:6] == [
            "self", "engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size",
        ]  # fmt: skip
        worker, scheduler = region(rank=0), region(rank=None)
        assert (worker._creator, scheduler._creator) == (True, False)
        assert os.fstat(worker.fd).st_ino == os.fstat(scheduler.fd).st_ino == Path(worker.mmap_path).stat().st_ino

    def test_workers_have_mapped_the_region_before_there_is_a_scheduler(self) -> None:
        """So its name may go when the scheduler comes, whatever the number of workers."""
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        source = inspect.getsource(EngineCore.__init__)
        assert source.index("self._initialize_kv_caches(vllm_config)") < source.index(
            "self.scheduler: SchedulerInterface"
        )
        assert "self.model_executor.initialize_from_config(" in inspect.getsource(EngineCore._initialize_kv_caches)
        assert "register_kv_caches(kv_caches)" in inspect.getsource(GPUModelRunner.initialize_kv_cache)

    def test_the_name_goes_once_the_scheduler_has_it_mapped(self, region: Callable[..., Any]) -> None:
        from kvferry.engine.vllm.plugins.tier.cpu_tier import refuse_second_region, unlink_region

        worker, scheduler = region(rank=0), region(rank=None)
        unlink_region(scheduler)
        assert not Path(worker.mmap_path).exists()
        worker._base[5] = 77
        assert scheduler._base[5] == 77
        refuse_second_region(scheduler)
        late = region(rank=0)
        with pytest.raises(RuntimeError, match="made anew"):
            refuse_second_region(scheduler)
        unlink_region(scheduler)  # it is not the scheduler's to unlink
        assert Path(late.mmap_path).exists()

    def test_the_name_stays_when_the_scheduler_was_first(self, region: Callable[..., Any]) -> None:
        from kvferry.engine.vllm.plugins.tier.cpu_tier import refuse_second_region, unlink_region

        scheduler = region(rank=None)
        unlink_region(scheduler)
        refuse_second_region(scheduler)
        assert Path(scheduler.mmap_path).exists()

    @pytest.fixture
    def region(self) -> Iterator[Callable[..., Any]]:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        engine_id, made = f"test-{os.getpid()}", []

        def make(*, rank: int | None, num_chunks: int = 4, chunk_bytes: int = 8192) -> Any:
            made.append(SharedOffloadRegion(engine_id, num_chunks, rank, chunk_bytes, chunk_bytes))
            return made[-1]

        yield make
        for each in made:
            each.cleanup()
        Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").unlink(missing_ok=True)

    @pytest.mark.parametrize("per_chunk", [1, 2])
    def test_pages_come_back_as_they_went(self, region: Callable[..., Any], per_chunk: int) -> None:
        """Two layers; pages that begin within a chunk too."""
        import torch
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
            GPULoadStoreSpec,
        )
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        from kvferry.engine.vllm.plugins.tier.cpu_tier import CpuCopyWorker

        page_bytes, num_pages = 1024, 12
        tensors = [torch.randint(-128, 127, (num_pages, page_bytes), dtype=torch.int8) for _ in range(2)]
        before = [tensor.clone() for tensor in tensors]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
            [[CanonicalKVCacheRef(0, page_bytes), CanonicalKVCacheRef(1, page_bytes)]],
        )
        copies = CpuCopyWorker(caches, per_chunk, region(rank=0))
        try:
            # Pages 6, 1, 9 and 4 are tokens in this order; chunks 3, 0, ... hold them.
            pages, chunks = [6, 1, 9, 4], [3, 0, 2, 1][: 4 // per_chunk]
            assert copies.submit_store(7, GPULoadStoreSpec(pages, (4,), (0,)), CPULoadStoreSpec(chunks))
            copies.wait({7, 99})
            (done,) = copies.get_finished()
            assert (done.job_id, done.success, done.transfer_size) == (7, True, 2 * 4 * page_bytes)
            for tensor in tensors:
                tensor.zero_()
            # From the second page on, into other places.
            rest = chunks[1 // per_chunk :]
            assert copies.submit_load(8, CPULoadStoreSpec(rest), GPULoadStoreSpec([2, 10, 5], (3,), (1,)))
            copies.wait({8})
            assert [done.job_id for done in copies.get_finished()] == [8]
            for tensor, was in zip(tensors, before, strict=True):
                assert torch.equal(tensor[[2, 10, 5]], was[[1, 9, 4]])
                assert not tensor[[0, 1, 3, 4, 6, 7, 8, 9, 11]].any()
        finally:
            copies.shutdown()

    def test_a_copy_that_fails_ends_the_engine(self, region: Callable[..., Any]) -> None:
        from vllm.v1.kv_offload.base import CanonicalKVCaches

        from kvferry.engine.vllm.plugins.tier.cpu_tier import CpuCopyWorker

        copies = CpuCopyWorker(CanonicalKVCaches([], []), 1, region(rank=0))
        copies.submit_store(1, object(), object())
        with pytest.raises(RuntimeError, match="cannot copy"):
            copies.wait({1})
        with pytest.raises(RuntimeError, match="cannot copy"):
            copies.get_finished()
        copies.shutdown()
