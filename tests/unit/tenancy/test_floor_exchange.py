"""Floors of a cluster that follow demand: never more than their total or a node's capacity, and where the demand is."""

from __future__ import annotations

import random
from collections.abc import Mapping

import msgspec
import pytest

from kvferry.tenancy import floor_exchange
from kvferry.tenancy.floor_exchange import KEPT, MAX_RECEIVERS, MAX_TENANTS, FloorExchange, FloorReport, desired_floors

PERIOD_S = 10.0


class Cluster:
    """Nodes that report every PERIOD_S, whose reports a test may delay or lose."""

    def __init__(self, capacities: Mapping[str, int], parts: dict[str, float]) -> None:
        self.capacities = dict(capacities)
        self.parts = parts
        self.now_s = 1000.0
        self.exchanges = {node: FloorExchange(node) for node in capacities}
        self.demand: dict[str, dict[str, float]] = {}
        self.records: dict[str, bytes] = {}
        self.applied: dict[str, dict[str, int]] = {
            node: {tenant: int(part * capacity) for tenant, part in parts.items()}
            for node, capacity in capacities.items()
        }

    def tick(self, node: str, seen: Mapping[str, bytes] | None = None, *, publishes: bool = True) -> bytes:
        exchange = self.exchanges[node]
        for payload in (self.records if seen is None else seen).values():
            report = msgspec.json.decode(payload, type=FloorReport)
            report.check()
            exchange.see(report, self.now_s)
        report = exchange.step(self.now_s, self.parts, self.capacities[node], self.demand.get(node, {}))
        self.applied[node] |= exchange.floors(self.now_s)
        payload = msgspec.json.encode(report)
        if publishes:
            self.records[node] = payload
        return payload

    def interval(self) -> None:
        self.now_s += PERIOD_S
        for node in list(self.exchanges):
            self.tick(node)
            self.check()

    def total(self, tenant: str, nodes: Mapping[str, int] | None = None) -> int:
        return sum(int(self.parts[tenant] * capacity) for capacity in (nodes or self.capacities).values())

    def check(self) -> None:
        for tenant in self.parts:
            held = sum(floors[tenant] for floors in self.applied.values())
            assert held <= self.total(tenant), f"{tenant} holds {held} of {self.total(tenant)}"
        for node, floors in self.applied.items():
            assert sum(floors.values()) <= self.capacities[node], f"{node} gives away more than it has"
            assert all(
                floor >= int(int(self.parts[each] * self.capacities[node]) * KEPT) for each, floor in floors.items()
            )


FOUR = dict.fromkeys(("n1", "n2", "n3", "n4"), 1000)


def moving_part(cluster: Cluster, tenant: str, node: str) -> float:
    """How much of what may move is on a node, beside the part that it keeps."""
    even = cluster.parts[tenant] * cluster.capacities[node]
    return (cluster.applied[node][tenant] - KEPT * even) / ((1 - KEPT) * cluster.total(tenant))


def test_without_demand_floors_are_even() -> None:
    cluster = Cluster({"n1": 3000, "n2": 1000}, {"a": 0.2})
    for _ in range(10):
        cluster.interval()
    assert cluster.applied == {"n1": {"a": 600}, "n2": {"a": 200}}


def test_a_floor_goes_where_the_demand_is_and_returns_with_it() -> None:
    cluster = Cluster(FOUR, {"a": 0.2, "b": 0.2})
    cluster.demand = {"n1": {"a": 50.0}}
    for _ in range(8):
        cluster.interval()
    assert moving_part(cluster, "a", "n1") >= 0.8
    assert cluster.applied["n2"]["a"] == 200 * KEPT
    assert all(floors["b"] == 200 for floors in cluster.applied.values()), "of a tenant without demand it stays"
    cluster.demand = {"n3": {"a": 5.0}}
    for _ in range(10):
        cluster.interval()
    assert moving_part(cluster, "a", "n3") >= 0.8
    cluster.demand = {}
    for _ in range(10):
        cluster.interval()
    assert all(floors["a"] == 200 for floors in cluster.applied.values())


def test_a_floor_moves_in_steps() -> None:
    cluster = Cluster(FOUR, {"a": 0.4})
    cluster.demand = {"n1": {"a": 50.0}}
    before = {node: floors["a"] for node, floors in cluster.applied.items()}
    for _ in range(12):
        cluster.interval()
        for node in ("n2", "n3", "n4"):
            assert before[node] - cluster.applied[node]["a"] <= 100
        before = {node: floors["a"] for node, floors in cluster.applied.items()}


