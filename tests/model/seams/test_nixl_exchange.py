"""engine/vllm/plugins/nixl/nixl_exchange.py"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from .support import vllm_config

pytestmark = pytest.mark.vllm


class TestNixlExchange:
    """engine/vllm/plugins/nixl/nixl_exchange.py"""

    def test_vllm_calls_the_name_that_we_replace(self) -> None:
        import inspect

        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        source = inspect.getsource(NixlBaseConnectorWorker.register_kv_caches)
        assert "self.compat_hash = compute_nixl_compatibility_hash(\n" in source
        assert "handshake_payload.compatibility_hash != self.compat_hash" in inspect.getsource(NixlBaseConnectorWorker)

    def test_engines_with_other_weights_or_contexts_do_not_shake_hands(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

        from kvferry.engine.vllm.plugins.nixl.nixl_exchange import compare_exchange_digests

        def vllms(config: Any, backend: str, **named: Any) -> str:
            return f"{config.model_config.model} {backend}"

        monkeypatch.setattr("kvferry.engine.vllm.plugins.exchange_fields.attention_backend", lambda config: "CPU_ATTN")
        monkeypatch.setattr(base_worker, "compute_nixl_compatibility_hash", vllms)
        compare_exchange_digests()
        replaced = base_worker.compute_nixl_compatibility_hash
        compare_exchange_digests()
        assert base_worker.compute_nixl_compatibility_hash is replaced

        def compatibility(weights: str, backend: str = "CPU_ATTN", **changes: Any) -> str:
            path = changes.pop("path", "/models/m")
            config = vllm_config(**changes)
            config.model_config.model = path
            config.kv_transfer_config = SimpleNamespace(
                get_from_extra_config=lambda name, default: {"weights": weights}.get(name, default)
            )
            return str(replaced(config, backend, transfer_mode="pull"))

        hashes = [
            compatibility("w"),
            compatibility("v"),
            compatibility("w", max_model_len=8192),
            compatibility("w", rope={"factor": 2.0}),
            compatibility("w", "FLASH_ATTN"),
        ]
        assert len(set(hashes)) == len(hashes)
        assert compatibility("w") == compatibility("w", path="/elsewhere/m") == hashes[0]
        with pytest.raises(RuntimeError, match="digest of the weights"):
            compatibility("")
