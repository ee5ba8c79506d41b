"""Measured rates of workers: milliseconds per token, page and step."""

# A rate that is not measured any more fades into the typical one: the median of the workers measured lately. Without
# any, the typical rate itself fades into the cost default, while requests are placed. So a wrong rate, which keeps work
# and with it measurements away, does not last; a quiet fleet forgets little.

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection
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
    kv_transfer_fixed_ms: float = 5.0  # of every KV transfer, whatever its size
    step_ms: float = 10.0  # a decode step of no stream
    step_ms_per_stream: float = 0.1
    adapter_load_ms: float = 100.0  # from disk to an engine that lacks it, whose steps wait
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
# Weight of the first observation of a rate that has begun to fade.
_STALE_GAIN = 0.75
_MAX_GAIN = 0.75
# An observation is bounded to this many times the value before it, and to this part of it.
_MAX_RATIO = 3.0
# As many observations in a row beyond that bound, on one side of it, are believed: the rate has changed.
_NUM_BELIEVED = 3
_MIN_RELATIVE_SIZE = 0.5  # of those, to the mean
# Prefills of fewer tokens are mostly overhead, and say nothing about the rate.
_MIN_TOKENS = 32
_REFRESH_EVERY = 16
_MIN_CHANGE = 0.01  # of the typical rate, in which no worker's costs are computed anew

# A rate fades once its age, since it was last observed, is above 1. The age grows by 1 in _STALE_S seconds, and in
# _STALE_PLACEMENTS + _STALE_SHARE x workers placements: at equal shares each worker is observed _STALE_SHARE times.
_STALE_S = 60.0
_STALE_PLACEMENTS = 40
_STALE_SHARE = 5
_HALVINGS_PER_AGE = 8.0
# A rate above the typical one fades to below it, the further the higher it was: what made it high may be over, and only
# work shows that.
_DOUBT = 0.25


def faded(value: float, typical: float, age: float) -> float:
    """Return `value` until age 1, and from there on what is nearer and nearer to `typical`."""
    num_halvings = (age - 1.0) * _HALVINGS_PER_AGE
    if num_halvings <= 0:
        return value
    weight = 2.0**-num_halvings
    if value > typical:
        weight -= _DOUBT * (1.0 - weight)
    return float(typical * (value / typical) ** weight)


class Rate:
    """A robust moving average with an age. Until observed, it is the fleet's."""

    __slots__ = ("_beyond", "_mean_size", "num_observed", "observed_at", "value")

    def __init__(self, value: float) -> None:
        self.value = value  # last learned
        self.num_observed = 0
        self.observed_at = 0.0  # on the clock of `RatePool.age`
        self._mean_size = 0.0
        self._beyond: list[float] = []  # the last observations, where all were out of bounds on the same side

    def __repr__(self) -> str:
        return f"<Rate {self.value:.4g} of {self.num_observed}>"

    def is_stale(self, age: float) -> bool:
        """Whether it was observed and has begun to fade."""
        return age - self.observed_at > 1.0 and self.num_observed > 0

    def faded(self, age: float, typical: float) -> float:
        """Return the value, the nearer to `typical` the longer ago it was learned."""
        if not self.num_observed:
            return typical
        return faded(self.value, typical, age - self.observed_at)

    def observe(self, value: float, size: float = 1.0, age: float = 0.0, typical: float | None = None) -> None:
        """`size` is the number of tokens or pages behind it: larger ones count for more.

        Raises ValueError unless `value` is above 0 and finite.
        """
        if not 0 < value < float("inf"):
            raise ValueError(f"{value} was observed as a rate")
        # By size, so that the mean is all time over all tokens: what a step does for two prompts is not divided well
        # between a short and a long one.
        self._mean_size += _GAIN * (size - self._mean_size) if self.num_observed else size
        relative = min(_MAX_RATIO, size / self._mean_size)
        # The first few count for more, as in a plain mean.
        gain = min(_MAX_GAIN, max(_GAIN, 1 / (self.num_observed + 2)) * relative)
        before = self.value
        if typical is not None and not self.num_observed:
            before = typical
        elif typical is not None and self.is_stale(age):
            # One observation confirms what was known before, or that it is no longer so.
            gain = max(gain, _STALE_GAIN)
            before = min(max(value, min(self.value, typical)), max(self.value, typical))
        self.value = before + gain * (self._bounded(value, before, relative) - before)
        if len(self._beyond) == _NUM_BELIEVED:
            self.value = statistics.median(self._beyond)
            self._beyond.clear()
        self.num_observed += 1
        self.observed_at = age

    def _bounded(self, value: float, before: float, relative_size: float) -> float:
        bounded = min(max(value, before / _MAX_RATIO), before * _MAX_RATIO)
        if relative_size < _MIN_RELATIVE_SIZE:
            return bounded
        if bounded == value or (self._beyond and (self._beyond[0] > before) != (value > before)):
            self._beyond.clear()
        if bounded != value:
            self._beyond.append(value)
        return bounded


class WorkerRates:
    """`step_scale` is the decode step's time relative to its cost default."""

    __slots__ = ("kv_transfer_page_ms", "prefill_ms_per_token", "step_scale")

    def __init__(self, cost_defaults: CostDefaults) -> None:
        self.prefill_ms_per_token = Rate(cost_defaults.prefill_ms_per_token)
        self.kv_transfer_page_ms = Rate(cost_defaults.kv_transfer_page_ms)
        self.step_scale = Rate(1.0)


# The rates of what was measured; None where a measurement says nothing.


