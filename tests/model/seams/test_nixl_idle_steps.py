"""engine/vllm/plugins/nixl/nixl_idle_steps.py"""

from __future__ import annotations

import inspect

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestNixlIdleSteps:
    """engine/vllm/plugins/nixl/nixl_idle_steps.py"""

    def test_vllm_still_has_what_is_wrapped(self) -> None:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector, pull_scheduler
        from vllm.v1.core.sched.output import SchedulerOutput

        scheduler = pull_scheduler.NixlPullConnectorScheduler
        assert parameters(scheduler.build_connector_meta) == ["self", "scheduler_output"]
        source = inspect.getsource(connector.NixlPullConnector.build_connector_meta)
        assert "self.connector_scheduler.build_connector_meta(scheduler_output)" in source
        empty = SchedulerOutput.make_empty()
        assert (empty.total_num_scheduled_tokens, empty.finished_req_ids) == (0, set())
        roles = {role: KVTransferConfig(kv_connector="x", kv_role=role) for role in ("kv_producer", "kv_consumer")}
        assert [role for role, config in roles.items() if config.is_kv_consumer] == ["kv_consumer"]
