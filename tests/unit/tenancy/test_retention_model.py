"""Retention beside a model that looks at every page, and in long runs of random operations that are audited."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.retention import AuditedTier, audit
from kvferry.tenancy.contract import TierContract, TierSettings
from kvferry.tenancy.outcome import Cause, Refusal
from kvferry.tenancy.page import Page
from kvferry.tenancy.retention import Retention

NUM_OPERATIONS = int(os.environ.get("KVFERRY_RETENTION_OPERATIONS", "100000"))
CAPACITY = 8
TENANTS = ("a", "b", "c")
NEVER = float("inf")


@dataclass
class ModelPage:
    page: Page
    tenant: str
    key: int
    used_s: float
    reuses: int
    num_pins: int = 0
    is_ended: bool = False
    wanted_s: float | None = None


@dataclass
class Model:
    """The rules in words of lists: each choice sorts all pages."""

    contracts: dict[str, TierContract] = field(default_factory=dict)
    pages: list[ModelPage] = field(default_factory=list)
    ghosts: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # key, reuses; the oldest first

    def contract(self, tenant: str) -> TierContract:
        return self.contracts.get(tenant, TierContract())

    def limit(self, tenant: str) -> int:
        contract = self.contract(tenant)
        return contract.cap_in(CAPACITY) if contract.borrow else contract.floor

    def of(self, tenant: str) -> list[ModelPage]:
        return [page for page in self.pages if page.tenant == tenant]

    def until_s(self, page: ModelPage) -> float:
        if page.wanted_s is None:
            return -NEVER
        return page.used_s + min(page.wanted_s, self.contract(page.tenant).ttl_s or NEVER)

    def wanted(self, page: ModelPage) -> int:
        """Count the wanted pages of the page's tenant, this one left out."""
        others = (other for other in self.of(page.tenant) if other is not page)
        return sum(other.wanted_s is not None and not other.num_pins for other in others)

    def score(self, page: ModelPage) -> float:
        return page.used_s + 60 * self.contract(page.tenant).weight * (page.reuses + 1)

    def is_expired(self, page: ModelPage, now_s: float) -> bool:
        ttl_s = self.contract(page.tenant).ttl_s
        return ttl_s is not None and not page.num_pins and page.used_s + ttl_s <= now_s

    def advance(self, now_s: float) -> None:
        for page in self.pages:
            if page.wanted_s is not None and not page.num_pins and self.until_s(page) <= now_s:
                page.wanted_s, page.is_ended = None, True

    def for_others(self, now_s: float, demander: str | None) -> tuple[Cause, float] | None:
        """The best of all that may go; `demander` counts one page that is not stored yet."""
        found = []
        for page in self.pages:
            used = len(self.of(page.tenant)) + (page.tenant == demander)
            if page.num_pins or (page.wanted_s is not None and not self.is_unprotected(page)):
                continue
            if self.is_expired(page, now_s) and page.wanted_s is None:
                ttl_s = self.contract(page.tenant).ttl_s
                assert ttl_s is not None
                found.append((Cause.EXPIRED, page.used_s + ttl_s))
            elif used > self.contract(page.tenant).floor:
                if page.is_ended:
                    found.append((Cause.ENDED, page.used_s))
                elif used > self.limit(page.tenant):
                    found.append((Cause.OVER_CAP, self.score(page)))
                else:
                    found.append((Cause.BORROWED, self.score(page)))
        return min(found, default=None)

    def is_unprotected(self, page: ModelPage) -> bool:
        """Whether others may evict the wanted page: it is the first of too many, and all that is left."""
        free = [other for other in self.of(page.tenant) if not other.num_pins]
        is_first = self.until_s(page) == min(
            self.until_s(other) for other in free
        )  # minus infinity for others than wanted ones
        return is_first and len(free) > self.contract(page.tenant).floor

    def rank(self, page: ModelPage, now_s: float) -> tuple[int, float]:
        """The order in which a tenant's own demand takes its pages."""
        if self.is_expired(page, now_s) and page.wanted_s is None:
            return 0, page.used_s
        if page.is_ended:
            return 1, page.used_s
        if page.wanted_s is None:
            return 2, self.score(page)
        return 3, self.until_s(page)

    def store_victim(self, tenant: str, now_s: float) -> tuple[str, object]:
        """Return ("none" | "own" | "others", what goes), or ("refused", why)."""
        used, free = len(self.of(tenant)), CAPACITY - len(self.pages)
        may_grow = free > 0 and self.contract(tenant).borrow
        if used + 1 > self.limit(tenant) and not may_grow:
            ranks = [self.rank(page, now_s) for page in self.of(tenant) if not page.num_pins]
            return ("own", min(ranks)) if ranks else ("refused", Refusal.LIMIT)
        if free:
            return "none", None
        if (best := self.for_others(now_s, tenant)) is not None:
            return "others", best
        ranks = [self.rank(page, now_s) for page in self.of(tenant) if not page.num_pins]
        return ("own", min(ranks)) if ranks else ("refused", Refusal.NO_ROOM)

    def remove(self, page: ModelPage, *, is_evicted: bool) -> None:
        self.pages.remove(page)
        ghosts = self.ghosts.setdefault(page.tenant, [])
        if is_evicted:
            ghosts[:] = [ghost for ghost in ghosts if ghost[0] != page.key] + [(page.key, page.reuses)]
        del ghosts[: max(0, len(ghosts) - 8 * len(self.of(page.tenant)))]


class RetentionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.policy = Retention(TierSettings(CAPACITY, high_water=0.9, low_water=0.5))
        self.model = Model()
        self.now_s = 0.0

    def page(self, number: int) -> ModelPage | None:
        return self.model.pages[number % len(self.model.pages)] if self.model.pages else None

    def forget_wish_beyond_floor(self, page: ModelPage) -> None:
        if self.model.wanted(page) >= self.model.contract(page.tenant).floor:
            page.wanted_s = None

    def of(self, page: Page) -> ModelPage:
        return next(known for known in self.model.pages if known.page is page)

    @rule(pause_s=st.sampled_from([0.0, 0.37, 1.013, 29.71, 61.17]))
    def pass_time(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.policy.reclaim(self.now_s, 0)
        self.model.advance(self.now_s)

    @rule(
        contracts=st.dictionaries(
            st.sampled_from(TENANTS),
            st.builds(
                lambda floor, more, weight, borrow, ttl_s: TierContract(
                    floor, None if more is None else floor + more, weight, borrow, ttl_s
                ),
                st.integers(0, 4),
                st.none() | st.integers(0, 6),
                st.sampled_from([0.5, 1.0, 3.0]),
                st.booleans() | st.just(True),
                st.none() | st.sampled_from([20.0, 90.0]),
            ),
        )
    )
    def configure(self, contracts: dict[str, TierContract]) -> None:
        if sum(contract.floor for contract in contracts.values()) > CAPACITY:
            with pytest.raises(ValueError, match="floors sum to"):
                self.policy.configure(contracts)
            return
        self.policy.configure(contracts)
        self.model.contracts = contracts
        self.policy.reclaim(self.now_s, 0)
        self.model.advance(self.now_s)
        for tenant in TENANTS:
            if not self.model.of(tenant):
                self.model.ghosts.pop(tenant, None)

    @rule(tenant=st.sampled_from(TENANTS), key=st.integers(0, 60))
    def store(self, tenant: str, key: int) -> None:
        if any(page.key == key for page in self.model.of(tenant)):
            return
        self.policy.reclaim(self.now_s, 0)
        self.model.advance(self.now_s)
        kind, expected = self.model.store_victim(tenant, self.now_s)
        room = self.policy.room(tenant)
        result = self.policy.store(tenant, key, 1, self.now_s)
        if isinstance(result, Refusal):
            assert (kind, expected) == ("refused", result)
            assert room == 0
            return
        assert kind != "refused"
        if kind == "none":
            assert not result.victims
        else:
            ((gone, cause),) = result.victims
            victim = self.of(gone)
            if kind == "own":
                assert gone.tenant == tenant
                assert self.model.rank(victim, self.now_s) == expected
            else:
                assert isinstance(expected, tuple)
                best_cause, best_score = expected
                if best_cause in (Cause.OVER_CAP, Cause.BORROWED):
                    assert self.model.score(victim) == best_score
                    assert cause is (Cause.OWN if gone.tenant == tenant else best_cause)
                else:
                    assert cause is best_cause
            if cause is not Cause.EXPIRED:
                assert room >= 1
        ghosts = self.model.ghosts.setdefault(tenant, [])
        reuses = next((min(ghost[1] + 1, 4) for ghost in ghosts if ghost[0] == key), 0)
        assert result.page.reuses == reuses
        ghosts[:] = [ghost for ghost in ghosts if ghost[0] != key]
        self.model.pages.append(ModelPage(result.page, tenant, key, self.now_s, reuses))
        for gone, _ in result.victims:
            self.model.remove(self.of(gone), is_evicted=True)

    @rule(number=st.integers(0, 99))
    def touch(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            is_hit = not self.model.is_expired(page, self.now_s)
            self.model.advance(self.now_s)
            assert self.policy.touch(page.page, self.now_s) is is_hit
            if is_hit:
                page.used_s, page.reuses, page.is_ended = self.now_s, min(page.reuses + 1, 4), False
                if not page.num_pins:
                    self.forget_wish_beyond_floor(page)

    @rule(number=st.integers(0, 99))
    def pin(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            is_hit = not self.model.is_expired(page, self.now_s)
            assert self.policy.pin(page.page, self.now_s) is is_hit
            page.num_pins += is_hit

    @rule(number=st.integers(0, 99))
    def unpin(self, number: int) -> None:
        if (page := self.page(number)) is not None and page.num_pins:
            self.policy.unpin(page.page, self.now_s)
            page.num_pins -= 1
            if not page.num_pins:
                page.used_s = self.now_s
                self.forget_wish_beyond_floor(page)

    @rule(number=st.integers(0, 99), ttl_s=st.sampled_from([5.0, 45.0, 200.0]))
    def want(self, number: int, ttl_s: float) -> None:
        if (page := self.page(number)) is None:
            return
        contract = self.model.contract(page.tenant)
        is_wanted = not self.model.is_expired(page, self.now_s) and self.model.wanted(page) < contract.floor
        assert self.policy.want(page.page, ttl_s, self.now_s) is is_wanted
        if is_wanted:
            page.used_s, page.is_ended = self.now_s, False
            page.wanted_s = ttl_s

    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            self.policy.end(page.page)
            page.wanted_s, page.is_ended = None, True

    @rule(number=st.integers(0, 99))
    def discard(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            self.policy.discard(page.page)
            self.model.remove(page, is_evicted=False)

    @rule(max_pages=st.integers(1, 5))
    def reclaim(self, max_pages: int) -> None:
        self.model.advance(self.now_s)
        for gone, cause in self.policy.reclaim(self.now_s, max_pages):
            expected = self.model.for_others(self.now_s, None)
            assert expected is not None
            assert cause is expected[0]
            if cause in (Cause.OVER_CAP, Cause.BORROWED):
                assert self.model.score(self.of(gone)) == expected[1]
            self.model.remove(self.of(gone), is_evicted=True)

    @invariant()
    def counts_agree(self) -> None:
        self.policy.check()
        assert self.policy.used == len(self.model.pages) <= CAPACITY
        for tenant in TENANTS:
            usage = self.policy.usage_of(tenant)
            pages = self.model.of(tenant)
            assert usage.used == len(pages)
            assert usage.pinned == sum(page.num_pins > 0 for page in pages)
            assert usage.wanted == sum(page.wanted_s is not None and not page.num_pins for page in pages)
            assert usage.num_ghosts == len(self.model.ghosts.get(tenant, []))
        for page in self.model.pages:
            assert page.page.is_resident
            assert page.page.reuses == page.reuses


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_operations_keep_every_contract(seed: int) -> None:
    counts = audit(NUM_OPERATIONS // 2, seed)
    assert all(counts[f"evicted {cause.name}"] for cause in Cause)
    assert all(counts[f"refused {refusal.name}"] for refusal in Refusal)


def test_the_audit_finds_a_page_that_a_floor_protects(monkeypatch: pytest.MonkeyPatch) -> None:
    def seize(self: Retention, name: str, key: int, size: int, now_s: float) -> object:
        contracts = self._contracts
        self.configure({})
        try:
            return store(self, name, key, size, now_s)
        finally:
            self.configure(contracts)

    store = Retention.store
    monkeypatch.setattr(Retention, "store", seize)
    with pytest.raises(AssertionError):
        audit(20_000, seed=1)


def test_an_audited_tier_starts_empty() -> None:
    assert AuditedTier(1, 1).policy.used == 0
