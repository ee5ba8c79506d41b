"""The exchange digest in the handshake of vLLM's NixlConnector."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from kvferry.engine.vllm.plugins.exchange_fields import exchange_fields
from kvferry.pages.exchange import WEIGHTS, exchange_digest


def compare_exchange_digests() -> None:
    """Make handshakes fail between engines whose pages mean different things. Idempotent."""
    # vLLM compares the model's path, types, numbers of heads and layers, and the backend: neither weights nor the
    # context length nor the instruction set, which change bytes. Our digest compares weights instead of the path.
    original = base_worker.compute_nixl_compatibility_hash
    if getattr(original, "has_exchange_digest", False):
        return

    def compatibility_hash(vllm_config: Any, *args: Any, **named: Any) -> str:
        weights = vllm_config.kv_transfer_config.get_from_extra_config(WEIGHTS, "")
        if not weights:
            raise RuntimeError("the digest of the weights is missing in the connector's configuration")
        exchange = exchange_digest(exchange_fields(vllm_config, weights=weights))
        without_path = copy.copy(vllm_config)
        without_path.model_config = copy.copy(vllm_config.model_config)
        without_path.model_config.model = ""
        return hashlib.sha256(f"{original(without_path, *args, **named)}:{exchange}".encode()).hexdigest()

    compatibility_hash.has_exchange_digest = True  # type: ignore[attr-defined]
    base_worker.compute_nixl_compatibility_hash = compatibility_hash
