"""What each tenant used of a gateway, for metrics and usage records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from kvferry import telemetry
from kvferry.exposition import Reading
from kvferry.gateway.usage_log import UsageLog, UsageRecord
from kvferry.telemetry import TENANT_OUTCOMES, TENANT_TOKEN_KINDS
from kvferry.tenancy.outcome import OTHER

MAX_NAMED: Final = 200  # tenants with series of their own
MAX_KEPT: Final = 10_000


class TenantUse:
    __slots__ = ("first_tokens", "first_tokens_s", "gaps", "gaps_s", "requests", "tokens")

    def __init__(self) -> None:
        self.requests = [0] * len(TENANT_OUTCOMES)
        self.tokens = [0] * len(TENANT_TOKEN_KINDS)
        self.first_tokens = self.gaps = 0
        self.first_tokens_s = self.gaps_s = 0.0

    def add(self, other: TenantUse) -> None:
        self.requests = [a + b for a, b in zip(self.requests, other.requests, strict=True)]
        self.tokens = [a + b for a, b in zip(self.tokens, other.tokens, strict=True)]
        self.first_tokens += other.first_tokens
        self.first_tokens_s += other.first_tokens_s
        self.gaps += other.gaps
        self.gaps_s += other.gaps_s


class TenantUses:
    def __init__(self) -> None:
        # Names with a series from the start; where tenants are not registered, those that were seen have one.
        self.read_registered: Callable[[], Iterable[str]] | None = None
        self.log: UsageLog | None = None
        self._by_tenant: dict[str, TenantUse] = {}

    @property
    def num_lost(self) -> int:
        return 0 if self.log is None else self.log.num_lost

    def note(self, record: UsageRecord, first_token_s: float | None, gap_s: float | None) -> None:
        """`gap_s` is the mean time between tokens."""
        if self.log is not None:
            self.log.add(record)
        tenant = record.tenant
        use = self._by_tenant.get(tenant)
        if use is None:
            if len(self._by_tenant) >= MAX_KEPT:
                tenant = OTHER
            use = self._by_tenant.setdefault(tenant, TenantUse())
        use.requests[TENANT_OUTCOMES.index(record.outcome)] += 1
        tokens = use.tokens
        tokens[0] += record.prompt_tokens
        tokens[1] += record.cached_tokens
        tokens[2] += record.generated_tokens
        if first_token_s is not None:
            use.first_tokens += 1
            use.first_tokens_s += first_token_s
        if gap_s is not None:
            use.gaps += 1
            use.gaps_s += gap_s

    def readings(self) -> Iterator[Reading]:
        names = self._by_tenant if self.read_registered is None else self.read_registered()
        named = sorted(name for name in names if name != OTHER)[:MAX_NAMED]
        uses = {name: self._by_tenant.get(name) or TenantUse() for name in named}
        other = uses[OTHER] = TenantUse()
        for name, use in self._by_tenant.items():
            if name not in uses or name == OTHER:
                other.add(use)
        for name, use in uses.items():
            for outcome, count in zip(TENANT_OUTCOMES, use.requests, strict=True):
                yield Reading(telemetry.TENANT_REQUESTS, (name, outcome), count)
            for kind, count in zip(TENANT_TOKEN_KINDS, use.tokens, strict=True):
                yield Reading(telemetry.TENANT_TOKENS, (name, kind), count)
            yield Reading(telemetry.TENANT_FIRST_TOKEN, (name,), use.first_tokens, use.first_tokens_s)
            yield Reading(telemetry.TENANT_TOKEN_GAP, (name,), use.gaps, use.gaps_s)
