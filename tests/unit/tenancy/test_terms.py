"""Terms of contracts: what is refused, and what they come to in a tier."""

from __future__ import annotations

import pytest

from kvferry.observability.telemetry import EVICTION_CAUSES, EVICTION_REFUSALS
from kvferry.tenancy.pages.outcome import Cause, Refusal
from kvferry.tenancy.records import TenantRecord, decode, encode
from kvferry.tenancy.terms import (
    CLASSES,
    CPU_TIER,
    DEVICE_TIER,
    MAX_FLOORS,
    TIERS,
    VOLUME_TIER,
    TierTerms,
    check_floors,
    contracts_in,
    describe,
)

NAN = float("nan")


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (TierTerms(floor=-0.1), "floor -0.1"),
        (TierTerms(floor=1.1), "floor 1.1"),
        (TierTerms(floor=NAN), "floor nan"),
        (TierTerms(cap=0.0), "cap 0.0"),
        (TierTerms(cap=NAN), "cap nan"),
        (TierTerms(floor=0.6, cap=0.5), "below the floor"),
        (TierTerms(ttl_s=0.5), "ttl 0.5 s"),
        (TierTerms(ttl_s=NAN), "ttl nan"),
        (TierTerms(ttl_s=1e12), "ttl"),
    ],
)
def test_terms_that_make_no_sense_are_refused(terms: TierTerms, said: str) -> None:
    with pytest.raises(ValueError, match=f"the volume tier: .*{said}"):
        TenantRecord(name="a", own_tiers={VOLUME_TIER: terms}).check()


def test_a_tier_that_keeps_no_contracts_is_refused() -> None:
    with pytest.raises(ValueError, match="the cpu tier: ttl"):
        TenantRecord(name="a", own_tiers={CPU_TIER: TierTerms(ttl_s=60.0)}).check()
    with pytest.raises(ValueError, match="the cpu tier: borrow"):
        TenantRecord(name="a", own_tiers={CPU_TIER: TierTerms(borrow=False)}).check()
    with pytest.raises(ValueError, match="tier 'tape': one of volume"):
        TenantRecord(name="a", own_tiers={"tape": TierTerms()}).check()
    with pytest.raises(ValueError, match="Expected"):
        decode("a", b'{"name": "a", "own_tiers": {"volume": {"floor": "all"}}}')


def test_a_record_keeps_its_terms() -> None:
    record = TenantRecord(name="a", own_tiers={VOLUME_TIER: TierTerms(floor=0.25, cap=0.5, borrow=False, ttl_s=60.0)})
    assert decode("a", encode(record)) == record
    assert record.tiers[VOLUME_TIER].floor == 0.25
    assert TenantRecord(name="a", class_name="basic").tiers == CLASSES["basic"].tiers
    assert all(set(each.tiers) == set(TIERS) for each in CLASSES.values())
    for tenant_class in CLASSES:
        TenantRecord(name="a", class_name=tenant_class, own_tiers=dict(CLASSES[tenant_class].tiers)).check()


def test_parts_become_units_of_a_tier() -> None:
    terms = {"a": {VOLUME_TIER: TierTerms(floor=0.25, cap=0.5, ttl_s=60.0)}, "b": {VOLUME_TIER: TierTerms()}}
    contracts = contracts_in(VOLUME_TIER, terms, 1000)
    assert (contracts["a"].floor, contracts["a"].cap, contracts["a"].ttl_s) == (250, 500, 60.0)
    assert (contracts["b"].floor, contracts["b"].cap, contracts["b"].ttl_s) == (0, 500, None)
    assert contracts_in(VOLUME_TIER, terms, 0)["a"].floor == 0


def test_floors_of_two_administrators_at_once_are_scaled_to_what_there_is() -> None:
    terms = {name: {VOLUME_TIER: TierTerms(floor=0.8, cap=0.9)} for name in "ab"}
    with pytest.raises(ValueError, match=r"floors in the volume tier sum to 160\.0%; 100% is the limit: a 80%, b 80%"):
        check_floors(terms)
    contracts = contracts_in(VOLUME_TIER, terms, 1001)
    assert [contract.floor for contract in contracts.values()] == [500, 500]


def test_an_error_of_many_floors_names_a_few() -> None:
    terms = {f"t{number}": {VOLUME_TIER: TierTerms(floor=0.01)} for number in range(10_000)}
    with pytest.raises(ValueError, match="sum to 10000") as caught:
        check_floors(terms)
    assert len(str(caught.value)) < 200


def test_parts_that_sum_to_one_are_accepted() -> None:
    for tier in TIERS:
        rest = dict.fromkeys(TIERS, TierTerms())
        check_floors({f"t{number}": {**rest, tier: TierTerms(floor=MAX_FLOORS[tier] / 10)} for number in range(10)})


def test_metrics_name_all_causes() -> None:
    assert tuple(cause.name.lower() for cause in Cause) == EVICTION_CAUSES
    assert tuple(refusal.name.lower() for refusal in Refusal) == EVICTION_REFUSALS


def test_half_of_a_devices_memory_is_left_to_requests_that_run() -> None:
    terms = {name: {tier: TierTerms(floor=0.3) for tier in TIERS} for name in "ab"}
    without = dict.fromkeys(TIERS, TierTerms())
    with pytest.raises(ValueError, match=r"floors in the device tier sum to 60\.0%; 50% is the limit: a 30%, b 30%$"):
        check_floors({**terms, "none": without})
    contracts = contracts_in(DEVICE_TIER, terms, 1000)
    assert sum(contract.floor for contract in contracts.values()) == 500
    assert contracts_in(CPU_TIER, terms, 1000)["a"].floor == 300


def test_a_time_to_live_is_written_in_whole_seconds() -> None:
    assert describe(TierTerms(ttl_s=30 * 86400.0)).endswith("ttl 2592000 s")
