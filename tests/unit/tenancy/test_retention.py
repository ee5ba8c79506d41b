"""Rules of retention, one by one."""

from __future__ import annotations

import pytest

from kvferry.tenancy.pages import usage_report
from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, Stored
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings


class Tier:
    """Stores pages by name and remembers what went."""

    def __init__(self, capacity: int, **contracts: TierContract) -> None:
        self.policy = Retention(TierSettings(capacity, high_water=0.9, low_water=0.5))
        self.policy.configure(contracts)
        self.pages: dict[str, Page] = {}
        self.gone: list[tuple[str, Cause]] = []

    def store(self, tenant: str, keys: str, now_s: float, size: int = 1) -> None:
        for key in keys.split():
            stored = self.policy.store(tenant, key, size, now_s)
            assert isinstance(stored, Stored), stored
            self.pages[key] = stored.page
            self.gone += [(str(victim.page.key), victim.cause) for victim in stored.victims]
        self.policy.check()

    def refuses(self, tenant: str, now_s: float, size: int = 1) -> Refusal:
        refusal = self.policy.store(tenant, "refused", size, now_s)
        assert isinstance(refusal, Refusal)
        self.policy.check()
        return refusal

    def touch(self, keys: str, now_s: float) -> None:
        for key in keys.split():
            assert self.policy.touch(self.pages[key], now_s)

    def pin(self, keys: str) -> None:
        for key in keys.split():
            assert self.policy.pin(self.pages[key], 0)

    def held(self) -> str:
        return " ".join(sorted(key for key, page in self.pages.items() if page.is_resident))


def test_the_least_recently_used_page_goes_first() -> None:
    tier = Tier(3)
    tier.store("a", "a1 a2 a3", 0)
    tier.touch("a1", 1)
    tier.store("a", "a4", 2)
    assert tier.gone == [("a2", Cause.OWN)]


def test_each_reuse_is_worth_a_minute_up_to_four() -> None:
    tier = Tier(2)
    tier.store("a", "a1", 0)
    for now_s in range(1, 8):
        tier.touch("a1", now_s)
    tier.store("a", "a2", 246)
    tier.store("a", "a3", 248)
    tier.store("a", "a4", 249)
    assert tier.gone == [("a2", Cause.OWN), ("a1", Cause.OWN)]  # 7 + 4 x 60 lies between 246 and 248


def test_a_page_that_returns_remembers_its_reuses() -> None:
    tier = Tier(1, b=TierContract(cap=1))
    tier.store("a", "a1", 0)
    tier.touch("a1", 1)
    tier.store("a", "a2", 100)
    tier.store("a", "a1", 101)
    assert tier.pages["a1"].reuses == 2
    tier.store("b", "a2", 102)
    assert tier.pages["a2"].reuses == 0, "another tenant's ghost was used"


def test_ghosts_are_eight_times_the_tenants_pages_at_most() -> None:
    tier = Tier(4)
    tier.store("a", " ".join(f"a{number}" for number in range(100)), 0)
    assert tier.policy.usage_of("a").num_ghosts == 32
    for key in ["a96", "a97", "a98"]:
        tier.policy.discard(tier.pages[key])
    assert tier.policy.usage_of("a").num_ghosts == 8


def test_a_floor_outlasts_a_flood() -> None:
    tier = Tier(10, a=TierContract(floor=4), b=TierContract(cap=10))
    tier.store("a", "a1 a2 a3 a4 a5 a6", 0)
    tier.store("b", " ".join(f"b{number}" for number in range(100)), 1000)
    assert tier.held().startswith("a3 a4 a5 a6 b")
    assert sum(tier.policy.usage_of("a").evicted.values()) == 2


def test_a_tenant_under_its_floor_evicts_others_and_not_itself() -> None:
    tier = Tier(4, a=TierContract(floor=3), b=TierContract(floor=1, cap=4))
    tier.store("a", "a1", 0)
    tier.store("b", "b1 b2 b3", 100)
    tier.store("a", "a2 a3", 101)
    assert tier.held() == "a1 a2 a3 b3"
    tier.store("a", "a4", 102)
    assert tier.held() == "a2 a3 a4 b3"


