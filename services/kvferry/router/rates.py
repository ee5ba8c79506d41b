"""Measured rates of workers: milliseconds per token, page and step.

Unmeasured workers have the median rate, at first the cost defaults.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostDefaults:
    """Rates before any measurement, and weights of prices. Times in ms."""

    prefill_ms_per_token: float = 0.1  # 10,000 tokens a second
    prefill_fixed_ms: float = 5.0  # a step's cost apart from its tokens
    cpu_page_ms: float = 0.02  # 1 MiB at 50 GB/s
    volume_page_ms: float = 0.25  # 1 MiB at 4 GB/s, verified
    remote_page_ms: float = 0.1  # more, where another node's keeper has to send it: 1 MiB at 10 GB/s
    kv_transfer_page_ms: float = 0.05  # 1 MiB at 20 GB/s
    handoff_ms: float = 5.0  # of every KV transfer, whatever its size
    step_ms: float = 10.0  # a decode step of no stream
    step_ms_per_stream: float = 0.1
    output_tokens: float = 256.0  # how long an answer is, until answers are seen
    # Part of the compute that is charged once more, because it keeps other requests waiting: without it, waiting for
    # the pages of a request in flight costs as much as computing them again on an idle worker.
    work_weight: float = 0.3
    # Part of the delay that a prefill brings to each stream decoding beside it. Streams smooth over a single pause.
    interference_weight: float = 0.1
    pages_full_share: float = 0.9  # of KV pages in use: beyond it requests get preempted
    pages_full_ms: float = 2000.0  # at a share of 1
    # Candidates up to this much above the cheapest are chosen too, the less often the dearer they are.
    near_ms: float = 1.0
    near_share: float = 0.03
    expected_grace_s: float = 2.0  # how long computed pages are expected before the worker publishes them


# Weight of a new observation. 0.2 forgets half in 3 requests: a worker that slows down is seen within a second.
_GAIN = 0.2
# An observation is bounded to this many times the value before it, and to this part of it.
_MAX_RATIO = 3.0
# Prefills of fewer tokens are mostly overhead, and say nothing about the rate.
_MIN_TOKENS = 32
_REFRESH_EVERY = 16


class Rate:
    """A robust moving average. Until observed, `value` is the assumed rate."""

    __slots__ = ("num_observed", "value")

    def __init__(self, value: float) -> None:
        self.value = value
        self.num_observed = 0

    def __repr__(self) -> str:
        return f"<Rate {self.value:.4g} of {self.num_observed}>"

    def assume(self, value: float) -> None:
        """Set the assumed rate; ignored once observed."""
        if not self.num_observed:
            self.value = value

    def observe(self, value: float) -> None:
        """Raises ValueError unless `value` is above 0 and finite."""
        if not 0 < value < float("inf"):
            raise ValueError(f"{value} was observed as a rate")
        bounded = min(max(value, self.value / _MAX_RATIO), self.value * _MAX_RATIO)
        # The first few count for more, as in a plain mean.
        gain = max(_GAIN, 1 / (self.num_observed + 2))
        self.value += gain * (bounded - self.value)
        self.num_observed += 1


class WorkerRates:
    """`step_scale` is the decode step's time relative to its cost default."""

    __slots__ = ("kv_transfer_page_ms", "prefill_ms_per_token", "step_scale")

    def __init__(self, cost_defaults: CostDefaults) -> None:
        self.prefill_ms_per_token = Rate(cost_defaults.prefill_ms_per_token)
        self.kv_transfer_page_ms = Rate(cost_defaults.kv_transfer_page_ms)
        self.step_scale = Rate(1.0)

    def observed_prefill(
        self, cost_defaults: CostDefaults, computed_tokens: int, elapsed_ms: float, queued_ahead_tokens: int
    ) -> bool:
        tokens = computed_tokens + queued_ahead_tokens
        if computed_tokens < _MIN_TOKENS or elapsed_ms <= 0:
            return False
        # At least half of the time is attributed to the tokens, however small the job.
        self.prefill_ms_per_token.observe(max(elapsed_ms - cost_defaults.prefill_fixed_ms, elapsed_ms / 2) / tokens)
        return True

    def observed_kv_transfer(self, cost_defaults: CostDefaults, num_pages: int, elapsed_ms: float) -> bool:
        if num_pages < 1 or elapsed_ms <= 0:
            return False
        self.kv_transfer_page_ms.observe(max(elapsed_ms - cost_defaults.handoff_ms, elapsed_ms / 10) / num_pages)
        return True

    def observed_step(self, cost_defaults: CostDefaults, step_ms: float, num_streams: int) -> bool:
        if num_streams < 1 or step_ms <= 0:
            return False
        self.step_scale.observe(step_ms / (cost_defaults.step_ms + cost_defaults.step_ms_per_stream * num_streams))
        return True


class RatePool:
    def __init__(self, cost_defaults: CostDefaults) -> None:
        self._cost_defaults = cost_defaults
        self._typical = WorkerRates(cost_defaults)
        self._workers: dict[str, WorkerRates] = {}
        self._num_changes = 0

    def of(self, worker: str) -> WorkerRates:
        rates = self._workers.get(worker)
        if rates is None:
            rates = self._workers[worker] = WorkerRates(self._cost_defaults)
            self._assume([rates])
        return rates

    def changed(self) -> bool:
        """Note an observation. Return whether it updated the assumed rates, in O(workers)."""
        self._num_changes += 1
        if self._num_changes % _REFRESH_EVERY and self._num_changes > _REFRESH_EVERY:
            return False
        for name in WorkerRates.__slots__:
            seen = [
                rate.value for rate in (getattr(rates, name) for rates in self._workers.values()) if rate.num_observed
            ]
            if seen:
                getattr(self._typical, name).value = statistics.median(seen)
        self._assume(self._workers.values())
        return True

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)

    def _assume(self, workers: Iterable[WorkerRates]) -> None:
        for rates in workers:
            for name in WorkerRates.__slots__:
                getattr(rates, name).assume(getattr(self._typical, name).value)
