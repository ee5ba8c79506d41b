"""Terms that workers give their engines: those of records, with floors that follow demand and keep to their total."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping

import msgspec
import pytest

from kvferry.membership.base import Records
from kvferry.tenancy.floor_exchange import DROP_S, KEPT, LEASE_S
from kvferry.tenancy.records import ENGINE_FLOORS, TENANTS
from kvferry.tenancy.terms import CLASSES, TierTerms
from kvferry.worker import engine_terms
from kvferry.worker.engine_terms import FORGET_S, MAX_MOVING, EngineTerms
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.waiting import SOON_S, until

CAPACITY = 1000


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """What an engine was told, and a worker's count of tokens."""

    def __init__(self, registry: MemoryRegistry, worker_id: str, clock: Clock, capacities: Mapping[str, int]) -> None:
        self.prompt_tokens: dict[str, int] = defaultdict(int)
        self.terms: dict[str, dict[str, TierTerms | None]] = defaultdict(dict)
        self.num_changes = 0
        self.records = MemoryMembership(registry).records
        self.side = EngineTerms(
            self.records,
            role="decode",
            worker_id=worker_id,
            capacities=capacities,
            prompt_tokens=lambda: self.prompt_tokens,
            apply=self.set_terms,
            now_s=clock,
        )

    async def set_terms(self, terms: Mapping[str, Mapping[str, TierTerms | None]]) -> None:
        self.num_changes += 1
        for tier, by_tenant in terms.items():
            self.terms[tier].update(by_tenant)

    def floor(self, tier: str = "device", tenant: str = "acme") -> float:
        terms = self.terms[tier].get(tenant)
        return 0.0 if terms is None else terms.floor

    async def step(self) -> None:
        await self.side.follower.take(
            Records({name: each.value for name, each in (await self.records.read_all(TENANTS)).items()})
        )
        await self.side.step()


class Cluster:
    def __init__(self, *capacities: int) -> None:
        self.registry = MemoryRegistry()
        self.clock = Clock()
        self.workers = [
            Worker(self.registry, f"w{number:03}", self.clock, {"device": capacity, "cpu": 4 * capacity})
            for number, capacity in enumerate(capacities)
        ]
        self.admin = TenantAdmin(MemoryMembership(self.registry), now_unix_s=lambda: 0.0)

    async def rounds(self, count: int, *, busy: Worker | None = None) -> None:
        for _ in range(count):
            self.clock.now_s += engine_terms.PERIOD_S
            if busy is not None:
                busy.prompt_tokens["acme"] += 1000
            for worker in self.workers:
                await worker.step()

    async def num_reports(self, tier: str = "device") -> int:
        return len(await self.workers[0].records.read_all(f"{ENGINE_FLOORS}/decode-{tier}"))


async def with_floor(cluster: Cluster, **floors: float) -> None:
    await cluster.admin.create("acme")
    for tier, floor in floors.items():
        await cluster.admin.set_tier("acme", tier, {"floor": floor, "cap": 1.0})


async def test_floors_go_where_the_tenant_is_served() -> None:
    cluster = Cluster(CAPACITY, CAPACITY)
    busy, idle = cluster.workers
    await with_floor(cluster, device=0.2, cpu=0.4)
    await cluster.rounds(1)
    assert busy.floor() == idle.floor() == 0.2
    assert busy.floor("cpu") == idle.floor("cpu") == 0.4
    for _ in range(12):
        await cluster.rounds(1, busy=busy)
        for tier, part in (("device", 0.2), ("cpu", 0.4)):
            assert busy.floor(tier) + idle.floor(tier) <= 2 * part + 1e-9
    assert busy.floor() == pytest.approx(0.2 * (2 - KEPT), abs=0.005)
    assert idle.floor() == pytest.approx(0.2 * KEPT, abs=0.005)
    assert busy.floor("cpu") == pytest.approx(0.4 * (2 - KEPT), abs=0.005)
    await cluster.rounds(120)  # nobody is served: it is even again
    assert busy.floor() == pytest.approx(0.2, abs=0.005)
    assert idle.floor() == pytest.approx(0.2, abs=0.005)


async def test_all_floors_of_a_device_stay_within_their_part_of_it() -> None:
    cluster = Cluster(CAPACITY, CAPACITY)
    busy, _ = cluster.workers
    for tenant, floor in (("acme", 0.25), ("beta", 0.25)):
        await cluster.admin.create(tenant)
        await cluster.admin.set_tier(tenant, "device", {"floor": floor, "cap": 1.0})
    for _ in range(20):
        busy.prompt_tokens["beta"] += 1000
        await cluster.rounds(1, busy=busy)
        for worker in cluster.workers:
            assert worker.floor() + worker.floor(tenant="beta") <= 0.5 + 1e-9
    assert busy.floor() + busy.floor(tenant="beta") == pytest.approx(0.5, abs=0.01)


