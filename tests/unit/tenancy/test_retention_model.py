"""Retention beside a model that looks at every page, and in long runs of random operations that are audited."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bench.results import BenchFailed
from bench.retention import AuditedTier, audit
from kvferry.tenancy.pages.outcome import Cause, Refusal
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings

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
    until_s: float | None = None  # wanted until then
    is_used_since: bool = False
    place: tuple[float, int] = (0.0, 0)  # of a wanted page: last use and reuses that count for it

    @property
    def own_place(self) -> tuple[float, int]:
        return self.used_s, min(self.reuses, 4)

    def settle(self, ttl_s: float | None) -> None:
        """Begin to wait after a use."""
        if self.until_s is not None:
            self.until_s = min(self.until_s, self.used_s + (ttl_s or NEVER))
            self.place = self.own_place
            if self.until_s <= self.used_s:
                self.until_s = None


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

    def may_want(self, page: ModelPage) -> bool:
        num_wanted = sum(other.until_s is not None for other in self.of(page.tenant))
        most = max(self.contract(page.tenant).floor, self.limit(page.tenant) // 2)
        return page.until_s is not None or num_wanted < most

    def score(self, page: ModelPage) -> float:
        used_s, reuses = page.own_place if page.until_s is None else page.place
        return used_s + 60 * self.contract(page.tenant).weight * (reuses + 1)

    def free(self, tenant: str) -> list[ModelPage]:
        return [page for page in self.of(tenant) if not page.num_pins]

    def lowest(self, tenant: str) -> float:
        """Return the score at which the tenant loses a page, whichever."""
        return min(map(self.score, self.free(tenant)))

    def goes(self, tenant: str) -> list[ModelPage]:
        """Return the pages of which one goes there: those without a hint first."""
        unwanted = [page for page in self.free(tenant) if page.until_s is None]
        if unwanted:
            lowest = min(map(self.score, unwanted))
            return [page for page in unwanted if self.score(page) == lowest]
        first = min(page.until_s or 0.0 for page in self.free(tenant))
        return [page for page in self.free(tenant) if page.until_s == first]

    def trade(self, victim: ModelPage, policy: Retention) -> None:
        """Give the victim's place to the wanted page that was due instead of it."""
        lowest = self.lowest(victim.tenant)
        due = [page for page in self.free(victim.tenant) if self.score(page) == lowest]
        if self.score(victim) == lowest:
            return
        place = victim.own_place if victim.until_s is None else victim.place
        hinted = policy._tenants[victim.tenant]._hinted
        assert hinted is not None
        moved = [page for page in due if hinted.place_of(page.page) != page.place]
        assert len(moved) == 1, "one wanted page takes another place"
        moved[0].place = place
        assert hinted.place_of(moved[0].page) == place

    def is_expired(self, page: ModelPage, now_s: float) -> bool:
        ttl_s = self.contract(page.tenant).ttl_s
        return ttl_s is not None and not page.num_pins and page.used_s + ttl_s <= now_s

    def advance(self, now_s: float) -> None:
        for page in self.pages:
            if page.until_s is not None and not page.num_pins and page.until_s <= now_s:
                page.until_s, page.is_ended = None, not page.is_used_since

    def for_others(self, now_s: float, demander: str | None) -> tuple[Cause, float] | None:
        """The best of all that may go; `demander` counts one page that is not stored yet."""
        found = []
        for tenant in {page.tenant for page in self.pages}:
            free, contract = self.free(tenant), self.contract(tenant)
            used = len(self.of(tenant)) + (tenant == demander)
            found += [
                (Cause.EXPIRED, page.used_s + (contract.ttl_s or NEVER))
                for page in free
                if page.until_s is None and self.is_expired(page, now_s)
            ]
            if used <= contract.floor or not free:
                continue
            if any(page.is_ended for page in free):
                found.append((Cause.ENDED, min(page.used_s for page in free if page.is_ended)))
            else:
                cause = Cause.OVER_CAP if used > self.limit(tenant) else Cause.BORROWED
                found.append((cause, self.lowest(tenant)))
        return min(found, default=None)

    def own(self, tenant: str, now_s: float) -> tuple[Cause, float] | None:
        """What the tenant's own demand takes."""
        free = self.free(tenant)
        expired = [page.used_s for page in free if page.until_s is None and self.is_expired(page, now_s)]
        ended = [page.used_s for page in free if page.is_ended]
        if expired:
            return Cause.EXPIRED, min(expired)
        if ended:
            return Cause.ENDED, min(ended)
        return (Cause.OWN, self.lowest(tenant)) if free else None

    def store_victim(self, tenant: str, now_s: float) -> tuple[str, object]:
        """Return ("none" | "own" | "others", what goes), or ("refused", why)."""
        used, free = len(self.of(tenant)), CAPACITY - len(self.pages)
        may_grow = free > 0 and self.contract(tenant).borrow
        if used + 1 > self.limit(tenant) and not may_grow:
            own = self.own(tenant, now_s)
            return ("refused", Refusal.LIMIT) if own is None else ("own", own)
        if free:
            return "none", None
        if (best := self.for_others(now_s, tenant)) is not None:
            return "others", best
        own = self.own(tenant, now_s)
        return ("refused", Refusal.NO_ROOM) if own is None else ("own", own)

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
        for page in self.model.pages:
            ttl_s = self.model.contract(page.tenant).ttl_s
            if page.until_s is not None and not page.num_pins and ttl_s is not None:
                page.until_s = min(page.until_s, page.used_s + ttl_s)
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
            assert isinstance(expected, tuple)
            if kind == "own":
                assert gone.tenant == tenant
            self.expect(victim, cause, expected, demander=tenant)
            if cause is not Cause.EXPIRED:
                assert room >= 1
        stored = ModelPage(result.page, tenant, key, self.now_s, 0)
        self.model.pages.append(stored)
        for gone, _ in result.victims:
            self.model.remove(self.of(gone), is_evicted=True)
        # After the victims, whose ghosts may have been one too many.
        ghosts = self.model.ghosts.setdefault(tenant, [])
        stored.reuses = next((ghost[1] + 1 for ghost in ghosts if ghost[0] == key), 0)
        assert result.page.reuses == stored.reuses
        ghosts[:] = [ghost for ghost in ghosts if ghost[0] != key]

    def expect(self, victim: ModelPage, cause: Cause, expected: tuple[Cause, float], demander: str | None) -> None:
        expected_cause, score = expected
        if expected_cause in (Cause.EXPIRED, Cause.ENDED):
            assert cause is expected_cause
            ttl_s = self.model.contract(victim.tenant).ttl_s or 0.0
            assert score in (victim.used_s, victim.used_s + ttl_s)
            return
        assert cause is (Cause.OWN if victim.tenant == demander else expected_cause)
        assert self.model.lowest(victim.tenant) == score
        assert victim in self.model.goes(victim.tenant)
        self.model.trade(victim, self.policy)

    @rule(number=st.integers(0, 99))
    def touch(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            is_hit = not self.model.is_expired(page, self.now_s)
            self.model.advance(self.now_s)
            assert self.policy.touch(page.page, self.now_s) is is_hit
            if is_hit:
                page.used_s, page.reuses, page.is_ended = self.now_s, page.reuses + 1, False
                page.is_used_since = True
                if not page.num_pins:
                    page.settle(self.model.contract(page.tenant).ttl_s)

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
                page.settle(self.model.contract(page.tenant).ttl_s)

    @rule(number=st.integers(0, 99), ttl_s=st.sampled_from([5.0, 45.0, 200.0]))
    def want(self, number: int, ttl_s: float) -> None:
        if (page := self.page(number)) is None:
            return
        ttl_of_tier_s = self.model.contract(page.tenant).ttl_s
        is_wanted = not self.model.is_expired(page, self.now_s) and self.model.may_want(page)
        assert self.policy.want(page.page, ttl_s, self.now_s) is is_wanted
        if is_wanted:
            until_s = self.now_s + ttl_s
            if not page.num_pins:
                until_s = min(until_s, page.used_s + (ttl_of_tier_s or NEVER))
            if page.until_s is None:
                page.place = page.own_place
            page.until_s = max(page.until_s or 0.0, until_s)
            page.is_ended = page.is_used_since = False

    @rule(number=st.integers(0, 99))
    def end(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            self.policy.end(page.page)
            page.is_ended = page.until_s is None

    @rule(number=st.integers(0, 99))
    def discard(self, number: int) -> None:
        if (page := self.page(number)) is not None:
            self.policy.discard(page.page)
            self.model.remove(page, is_evicted=False)

    @rule(max_pages=st.integers(1, 5))
    def reclaim(self, max_pages: int) -> None:
        self.model.advance(self.now_s)
        # Places of wanted pages are compared after each page that goes.
        has_wanted = any(page.until_s is not None for page in self.model.pages)
        for _ in range(max_pages if has_wanted else 1):
            for gone, cause in self.policy.reclaim(self.now_s, 1 if has_wanted else max_pages):
                expected = self.model.for_others(self.now_s, None)
                assert expected is not None
                self.expect(self.of(gone), cause, expected, demander=None)
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
            assert usage.wanted == sum(page.until_s is not None and not page.num_pins for page in pages)
            assert usage.num_ghosts == len(self.model.ghosts.get(tenant, []))
        for page in self.model.pages:
            assert page.page.is_resident
            assert page.page.reuses == page.reuses


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=settings.default.max_examples // 2, stateful_step_count=60)


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
    with pytest.raises(BenchFailed, match=r"seed 1, tier .*, operation "):
        audit(20_000, seed=1)


def test_an_audited_tier_starts_empty() -> None:
    assert AuditedTier(1, 1).policy.used == 0