def test_the_lowest_score_goes_among_all_that_borrow() -> None:
    tier = Tier(4, a=TierContract(floor=1), b=TierContract(floor=1), c=TierContract(cap=4))
    tier.store("a", "a1 a2", 0)
    tier.store("b", "b1 b2", 1)
    tier.store("c", "c1 c2 c3", 2)
    assert tier.gone == [("a1", Cause.BORROWED), ("b1", Cause.BORROWED), ("c1", Cause.OWN)]


def test_a_use_counts_by_weight() -> None:
    tier = Tier(4, a=TierContract(weight=3), b=TierContract(weight=1), c=TierContract())
    tier.store("a", "a1 a2", 0)
    tier.store("b", "b1", 119)
    tier.store("b", "b2", 121)
    tier.store("c", "c1 c2", 122)
    assert tier.gone == [("b1", Cause.BORROWED), ("a1", Cause.BORROWED)]


def test_a_lone_tenant_fills_the_tier_and_gives_back_what_is_over_its_cap_first() -> None:
    tier = Tier(4)
    tier.store("a", "a1 a2 a3 a4 a5", 1000)
    assert tier.policy.usage_of("a").used == 4
    tier.store("b", "b1", 0)
    tier.store("b", "b2", 1001)
    assert tier.gone[1:] == [("a2", Cause.OVER_CAP), ("a3", Cause.OVER_CAP)]
    tier.store("b", "b3", 1002)
    assert tier.gone[3:] == [("b1", Cause.OWN)]  # b is at its cap, and no room is free
    tier.store("c", "c1", 1003)
    assert tier.gone[4:] == [("a4", Cause.BORROWED)]


def test_a_store_over_the_cap_is_refused_and_counted_while_own_pages_are_in_use() -> None:
    tier = Tier(4)
    tier.store("a", "a1 a2", 0)
    tier.store("b", "b1 b2", 0)
    tier.pin("a1 a2")
    assert tier.policy.room("a") == 0
    assert tier.refuses("a", 1) is Refusal.LIMIT
    assert tier.policy.usage_of("a").refused[Refusal.LIMIT] == 1
    assert tier.held() == "a1 a2 b1 b2"


def test_a_store_finds_no_room_where_all_is_pinned_or_within_floors() -> None:
    tier = Tier(4, a=TierContract(floor=2, cap=4), b=TierContract(cap=4))
    tier.store("a", "a1 a2", 0)
    tier.store("b", "b1 b2", 0)
    tier.pin("b1 b2")
    assert tier.policy.room("b") == 0
    assert tier.refuses("b", 1) is Refusal.NO_ROOM
    assert tier.refuses("c", 1) is Refusal.NO_ROOM
    assert tier.policy.counts.of(OTHER).refused[Refusal.NO_ROOM] == 1
    assert tier.policy.room("a") == 2


def test_a_refused_store_leaves_the_order_as_it_was() -> None:
    tier = Tier(6, a=TierContract(floor=0, cap=6), b=TierContract(floor=0, cap=6))
    tier.store("a", "a1 a2 a3", 0)
    tier.store("b", "b1 b2 b3", 1)
    tier.pin("b3")
    tier.policy.end(tier.pages["a3"])
    assert tier.refuses("a", 2, size=6) is Refusal.NO_ROOM
    tier.store("a", "a4 a5 a6 a7 a8", 3)
    assert [key for key, _ in tier.gone] == ["a3", "a1", "a2", "b1", "b2"]


def test_without_borrowing_a_floor_is_the_limit_even_of_free_room() -> None:
    tier = Tier(10, a=TierContract(floor=2, borrow=False))
    tier.store("a", "a1 a2 a3", 0)
    assert tier.held() == "a2 a3"
    assert tier.policy.room("a") == 2
    assert tier.policy.room("none") == 8
    tier.pin("a2 a3")
    assert tier.refuses("a", 1) is Refusal.LIMIT