async def test_engines_of_other_sizes_and_a_worker_that_is_gone() -> None:
    cluster = Cluster(CAPACITY, 3 * CAPACITY)
    small, large = cluster.workers
    await with_floor(cluster, device=0.1)
    await cluster.rounds(12, busy=small)
    total = 0.1 * 4 * CAPACITY
    assert small.floor() * CAPACITY + large.floor() * 3 * CAPACITY <= total
    assert small.floor() * CAPACITY == pytest.approx(0.1 * CAPACITY + (1 - KEPT) * 0.3 * CAPACITY, abs=5)
    cluster.workers.remove(large)
    await cluster.rounds(int(LEASE_S / engine_terms.PERIOD_S) + 1, busy=small)
    assert small.floor() == 0.1
    assert await cluster.num_reports() == 2
    await cluster.rounds(int(FORGET_S / engine_terms.PERIOD_S) + 2)
    assert await cluster.num_reports() == 1


async def test_without_the_registry_floors_are_even_again() -> None:
    cluster = Cluster(CAPACITY, CAPACITY)
    busy, idle = cluster.workers
    await with_floor(cluster, device=0.2)
    await cluster.rounds(12, busy=busy)
    assert idle.floor() < 0.1
    with cluster.registry.outage():
        for _ in range(int(DROP_S / engine_terms.PERIOD_S) + 1):
            cluster.clock.now_s += engine_terms.PERIOD_S
            for worker in cluster.workers:
                await worker.side.step()
            assert busy.floor() + idle.floor() <= 0.4 + 1e-9
    assert busy.floor() == idle.floor() == 0.2


async def test_nothing_is_written_without_floors_and_nothing_stays() -> None:
    cluster = Cluster(CAPACITY, CAPACITY)
    await cluster.admin.create("acme")
    await cluster.rounds(2)
    assert await cluster.num_reports() == 0
    await cluster.admin.set_tier("acme", "device", {"floor": 0.2})
    await cluster.rounds(2)
    assert await cluster.num_reports() == 2
    assert await cluster.num_reports("cpu") == 0
    await cluster.admin.set_tier("acme", "device", {"floor": 0.0})
    await cluster.rounds(1)
    assert await cluster.num_reports() == 0
    assert cluster.workers[0].terms["device"] == {"acme": TierTerms()}


async def test_only_so_many_workers_move_floors() -> None:
    cluster = Cluster(*[CAPACITY] * (MAX_MOVING + 2))
    await with_floor(cluster, device=0.2)
    first, last = cluster.workers[0], cluster.workers[-1]
    await cluster.rounds(8, busy=first)
    assert await cluster.num_reports() == MAX_MOVING
    assert first.floor() > 0.2
    assert last.floor() == 0.2


async def test_a_worker_follows_records_and_withdraws_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_terms, "PERIOD_S", 0.01)
    monkeypatch.setattr(engine_terms, "PAUSE_S", 0.0)
    cluster = Cluster(CAPACITY)
    (worker,) = cluster.workers
    worker.side.start()
    try:
        await with_floor(cluster, device=0.2)
        await until(lambda: worker.floor() == 0.2)
        async with asyncio.timeout(SOON_S):
            async for change in worker.records.watch(f"{ENGINE_FLOORS}/decode-device"):
                if not isinstance(change, Records) or change.by_name:
                    break
        await cluster.admin.delete("acme")
        await until(lambda: worker.terms["device"] == {"acme": None})
    finally:
        await worker.side.close()
    assert await cluster.num_reports() == 0


async def test_names_that_dead_workers_left_are_forgotten_and_floors_move_again() -> None:
    cluster = Cluster(CAPACITY, CAPACITY)
    busy, idle = cluster.workers
    await with_floor(cluster, device=0.2)
    for number in range(MAX_MOVING):  # they come first by name
        assert await busy.records.write(f"{ENGINE_FLOORS}/decode-device/a{number:03}", b"{}", 0)
    await cluster.rounds(10, busy=busy)
    assert busy.floor() == idle.floor() == 0.2
    await cluster.rounds(int(FORGET_S / engine_terms.PERIOD_S) + MAX_MOVING, busy=busy)
    assert await cluster.num_reports() == 2
    assert busy.floor() > 0.3