def test_a_full_node_gives_each_tenant_room_as_it_has() -> None:
    cluster = Cluster({"n1": 1000, "n2": 1000}, {"a": 0.5, "b": 0.5})
    cluster.demand = {"n1": {"a": 9.0}, "n2": {"b": 9.0}}
    for _ in range(12):
        cluster.interval()
    assert cluster.applied["n1"] == {"a": 875, "b": 125}, "where they part, each has its own"
    cluster.demand = {"n1": {"a": 9.0, "b": 9.0}}
    for _ in range(20):
        cluster.interval()
    assert cluster.applied["n1"] == pytest.approx({"a": 500, "b": 500}, abs=5)
    assert sum(cluster.applied["n2"].values()) >= 900, "and what has no room there stays"


def test_a_node_that_is_cut_off_goes_back_to_its_even_part_and_the_others_after_it() -> None:
    cluster = Cluster(FOUR, {"a": 0.2})
    cluster.demand = {"n1": {"a": 50.0}}
    for _ in range(8):
        cluster.interval()
    others = {node: exchange for node, exchange in cluster.exchanges.items() if node != "n1"}
    last = dict(cluster.records)
    for _ in range(int(floor_exchange.DROP_S / PERIOD_S) + 2):
        cluster.now_s += PERIOD_S
        cluster.tick("n1", last, publishes=False)
        cluster.check()
        for node in others:
            cluster.tick(node)
            cluster.check()
        if cluster.now_s < 1080 + floor_exchange.LEASE_S:
            assert cluster.applied["n2"]["a"] < 200, "n1 may still count on it"
    assert all(floors["a"] == 200 for floors in cluster.applied.values())


def test_a_node_that_starts_anew_begins_with_its_even_part() -> None:
    cluster = Cluster(FOUR, {"a": 0.2})
    cluster.demand = {"n1": {"a": 50.0}}
    for _ in range(8):
        cluster.interval()
    cluster.exchanges["n1+"] = FloorExchange("n1+")
    cluster.capacities["n1+"], cluster.demand["n1+"] = cluster.capacities.pop("n1"), {"a": 50.0}
    cluster.applied["n1+"] = {"a": 200}
    del cluster.exchanges["n1"], cluster.applied["n1"]
    for _ in range(30):
        cluster.interval()
    assert moving_part(cluster, "a", "n1+") >= 0.8


def test_a_node_that_starts_anew_does_not_use_what_it_had_offered() -> None:
    cluster = Cluster(FOUR, {"a": 0.2})
    cluster.demand = {"n1": {"a": 50.0}}
    for _ in range(8):
        cluster.interval()
    assert cluster.applied["n2"]["a"] < 100, "its floor has moved to n1"
    cluster.exchanges["n2+"] = FloorExchange("n2+")
    cluster.exchanges["n2+"].hold(cluster.now_s)
    cluster.capacities["n2+"] = cluster.capacities.pop("n2")
    cluster.applied["n2+"] = cluster.applied.pop("n2")
    del cluster.exchanges["n2"]
    cluster.demand = {}
    held = []
    for _ in range(30):
        cluster.interval()  # no sum of floors is above the total
        held.append(cluster.applied["n2+"]["a"])
    assert held[0] == KEPT * 200
    assert held[-1] == 200


def test_records_of_dead_nodes_draw_nothing() -> None:
    cluster = Cluster({"n1": 1000, "n2": 1000}, {"a": 0.2})
    dead = FloorReport(node="dead", version=77, capacity=10**6, demand={"a": 1e6}, seen={"n0": 3})
    cluster.records["dead"] = msgspec.json.encode(dead)
    for _ in range(20):
        cluster.interval()
        assert all(floors["a"] == 200 for floors in cluster.applied.values())


def test_reports_are_bounded() -> None:
    parts = {f"t{number:03}": 0.001 + number * 1e-6 for number in range(MAX_TENANTS + 20)}
    cluster = Cluster({f"n{number:02}": 10**12 for number in range(20)}, parts)
    cluster.demand = {f"n{number:02}": dict.fromkeys(parts, 9.0) for number in range(12)}
    for _ in range(6):
        cluster.interval()
    largest = max(cluster.records.values(), key=len)
    report = msgspec.json.decode(largest, type=FloorReport)
    assert report.offers
    assert len(report.offers) <= MAX_TENANTS
    assert max(len(by_node) for by_node in report.offers.values()) == MAX_RECEIVERS
    assert len(largest) < 32 << 10
    assert "t000" not in cluster.exchanges["n00"].floors(cluster.now_s), "the smallest floors do not move"
    assert "t083" in cluster.exchanges["n00"].floors(cluster.now_s)


@pytest.mark.parametrize(
    "fault",
    [
        {"version": 0},
        {"capacity": -1},
        {"demand": {"a": float("nan")}},
        {"demand": {"a": -1.0}},
        {"demand": dict.fromkeys(map(str, range(MAX_TENANTS + 1)), 1.0)},
        {"offers": {"a": {"n": -1}}},
        {"offers": {"a": dict.fromkeys(map(str, range(MAX_RECEIVERS + 1)), 1)}},
        {"seen": dict.fromkeys(map(str, range(floor_exchange.MAX_NODES + 1)), 1)},
    ],
)
def test_a_report_that_none_would_write_is_refused(fault: dict[str, object]) -> None:
    fields: dict[str, object] = {"node": "n", "version": 1, "capacity": 10}
    with pytest.raises(ValueError, match=r"."):
        FloorReport(**{**fields, **fault}).check()  # type: ignore[arg-type]


