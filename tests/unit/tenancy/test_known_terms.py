"""Terms that a tier learns from requests."""

from __future__ import annotations

import pytest

from kvferry.tenancy import terms
from kvferry.tenancy.terms import CPU_TIER, KnownTerms, TierTerms


def test_contracts_are_returned_where_terms_change() -> None:
    known = KnownTerms(CPU_TIER, 100)
    contracts = known.learn("a", TierTerms(floor=0.5, cap=0.75))
    assert contracts is not None
    assert (contracts["a"].floor, contracts["a"].cap) == (50, 75)
    assert known.learn("a", TierTerms(floor=0.5, cap=0.75)) is None
    assert known.learn("b", TierTerms()) == known.contracts()
    contracts = known.learn("a", TierTerms())
    assert contracts is not None
    assert contracts["a"].floor == 0
    assert contracts.keys() == {"a", "b"}


def test_floors_that_follow_demand_take_the_place_of_those_in_terms() -> None:
    known = KnownTerms(CPU_TIER, 100)
    known.learn("a", TierTerms(floor=0.25, cap=0.5))
    known.learn("b", TierTerms())
    contracts = known.move({"a": 0.75, "b": 0.1, "unknown": 0.1})
    assert contracts is not None
    assert (contracts["a"].floor, contracts["a"].cap) == (50, 50), "no more than it may hold"
    assert contracts["b"].floor == 10, "its terms may be older than its floor"
    assert contracts.keys() == {"a", "b"}
    assert known.move({"a": 0.75, "b": 0.1, "unknown": 0.1}) is None
    assert known.learn("a", TierTerms(floor=0.25, cap=0.5)) is None
    contracts = known.move({})
    assert contracts is not None
    assert contracts["a"].floor == 25
    assert known.move({"a": 0.2501}) is None, "the same in units"


def test_floors_that_an_operator_lowers_or_takes_away_do_not_come_back() -> None:
    known = KnownTerms(CPU_TIER, 100)
    known.learn("a", TierTerms(floor=0.8, cap=0.8))
    known.move({"a": 0.2})
    contracts = known.move({"a": 0.0})  # its record has none any more; what its last request said is older
    assert contracts is not None
    assert contracts["a"].floor == 0
    known.move({"a": 0.7})
    contracts = known.learn("a", TierTerms(floor=0.1, cap=0.8))
    assert contracts is not None
    assert contracts["a"].floor == 10, "a part of the floor before"


def test_floors_that_do_not_fit_together_are_scaled() -> None:
    known = KnownTerms(CPU_TIER, 100)
    for name in "ab":
        known.learn(name, TierTerms(floor=0.8, cap=1.0))
    assert [contract.floor for contract in known.contracts().values()] == [50, 50]


def test_tenants_that_were_not_seen_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "MAX_KNOWN", 3)
    known = KnownTerms(CPU_TIER, 100)
    for name in "abcad":
        known.learn(name, TierTerms())
    assert known.contracts().keys() == {"a", "c", "d"}
