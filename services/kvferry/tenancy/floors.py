"""Tenants' floors of a cluster, split over its nodes by demand."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.tenancy.contract import check_floors

# Part of a floor that follows the nodes' capacities: demand may turn to any node.
_EVEN = 0.2
# Part of the way to the new demand that one rebalance goes: each unit that moves is computed again elsewhere.
_STEP = 0.25

TenantToFloor = dict[str, int]


def split_floors(
    tenant_to_floor: Mapping[str, int],
    node_to_capacity: Mapping[str, int],
    node_to_demand: Mapping[str, Mapping[str, float]],
    previous: Mapping[str, Mapping[str, int]] | None = None,
) -> dict[str, TenantToFloor]:
    """Return node -> tenant -> floor, in part the `previous` split; sums over nodes are the cluster's floors.

    Demand is in lookups per second. Raises ValueError for floors beyond all capacity or a demand that is no rate.
    """
    check_floors(tenant_to_floor, sum(node_to_capacity.values()))
    nodes = sorted(node for node, capacity in node_to_capacity.items() if capacity > 0)
    tenants = sorted(tenant_to_floor, key=lambda tenant: (-tenant_to_floor[tenant], tenant))
    split: dict[str, TenantToFloor] = {node: {} for node in sorted(node_to_capacity)}
    room = {node: node_to_capacity[node] for node in nodes}
    wishes: dict[str, dict[str, int]] = {}
    for tenant in tenants:
        shares = _shares(tenant, nodes, node_to_capacity, node_to_demand)
        before = {node: (previous or {}).get(node, {}).get(tenant, 0) for node in nodes}
        if total := sum(before.values()):
            shares = {node: before[node] / total + _STEP * (shares[node] - before[node] / total) for node in nodes}
        wishes[tenant] = _round(tenant_to_floor[tenant], shares)
    for node in nodes:
        wished = sum(wishes[tenant][node] for tenant in tenants)
        for tenant in tenants:
            # A full node gives each tenant the same part of its wish.
            floor = min(wishes[tenant][node], wishes[tenant][node] * node_to_capacity[node] // max(1, wished))
            split[node][tenant] = floor
            room[node] -= floor
    for tenant in tenants:
        missing = tenant_to_floor[tenant] - sum(split[node][tenant] for node in nodes)
        for node in sorted(nodes, key=lambda node: (-wishes[tenant][node], -room[node], node)):
            added = min(missing, room[node])
            split[node][tenant] += added
            room[node] -= added
            missing -= added
        assert not missing, "floors within the capacity find no room"
    return split


def _shares(
    tenant: str,
    nodes: list[str],
    node_to_capacity: Mapping[str, int],
    node_to_demand: Mapping[str, Mapping[str, float]],
) -> dict[str, float]:
    demand = {node: node_to_demand.get(node, {}).get(tenant, 0.0) for node in nodes}
    for node, rate in demand.items():
        if not 0 <= rate < float("inf"):
            raise ValueError(f"demand of tenant {tenant} on node {node} is {rate}")
    total, capacity = sum(demand.values()), sum(node_to_capacity[node] for node in nodes)
    even = _EVEN if total else 1.0
    return {
        node: even * node_to_capacity[node] / capacity + (1 - even) * (demand[node] / total if total else 0.0)
        for node in nodes
    }


def _round(floor: int, shares: Mapping[str, float]) -> dict[str, int]:
    """By the largest remainders."""
    exact = {node: floor * share for node, share in shares.items()}
    units = {node: int(value) for node, value in exact.items()}
    ranked = sorted(exact, key=lambda node: (units[node] - exact[node], node))
    for node in ranked[: max(0, floor - sum(units.values()))]:
        units[node] += 1
    return units
