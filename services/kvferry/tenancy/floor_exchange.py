"""Tenants' floors of a cluster, which follow demand without a coordinator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

HALF_LIFE_S: Final = 60.0


class FloorDemand:
    """Uses of the last minute or so, by tenant."""

    def __init__(self, now_s: Callable[[], float], least: float) -> None:
        """Demand below `least` is none."""
        self._now_s = now_s
        self._least = least
        self._counted_s = now_s()
        self._demand: dict[str, float] = {}

    def count(self, num_uses: Mapping[str, float]) -> Mapping[str, float]:
        """Add uses since the last call, and return the demand of these tenants. Others are forgotten."""
        now_s = self._now_s()
        left = 0.5 ** ((now_s - self._counted_s) / HALF_LIFE_S)
        self._counted_s = now_s
        demand = {tenant: self._demand.get(tenant, 0.0) * left + uses for tenant, uses in num_uses.items()}
        self._demand = {tenant: uses for tenant, uses in demand.items() if uses >= self._least}
        return self._demand


# A node has its even share of a floor: the floor's part of its own capacity. It offers some of that to nodes with more
# demand, in reports that all nodes read. Its floor is its even share, less what others may count on, and what others
# offer it. So the floors of a tenant never exceed their total, whatever reports are lost, late or out of order:
# - others may count on every offer since the last report that they say they have seen, and on nothing DROP_S after
#   their last news;
# - a node counts on an offer for LEASE_S from when it began the report that the offering node says it has seen.
LEASE_S: Final = 60.0
DROP_S: Final = 120.0  # later than LEASE_S by far more than a node needs to apply its floors
KEPT: Final = 0.25  # of its even share a node keeps: a tenant that returns begins with it
STEP: Final = 0.25  # of its even share that a node moves at once: each unit that moves is computed again elsewhere

MAX_TENANTS: Final = 64  # whose floors move: those with the largest
MAX_NODES: Final = 256
MAX_RECEIVERS: Final = 8  # of a tenant's offers by one node
MAX_VERSIONS: Final = 32  # of offers that are told apart
MAX_VERSION: Final = 1 << 53  # of a report
MAX_DEMAND: Final = 1e12
MAX_CAPACITY: Final = 1 << 60
_LEAST_DEMAND: Final = 0.5  # uses in a minute


class FloorReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Report of one node to all others. Units are those of `capacity`."""

    node: str  # fresh on every start
    version: int
    capacity: int
    demand: dict[str, float] = {}  # by tenant
    offers: dict[str, dict[str, int]] = {}  # by tenant and node
    seen: dict[str, int] = {}  # versions of other nodes' reports

    def check(self) -> None:
        """Raises ValueError."""
        if not (0 < self.version <= MAX_VERSION and 0 <= self.capacity <= MAX_CAPACITY):
            raise ValueError(f"version {self.version}, capacity {self.capacity}")
        if max(len(self.demand), len(self.offers)) > MAX_TENANTS or len(self.seen) > MAX_NODES:
            raise ValueError("more tenants or nodes than a report has")
        if any(len(by_node) > MAX_RECEIVERS for by_node in self.offers.values()):
            raise ValueError(f"offers of a tenant to more than {MAX_RECEIVERS} nodes")
        if not all(0 <= version <= MAX_VERSION for version in self.seen.values()):
            raise ValueError("a version that was seen and is no number of a report")
        if not all(0 <= rate <= MAX_DEMAND for rate in self.demand.values()):
            raise ValueError("a demand that is no rate")
        if not all(0 <= units <= MAX_CAPACITY for by_node in self.offers.values() for units in by_node.values()):
            raise ValueError("an offer that is no number of units")


Parts = Mapping[str, float]  # floors by tenant, as parts of each node's capacity; their sum is 1 at most


@dataclass(slots=True)
class _Peer:
    report: FloorReport
    seen_s: float
    since: int  # the first own version on which it may count: before it was not known, or it had lost all

    def first_version(self, node: str) -> int:
        """Return the first version of `node` on which this one may count."""
        return max(self.since, self.report.seen.get(node, 0))


