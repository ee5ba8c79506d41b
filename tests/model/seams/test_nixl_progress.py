"""engine/vllm/plugins/nixl/nixl_progress.py"""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.vllm


class TestNixlProgress:
    """engine/vllm/plugins/nixl/nixl_progress.py"""

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

        from kvferry.engine.vllm.plugins.nixl.nixl_progress import PROGRESS_PERIOD_US, blocking_progress_thread

        bindings = sys.modules[nixl_agent.__module__].nixlBind
        plain = bindings.nixlAgentConfig
        with blocking_progress_thread():
            configured = bindings.nixlAgentConfig()
            configured.pthrDelay = 0
            configured.captureTelemetry = True
        assert configured.pthrDelay == PROGRESS_PERIOD_US
        assert configured.captureTelemetry is True
        assert bindings.nixlAgentConfig is plain
