"""engine/vllm/plugins/transfer_times.py, and the statistics of requests that engine/vllm/engine.py reads."""

from __future__ import annotations

import dataclasses

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestTransferTimes:
    """engine/vllm/plugins/transfer_times.py, and the statistics of requests that engine/vllm/engine.py reads."""

    def test_connectors_are_told_when_pages_are_waited_for_and_there(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.v1.outputs import KVConnectorOutput

        for name in ("update_state_after_alloc", "update_connector_output", "request_finished"):
            assert hasattr(KVConnectorBase_V1, name)
        assert parameters(KVConnectorBase_V1.update_state_after_alloc) == [
            "self", "request", "blocks", "num_external_tokens",
        ]  # fmt: skip
        assert "finished_recving" in {field.name for field in dataclasses.fields(KVConnectorOutput)}

    def test_a_request_has_the_times_that_we_read(self) -> None:
        from vllm.outputs import RequestOutput
        from vllm.v1.metrics.stats import RequestStateStats

        from kvferry.engine.vllm.outputs import _times

        assert "metrics" in parameters(RequestOutput.__init__)
        stats = RequestStateStats(queued_ts=1.0, scheduled_ts=2.0, first_token_ts=3.0, last_token_ts=4.0)
        times = _times(stats, [1.25, 1.75, 0.5], None, 0.25)
        assert times is not None
        assert (times.queued_s, times.scheduled_s, times.first_token_s, times.last_token_s) == (1.0, 2.0, 3.0, 4.0)
        assert (times.kv_transfer, times.load) == ((1.25, 1.75), None)
        assert (times.kv_transfer_share, times.prefill_share) == (0.5, 0.25)
        assert _times(RequestStateStats(), None, None) is None

    def test_vllm_has_a_registry_of_its_own_metrics(self) -> None:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        assert callable(get_prometheus_registry().collect)
