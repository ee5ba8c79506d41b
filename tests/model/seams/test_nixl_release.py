"""engine/vllm/plugins/nixl/nixl_release.py"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.vllm


class TestNixlRelease:
    """engine/vllm/plugins/nixl/nixl_release.py"""

    def test_no_attribute_hides_one_of_the_worker(self) -> None:
        from vllm.v1.worker.worker_base import WorkerBase

        from kvferry.engine.vllm.plugins.nixl.nixl_release import ReleaseExtension

        ours = [name for name in dir(ReleaseExtension) if not name.startswith("__")]
        assert ours == ["kvferry_release"]
        assert not any(hasattr(WorkerBase, name) for name in ours)

    def test_leases_are_where_the_reaper_looks(self) -> None:
        """It compares the same clock, and an ended lease is reaped at its next look."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        from kvferry.engine.vllm.plugins.nixl.nixl_release import end_lease

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
