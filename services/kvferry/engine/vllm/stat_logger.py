"""vLLM's statistics of an engine."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.metrics.loggers import StatLoggerBase

from kvferry.engine.base import CachedTokens, PromptSources
from kvferry.engine.vllm.plugins.tenant_holdings import detach_from
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry.tenancy.pages.usage_report import usages_of


class EngineStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Totals since start or `reset`, and the last step's state."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.tier_to_usages: dict[str, dict[str, TenantUsage]] = {}  # by tenant, in pages, as reported last
        self.reset()

    def reset(self) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0  # share of pages in use, 0 to 1
        self.prompt_tokens = PromptSources()
        self.cached_tokens = CachedTokens()
        self.num_generated_tokens = 0
        self.transferred_bytes = 0
        self.num_transfers = 0
        self.transfer_s = 0.0
        self.num_failed_transfers = 0
        self.num_failed_handshakes = 0
        self.num_ended_leases = 0
        self.num_steps = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            # vLLM would make a series of each order in which adapters are in use, and keep it.
            scheduler_stats.running_lora_adapters = {}
            scheduler_stats.waiting_lora_adapters = {}
            # Once per step, also for steps without output.
            self.num_steps += 1
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
            for tier, rows in detach_from(scheduler_stats).items():
                self.tier_to_usages.setdefault(tier, {}).update(usages_of(rows))
            if scheduler_stats.kv_connector_stats:
                self._record_transfers(scheduler_stats.kv_connector_stats)
            external = scheduler_stats.connector_prefix_cache_stats
            num_local = scheduler_stats.prefix_cache_stats.hits if scheduler_stats.prefix_cache_stats else 0
            if num_local or (external is not None and external.hits):
                by_source = external.hits_by_source if external is not None else {}
                self.cached_tokens += CachedTokens(
                    device=num_local,
                    cpu=by_source.get(CacheHitSource.HOST, 0),
                    volume=by_source.get(CacheHitSource.DISK, 0),
                    kv_transfer=by_source.get(CacheHitSource.P2P, 0),
                )
        if iteration_stats is not None:
            self.num_generated_tokens += iteration_stats.num_generation_tokens
            prompt = iteration_stats.prompt_token_stats
            if prompt.total:
                self.prompt_tokens += PromptSources(
                    prompt.computed, prompt.local_cache_hit, prompt.external_kv_transfer
                )

    def _record_transfers(self, stats: dict[str, Any]) -> None:
        transfers = stats.get("KvTransferConnector", stats)
        self.transferred_bytes += int(sum(transfers.get("bytes_transferred", ())))
        durations_s = transfers.get("transfer_duration", ())
        self.num_transfers += len(durations_s)
        self.transfer_s += sum(durations_s)
        self.num_failed_transfers += len(transfers.get("num_failed_transfers", ()))
        self.num_failed_handshakes += len(transfers.get("num_failed_handshakes", ()))
        self.num_ended_leases += len(transfers.get("num_kv_expired_reqs", ()))

    def log_engine_initialized(self) -> None:
        pass  # abstract in vLLM
