"""engine/vllm/stat_logger.py"""

from __future__ import annotations

import inspect
import itertools
from pathlib import Path

import pytest

from bench.tiny_models import make_model
from support.vllm_configs import vllm_config_of

from .support import parameters

pytestmark = pytest.mark.vllm


class TestStatLogger:
    """engine/vllm/stat_logger.py"""

    def test_the_statistics_have_what_we_read(self) -> None:
        from vllm.v1.metrics.loggers import StatLoggerBase
        from vllm.v1.metrics.stats import IterationStats, SchedulerStats

        assert parameters(StatLoggerBase.record) == [
            "self",
            "scheduler_stats",
            "iteration_stats",
            "mm_cache_stats",
            "engine_idx",
        ]
        stats = SchedulerStats()
        for name in ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage"):
            assert hasattr(stats, name)
        assert stats.kv_connector_stats is None
        iteration = IterationStats()
        assert iteration.prompt_token_stats.total == 0
        assert iteration.num_generation_tokens == 0

    def test_transfers_are_counted_under_the_names_we_read(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

        assert {"bytes_transferred", "num_failed_transfers"} <= NixlKVConnectorStats().data.keys()

    def test_adapters_in_use_make_no_series(self, tmp_path: Path) -> None:
        from vllm.config.lora import LoRAConfig
        from vllm.v1.metrics.loggers import StatLoggerManager
        from vllm.v1.metrics.prometheus import get_prometheus_registry, unregister_vllm_metrics
        from vllm.v1.metrics.stats import LoRARequestStates, SchedulerStats

        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        config = vllm_config_of(make_model("llama", tmp_path / "llama"))
        config.lora_config = LoRAConfig(max_lora_rank=8, max_loras=2, max_cpu_loras=2)
        try:
            loggers = StatLoggerManager(config, custom_stat_loggers=[EngineStatLogger])
            for in_use in itertools.permutations("abcd"):
                states = LoRARequestStates(log_stats=True)
                for name in in_use:
                    states.request_waiting(f"r-{name}", name)
                stats = SchedulerStats()
                states.update_scheduler_stats(stats)
                assert stats.waiting_lora_adapters
                loggers.record(stats, None)
            families = get_prometheus_registry().collect()
            assert sum(len(each.samples) for each in families if each.name == "vllm:lora_requests_info") == 1
        finally:
            unregister_vllm_metrics()

    def test_a_report_on_tenants_is_taken_before_loggers_of_vllm_see_it(self) -> None:
        from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerManager
        from vllm.v1.metrics.stats import SchedulerStats

        from kvferry.engine.vllm.plugins.core_fields import HOLDINGS_TAG
        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        source = inspect.getsource(StatLoggerManager.__init__)
        assert source.index("extend(custom_stat_loggers)") < source.index("append(default_logger_factory)")
        assert "ec_connector_stats" in inspect.getsource(LoggingStatLogger.record)
        counters, stats = EngineStatLogger(None), SchedulerStats()
        numbers = [5, 4, 8, 1, 2, *range(10, 15), 20, 21]
        stats.ec_connector_stats = {HOLDINGS_TAG: {"device": [["acme", numbers]]}}
        counters.record(stats, None)
        assert stats.ec_connector_stats is None
        usage = counters.tier_to_usages["device"]["acme"]
        assert (usage.used, usage.floor, usage.cap, usage.borrowed, usage.displaced) == (5, 4, 8, 1, 2)
        assert (list(usage.evicted.values()), list(usage.refused.values())) == ([10, 11, 12, 13, 14], [20, 21])
        stats.ec_connector_stats = {"other": 1}
        counters.record(stats, None)
        counters.reset()
        assert stats.ec_connector_stats == {"other": 1}
        assert counters.tier_to_usages["device"]["acme"] is usage, "a state, no count of this process"

    @pytest.mark.parametrize("joined", [False, True])
    def test_transfers_are_counted_alone_and_joined(self, joined: bool) -> None:
        from vllm.v1.metrics.stats import SchedulerStats

        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        moved = {"bytes_transferred": [3, 4], "num_failed_transfers": [1]}
        counters = EngineStatLogger(None)
        stats = SchedulerStats()
        stats.kv_connector_stats = {"KvTransferConnector": moved, "TierConnector": {"x": 1}} if joined else moved
        counters.record(stats, None)
        assert (counters.transferred_bytes, counters.num_failed_transfers) == (7, 1)

    def test_cached_tokens_are_counted_by_tier(self) -> None:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
        from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

        from kvferry.engine.base import CachedTokens
        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        assert {source.value for source in CacheHitSource} == {"device", "host", "p2p", "disk", "external_unspecified"}
        counters, stats = EngineStatLogger(None), SchedulerStats()
        counters.record(stats, None)
        stats.prefix_cache_stats.record(num_tokens=10, num_hits=4, preempted=False)
        stats.connector_prefix_cache_stats = external = PrefixCacheStats()
        by_source = {CacheHitSource.HOST: 1, CacheHitSource.DISK: 2, CacheHitSource.P2P: 3}
        external.record(num_tokens=6, num_hits=6, preempted=False, hits_by_source=by_source)
        counters.record(stats, None)
        assert counters.cached_tokens == CachedTokens(device=4, cpu=1, volume=2, kv_transfer=3)