@pytest.mark.parametrize(
    "record",
    [
        b'{"node":"x","version":%d,"capacity":1}' % 2**70,
        b'{"node":"x","version":1,"capacity":1,"seen":{"w000":%d}}' % 2**70,
        b'{"node":"x","version":1,"capacity":1,"seen":{"w000":-1}}',
        b'{"node":"x","version":1,"capacity":1,"demand":{"acme":1e999}}',
        b"[" * 10_000,
        b"\xff",
    ],
)
async def test_a_record_that_is_no_report_harms_none(record: bytes) -> None:
    cluster = Cluster(CAPACITY, CAPACITY)
    busy, _ = cluster.workers
    await with_floor(cluster, device=0.2)
    assert await busy.records.write(f"{ENGINE_FLOORS}/decode-device/a", record, 0)
    await cluster.rounds(12, busy=busy)
    assert await cluster.num_reports() == 3
    assert busy.floor() > 0.3


async def test_records_that_change_no_terms_of_engines_change_nothing_there() -> None:
    cluster = Cluster(CAPACITY)
    (worker,) = cluster.workers
    await with_floor(cluster, device=0.2)
    await cluster.rounds(1)
    worker.side._changed.clear()
    assert worker.num_changes == 1
    await cluster.admin.set_tier("acme", "volume", {"floor": 0.1})
    await cluster.admin.set_contract("acme", share=3.0)
    await cluster.rounds(3)
    assert not worker.side._changed.is_set()
    assert worker.num_changes == 1
    await cluster.admin.set_tier("acme", "device", {"floor": 0.1})
    await cluster.rounds(1)
    assert worker.side._changed.is_set()
    assert worker.num_changes == 2


async def test_an_engine_has_the_terms_of_all_records_and_of_no_others() -> None:
    cluster = Cluster(CAPACITY)
    (worker,) = cluster.workers
    await with_floor(cluster, device=0.2)
    await cluster.admin.create("beta")
    await cluster.admin.set_contract("beta", class_name="premium")
    await cluster.admin.set_tier("beta", "device", {"ttl_s": 60.0})
    await cluster.admin.create("gone")
    await cluster.rounds(1)
    standard, premium = (CLASSES[name].tiers["cpu"] for name in ("standard", "premium"))
    assert worker.terms == {
        "device": {
            "acme": TierTerms(floor=0.2, cap=1.0),
            "beta": msgspec.structs.replace(premium, ttl_s=60.0),
            "gone": standard,
        },
        "cpu": {"acme": standard, "beta": premium, "gone": standard},
    }
    await cluster.admin.delete("gone")
    await cluster.rounds(1)
    assert worker.terms["device"]["gone"] is worker.terms["cpu"]["gone"] is None
    assert all(each.keys() == {"acme", "beta"} for each in worker.side._applied.values()), "names come and go for ever"
    num_changes = worker.num_changes
    await cluster.rounds(2)
    assert worker.num_changes == num_changes
    await cluster.admin.create("gone")
    await cluster.rounds(1)
    assert worker.terms["device"]["gone"] == worker.terms["cpu"]["gone"] == standard


async def test_terms_that_an_engine_did_not_take_are_given_again() -> None:
    cluster = Cluster(CAPACITY)
    (worker,) = cluster.workers
    await with_floor(cluster, device=0.2)
    await cluster.admin.create("beta")
    apply, worker.side._apply = worker.side._apply, failing
    with pytest.raises(RuntimeError):
        await worker.step()
    worker.side._apply = apply
    await worker.side.step()
    assert worker.terms["device"] == {"acme": TierTerms(floor=0.2, cap=1.0), "beta": TierTerms()}


async def test_an_engine_takes_many_terms_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_terms, "MAX_AT_ONCE", 2)
    cluster = Cluster(CAPACITY)
    (worker,) = cluster.workers
    for number in range(5):
        await cluster.admin.create(f"t{number}")
    await cluster.rounds(1)
    assert worker.num_changes == 3
    assert worker.terms["device"].keys() == worker.terms["cpu"].keys() == {f"t{number}" for number in range(5)}


async def failing(terms: object) -> None:
    raise RuntimeError("of this test")


async def test_an_idle_worker_applies_changed_terms_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_terms, "PERIOD_S", 600.0)  # no period ends in this test
    assert engine_terms.PAUSE_S < 1.0
    cluster = Cluster(CAPACITY)
    (worker,) = cluster.workers
    await with_floor(cluster, device=0.1)
    worker.side.start()
    try:
        for fields in ({"floor": 0.2}, {"floor": 0.3, "ttl_s": 60.0}, {"floor": 0.0, "cap": 0.25}):
            await cluster.admin.set_tier("acme", "device", fields)
            wanted = (await cluster.admin.get("acme")).tiers["device"]
            await until(lambda wanted=wanted: worker.terms["device"].get("acme") == wanted)  # type: ignore[misc]
    finally:
        await worker.side.close()
