"""Terms of all tenants, and contracts of those that a tier has seen."""

from __future__ import annotations

import pytest

from kvferry.tenancy import terms
from kvferry.tenancy.terms import CPU_TIER, KnownTerms, TierTerms


def test_tenants_that_are_seen_have_contracts() -> None:
    known = KnownTerms(CPU_TIER, 100)
    assert known.change({"a": TierTerms(floor=0.5, cap=0.75), "b": TierTerms()}) is None
    contracts = known.see("a")
    assert contracts is not None
    assert contracts.keys() == {"a"}
    assert (contracts["a"].floor, contracts["a"].cap) == (50, 75)
    assert known.see("a") is None
    contracts = known.see("b")
    assert contracts is not None
    assert contracts.keys() == {"a", "b"}


def test_contracts_are_returned_where_terms_of_tenants_that_were_seen_change() -> None:
    known = KnownTerms(CPU_TIER, 100)
    known.change({"a": TierTerms(floor=0.5, cap=0.75)})
    known.see("a")
    assert known.change({"b": TierTerms(floor=0.1)}) is None
    assert known.change({"a": TierTerms(floor=0.5001, cap=0.75)}) is None, "the same in units"
    contracts = known.change({"a": TierTerms(floor=0.25)})
    assert contracts is not None
    assert contracts["a"].floor == 25
    assert known.change({"a": None}) == {}


def test_a_tenant_that_is_seen_before_its_terms_are_known_has_them_as_soon_as_they_are() -> None:
    known = KnownTerms(CPU_TIER, 100)
    known.change({"b": TierTerms(floor=0.5)})
    known.see("b")
    assert known.see("a") is None, "it has the default contract, and b keeps its own"
    contracts = known.change({"a": TierTerms(floor=0.25)})
    assert contracts is not None
    assert {tenant: contract.floor for tenant, contract in contracts.items()} == {"a": 25, "b": 50}


def test_floors_that_do_not_fit_together_are_scaled() -> None:
    known = KnownTerms(CPU_TIER, 100)
    known.change({name: TierTerms(floor=0.8, cap=1.0) for name in "ab"})
    known.see("a")
    contracts = known.see("b")
    assert contracts is not None
    assert [contract.floor for contract in contracts.values()] == [50, 50]


def test_tenants_that_were_not_seen_for_longest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "MAX_KNOWN", 3)
    known = KnownTerms(CPU_TIER, 100)
    known.change({name: TierTerms() for name in "abcd"})
    *_, contracts = [known.see(name) for name in "abcad"]
    assert contracts is not None
    assert contracts.keys() == {"a", "c", "d"}
    contracts = known.see("without terms")
    assert contracts is not None
    assert contracts.keys() == {"a", "d"}


def test_a_tenant_with_a_floor_is_not_forgotten_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "MAX_KNOWN", 3)
    known = KnownTerms(CPU_TIER, 100)
    known.change({"a": TierTerms(floor=0.5), "b": TierTerms()})
    *_, contracts, _ = [known.see(name) for name in "abcde"]
    assert contracts is not None, "b was forgotten for d"
    assert {tenant: contract.floor for tenant, contract in contracts.items()} == {"a": 50}
    known.change({name: TierTerms(floor=0.1) for name in "de"})
    assert known.see("f") is None, "where all have floors, the new one is forgotten"
    contracts = known.change({"a": TierTerms(floor=0.2)})
    assert contracts is not None
    assert {tenant: contract.floor for tenant, contract in contracts.items()} == {"a": 20, "d": 10, "e": 10}
