"""Clients' hints: which of a tenant's pages goes, and that no other tenant's does for it."""

from __future__ import annotations

import random

import pytest

from kvferry.tenancy.pages.hinted_pages import HintedPages, Place, first_private
from kvferry.tenancy.pages.outcome import Cause, Stored
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings

CAPACITY = 40
CONTRACTS = {
    "a": TierContract(floor=6, cap=30),
    "b": TierContract(floor=5, cap=20, weight=2.0),
    "c": TierContract(cap=15, ttl_s=200.0),
}


class Tier:
    """A tier, and what it evicted."""

    def __init__(self, capacity: int = CAPACITY, **contracts: TierContract) -> None:
        self.policy = Retention(TierSettings(capacity))
        self.policy.configure(contracts)
        self.pages: dict[str, Page] = {}
        self.gone: list[tuple[str, str, Cause]] = []

    def store(self, tenant: str, keys: str, now_s: float) -> None:
        for key in keys.split():
            stored = self.policy.store(tenant, key, 1, now_s)
            assert isinstance(stored, Stored)
            for victim in stored.victims:
                del self.pages[str(victim.page.key)]
                self.gone.append((victim.page.tenant, str(victim.page.key), victim.cause))
            self.pages[key] = stored.page
        self.policy.check()

    def hint(self, keys: str, wanted_s: float, now_s: float) -> None:
        self.policy.hint([self.pages[key] for key in keys.split()], wanted_s, now_s)
        self.policy.check()

    def held(self, tenant: str) -> list[str]:
        return sorted(key for key, page in self.pages.items() if page.tenant == tenant)


def run(seed: int, kinds: str) -> tuple[list[tuple[str, Cause]], list[set[str]]]:
    """Random operations of which tenant a's hints alone differ: `kinds` has those that are given.

    Return the tenants that lost pages in order, and after each step what the others hold.
    """
    rng = random.Random(seed)
    tier = Tier(**CONTRACTS)
    now_s, others, theirs = 0.0, [], []
    for number in range(500):
        now_s += rng.choice((0.0, 0.7, 3.1, 20.3))
        verb, tenant, chance, wanted_s = rng.random(), rng.choice("abc"), rng.random(), rng.choice((15.0, 90.0, 900.0))
        mine = sorted((page for page in tier.pages.values() if page.tenant == "a"), key=lambda page: str(page.key))
        if verb < 0.6:
            tier.store(tenant, f"{tenant}{number}", now_s)
            if tenant != "a":
                theirs.append(f"{tenant}{number}")
        elif verb < 0.75 and theirs:
            key = theirs[-1 - int(chance * min(20, len(theirs)))]
            if key in tier.pages:
                tier.policy.touch(tier.pages[key], now_s)
        elif mine:
            page = mine[int(chance * len(mine))]
            if verb < 0.9 and "want" in kinds:
                tier.policy.want(page, 9000.0 if kinds == "want" else wanted_s, now_s)  # beyond the run's end
            elif verb >= 0.9 and "end" in kinds:
                tier.policy.end(page)
        tier.policy.check()
        others.append({key for key, page in tier.pages.items() if page.tenant != "a"})
    return [(tenant, cause) for tenant, _, cause in tier.gone], others


@pytest.mark.parametrize("seed", range(12))
def test_wishes_change_no_other_tenants_pages_and_not_when_a_page_goes(seed: int) -> None:
    plain, hinted = run(seed, ""), run(seed, "want")
    assert hinted[1] == plain[1], "another tenant lost or kept a page because of a hint"
    is_same = [tenant for tenant, _ in plain[0]] == [tenant for tenant, _ in hinted[0]]
    assert is_same, "a tenant lost a page at another time"


@pytest.mark.parametrize("seed", range(12))
def test_ends_of_sessions_leave_other_tenants_all_that_they_would_have(seed: int) -> None:
    plain, hinted = run(seed, ""), run(seed, "want end")
    assert all(without <= with_hints for without, with_hints in zip(plain[1], hinted[1], strict=True))