def prefill_rate(
    cost_defaults: CostDefaults, computed_tokens: int, elapsed_ms: float, other_tokens: float
) -> float | None:
    """`other_tokens` of other prompts were computed in the same time."""
    if computed_tokens < _MIN_TOKENS or elapsed_ms <= 0:
        return None
    # At least half of the time is attributed to the tokens, however small the job.
    return max(elapsed_ms - cost_defaults.prefill_fixed_ms, elapsed_ms / 2) / (computed_tokens + other_tokens)


def kv_transfer_rate(
    cost_defaults: CostDefaults, num_pages: int, elapsed_ms: float, other_pages: float
) -> float | None:
    """`other_pages` of other requests were transferred in the same time."""
    if num_pages < 1 or elapsed_ms <= 0:
        return None
    return max(elapsed_ms - cost_defaults.kv_transfer_fixed_ms, elapsed_ms / 10) / (num_pages + other_pages)


def step_scale(cost_defaults: CostDefaults, step_ms: float, num_streams: int) -> float | None:
    if num_streams < 1 or step_ms <= 0:
        return None
    return step_ms / (cost_defaults.step_ms + cost_defaults.step_ms_per_stream * num_streams)


class RatePool:
    """The rates of one kind of worker."""

    # `typical_of_peers` returns the median of another kind of worker, by the names of WorkerRates: it is typical where
    # none of this kind was measured lately. `age` counts seconds and placements together.

    def __init__(
        self, cost_defaults: CostDefaults, typical_of_peers: Callable[[str], float | None] = lambda name: None
    ) -> None:
        self._defaults = WorkerRates(cost_defaults)
        self._typical_of_peers = typical_of_peers
        self._typical = {name: getattr(self._defaults, name).value for name in WorkerRates.__slots__}
        self._cost_defaults = cost_defaults
        self._workers: dict[str, WorkerRates] = {}
        self._observed: dict[str, dict[str, Rate]] = {name: {} for name in WorkerRates.__slots__}
        # The last medians, and how old the fleet was by placements alone.
        self._medians: dict[str, tuple[float, float]] = {}
        self._placement_age = 0.0
        self._num_changes = 0
        self._num_placements = 0
        self._now_s: float | None = None
        self.age = 0.0

    def of(self, worker: str) -> WorkerRates:
        rates = self._workers.get(worker)
        if rates is None:
            rates = self._workers[worker] = WorkerRates(self._cost_defaults)
        return rates

    def prefill_ms_per_token(self, rates: WorkerRates, *, is_tried: bool) -> float:
        """Return the rate as of now; of a stale one that `is_tried` by a request already, what is known if higher."""
        return self._current("prefill_ms_per_token", rates.prefill_ms_per_token, is_tried)

    def kv_transfer_page_ms(self, rates: WorkerRates, *, is_tried: bool) -> float:
        return self._current("kv_transfer_page_ms", rates.kv_transfer_page_ms, is_tried)

    def step_scale(self, rates: WorkerRates, *, is_tried: bool) -> float:
        return self._current("step_scale", rates.step_scale, is_tried)

    def observe(self, worker: str, name: str, value: float, size: float = 1.0) -> bool:
        """Return whether it is time for `refresh`."""
        rate: Rate = getattr(self.of(worker), name)
        rate.observe(value, size, self.age, self._typical[name])
        self._observed[name][worker] = rate
        self._num_changes += 1
        return not self._num_changes % _REFRESH_EVERY or self._num_changes <= _REFRESH_EVERY

    def advance(self, now_s: float) -> bool:
        """Count a placement. Return whether it is time for `refresh`."""
        before_s, self._now_s = self._now_s, now_s
        elapsed_s = now_s - before_s if before_s is not None and now_s > before_s else 0.0
        num_workers = len(self._workers)
        placement_age = 1.0 / (_STALE_PLACEMENTS + _STALE_SHARE * num_workers)
        self._placement_age += placement_age
        self.age += elapsed_s / _STALE_S + placement_age
        self._num_placements += 1
        # So that refreshing takes the same part of a placement in small and large fleets.
        refresh_every = 2 * num_workers if num_workers > _REFRESH_EVERY // 2 else _REFRESH_EVERY
        return not self._num_placements % refresh_every or elapsed_s >= 1.0

    def refresh(self) -> Collection[str]:
        """Update the typical rates. Return the workers whose rates are others now, in O(workers observed)."""
        stale: set[str] = set()
        is_changed = False
        for name, before in self._typical.items():
            median = self._fresh(name, stale)
            if median is not None:
                self._medians[name] = (median, self._placement_age)
            typical = median or self._typical_of_peers(name) or self._faded_median(name)
            if abs(typical - before) > _MIN_CHANGE * before:
                self._typical[name] = typical
                is_changed = True
        return self._workers if is_changed else stale

    def forget(self, worker: str) -> None:
        self._workers.pop(worker, None)
        for rates in self._observed.values():
            rates.pop(worker, None)

    def fresh(self, name: str) -> float | None:
        """Return the median of the rates observed lately; None without any."""
        return self._fresh(name, set())

    def _fresh(self, name: str, stale: set[str]) -> float | None:
        since = self.age - 1.0
        seen: list[float] = []
        for worker, rate in self._observed[name].items():
            if rate.observed_at < since:
                stale.add(worker)
            else:
                seen.append(rate.value)
        return statistics.median(seen) if seen else None

    def _faded_median(self, name: str) -> float:
        default: float = getattr(self._defaults, name).value
        if name not in self._medians:
            return default
        median, since = self._medians[name]
        return faded(median, default, 1.0 + self._placement_age - since)

    def _current(self, name: str, rate: Rate, is_tried: bool) -> float:
        if not rate.num_observed:
            typical: float = self._typical[name]
            return typical
        if self.age - rate.observed_at <= 1.0:
            return rate.value
        now = rate.faded(self.age, self._typical[name])
        # One request at a time tries a worker that was slow.
        return max(now, rate.value) if is_tried else now
