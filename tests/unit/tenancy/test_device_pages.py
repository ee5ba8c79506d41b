"""Pages in an engine's device memory: the policy of other tiers, and room for requests that run."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvferry.tenancy.pages import device_pages
from kvferry.tenancy.pages.device_pages import DevicePages
from kvferry.tenancy.pages.hinted_pages import HintedPages
from kvferry.tenancy.pages.outcome import Cause, Refusal
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings


def device_of(capacity: int, **contracts: TierContract) -> DevicePages:
    device = DevicePages(capacity, capacity)
    device.configure(contracts)
    device.put_blank(range(capacity))
    return device


def store(device: DevicePages, tenant: str, num: int, now_s: float) -> list[int]:
    """Cache pages and end their request."""
    pages = device.take(num, tenant, now_s)
    for page in pages:
        device.claim(page, tenant)
    device.put(pages, now_s)
    device.check()
    return pages


def held(device: DevicePages, tenant: str) -> int:
    return device.holding_of(tenant).used


def test_blank_pages_go_first_and_the_one_freed_last() -> None:
    device = device_of(4)
    assert device.take(2, "a", 0.0) == [0, 1]
    device.put_blank([1, 0])
    assert device.take(3, "a", 0.0) == [1, 0, 2]
    assert device.num_free == 1


def test_a_floor_survives_a_flood_of_ten_times_the_pool() -> None:
    device = device_of(40, acme=TierContract(floor=10, cap=20))
    pages = store(device, "acme", 10, 0.0)
    for now_s in range(1, 101):
        store(device, "noise", 4, float(now_s))
    assert held(device, "acme") == 10
    for page in pages:
        device.use(page)  # they are hit
    device.check()
    assert device.counts.of("noise").evicted[Cause.OWN] > 0


def test_what_is_above_a_floor_is_lent_and_a_tenant_over_its_cap_loses_first() -> None:
    device = device_of(40, acme=TierContract(floor=10, cap=20), plain=TierContract(cap=40))
    store(device, "plain", 10, 0.0)
    store(device, "acme", 30, 1.0)
    store(device, "plain", 10, 2.0)
    assert held(device, "acme") == 20
    assert device.counts.of("acme").evicted[Cause.OVER_CAP] == 10
    store(device, "plain", 25, 3.0)
    assert held(device, "acme") == 10


def test_a_tenant_at_its_cap_takes_its_own() -> None:
    device = device_of(40, a=TierContract(cap=10), b=TierContract(cap=40))
    store(device, "b", 30, 0.0)
    store(device, "a", 10, 1.0)
    store(device, "a", 10, 2.0)
    assert (held(device, "a"), held(device, "b")) == (10, 30)


def test_floors_yield_to_requests_that_run() -> None:
    device = device_of(10, acme=TierContract(floor=5, cap=5))
    store(device, "acme", 5, 0.0)
    assert device.reserved_for_others("noise") == 5
    assert device.reserved_for_others("acme") == 0
    assert len(device.take(8, "noise", 1.0)) == 8
    assert held(device, "acme") == 2
    device.check()
    assert device.reserved_for_others("noise") == 2


def test_pages_in_use_count_for_the_floor() -> None:
    device = device_of(10, acme=TierContract(floor=4, cap=8))
    pages = store(device, "acme", 6, 0.0)
    for page in pages[:3]:
        device.use(page)
    assert device.reserved_for_others("noise") == 1, "of three free ones, one is within the floor"


def test_pages_that_leave_the_cache_stay_free() -> None:
    device = device_of(4)
    pages = store(device, "a", 3, 0.0)
    device.forget(pages[1])
    device.forget(pages[1])
    device.check()
    assert (device.num_free, held(device, "a"), device.owner_of(pages[1])) == (4, 2, None)
    device.use(pages[0])
    device.forget(pages[0])  # in use
    device.check()
    assert (device.num_free, held(device, "a")) == (3, 1)


def test_a_reused_page_outlives_others_for_a_while() -> None:
    device = device_of(2)
    (first,) = store(device, "a", 1, 0.0)
    device.use(first)
    device.reuse(first)
    device.put([first], 0.0)
    store(device, "a", 1, 30.0)
    store(device, "a", 1, 31.0)
    assert device.owner_of(first) == "a", "a use is worth 60 s"
    store(device, "a", 1, 95.0)
    assert device.owner_of(first) == "a"
    store(device, "a", 1, 96.0)
    assert device.owner_of(first) == "a"


def test_pages_expire_after_their_last_use() -> None:
    device = device_of(10, a=TierContract(cap=10, ttl_s=5.0), b=TierContract(cap=10))
    first, second, third = store(device, "a", 3, 0.0)
    store(device, "b", 3, 0.0)
    device.use(second)
    device.put([second], 3.0)
    assert device.expired(4.9, 10) == []
    assert device.expired(5.0, 10) == [first, third]
    assert device.expired(5.0, 1) == [first]
    for page in device.expired(5.0, 10):
        device.forget(page)
    device.check()
    assert held(device, "a") == 1
    taken = device.take(7, "b", 9.0)
    assert second in taken, "what has expired goes before the older pages of others"
    assert device.counts.of("a").evicted[Cause.EXPIRED] == 1


def test_a_changed_contract_counts_at_once() -> None:
    device = device_of(10, a=TierContract(floor=8, cap=10))
    store(device, "a", 8, 0.0)
    assert device.reserved_for_others("b") == 8
    device.configure({"a": TierContract(floor=2, cap=10)})
    assert device.reserved_for_others("b") == 2
    with pytest.raises(ValueError, match="floors sum to 11"):
        device.configure({"a": TierContract(floor=11, cap=11)})


def test_tenants_without_pages_are_forgotten() -> None:
    device = device_of(4)
    for number in range(1000):
        store(device, f"t{number}", 2, float(number))
    assert len(device._tenants) <= 3


def test_a_tenant_whose_hints_are_over_costs_as_before() -> None:
    device = device_of(8, a=TierContract(cap=8))
    pages = device.take(4, "a", 0.0)
    for page in pages:
        device.claim(page, "a")
    device.want(pages[:2], 10.0, 0.0)
    device.end(pages[2])
    device.put(pages, 1.0)
    device.check()
    assert len(device._by_due) == 1
    assert store(device, "a", 5, 2.0)[-1] == pages[2], "the first to go, after four that are free"
    store(device, "a", 7, 30.0)
    device.check()
    assert not device._by_due
    assert device._tenants["a"].hinted is None


def test_the_end_of_a_hint_costs_the_same_for_one_tenant_and_for_thousands(monkeypatch: pytest.MonkeyPatch) -> None:
    num = 2000
    device = device_of(num + 8)
    for number in range(num):
        pages = device.take(1, f"t{number}", 0.0)
        device.claim(pages[0], f"t{number}")
        device.want(pages, 1000.0 + number, 0.0)
        device.put(pages, 0.0)
    device.check()
    looks = Counter[str]()
    due_s = HintedPages.due_s.fget
    assert due_s is not None

    def counting(hinted: HintedPages[int]) -> float:
        looks["due_s"] += 1
        return float(due_s(hinted))

    monkeypatch.setattr(HintedPages, "due_s", property(counting))
    for number in range(20):
        device.put_blank(device.take(1, "other", 1000.0 + number))
    monkeypatch.undo()
    device.check()
    assert sum(not device._tenants[f"t{number}"].hinted.num_units for number in range(num)) == 20  # type: ignore[union-attr]
    assert looks["due_s"] <= 20 * 4, "and not 20 times all tenants"


def test_hints_of_taken_pages_leave_the_order_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pages, "_ENDS_PER_CALL", 1)
    device = device_of(8)
    held: dict[str, list[int]] = {}
    for tenant, ttls_s in {"a": (10.0, 40.0), "b": (20.0, 50.0), "c": (30.0, 60.0)}.items():
        held[tenant] = device.take(2, tenant, 0.0)
        for page, ttl_s in zip(held[tenant], ttls_s, strict=True):
            device.claim(page, tenant)
            device.want([page], ttl_s, 0.0)
        device.put(held[tenant], 0.0)
    device.use(held["a"][0])  # its hint would have ended first

    def num_wanted() -> list[int]:
        return [device._tenants[tenant].hinted.num_free for tenant in "abc"]  # type: ignore[union-attr]

    assert num_wanted() == [1, 2, 2]
    for wanted in ([1, 1, 2], [1, 1, 1], [0, 1, 1], [0, 0, 1], [0, 0, 0]):
        device.put_blank(device.take(1, "other", 100.0))
        device.check()
        assert num_wanted() == wanted


CONTRACTS = {
    "a": TierContract(floor=6, cap=12),
    "b": TierContract(floor=4, cap=30, weight=2.0),
    "c": TierContract(cap=9),
    "d": TierContract(floor=3, cap=3),
    "e": TierContract(cap=32, ttl_s=40.0),
}


@pytest.mark.parametrize("with_hints", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_the_same_pages_go_as_in_other_tiers(seed: int, with_hints: bool) -> None:
    rng = random.Random(seed)
    capacity = 32
    device = device_of(capacity, **CONTRACTS)
    tier = Retention(TierSettings(capacity, ghosts_per_page=0))
    tier.configure(CONTRACTS)
    pages: dict[int, Page] = {}
    in_use: set[int] = set()
    now_s, num_taken, num_hints = 0.0, 0, 0
    for _ in range(400):
        now_s += rng.choice((0.0, 0.3, 2.0, 30.0))
        free = sorted(pages.keys() - in_use)
        action = rng.random()
        if action < 0.5:
            tenant, num = rng.choice("abcdef"), rng.randint(1, 6)
            if num > device.num_free:
                continue
            num_blank = capacity - len(pages)
            victims = tier.reserve(tenant, num, max(0, num - num_blank), now_s)
            if isinstance(victims, Refusal):
                continue
            taken = device.take(num, tenant, now_s)
            gone = [page for page in taken if page in pages]
            assert gone == [victim.page.key for victim in victims]
            for page in gone:
                del pages[page]
            tier.release(tenant, num)
            for page in taken:
                device.claim(page, tenant)
                tier.hold(tenant, 1)
                in_use.add(page)
                pages[page] = Page(tenant, page, 1, now_s)
                tier.fill(pages[page], now_s)
                tier.pin(pages[page], now_s)
            num_taken += len(gone)
        elif action < 0.6 and in_use and with_hints:
            page, ttl_s = rng.choice(sorted(in_use)), rng.choice((0.0, 0.0, 20.0, 60.0, 300.0))
            if ttl_s:
                device.want([page], ttl_s, now_s)
                tier.want(pages[page], ttl_s, now_s)
                num_hints += 1
            else:
                device.end(page)
                tier.end(pages[page])
        elif action < 0.8 and in_use:
            for page in rng.sample(sorted(in_use), rng.randint(1, len(in_use))):
                in_use.remove(page)
                device.put([page], now_s)
                tier.unpin(pages[page], now_s)
        elif action < 0.95 and free:
            page = rng.choice(free)
            if tier.touch(pages[page], now_s):
                tier.pin(pages[page], now_s)
                device.use(page)
                device.reuse(page)
                in_use.add(page)
        elif free:
            page = rng.choice(free)
            device.forget(page)
            tier.discard(pages.pop(page))
        device.check()
        tier.check()
    assert num_taken > 50, "so the test compares something"
    assert num_hints > 5 or not with_hints
