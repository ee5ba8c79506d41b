"""Series of tenants: bounded, there from the start, and with sums that never go down."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry.gateway.usage import tenant_uses
from kvferry.gateway.usage.tenant_uses import OTHER, TenantUses
from kvferry.gateway.usage.usage_log import UsageRecord
from kvferry.observability.telemetry import TENANT_REQUESTS, TENANT_TOKENS


def note(uses: TenantUses, tenant: str, outcome: str = "ok") -> None:
    uses.note(UsageRecord(0.0, tenant, "r", "completions", outcome, 10, 4, 3, 0.1), 0.5, None)


def requests_of(uses: TenantUses) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for reading in uses.readings():
        if reading.metric is TENANT_REQUESTS:
            counts[reading.labels[0]] += int(reading.value)
    return {name: counts[name] for name in counts}


def test_registered_tenants_have_series_before_their_first_request() -> None:
    uses = TenantUses(lambda: ["acme", "beta"], {"acme", "beta"}.__contains__)
    assert requests_of(uses) == {"acme": 0, "beta": 0, OTHER: 0}
    note(uses, "acme")
    note(uses, "stranger", "refused")
    assert requests_of(uses) == {"acme": 1, "beta": 0, OTHER: 1}
    tokens = {reading.labels: reading.value for reading in uses.readings() if reading.metric is TENANT_TOKENS}
    assert tokens["acme", "prompt"] == 10
    assert tokens["acme", "cached"] == 4
    assert tokens["acme", "generated"] == 3


def test_a_deleted_tenants_counts_stay() -> None:
    registered = ["acme", "beta"]
    uses = TenantUses(lambda: registered, lambda name: name in registered)
    note(uses, "acme")
    note(uses, "beta")
    registered.remove("acme")
    assert requests_of(uses) == {"acme": 1, "beta": 1, OTHER: 0}


def test_no_count_falls_when_other_tenants_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_uses, "MAX_NAMED", 2)
    registered: set[str] = set()
    uses = TenantUses(lambda: sorted(registered), lambda name: name in registered)
    before: dict[str, float] = {}
    for named in ("", "my", "aby", "y", "xyz", "", "am", "mz"):
        registered = set(named)
        for name in "abmxyz":
            note(uses, name)
        counts = requests_of(uses)
        assert set(counts) == ({"m", "y", OTHER} if before else {OTHER})
        assert all(counts[name] >= before.get(name, 0) for name in counts), (before, counts)
        before = counts
    assert before == {"m": 7, "y": 7, OTHER: 34}


def test_series_and_memory_are_limited_and_nothing_is_uncounted() -> None:
    uses = TenantUses()
    for number in range(tenant_uses.MAX_NAMED + 500):
        note(uses, f"t{number}")
    note(uses, OTHER)  # a tenant may have this name
    counts = requests_of(uses)
    assert len(counts) == tenant_uses.MAX_NAMED + 1
    assert sum(counts.values()) == tenant_uses.MAX_NAMED + 501
    assert len(uses._by_name) == tenant_uses.MAX_NAMED + 1
