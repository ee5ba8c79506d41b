"""Contracts and settings of a tier: impossible ones are refused."""

from __future__ import annotations

import pytest

from kvferry.tenancy.terms import TierContract, TierSettings, check_sum_of_floors


def test_the_cap_is_half_of_the_tier_unless_set() -> None:
    assert TierContract().cap_in(101) == 50
    assert TierContract(floor=70).cap_in(100) == 70
    assert TierContract(floor=70, cap=90).cap_in(100) == 90


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"floor": -1}, "floor -1"),
        ({"floor": 10, "cap": 9}, "cap 9 is below the floor of 10"),
        ({"weight": 0.0}, "weight 0.0"),
        ({"weight": float("inf")}, "weight inf"),
        ({"weight": float("nan")}, "weight nan"),
        ({"ttl_s": 0.0}, "ttl_s 0.0"),
        ({"ttl_s": float("nan")}, "ttl_s nan"),
    ],
)
def test_an_impossible_contract_is_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TierContract(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"capacity": 0}, "capacity 0"),
        ({"capacity": 9, "high_water": 0.5, "low_water": 0.6}, "low_water 0.6 and high_water 0.5"),
        ({"capacity": 9, "high_water": 1.1}, "high_water 1.1"),
        ({"capacity": 9, "bonus_s": float("nan")}, "bonus_s nan"),
        ({"capacity": 9, "ghosts_per_page": -1}, "ghosts_per_page -1"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TierSettings(**fields)  # type: ignore[arg-type]


def test_floors_may_fill_the_tier_and_no_more() -> None:
    check_sum_of_floors({"a": 60, "b": 40}, 100)
    with pytest.raises(ValueError, match=r"floors sum to 101, but the capacity is 100: a 60, b 41$"):
        check_sum_of_floors({"b": 41, "a": 60, "none": 0}, 100)