def test_a_lower_limit_makes_pages_go_first_and_stops_growth() -> None:
    tier = Tier(6, a=TierContract(cap=6))
    tier.store("a", "a1 a2 a3 a4", 1000)
    tier.store("b", "b1 b2", 0)
    tier.policy.configure({"a": TierContract(floor=1, borrow=False)})
    tier.store("a", "a5", 1001)
    assert tier.gone == [("a1", Cause.OWN)]
    tier.store("b", "b3", 1002)
    assert tier.gone[1:] == [("a2", Cause.OVER_CAP)]


def test_expired_pages_go_first_and_are_misses() -> None:
    tier = Tier(3, a=TierContract(floor=3, ttl_s=10))
    tier.store("a", "a1", 0)
    tier.store("a", "a2", 1)
    tier.touch("a1", 9)  # slides
    tier.store("b", "b1", 10)
    assert tier.policy.touch(tier.pages["a2"], 11) is False
    assert tier.policy.pin(tier.pages["a2"], 11) is False
    assert tier.policy.want(tier.pages["a2"], 5, 11) is False
    tier.store("a", "a3", 11)
    assert tier.gone == [("a2", Cause.EXPIRED)]
    assert [victim.page.key for victim in tier.policy.reclaim(19, 1)] == ["a1"]


def test_a_pinned_page_stays_and_its_end_of_use_is_its_last_use() -> None:
    tier = Tier(2, a=TierContract(cap=2, ttl_s=10))
    tier.store("a", "a1 a2", 0)
    tier.pin("a1 a1")
    tier.store("a", "a3", 50)
    assert tier.gone == [("a2", Cause.EXPIRED)]
    tier.policy.unpin(tier.pages["a1"], 60)
    tier.store("a", "a4", 65)
    assert tier.gone[1:] == [("a3", Cause.EXPIRED)]
    tier.policy.unpin(tier.pages["a1"], 66)
    tier.touch("a1", 75)
    with pytest.raises(ValueError, match="not pinned"):
        tier.policy.unpin(tier.pages["a1"], 76)


def test_pages_of_an_ended_session_go_before_others_but_not_below_a_floor() -> None:
    tier = Tier(4, a=TierContract(floor=1), b=TierContract(floor=1))
    tier.store("a", "a1 a2", 0)
    tier.store("b", "b1 b2", 100)
    tier.touch("b2", 101)
    tier.policy.end(tier.pages["b2"])
    tier.policy.end(tier.pages["b1"])
    tier.store("c", "c1 c2", 102)
    assert tier.gone == [("b1", Cause.ENDED), ("a1", Cause.BORROWED)]
    tier.store("b", "b3", 103)
    assert tier.gone[2:] == [("b2", Cause.ENDED)]


def test_a_hit_takes_the_end_of_a_session_back() -> None:
    tier = Tier(2)
    tier.store("a", "a1 a2", 0)
    tier.policy.end(tier.pages["a2"])
    tier.touch("a2", 1)
    tier.store("a", "a3", 2)
    assert tier.gone == [("a1", Cause.OWN)]


def test_a_wanted_page_is_the_last_to_go_until_its_deadline_and_then_goes_first() -> None:
    tier = Tier(3, a=TierContract(floor=2, cap=3))
    tier.store("a", "a1 a2 a3", 0)
    assert tier.policy.want(tier.pages["a1"], 30, 0)
    tier.store("a", "a4", 1)
    tier.store("b", "b1", 2)
    assert [key for key, _ in tier.gone] == ["a2", "a3"]
    tier.touch("a1", 20)
    assert tier.policy.want(tier.pages["a1"], 30, 20)  # the time starts again
    tier.store("a", "a5", 49)
    assert [key for key, _ in tier.gone] == ["a2", "a3", "a4"]
    tier.store("a", "a6", 50)
    assert tier.gone[3:] == [("a1", Cause.ENDED)]


