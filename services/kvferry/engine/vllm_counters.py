"""vLLM's own statistics of an engine, kept as totals: a StatLogger, the seam vLLM offers for it."""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvferry.engine.base import PromptSources


class Counters(StatLoggerBase):  # type: ignore[misc]
    """Totals since the engine started, and the last step's moment."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin counting anew."""
        self.num_running = 0
        self.num_waiting = 0
        self.kv_cache_usage = 0.0  # share of pages in use, 0 to 1
        self.prompt_tokens = PromptSources()
        self.num_generated_tokens = 0
        self.ferried_bytes = 0
        self.num_failed_transfers = 0
        self.num_steps = 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        if scheduler_stats is not None:
            # Once a step, also where it only computed a chunk of a prompt and gave nobody anything.
            self.num_steps += 1
            self.num_running = scheduler_stats.num_running_reqs
            self.num_waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_cache_usage = scheduler_stats.kv_cache_usage
            if transfers := scheduler_stats.kv_connector_stats:
                self.ferried_bytes += int(sum(transfers.get("bytes_transferred", ())))
                self.num_failed_transfers += len(transfers.get("num_failed_transfers", ()))
        if iteration_stats is not None:
            self.num_generated_tokens += iteration_stats.num_generation_tokens
            prompt = iteration_stats.prompt_token_stats
            if prompt.total:
                self.prompt_tokens += PromptSources(
                    prompt.computed, prompt.local_cache_hit, prompt.external_kv_transfer
                )

    def log_engine_initialized(self) -> None:
        """Nothing to announce: the worker says when it serves."""