def test_hints_do_change_which_pages_of_the_tenant_stay() -> None:
    """So that the two tests above compare something."""
    num_causes = 0
    for seed in range(10):
        num_causes += sum(cause is Cause.ENDED for _, cause in run(seed, "want end")[0])
    assert num_causes > 50


def test_a_wanted_prefix_survives_a_flood_of_its_tenant_until_its_time_is_over() -> None:
    tier = Tier(10, a=TierContract(cap=6), b=TierContract(cap=10))
    tier.store("b", "b1 b2 b3 b4", 0.0)
    tier.store("a", "system1 system2", 0.0)
    tier.hint("system1 system2", 600.0, 0.0)
    for number in range(50):
        tier.store("a", f"once{number}", 1.0 + number)
        assert {"system1", "system2"} <= tier.pages.keys()
        assert tier.held("b") == ["b1", "b2", "b3", "b4"]
    tier.store("a", "late1 late2", 600.0)
    assert tier.gone[-2:] == [("a", "system1", Cause.ENDED), ("a", "system2", Cause.ENDED)]
    plain = Tier(10, a=TierContract(cap=6), b=TierContract(cap=10))
    plain.store("b", "b1 b2 b3 b4", 0.0)
    plain.store("a", "system1 system2", 0.0)
    plain.store("a", " ".join(f"once{number}" for number in range(50)), 1.0)
    assert "system1" not in plain.pages, "so the flood is one"


def test_a_wanted_page_does_not_hold_a_tenants_place_against_others() -> None:
    """The page that goes instead leaves its place: else b would lose pages that are older than those of a."""
    tier = Tier(6, a=TierContract(cap=6), b=TierContract(cap=6), c=TierContract(cap=6))
    tier.store("a", "old", 0.0)
    tier.store("b", "b1 b2", 50.0)
    tier.store("a", "young1 young2 young3", 100.0)
    tier.hint("old", 3600.0, 100.0)
    tier.store("c", "c1 c2 c3", 200.0)
    assert tier.gone == [("a", "young1", Cause.BORROWED), ("b", "b1", Cause.BORROWED), ("b", "b2", Cause.BORROWED)]


def test_wanted_pages_go_to_others_once_nothing_else_is_left_and_not_within_the_floor() -> None:
    tier = Tier(6, a=TierContract(floor=2, cap=6), b=TierContract(cap=6))
    tier.store("a", "a1 a2 a3 a4 a5 a6", 0.0)
    tier.hint("a1 a2 a3", 3600.0, 0.0)
    tier.store("b", "b1 b2 b3 b4", 1.0)
    assert [key for _, key, _ in tier.gone] == ["a4", "a5", "a6", "a1"]
    tier.store("b", "b5", 2.0)
    assert tier.held("a") == ["a2", "a3"]


def test_more_than_half_of_what_a_tenant_may_hold_is_not_wanted() -> None:
    tier = Tier(8, a=TierContract(cap=8))
    tier.store("a", "a1 a2 a3 a4 a5 a6 a7 a8", 0.0)
    tier.hint("a1 a2 a3 a4 a5 a6 a7 a8", 3600.0, 0.0)
    assert tier.policy.usage_of("a").wanted == 4
    tier.hint("a1", 3600.0, 5.0)  # one that is wanted may be wanted again
    assert tier.policy.usage_of("a").wanted == 4


def test_the_longest_hint_counts() -> None:
    tier = Tier(4, a=TierContract(cap=4))
    tier.store("a", "a1", 0.0)
    tier.hint("a1", 100.0, 0.0)
    tier.hint("a1", 10.0, 50.0)
    tier.hint("a1", 0.0, 60.0)  # the end of a session: another request wants the page
    tier.policy.reclaim(99.0, 0)
    assert tier.policy.usage_of("a").wanted == 1
    tier.policy.reclaim(100.0, 0)
    assert tier.policy.usage_of("a").wanted == 0


