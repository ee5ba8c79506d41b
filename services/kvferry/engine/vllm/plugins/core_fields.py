"""Under which names an engine's core says things to its worker that vLLM has no place for."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.engine.base import CachedTokens, PromptSources

# In `extra_keys` of an event of pages stored, first of the first entry, where vLLM has what a block's hash is salted
# with: packed keys follow it.
ROUTE_KEYS_TAG = "kvferry.route_keys"

# In the transfer parameters of a finished request: {"cpu": tokens, "volume": tokens} that its tiers brought.
CACHED_PARAMETER = "kvferry_cached"


def cached_tokens(sources: PromptSources, loaded: Mapping[str, int] | None) -> CachedTokens:
    """Where the cached tokens of a finished request were. Of what came from outside, the ferry brought the rest."""
    cpu, volume = (loaded.get("cpu", 0), loaded.get("volume", 0)) if loaded is not None else (0, 0)
    kv_transfer = max(0, sources.external_kv_transfer - cpu - volume)
    return CachedTokens(device=sources.local_cache_hit, cpu=cpu, volume=volume, kv_transfer=kv_transfer)
