"""engine/vllm/plugins/core_fields.py"""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.vllm


class TestCoreFields:
    """engine/vllm/plugins/core_fields.py"""

    @pytest.mark.parametrize(
        ("brought", "expected"),
        [(None, (3, 0, 0, 40)), ({"cpu": 8, "volume": 32}, (3, 8, 32, 0)), ({"cpu": 8}, (3, 8, 0, 32))],
    )
    def test_what_the_tiers_did_not_bring_the_kv_transfer_did(
        self, brought: dict[str, int] | None, expected: tuple[int, ...]
    ) -> None:
        from kvferry.engine.base import CachedTokens, PromptSources
        from kvferry.engine.vllm.plugins.core_fields import cached_tokens

        assert cached_tokens(PromptSources(7, 3, 40), brought) == CachedTokens(*expected)

    def test_parameters_of_several_connectors_are_joined(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        source = inspect.getsource(MultiConnector._aggregate_request_finished)
        assert "kv_txfer_params.update(txfer_params)" in source
        assert "Key clash" in source