def test_a_page_that_others_used_since_is_an_ordinary_one_after_its_hint() -> None:
    tier = Tier(3, a=TierContract(cap=3))
    tier.store("a", "a1 a2 a3", 0.0)
    tier.hint("a1", 100.0, 0.0)
    tier.policy.touch(tier.pages["a1"], 90.0)  # without a hint
    tier.store("a", "a4", 101.0)
    assert tier.gone == [("a", "a2", Cause.OWN)]
    tier.store("a", "a5 a6", 102.0)
    assert [key for _, key, _ in tier.gone] == ["a2", "a3", "a4"], "a1 has the use at 90 s, and two uses"
    tier.store("a", "a7 a8 a9", 200.0)
    assert "a1" not in tier.pages


def test_no_hint_outlives_the_tiers_time_to_live() -> None:
    tier = Tier(4, a=TierContract(floor=4, ttl_s=60.0))
    tier.store("a", "a1 a2", 0.0)
    tier.hint("a1", 86400.0, 30.0)
    assert [victim.page.key for victim in tier.policy.reclaim(59.9, 9)] == []
    assert {str(victim.page.key) for victim in tier.policy.reclaim(60.0, 9)} == {"a1", "a2"}


def test_an_ended_session_goes_before_older_pages_of_its_tenant() -> None:
    tier = Tier(6, a=TierContract(cap=6))
    tier.store("a", "old1 old2 old3", 0.0)
    tier.store("a", "turn1 turn2 turn3", 500.0)
    tier.hint("turn1 turn2 turn3", 0.0, 501.0)
    tier.store("a", "n1 n2 n3", 502.0)
    assert tier.held("a") == ["n1", "n2", "n3", "old1", "old2", "old3"]


def test_an_ended_session_leaves_a_prefix_that_other_conversations_share() -> None:
    tier = Tier(9, a=TierContract(cap=9))
    tier.store("a", "s1 s2", 0.0)
    for now_s, end in ((0.0, "x1"), (1.0, "y1"), (2.0, "z1")):  # three conversations
        for key in ("s1", "s2"):
            tier.policy.touch(tier.pages[key], now_s)
        tier.store("a", end, now_s)
    tier.policy.touch(tier.pages["z1"], 3.0)  # with the next turn of the third one
    for key in ("s1", "s2"):
        tier.policy.touch(tier.pages[key], 3.0)
    tier.store("a", "z2", 3.0)
    tier.hint("s1 s2 z1 z2", 0.0, 4.0)
    tier.store("a", "n1 n2 n3", 5.0)
    assert not tier.gone
    tier.store("a", "n4 n5", 5.0)
    assert [key for _, key, _ in tier.gone] == ["z1", "z2"]


@pytest.mark.parametrize(
    ("reuses", "index"),
    [
        ([], 0),
        ([0, 0, 0], 0),
        ([3, 2, 1, 0], 0),  # a conversation of four turns
        ([7, 7, 1, 0], 2),  # of a prompt that others have, too
        ([4, 3, 3], 3),  # others have all of it
        ([255, 255, 254], 3),  # too many uses to tell
        ([255, 255, 3, 2, 1, 0], 2),
        ([2, 1, 4, 0], 3),  # the first pages came back later than those after them
        ([1], 0),
        ([2], 1),
    ],
)
def test_conversations_part_where_uses_fall_by_more_than_one(reuses: list[int], index: int) -> None:
    assert first_private(reuses) == index


def test_pages_that_expire_are_found_in_the_order_of_their_last_use_and_stay() -> None:
    hinted: HintedPages[int] = HintedPages()
    for page in range(20):
        hinted.end(page)
        assert hinted.link(page, Place(float(20 - page), 0), None)
    assert hinted.used_before(15.0, 4) == [19, 18, 17, 16]
    assert sorted(hinted.used_before(15.0, 100)) == list(range(5, 20))
    hinted.check()
    assert hinted.ended() == (1.0, 19)


def test_only_a_shorter_time_to_live_shortens_hints() -> None:
    hinted: HintedPages[int] = HintedPages(100.0)
    assert hinted.want(1, 1, 1000.0, 10)
    assert hinted.link(1, Place(0.0, 0), 100.0)
    assert hinted.due_s == 100.0
    hinted.shorten(200.0)
    assert hinted.due_s == 100.0
    hinted.shorten(50.0)
    assert hinted.due_s == 50.0
    hinted.shorten(None)
    hinted.shorten(20.0)
    assert hinted.due_s == 20.0
    hinted.check()
