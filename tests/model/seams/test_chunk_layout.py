"""engine/vllm/plugins/exchange_fields.py"""

from __future__ import annotations

from typing import Any

import pytest

from .support import vllm_config

pytestmark = pytest.mark.vllm


class TestChunkLayout:
    """engine/vllm/plugins/exchange_fields.py"""

    @pytest.fixture(autouse=True)
    def _known_backend(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvferry.engine.vllm.plugins.exchange_fields.attention_backend", lambda config: "CPU_ATTN")

    def test_whatever_changes_a_byte_changes_the_digest(self) -> None:
        import torch

        from kvferry.engine.vllm.plugins.exchange_fields import layout_fields
        from kvferry.keeper.layout import ChunkLayout

        named = {"model_name": "m", "weights_revision": "r", "blocks_per_chunk": 1}

        def digest(names: dict[str, Any], **changes: Any) -> bytes:
            return ChunkLayout(**layout_fields(vllm_config(**changes), **names), payload_bytes=1_474_560).digest  # type: ignore[arg-type]

        digests = [
            digest(named),
            digest(named, dtype=torch.bfloat16),
            digest(named, cache_dtype="bfloat16"),
            digest(named, block_size=64),
            digest(named, heads=4),
            digest(named, tensor_parallel=2),
            digest(named, max_model_len=8192),
            digest(named, rope={"factor": 2.0}),
            digest(named | {"weights_revision": "s"}),
            digest(named | {"model_name": "n"}),
            digest(named | {"blocks_per_chunk": 2}),
        ]
        assert len(set(digests)) == len(digests)
        assert digest(named) == digest(named, cache_dtype="auto")
