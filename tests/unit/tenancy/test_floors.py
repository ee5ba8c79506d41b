"""Floors of a cluster on its nodes: all of each floor, nowhere more than fits, where the demand is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.floors import split_floors

NODES = {"n1": 100, "n2": 100}


def test_without_demand_floors_follow_the_capacities() -> None:
    assert split_floors({"a": 40}, {"n1": 300, "n2": 100}, {}) == {"n1": {"a": 30}, "n2": {"a": 10}}


def test_demand_draws_floors_and_a_part_stays_even() -> None:
    assert split_floors({"a": 50}, NODES, {"n1": {"a": 8.0}}) == {"n1": {"a": 45}, "n2": {"a": 5}}


def test_a_rebalance_goes_part_of_the_way_and_settles() -> None:
    demand = {"n2": {"a": 1.0}}
    split = {"n1": {"a": 50}, "n2": {"a": 0}}
    moved = []
    for _ in range(30):
        following = split_floors({"a": 50}, NODES, demand, split)
        moved.append(abs(following["n2"]["a"] - split["n2"]["a"]))
        split = following
    assert moved[0] == 11
    assert max(moved) == 11
    assert moved[-10:] == [0] * 10
    assert split["n2"]["a"] >= 43  # of 45; whole units stop the last steps


def test_a_node_that_left_gives_its_floors_to_the_others() -> None:
    split = {"n1": {"a": 20}, "gone": {"a": 30}}
    assert split_floors({"a": 50}, {"n1": 100}, {}, split) == {"n1": {"a": 50}}


def test_a_full_node_passes_the_rest_on() -> None:
    demand = {"n1": {"a": 9.0, "b": 9.0}}
    split = split_floors({"a": 80, "b": 80}, NODES, demand)
    assert sum(split["n1"].values()) == 100
    assert split["n1"]["a"] == split["n1"]["b"] == 50
    assert split["n2"] == {"a": 30, "b": 30}


def test_floors_beyond_the_cluster_are_refused_with_names_and_sums() -> None:
    with pytest.raises(ValueError, match="sum to 210, but the capacity is 200: a 150, b 60"):
        split_floors({"a": 150, "b": 60}, NODES, {})


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_demand_that_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="demand of tenant a on node n1"):
        split_floors({"a": 1}, NODES, {"n1": {"a": rate}})


tenants = st.sampled_from("abcd")
nodes = st.sampled_from(["n1", "n2", "n3", "n4", "n5"])


@given(
    st.dictionaries(nodes, st.integers(0, 50), min_size=1),
    st.dictionaries(tenants, st.integers(0, 60)),
    st.dictionaries(nodes, st.dictionaries(tenants, st.floats(0, 1e6))),
    st.none() | st.dictionaries(nodes, st.dictionaries(tenants, st.integers(0, 100))),
)
def test_all_of_each_floor_is_placed_and_no_node_is_overcommitted(
    capacities: dict[str, int],
    floors: dict[str, int],
    demand: dict[str, dict[str, float]],
    previous: dict[str, dict[str, int]] | None,
) -> None:
    if sum(floors.values()) > sum(capacities.values()):
        with pytest.raises(ValueError, match="floors sum to"):
            split_floors(floors, capacities, demand, previous)
        return
    split = split_floors(floors, capacities, demand, previous)
    assert split.keys() == capacities.keys()
    for node, capacity in capacities.items():
        assert all(floor >= 0 for floor in split[node].values())
        assert sum(split[node].values()) <= capacity
    for tenant, floor in floors.items():
        assert sum(split[node].get(tenant, 0) for node in split) == floor
