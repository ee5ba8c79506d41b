"""Hard limits of a tenant at a gateway. Pure."""

from __future__ import annotations

import enum
import math
from typing import Final

import msgspec

MAX_RETRY_AFTER_S: Final = 60
BURST_S: Final = 10.0  # a bucket holds what its limit gives in this time, and one request at least
MAX_LIMIT: Final = 1e12
MAX_GATEWAYS: Final = 16.0  # that promises reckon with

_NUM_REMEMBERED: Final = 256.0  # requests, to know the part of this gateway


class LimitName(enum.StrEnum):
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    CHOICES = "max_choices"


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """None: not limited."""

    requests_per_minute: float | None = None  # a request of several choices counts as many
    tokens_per_minute: float | None = None  # of prompts and of answers
    max_choices: int | None = None  # in flight

    def check(self) -> None:
        """Raises ValueError naming the fault."""
        for name in LimitName:
            limit = getattr(self, name.value)
            if limit is not None and not 0 < limit <= MAX_LIMIT:
                raise ValueError(f"{name.value} {limit}: above 0, at most {MAX_LIMIT:g}")


class Refusal(msgspec.Struct, frozen=True):
    limit: LimitName
    allowed: float
    retry_after_s: int


class Bucket:
    """Starts full; below 0 after more was spent."""

    __slots__ = ("_capacity", "_filled_s", "_level", "_per_s", "_promised_s")

    def __init__(self, per_minute: float, now_s: float) -> None:
        self._per_s = per_minute / 60
        self._capacity = self._level = _capacity(per_minute)
        self._filled_s = self._promised_s = now_s

    def __repr__(self) -> str:
        return f"<Bucket {self._level:.1f} of {self._capacity:.1f}>"

    def resize(self, per_minute: float, now_s: float) -> None:
        self._fill(now_s)
        capacity = _capacity(per_minute)
        self._level *= capacity / self._capacity
        self._per_s, self._capacity = per_minute / 60, capacity

    def spend(self, amount: float, now_s: float) -> None:
        # A negative amount is given back.
        self._fill(now_s)
        self._level = min(self._capacity, self._level - amount)

    def wait_s(self, needed: float, now_s: float) -> float:
        self._fill(now_s)
        return max(0.0, needed - self._level) / self._per_s

    def promise_s(self, wait_s: float, cost: float, now_s: float) -> float:
        """Return when a refused request may come back: one after another."""
        comes_s = max(self._promised_s, now_s + wait_s)
        # Refused requests that never come back do not push later ones away for ever.
        self._promised_s = min(comes_s + cost / self._per_s, now_s + MAX_RETRY_AFTER_S)
        return comes_s - now_s

    def _fill(self, now_s: float) -> None:
        elapsed_s = max(0.0, now_s - self._filled_s)
        self._filled_s = max(self._filled_s, now_s)
        self._level = min(self._capacity, self._level + self._per_s * elapsed_s)


class TenantLimits:
    """Usage of a tenant that one gateway knows. Continuations of lost answers are not checked."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.num_choices = 0  # in flight at this gateway
        self.num_choices_elsewhere = 0
        self._num_own = self._num_others = 0.0  # requests of late, of this gateway and of others
        self._buckets: dict[LimitName, Bucket] = {}
        self.set(limits, now_s)

    def set(self, limits: Limits, now_s: float) -> None:
        for name in (LimitName.REQUESTS, LimitName.TOKENS):
            per_minute = getattr(limits, name.value)
            if per_minute is None:
                self._buckets.pop(name, None)
            elif name in self._buckets:
                self._buckets[name].resize(per_minute, now_s)
            else:
                self._buckets[name] = Bucket(per_minute, now_s)
        self.limits = limits

    def admit(self, num_choices: int, num_tokens: int, now_s: float) -> Refusal | None:
        """Return the limit that opens last, or count the request and return None. End it with `end`."""
        costs = {LimitName.REQUESTS: float(num_choices), LimitName.TOKENS: float(num_tokens)}
        # Any request may pass that the bucket has a part for: what it lacks, later ones wait for.
        needs = {LimitName.REQUESTS: 1.0, LimitName.TOKENS: 1.0}
        waits_s = {name: bucket.wait_s(needs[name], now_s) for name, bucket in self._buckets.items()}
        hit = max(waits_s, key=waits_s.__getitem__, default=None)
        if hit is not None and waits_s[hit] > 0:
            # Other gateways promise the same room.
            cost = costs[hit] * min(MAX_GATEWAYS, 1 + self._num_others / max(1.0, self._num_own))
            wait_s = self._buckets[hit].promise_s(waits_s[hit], cost, now_s)
            return Refusal(hit, getattr(self.limits, hit.value), _seconds(wait_s))
        most = self.limits.max_choices
        if most is not None and self.num_choices + self.num_choices_elsewhere + num_choices > most:
            return Refusal(LimitName.CHOICES, most, 1)
        self.num_choices += num_choices
        self._num_own += num_choices
        self._spend(num_choices, num_tokens, now_s)
        return None

    def end(self, num_choices: int) -> None:
        self.num_choices -= num_choices

    def take_back(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        # All that `admit` counted but choices in flight.
        self._num_own = max(0.0, self._num_own - num_requests)
        self._spend(-num_requests, -num_tokens, now_s)

    def used(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        """Note admissions of other gateways, and tokens of answers."""
        self._num_others += num_requests
        self._spend(num_requests, num_tokens, now_s)

    def _spend(self, num_requests: int, num_tokens: int, now_s: float) -> None:
        if self._num_own + self._num_others > _NUM_REMEMBERED:
            self._num_own, self._num_others = self._num_own / 2, self._num_others / 2
        amounts = {LimitName.REQUESTS: num_requests, LimitName.TOKENS: num_tokens}
        for name, bucket in self._buckets.items():
            bucket.spend(amounts[name], now_s)


def shown(limit: float | None) -> str:
    """For people."""
    return "none" if limit is None else f"{limit:g}"


def _capacity(per_minute: float) -> float:
    return max(1.0, per_minute / 60 * BURST_S)


def _seconds(wait_s: float) -> int:
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
