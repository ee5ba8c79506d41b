"""Usage of a gateway by tenant and by model, for metrics and usage records."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from kvferry.gateway.usage.usage_log import UsageLog, UsageRecord
from kvferry.observability import telemetry
from kvferry.observability.exposition import Reading
from kvferry.observability.telemetry import TENANT_OUTCOMES, TENANT_TOKEN_KINDS
from kvferry.tenancy.pages.outcome import OTHER

MAX_NAMED: Final = 200  # tenants with series of their own


class TenantUse:
    __slots__ = ("first_tokens", "first_tokens_s", "gaps", "gaps_s", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = [0] * len(TENANT_OUTCOMES)
        self.tokens = [0] * len(TENANT_TOKEN_KINDS)
        self.first_tokens = self.gaps = 0
        self.first_tokens_s = self.gaps_s = 0.0

    def add(self, record: UsageRecord, first_token_s: float | None, gap_s: float | None) -> None:
        self.requests[TENANT_OUTCOMES.index(record.outcome)] += 1
        tokens = self.tokens
        tokens[0] += record.prompt_tokens
        tokens[1] += record.cached_tokens
        tokens[2] += record.generated_tokens
        if first_token_s is not None:
            self.first_tokens += 1
            self.first_tokens_s += first_token_s
        if gap_s is not None:
            self.gaps += 1
            self.gaps_s += gap_s

    def add_all(self, other: TenantUse) -> None:
        self.requests = list(map(operator.add, self.requests, other.requests))
        self.tokens = list(map(operator.add, self.tokens, other.tokens))
        self.first_tokens += other.first_tokens
        self.first_tokens_s += other.first_tokens_s
        self.gaps += other.gaps
        self.gaps_s += other.gaps_s


class TenantUses:
    def __init__(
        self,
        read_registered: Callable[[], Iterable[str]] = tuple,
        is_registered: Callable[[str], bool] = lambda name: True,
        log: UsageLog | None = None,
    ) -> None:
        """Registered tenants have series from the start; where tenants are not registered, all that were seen do."""
        self._read_registered, self._is_registered, self._log = read_registered, is_registered, log
        # A name once given stays: counts that came out of the sum, or went into it later, would make it fall.
        self._by_name = {OTHER: TenantUse()}

    @property
    def num_lost(self) -> int:
        return 0 if self._log is None else self._log.num_lost

    def note(self, record: UsageRecord, first_token_s: float | None, gap_s: float | None) -> None:
        """`gap_s` is the mean time between tokens."""
        if self._log is not None:
            self._log.add(record)
        self._use_of(record.tenant).add(record, first_token_s, gap_s)

    def _use_of(self, tenant: str) -> TenantUse:
        use = self._by_name.get(tenant)
        if use is None:
            has_name = len(self._by_name) <= MAX_NAMED and self._is_registered(tenant)
            use = self._by_name.setdefault(tenant if has_name else OTHER, TenantUse())
        return use

    def readings(self) -> Iterator[Reading]:
        for name in self._read_registered() if len(self._by_name) <= MAX_NAMED else ():
            self._use_of(name)
        for name, use in self._by_name.items():
            for outcome, count in zip(TENANT_OUTCOMES, use.requests, strict=True):
                yield Reading(telemetry.TENANT_REQUESTS, (name, outcome), count)
            for kind, count in zip(TENANT_TOKEN_KINDS, use.tokens, strict=True):
                yield Reading(telemetry.TENANT_TOKENS, (name, kind), count)
            yield Reading(telemetry.TENANT_FIRST_TOKEN, (name,), use.first_tokens, use.first_tokens_s)
            yield Reading(telemetry.TENANT_TOKEN_GAP, (name,), use.gaps, use.gaps_s)


# Pairs of a model that was asked and one that answered: models come and go while a gateway serves.
MAX_PAIRS: Final = 256


class ModelUses:
    def __init__(self, read_ready: Callable[[], Mapping[str, bool]] = dict) -> None:
        self._read_ready = read_ready
        self._by_pair: dict[tuple[str, ...], TenantUse] = {}

    def note(self, record: UsageRecord, asked: str, first_token_s: float | None, gap_s: float | None) -> None:
        self._use_of(asked, record.model).add(record, first_token_s, gap_s)

    def _use_of(self, *pair: str) -> TenantUse:
        use = self._by_pair.get(pair)
        if use is None:
            use = self._by_pair.setdefault(pair if len(self._by_pair) < MAX_PAIRS else (OTHER, OTHER), TenantUse())
        return use

    def readings(self) -> Iterator[Reading]:
        ready = self._read_ready()
        for model in ready:
            self._use_of(model, model)  # there before its first request
        by_model: dict[str, TenantUse] = defaultdict(TenantUse)
        for (asked, model), use in self._by_pair.items():
            for outcome, count in zip(TENANT_OUTCOMES, use.requests, strict=True):
                yield Reading(telemetry.MODEL_REQUESTS, (model, asked, outcome), count)
            by_model[model].add_all(use)
        for model, use in by_model.items():
            for kind, count in zip(TENANT_TOKEN_KINDS, use.tokens, strict=True):
                yield Reading(telemetry.MODEL_TOKENS, (model, kind), count)
            yield Reading(telemetry.MODEL_FIRST_TOKEN, (model,), use.first_tokens, use.first_tokens_s)
            yield Reading(telemetry.MODEL_TOKEN_GAP, (model,), use.gaps, use.gaps_s)
        for model, is_ready in ready.items():
            yield Reading(telemetry.MODEL_READY, (model,), float(is_ready))