class FloorExchange:
    """One node's side. In this order: `see` reports of others, `step`, apply `floors`, and publish what `step` gave."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._version = 0
        self._parts: dict[str, float] = {}
        self._capacity = 0
        self._num_fixed = 0  # units of floors that do not move
        self._offers: dict[str, dict[str, int]] = {}
        self._peers: dict[str, _Peer] = {}
        self._begun_s: dict[int, float] = {}  # of own versions, while they may be a lease
        self._published: list[tuple[int, dict[str, dict[str, int]]]] = []  # by version, the oldest first
        self._held_until_s = -math.inf

    def __repr__(self) -> str:
        return f"<FloorExchange of {self._node}, version {self._version}, {len(self._peers)} others>"

    def hold(self, now_s: float) -> None:
        # Others may count on what this node's last process had offered.
        self._held_until_s = now_s + DROP_S

    def see(self, report: FloorReport, now_s: float) -> None:
        """Take another node's report; one that is not newer than the last is no news."""
        known = self._peers.get(report.node)
        if report.node == self._node or (known is not None and report.version <= known.report.version):
            return
        if known is not None:
            known.report, known.seen_s = report, now_s
        elif len(self._peers) < MAX_NODES:
            self._peers[report.node] = _Peer(report, now_s, self._version + 1)

    def step(self, now_s: float, parts: Parts, capacity: int, demand: Mapping[str, float]) -> FloorReport:
        """Move offers towards the demand, and return the report to publish."""
        self._parts = moving_parts(parts)
        self._capacity = capacity
        self._num_fixed = sum(math.ceil(part * capacity) for tenant, part in parts.items() if tenant not in self._parts)
        for node, peer in list(self._peers.items()):
            if peer.seen_s + DROP_S <= now_s:
                peer.since = self._version + 1
            if peer.seen_s + 2 * DROP_S <= now_s:
                del self._peers[node]
        self._begun_s = {version: s for version, s in self._begun_s.items() if s + LEASE_S > now_s}
        demand = {each: min(rate, MAX_DEMAND) for each in self._parts if (rate := demand.get(each, 0.0)) > 0}
        leased = {node: peer.report for node, peer in self._peers.items() if self._has_lease(peer.report, now_s)}
        wanted = offers_of(
            self._node,
            self._parts,
            {self._node: capacity, **{node: report.capacity for node, report in leased.items()}},
            {self._node: demand, **{node: report.demand for node, report in leased.items()}},
        )
        self._offers = {
            tenant: moved
            for tenant in self._parts
            if now_s >= self._held_until_s and (moved := self._moved(tenant, wanted.get(tenant, {})))
        }
        self._version += 1
        self._begun_s[self._version] = now_s
        self._remember()
        seen = {node: peer.report.version for node, peer in self._peers.items()}
        return FloorReport(
            node=self._node,
            version=self._version,
            capacity=capacity,
            demand=demand,
            offers=self._offers,
            seen=seen,
        )

    def floors(self, now_s: float) -> dict[str, int]:
        """Return this node's floors by tenant, for those whose floors move. They fit into its capacity."""
        kept: dict[str, int] = {}
        taken: dict[str, int] = {}
        for tenant in self._parts:
            committed = sum(self._committed(tenant, node, peer) for node, peer in self._peers.items())
            even = self._even(tenant, self._capacity)
            if now_s < self._held_until_s:
                committed = max(committed, _most(even))
            kept[tenant] = max(0, even - committed)
            taken[tenant] = sum(self._taken(tenant, peer.report, now_s) for peer in self._peers.values())
        room, num_taken = max(0, self._capacity - self._num_fixed - sum(kept.values())), sum(taken.values())
        if num_taken > room:
            taken = {tenant: units * room // num_taken for tenant, units in taken.items()}
        return {tenant: kept[tenant] + taken[tenant] for tenant in self._parts}

    def _even(self, tenant: str, capacity: int) -> int:
        return int(self._parts.get(tenant, 0.0) * capacity)

    def _has_lease(self, report: FloorReport, now_s: float) -> bool:
        begun_s = self._begun_s.get(report.seen.get(self._node, 0))
        return begun_s is not None and now_s < begun_s + LEASE_S

    def _taken(self, tenant: str, report: FloorReport, now_s: float) -> int:
        if not self._has_lease(report, now_s):
            return 0
        offers = report.offers.get(tenant, {})
        # The floor may have been lowered since.
        most, total = _most(self._even(tenant, report.capacity)), sum(offers.values())
        offered = offers.get(self._node, 0)
        return offered if total <= most else offered * most // total

    def _moved(self, tenant: str, wanted: Mapping[str, int]) -> dict[str, int]:
        """Return the next offers of a tenant, on the way to those that are wanted."""
        before, even = self._offers.get(tenant, {}), self._even(tenant, self._capacity)
        ways = {node: wanted.get(node, 0) - before.get(node, 0) for node in before.keys() | wanted.keys()}
        length = sum(map(abs, ways.values()))
        scale = min(1.0, STEP * even / length) if length else 1.0
        moved = {node: before.get(node, 0) + int(way * scale) for node, way in ways.items()}
        # A floor that is withdrawn is offered again once its receiver is known to count on it no more.
        held = {node: self._committed(tenant, node, peer) for node, peer in self._peers.items()}
        room = max(0, _most(even) - sum(held.values()))
        more = sum(max(0, units - held.get(node, 0)) for node, units in moved.items())
        if more > room:
            moved = {
                node: units
                if units <= held.get(node, 0)
                else held.get(node, 0) + (units - held.get(node, 0)) * room // more
                for node, units in moved.items()
            }
        largest = sorted((node for node in moved if moved[node] > 0), key=lambda node: (-moved[node], node))
        return {node: moved[node] for node in largest[:MAX_RECEIVERS]}

    def _committed(self, tenant: str, node: str, peer: _Peer) -> int:
        first = peer.first_version(self._node)
        return max(
            (offers.get(tenant, {}).get(node, 0) for version, offers in self._published if version >= first), default=0
        )

    def _remember(self) -> None:
        self._published.append((self._version, self._offers))
        # Each node has seen one of these versions or a later one.
        first = min((peer.first_version(self._node) for peer in self._peers.values()), default=self._version)
        self._published = [each for each in self._published if each[0] >= first]
        while len(self._published) > MAX_VERSIONS:
            (_, before), (version, after), *rest = self._published
            self._published = [(version, _largest(before, after)), *rest]


def moving_parts(parts: Parts) -> dict[str, float]:
    """Return the floors that move: the largest; the others stay even."""
    return {each: parts[each] for each in sorted(parts, key=lambda each: (-parts[each], each))[:MAX_TENANTS]}


def offers_of(
    node: str, parts: Parts, capacities: Mapping[str, int], demands: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, int]]:
    """Return what `node` is to offer of its even shares, by tenant and receiving node."""
    wishes = desired_floors(parts, capacities, demands)
    offers: dict[str, dict[str, int]] = {}
    for tenant, part in parts.items():
        gains = {each: wishes[each][tenant] - part * capacity for each, capacity in capacities.items()}
        if gains[node] >= 0:
            continue
        receivers = sorted((each for each in gains if gains[each] > 0), key=lambda each: (-gains[each], each))
        receivers = receivers[:MAX_RECEIVERS]
        surplus = -sum(gain for gain in gains.values() if gain < 0)
        wanted = max(surplus, sum(gains[each] for each in receivers))
        units = {each: int(-gains[node] * gains[each] / wanted) for each in receivers}
        offers[tenant] = {each: number for each, number in units.items() if number}
    return offers