def test_wanted_pages_yield_to_their_own_tenant() -> None:
    tier = Tier(2, a=TierContract(floor=2))
    tier.store("a", "a1 a2", 0)
    assert tier.policy.want(tier.pages["a1"], 50, 0)
    assert tier.policy.want(tier.pages["a2"], 30, 0)
    assert tier.refuses("b", 1) is Refusal.NO_ROOM
    tier.store("a", "a3", 1)
    assert tier.gone == [("a2", Cause.OWN)]


def test_hints_are_bounded_by_the_contract() -> None:
    tier = Tier(4, a=TierContract(floor=1, ttl_s=10))
    tier.store("a", "a1 a2", 0)
    assert tier.policy.want(tier.pages["a1"], 1e9, 0)
    assert not tier.policy.want(tier.pages["a2"], 5, 0), "more pages wanted than the floor has"
    assert tier.policy.want(tier.pages["a1"], 1e9, 1), "a hint could not be renewed"
    assert tier.policy.usage_of("a").wanted == 1
    assert [victim.page.key for victim in tier.policy.reclaim(11, 9)] == ["a2", "a1"]
    with pytest.raises(ValueError, match="ttl_s nan"):
        tier.policy.want(tier.pages["a1"], float("nan"), 12)


def test_pages_wanted_beyond_a_lower_floor_go_after_the_tenants_others() -> None:
    tier = Tier(4, a=TierContract(floor=3))
    tier.store("a", "a1 a2 a3 a4", 0)
    for key, ttl_s in (("a1", 30), ("a2", 10), ("a3", 20)):
        assert tier.policy.want(tier.pages[key], ttl_s, 0)
    tier.policy.configure({"a": TierContract(floor=1), "b": TierContract(cap=4)})
    assert tier.policy.room("b") == 3
    tier.store("b", "b1 b2 b3 b4", 1)
    assert [key for key, _ in tier.gone] == ["a4", "a2", "a3", "b1"]


def test_a_shorter_time_to_live_shortens_hints() -> None:
    tier = Tier(4, a=TierContract(floor=3))
    tier.store("a", "a1", 0)
    assert tier.policy.want(tier.pages["a1"], 30, 0)
    tier.policy.configure({"a": TierContract(floor=3, ttl_s=10)})
    assert [victim.cause for victim in tier.policy.reclaim(10, 9)] == [Cause.EXPIRED]


def test_many_hints_that_end_at_once_do_not_end_in_one_call() -> None:
    tier = Tier(200, a=TierContract(floor=200))
    tier.store("a", " ".join(f"a{number}" for number in range(200)), 0)
    assert all(tier.policy.want(page, 10, 0) for page in tier.pages.values())
    left = []
    for now_s in range(10, 14):
        tier.policy.reclaim(now_s, 0)
        left.append(tier.policy.usage_of("a").wanted)
    assert left == [136, 72, 8, 0]


def test_a_reclaim_runs_in_steps_from_the_high_to_the_low_water_mark() -> None:
    tier = Tier(20, a=TierContract(floor=9), b=TierContract(cap=20))
    tier.store("a", "a1 a2 a3", 0)
    tier.store("b", " ".join(f"b{number}" for number in range(15)), 1)
    assert tier.policy.reclaim(2, 4) == [], "the high water mark is not exceeded"
    tier.store("b", "b15", 2)
    assert [len(tier.policy.reclaim(3, 4)) for _ in range(4)] == [4, 4, 1, 0]
    assert tier.policy.used == 10
    assert tier.policy.usage_of("a").used == 3


def test_a_reclaim_stops_at_floors() -> None:
    tier = Tier(10, a=TierContract(floor=8))
    tier.store("a", " ".join(f"a{number}" for number in range(10)), 0)
    assert len(tier.policy.reclaim(1, 99)) == 2
    assert tier.policy.reclaim(1, 99) == []


