"""Reports of what tenants hold: names for some, sums for all, and only what has changed."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from kvferry.tenancy.pages import usage_report
from kvferry.tenancy.pages.device_pages import DevicePages
from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, TenantUsage
from kvferry.tenancy.pages.usage_report import MAX_COUNTED, Holding, Row, TenantCounts, UsageReport, usages_of
from kvferry.tenancy.terms import TierContract


def counts_of(*names: str) -> TenantCounts:
    counts = TenantCounts()
    counts.add_names(names)
    return counts


def sent(rows: list[Row]) -> dict[str, TenantUsage]:
    """As they arrive in another process."""
    return usages_of(msgspec.msgpack.decode(msgspec.msgpack.encode(rows)))


def test_a_report_has_all_that_is_known_of_a_tenant() -> None:
    counts = counts_of("a")
    counts.of("a").evicted[Cause.BORROWED] += 3
    counts.of("a").refused[Refusal.NO_ROOM] += 2
    counts.of("a").displaced += 1
    (usage,) = sent(UsageReport(counts, pages_per_unit=4).rows([("a", Holding(5, 3, 9, 2))])).values()
    assert (usage.used, usage.floor, usage.cap, usage.borrowed, usage.displaced) == (20, 12, 36, 8, 4)
    assert usage.evicted == {**dict.fromkeys(Cause, 0), Cause.BORROWED: 12}
    assert usage.refused == {Refusal.LIMIT: 0, Refusal.NO_ROOM: 8}


def test_nothing_is_reported_where_nothing_changed() -> None:
    assert UsageReport(counts_of("a")).rows([]) == []
    assert [name for name, _ in UsageReport(counts_of("a")).rows([("a", Holding())])] == ["a"]


def test_only_so_many_tenants_have_names_and_all_are_in_the_sums() -> None:
    names = [f"t{number}" for number in range(MAX_COUNTED + 50)]
    counts = counts_of(*names)
    for name in names:
        counts.of(name).evicted[Cause.OWN] += 1
    usages = sent(UsageReport(counts).rows([(name, Holding(2, 1, 4, 1)) for name in names]))
    assert len(usages) == MAX_COUNTED + 1
    assert set(usages) - {OTHER} == set(names[:MAX_COUNTED])
    assert (usages[OTHER].used, usages[OTHER].floor, usages[OTHER].borrowed) == (100, 50, 50)
    assert sum(usage.evicted[Cause.OWN] for usage in usages.values()) == len(names)


def test_a_tenant_that_is_called_other_is_among_the_others() -> None:
    usages = sent(UsageReport(counts_of(OTHER)).rows([(OTHER, Holding(3)), ("b", Holding(4))]))
    assert {name: usage.used for name, usage in usages.items()} == {OTHER: 7}


def test_a_tenant_that_gets_a_name_leaves_the_others() -> None:
    counts = counts_of()
    report = UsageReport(counts)
    assert sent(report.rows([("a", Holding(3))]))[OTHER].used == 3
    counts.add_names(["a"])
    usages = sent(report.rows([("a", Holding(4))]))
    assert (usages["a"].used, usages[OTHER].used) == (4, 0)


@pytest.mark.parametrize("seed", range(10))
def test_reports_of_changes_add_up_to_the_pool(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random work of named, unnamed and unknown tenants in a device, whose contracts come late and go again."""
    monkeypatch.setattr(usage_report, "MAX_COUNTED", 3)
    chance, now_s = random.Random(seed), 0.0
    device = DevicePages(40, 40)
    device.put_blank(range(40))
    names = [f"t{number}" for number in range(6)]
    contracts: dict[str, TierContract] = {}
    report, seen = UsageReport(device.counts), dict[str, TenantUsage]()
    used: list[list[int]] = []
    last: Counter[tuple[str, Cause]] = Counter()
    for _ in range(300):
        now_s += chance.choice((0.0, 1.0, 40.0))
        name = chance.choice([*names, "default"])
        match chance.randrange(5):
            case 0:
                contracts = {
                    each: TierContract(floor=chance.randrange(6), cap=20) for each in names[: chance.randrange(7)]
                }
                device.configure(contracts)
            case 1 if used:
                device.put(used.pop(chance.randrange(len(used))), now_s)
            case 2:
                for page in device.expired(now_s, 5):
                    device.forget(page, Cause.EXPIRED)
            case _:
                pages = device.take(min(chance.randrange(1, 9), device.num_free), name, now_s)
                for page in pages:
                    device.claim(page, name)
                used.append(pages)
        if chance.randrange(3):
            continue
        seen |= sent(report.rows(device.changed_holdings()))
        device.check()
        cached = Counter(filter(None, map(device.owner_of, range(40))))
        assert len(seen) <= 4
        for each, usage in seen.items():
            if each != OTHER:
                assert usage.used == cached[each]
                assert usage.floor == (contracts[each].floor if each in contracts else 0)
                assert usage.borrowed == max(0, usage.used - usage.floor)
            for cause, count in usage.evicted.items():
                assert count >= last[each, cause], "a counter fell"
                last[each, cause] = count
        assert sum(usage.used for usage in seen.values()) == cached.total()
    evicted = sum(usage.evicted[cause] for usage in seen.values() for cause in (Cause.BORROWED, Cause.OVER_CAP))
    assert evicted == sum(usage.displaced for usage in seen.values()) > 0
