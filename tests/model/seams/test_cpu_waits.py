"""engine/vllm/plugins/cpu_device.py"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestNixlProgress:
    def test_nixl_still_spins_unless_told_otherwise(self) -> None:
        import sys

        from nixl._api import nixl_agent

        module = sys.modules[nixl_agent.__module__]
        assert "nixlBind.nixlAgentConfig()" in inspect.getsource(nixl_agent.__init__)
        assert "pthrDelay = 0" in inspect.getsource(nixl_agent.__init__)
        assert hasattr(module, "nixlBind")

    def test_the_period_reaches_the_configuration(self) -> None:
        import sys

        from nixl._api import nixl_agent

        from kvferry.engine.vllm.plugins.cpu_device import PROGRESS_PERIOD_US, blocking_progress_thread

        bindings = sys.modules[nixl_agent.__module__].nixlBind
        plain = bindings.nixlAgentConfig
        with blocking_progress_thread():
            configured = bindings.nixlAgentConfig()
            configured.pthrDelay = 0
            configured.captureTelemetry = True
        assert configured.pthrDelay == PROGRESS_PERIOD_US
        assert configured.captureTelemetry is True
        assert bindings.nixlAgentConfig is plain


class TestNixlIdleSteps:
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

    @pytest.mark.parametrize(
        ("num_tokens", "finished", "expected"),
        [
            (0, set(), 1),  # only keeps pages
            (512, set(), 0),
            (0, {"r"}, 0),  # the worker has yet to hear that a request's pages are kept from now on
            (512, {"r"}, 0),
        ],
    )
    def test_only_steps_that_neither_compute_nor_notify_pause(
        self, monkeypatch: pytest.MonkeyPatch, num_tokens: int, finished: set[str], expected: int
    ) -> None:
        from kvferry.engine.vllm.plugins import cpu_device

        pauses: list[float] = []
        monkeypatch.setattr(cpu_device, "time", SimpleNamespace(sleep=pauses.append))
        scheduler = SimpleNamespace(build_connector_meta=lambda output: ("meta of", output))
        cpu_device.slow_idle_steps(scheduler)
        output = SimpleNamespace(total_num_scheduled_tokens=num_tokens, finished_req_ids=finished)
        assert scheduler.build_connector_meta(output) == ("meta of", output)
        assert pauses == [cpu_device.IDLE_STEP_PAUSE_S] * expected
