"""Page hashes of requests with LoRA adapters: the same on every node."""

from __future__ import annotations

from typing import Any

from vllm.v1.core import kv_cache_utils

# vLLM hashes an adapter's name and its path. Each engine has its own copy of an adapter, in a folder of its own, so
# equal pages would have other hashes in each, and none would be found on a volume. The name has the digest of the
# adapter's files (`StagedAdapter.key`), so the path says nothing more.


def hash_adapters_by_name() -> None:
    """Idempotent."""
    kv_cache_utils._gen_lora_extra_hash_keys = lora_hash_keys


def lora_hash_keys(request: Any) -> list[tuple[str, str]]:
    adapter = request.lora_request
    return [("lora", adapter.lora_name)] if adapter else []
