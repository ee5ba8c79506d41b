"""Names of what vLLM's engine core and its workers tell each other beside vLLM's own messages."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.engine.base import CachedTokens, PromptSources

# In BlockStored events: the first of `extra_keys[0]`, before packed route keys. vLLM puts salts there.
ROUTE_KEYS_TAG = "kvferry.route_keys"

# In the transfer parameters of a finished request: loaded tokens as {"cpu": n, "volume": n}.
CACHED_PARAMETER = "kvferry_cached"

# In a scheduler's statistics, among those of encoder caches, which have a dictionary for any connector: tier -> rows of
# `tenancy/pages/usage_report.py`.
HOLDINGS_TAG = "kvferry.tenants"

# A utility of the engine core (plugins/tenant_scheduler.py), which vLLM's clients call by its name.
SET_TERMS = "kvferry_set_terms"


def cached_tokens(sources: PromptSources, loaded: Mapping[str, int] | None) -> CachedTokens:
    """`loaded` tokens came from tiers; KV transfer brought the rest from outside."""
    cpu, volume = (loaded.get("cpu", 0), loaded.get("volume", 0)) if loaded is not None else (0, 0)
    kv_transfer = max(0, sources.external_kv_transfer - cpu - volume)
    return CachedTokens(device=sources.local_cache_hit, cpu=cpu, volume=volume, kv_transfer=kv_transfer)