def desired_floors(
    parts: Parts, capacities: Mapping[str, int], demands: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return node -> tenant -> floor: the part that each node keeps, and the rest by demand, as far as nodes have room.

    Without demand it is the even split.
    """
    wishes: dict[str, dict[str, float]] = {node: {} for node in capacities}
    cluster = sum(capacities.values())
    for tenant, part in parts.items():
        rates = {node: demands.get(node, {}).get(tenant, 0.0) for node in capacities}
        total = sum(rates.values())
        for node, capacity in capacities.items():
            share = capacity / max(1, cluster) if total < _LEAST_DEMAND else rates[node] / total
            wishes[node][tenant] = KEPT * part * capacity + (1 - KEPT) * part * cluster * share
    for node, by_tenant in wishes.items():
        even = {tenant: parts[tenant] * capacities[node] for tenant in by_tenant}
        gain = sum(max(0.0, wish - even[tenant]) for tenant, wish in by_tenant.items())
        room = capacities[node] - sum(min(wish, even[tenant]) for tenant, wish in by_tenant.items())
        scale = min(1.0, max(0.0, room) / gain) if gain else 1.0
        for tenant, wish in by_tenant.items():
            if wish > even[tenant]:
                by_tenant[tenant] = even[tenant] + scale * (wish - even[tenant])
    return wishes


def _most(even: int) -> int:
    """Return the units of an even share that may be offered."""
    return even - math.ceil(KEPT * even)


def _largest(one: dict[str, dict[str, int]], two: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    merged = {tenant: dict(by_node) for tenant, by_node in one.items()}
    for tenant, by_node in two.items():
        into = merged.setdefault(tenant, {})
        for node, units in by_node.items():
            into[node] = max(into.get(node, 0), units)
    return merged