def test_only_so_many_nodes_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_exchange, "MAX_NODES", 4)
    exchange = FloorExchange("n")
    for number in range(9):
        exchange.see(FloorReport(node=f"m{number}", version=1, capacity=10), 0.0)
    assert len(exchange.step(0.0, {"a": 0.1}, 10, {}).seen) == 4


@pytest.mark.parametrize("seed", range(40))
def test_floors_never_exceed_total_or_capacity_whatever_reports_do(seed: int) -> None:
    """Random demand; reads and writes that are lost, late and out of order; nodes that pause, die and come."""
    chance = random.Random(seed)
    parts = {f"t{number}": chance.choice((0.05, 0.1, 0.3)) for number in range(3)}
    cluster = Cluster({f"n{number}": chance.choice((100, 1000, 777)) for number in range(4)}, parts)
    living = list(cluster.exchanges)
    history: dict[str, list[bytes]] = {node: [] for node in living}
    cut: dict[str, float] = {}
    has_moved = False
    for step in range(400):
        cluster.now_s += chance.uniform(0.5, 5.0)
        node = chance.choice(living)
        if chance.random() < 0.03:
            cluster.demand = {each: {t: chance.choice((0.0, 3.0, 80.0)) for t in parts} for each in living}
        if chance.random() < 0.02:
            cut[chance.choice(living)] = cluster.now_s + chance.uniform(1.0, 200.0)
        if chance.random() < 0.01 and len(living) > 2:
            living.remove(node)  # it is dead: what it held counts no more
            cluster.applied[node] = dict.fromkeys(parts, 10**9)
            del cluster.applied[node]
            continue
        if chance.random() < 0.02 and len(living) < 6:
            new = f"new{step}"
            living.append(new)
            history[new] = []
            cluster.capacities[new] = chance.choice((100, 1000))
            cluster.exchanges[new] = FloorExchange(new)
            cluster.applied[new] = {tenant: int(part * cluster.capacities[new]) for tenant, part in parts.items()}
        is_cut = cut.get(node, 0.0) > cluster.now_s
        seen: dict[str, bytes] = {}
        for other, reports in history.items():
            if reports and not is_cut and chance.random() < 0.9:
                seen[other] = chance.choice(reports[-3:]) if chance.random() < 0.2 else reports[-1]
        payload = cluster.tick(node, seen)
        if not is_cut or chance.random() < 0.2:
            history[node].append(payload)
        # Each node looks at what it may count on every few seconds, also without news.
        for each in living:
            cluster.applied[each] |= cluster.exchanges[each].floors(cluster.now_s)
        cluster.check()
        has_moved = has_moved or any(
            floors[t] > int(parts[t] * cluster.capacities[each])
            for each, floors in cluster.applied.items()
            for t in parts
        )
    assert has_moved


def test_what_nodes_want_fits_them() -> None:
    parts, capacities = {"a": 0.6, "b": 0.4}, {"n1": 100, "n2": 300}
    wishes = desired_floors(parts, capacities, {"n1": {"a": 5.0, "b": 1.0}, "n2": {"b": 9.0}})
    for node, capacity in capacities.items():
        assert sum(wishes[node].values()) <= capacity + 1e-6


def test_where_a_node_comes_again_with_less_capacity_floors_exceed_their_total_for_a_minute_at_most() -> None:
    cluster = Cluster(FOUR, {"a": 0.2})
    cluster.demand = {"n1": {"a": 50.0}}
    for _ in range(12):
        cluster.interval()
    del cluster.exchanges["n4"], cluster.records["n4"], cluster.applied["n4"], cluster.capacities["n4"]
    again = cluster.exchanges["n5"] = FloorExchange("n5")
    again.hold(cluster.now_s)
    cluster.capacities["n5"], cluster.applied["n5"] = 500, {}
    cluster.now_s += PERIOD_S
    cluster.tick("n5")
    excess = sum(floors["a"] for floors in cluster.applied.values()) - cluster.total("a")
    assert excess == pytest.approx((1 - KEPT) * 0.2 * (1000 - 500))
    begun_s = cluster.now_s
    while cluster.now_s < begun_s + 2 * floor_exchange.DROP_S:
        cluster.now_s += PERIOD_S
        for node in cluster.exchanges:
            cluster.tick(node)
            assert all(sum(floors.values()) <= cluster.capacities[at] for at, floors in cluster.applied.items())
            if cluster.now_s >= begun_s + floor_exchange.LEASE_S:
                cluster.check()
