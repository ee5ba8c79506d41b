"""engine/vllm/plugins/nixl/nixl_lease.py"""

from __future__ import annotations

import inspect
import time
from types import SimpleNamespace

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestNixlLease:
    def test_vllm_still_has_what_is_wrapped(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, pull_scheduler, pull_worker

        worker, scheduler = pull_worker.NixlPullConnectorWorker, pull_scheduler.NixlPullConnectorScheduler
        assert parameters(worker._read_blocks_for_req) == ["self", "req_id", "meta"]
        assert parameters(worker._pop_done_transfers) == ["self", "transfers"]
        assert parameters(scheduler.request_finished) == ["self", "request", "block_ids"]
        source = inspect.getsource(base_worker)
        assert "remote_perf - (start_time + recv_time) / 2" in source  # offset: the prefill engine's clock less ours
        assert "self._engine_clock_offset[eid] = clock_offset" in source
        finished = inspect.getsource(scheduler.request_finished)
        assert "self._reqs_need_send[request.request_id] = (\n                time.perf_counter()" in finished
        results = inspect.getsource(worker.get_transfer_results)
        assert "done_recving, newly_failed = self._pop_done_transfers(self._recving_transfers)" in results

    @staticmethod
    def worker(expiry: float | None, *, offset: float = 0.0) -> tuple[SimpleNamespace, SimpleNamespace, list[str]]:
        read: list[str] = []
        meta = SimpleNamespace(
            remote=SimpleNamespace(engine_id="e", blocks_expiry_time=expiry), local_block_ids=([1, 2],)
        )
        worker = SimpleNamespace(
            _read_blocks_for_req=lambda req_id, meta: read.append(req_id),
            _pop_done_transfers=lambda transfers: ({"r"}, set()),
            _engine_clock_offset={"e": offset},
            _remote_agents={"e": {}},
            _recving_metadata={"r": meta},
            _recv_failures=set(),
            xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: None),
        )
        worker._handle_failed_transfer = lambda req_id, handle, failed, **kwargs: failed.add(req_id)
        return worker, meta, read

    @pytest.mark.parametrize(
        ("left_s", "offset", "in_time"),
        [(60, 0, True), (4, 0, False), (-1, 0, False), (60, 1000, True), (4, -9, False)],
    )
    def test_nothing_is_read_past_the_lease(self, left_s: float, offset: float, in_time: bool) -> None:
        from kvferry.engine.vllm.plugins.nixl.nixl_lease import refuse_reads_after_lease

        worker, meta, read = self.worker(time.perf_counter() + offset + left_s, offset=offset)
        refuse_reads_after_lease(worker)
        worker._read_blocks_for_req("r", meta)
        assert read == (["r"] if in_time else [])
        assert worker._recv_failures == (set() if in_time else {"r"})

    @pytest.mark.parametrize(("left_s", "in_time"), [(60, True), (4, False)])
    def test_what_was_read_past_the_lease_is_a_failed_load(self, left_s: float, in_time: bool) -> None:
        from kvferry.engine.vllm.plugins.nixl.nixl_lease import refuse_reads_after_lease

        worker, _, _ = self.worker(time.perf_counter() + left_s)
        refuse_reads_after_lease(worker)
        assert worker._pop_done_transfers({}) == ({"r"}, set() if in_time else {"r"})

    def test_notices_without_pages_and_engines_not_met_pass(self) -> None:
        from kvferry.engine.vllm.plugins.nixl.nixl_lease import refuse_reads_after_lease

        worker, meta, read = self.worker(time.perf_counter() - 60)
        refuse_reads_after_lease(worker)
        meta.local_block_ids = ([],)  # everything is cached here: only the prefill engine is told
        worker._read_blocks_for_req("notice", meta)
        meta.local_block_ids = ([1],)
        worker._remote_agents.clear()  # the handshake comes first, and this again after it
        worker._read_blocks_for_req("unmet", meta)
        assert read == ["notice", "unmet"]

    def test_answers_carry_the_end_of_their_lease(self) -> None:
        from kvferry.engine.vllm.plugins.nixl.nixl_lease import send_lease_ends

        answers = {"kept": (True, {"do_remote_prefill": True}), "not": (False, None)}
        scheduler = SimpleNamespace(
            request_finished=lambda request, block_ids: answers[request.request_id], _reqs_need_send={"kept": 7.5}
        )
        send_lease_ends(scheduler)
        kept, params = scheduler.request_finished(SimpleNamespace(request_id="kept"), ())
        assert (kept, params) == (True, {"do_remote_prefill": True, "remote_blocks_expiry_time": 7.5})
        assert scheduler.request_finished(SimpleNamespace(request_id="not"), ()) == (False, None)


class TestNixlRelease:
    def test_no_attribute_hides_one_of_the_worker(self) -> None:
        from vllm.v1.worker.worker_base import WorkerBase

        from kvferry.engine.vllm.plugins.nixl.nixl_lease import ReleaseExtension

        ours = [name for name in dir(ReleaseExtension) if not name.startswith("__")]
        assert ours == ["kvferry_pool_bytes", "kvferry_release"]
        assert not any(hasattr(WorkerBase, name) for name in ours)

    def test_leases_are_where_the_reaper_looks(self) -> None:
        """It compares the same clock, and an ended lease is reaped at its next look."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        from kvferry.engine.vllm.plugins.nixl.nixl_lease import end_lease

        worker = SimpleNamespace(
            _reqs_to_send={"a": float("inf"), "b": float("inf")},
            _reqs_to_process={"a", "b"},
            consumer_notification_counts_by_req={},
            expected_consumer_notifications_by_req={},
            xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: None),
        )
        assert end_lease(worker, "a")
        assert not end_lease(worker, "unknown")
        done: set[str] = set()
        NixlBaseConnectorWorker._reap_expired_send_leases(worker, done)
        assert done == {"a"}
        assert not end_lease(worker, "a")