def test_larger_pages_take_no_part_of_a_floor() -> None:
    tier = Tier(10, a=TierContract(floor=5))
    tier.store("a", "a1 a2", 0, size=4)
    assert tier.refuses("b", 1, size=3) is Refusal.NO_ROOM, "8 - 4 units are less than the floor"
    tier.store("b", "b1", 1, size=2)
    assert tier.held() == "a1 a2 b1"


def test_discarded_pages_leave_nothing_behind() -> None:
    tier = Tier(4)
    tier.store("a", "a1 a2", 0)
    tier.pin("a1")
    for key in ("a1", "a2", "a2"):
        tier.policy.discard(tier.pages[key])
    tier.policy.unpin(tier.pages["a1"], 1)
    tier.policy.end(tier.pages["a1"])
    assert not tier.policy.touch(tier.pages["a1"], 1)
    tier.policy.check()
    assert tier.policy.used == 0
    assert repr(tier.policy) == "<Retention of 0 of 4 units, 0 tenants>"


def test_counts_of_tenants_that_left_stay() -> None:
    tier = Tier(2)
    tier.store("a", "a1", 0)
    tier.store("b", "b1 b2 b3", 1)
    tier.store("c", "c1", 62)
    tier.store("d", "d1", 62)
    assert tier.policy.usage_of("a").used == tier.policy.usage_of("b").used == 0
    assert tier.policy.counts.of(OTHER).evicted == {Cause.BORROWED: 2, Cause.OWN: 2}


def test_a_tier_counts_for_whom_pages_of_others_went() -> None:
    tier = Tier(2, b=TierContract(cap=2))
    tier.store("a", "a1 a2", 0)
    tier.store("b", "b1 b2", 1)
    tier.store("b", "b3", 2)
    usages = tier.policy.usages()
    assert (usages["b"].displaced, usages[OTHER].displaced) == (2, 0), "what it evicts of its own is not of others"
    tier.store("a", "a3", 200)
    tier.store("c", "c1 c2", 300)
    assert tier.policy.usages()[OTHER].displaced == 2, "those of tenants without a contract or a page stay"


def test_no_count_of_a_tier_falls_when_other_tenants_get_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_report, "MAX_COUNTED", 2)
    tier = Tier(2, m=TierContract(cap=2), y=TierContract(cap=2))
    before: dict[str, int] = {}

    def look() -> None:
        counts = {name: sum(usage.evicted.values()) + usage.displaced for name, usage in tier.policy.usages().items()}
        assert set(counts) == {"m", "y", OTHER}
        assert all(counts[name] >= before.get(name, 0) for name in counts), (before, counts)
        before.update(counts)

    # Named tenants go, others come before them in the alphabet, and some that had pages without a contract get one.
    for now_s, named in enumerate(("my", "aby", "y", "xyz", "", "am", "mz")):
        tier.policy.configure({tenant: TierContract(cap=2) for tenant in named})
        look()
        for tenant in "abmxyz":
            tier.store(tenant, f"{tenant}{now_s}a {tenant}{now_s}b {tenant}{now_s}c", 100.0 * now_s)
        look()
    assert sum(sum(usage.evicted.values()) for usage in tier.policy.usages().values()) == 7 * 6 * 3 - 2


def test_floors_beyond_the_tier_are_refused_and_change_nothing() -> None:
    tier = Tier(10, a=TierContract(floor=4))
    with pytest.raises(ValueError, match="floors sum to 11, but the capacity is 10: a 5, b 6"):
        tier.policy.configure({"a": TierContract(floor=5), "b": TierContract(floor=6)})
    assert tier.policy.usage_of("a").floor == 4


def test_an_earlier_time_counts_as_the_latest() -> None:
    tier = Tier(2)
    tier.store("a", "a1", 100)
    tier.store("a", "a2", 50)
    tier.store("a", "a3", 101)
    assert tier.gone == [("a1", Cause.OWN)]
    with pytest.raises(ValueError, match="0 units"):
        tier.policy.store("a", "a4", 0, 101)
