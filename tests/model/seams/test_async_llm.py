"""engine/vllm/engine.py"""

from __future__ import annotations

import os

import pytest

from .support import parameters

pytestmark = pytest.mark.vllm


class TestAsyncLLM:
    """engine/vllm/engine.py"""

    def test_the_calls_we_make(self) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.async_llm import AsyncLLM

        assert "stat_loggers" in parameters(AsyncLLM.from_engine_args)
        assert parameters(AsyncLLM.generate)[1:4] == ["prompt", "sampling_params", "request_id"]
        assert parameters(AsyncLLM.notify_kv_transfer_request_rejected)[1:3] == ["request_id", "kv_transfer_params"]
        assert "cache_salt" in parameters(tokens_input)
        assert isinstance(AsyncLLM.errored, property)

    def test_operators_keep_their_own_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvferry.config import EngineConfig
        from kvferry.engine.vllm.start.arguments import prepare_environment

        monkeypatch.setattr(os, "environ", {"UCX_TLS": "rc", "OMP_NUM_THREADS": "7"})
        prepare_environment(EngineConfig(threads=3), side_channel_port=1234)
        assert os.environ["UCX_TLS"] == "rc"
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1234"
