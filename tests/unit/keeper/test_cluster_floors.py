"""Floors of keepers of several nodes: they follow demand, and what a busy node keeps survives a flood."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.config import ClusterConfig
from kvferry.membership import floor_reports
from kvferry.tenancy.floor_exchange import DROP_S, FloorReport
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.pages.outcome import Cause
from kvferry.tenancy.records import FLOORS, MAX_RECORD_BYTES
from kvferry_keeper import cluster_floors, volume_tenants
from kvferry_keeper.cluster_floors import ClusterFloors
from kvferry_keeper.lifecycle import KeeperHost
from kvferry_keeper.store.chunk_file import chunk_file_bytes
from kvferry_keeper.store.index.eviction import TenantRetention
from kvferry_keeper.store.volume import Volume
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.tier_keeper import engine
from support.tier_node import hosting, node_config
from support.tier_rows import layout_of, rows_of
from support.waiting import SOON_S, until

PARTS = {"a": 0.5}
ACME, BETA = Namespace("acme"), Namespace("beta")
CHUNK = chunk_file_bytes(8192)
SMALL = {"capacity_gib": 64 * CHUNK / (1 << 30)}


def node(folder: Path) -> ClusterConfig:
    config = node_config(folder, volume=SMALL)
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"tenants_in_etcd": True})})


def floor_chunks(host: KeeperHost, tenant: str = "acme") -> float:
    usage = host._volumes[0].usages().get(tenant)
    return 0.0 if usage is None else usage.floor / CHUNK


async def admin_of(registry: MemoryRegistry) -> TenantAdmin:
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")
    await admin.set_tier("acme", "volume", {"floor": 0.25, "cap": 1.0})
    await admin.set_tier("beta", "volume", {"cap": 1.0})
    return admin


@pytest.mark.parametrize("follows", [True, False])
async def test_a_tenants_chunks_on_the_node_it_uses_survive_a_flood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    monkeypatch.setattr(cluster_floors, "PERIOD_S", 0.05 if follows else 3600.0)
    monkeypatch.setattr(volume_tenants, "CONFIGURE_PAUSE_S", 0.0)
    registry = MemoryRegistry()
    await admin_of(registry)
    async with (
        hosting(node(tmp_path / "n1"), MemoryMembership(registry), "n1") as busy,
        hosting(node(tmp_path / "n2"), MemoryMembership(registry), "n2") as idle,
    ):
        await until(lambda: floor_chunks(busy) == floor_chunks(idle) == 16)
        with rows_of(16, 8192) as rows, engine(busy.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(14), ACME)
            await a.store(range(14, 28), ACME)
            if follows:
                await until(lambda: floor_chunks(busy) > 27.9)
                assert floor_chunks(idle) == 4
            for first in range(1000, 1640, 16):
                assert len((await a.store(range(first, first + 16), BETA)).succeeded) == 16
            usage = busy._volumes[0].usages()["acme"]
            assert usage.used // CHUNK == (28 if follows else 16)
            assert usage.evicted[Cause.BORROWED] == (0 if follows else 12)
        busy._volumes[0].check()


async def test_a_floor_returns_when_the_keeper_it_went_to_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_floors, "PERIOD_S", 0.05)
    monkeypatch.setattr(volume_tenants, "CONFIGURE_PAUSE_S", 0.0)
    monkeypatch.setattr("kvferry.tenancy.floor_exchange.LEASE_S", 1.0)
    monkeypatch.setattr("kvferry.tenancy.floor_exchange.DROP_S", 2.0)
    registry = MemoryRegistry()
    admin = await admin_of(registry)
    async with hosting(node(tmp_path / "n2"), MemoryMembership(registry), "n2") as idle:
        async with hosting(node(tmp_path / "n1"), MemoryMembership(registry), "n1") as busy:
            await until(lambda: floor_chunks(busy) == floor_chunks(idle) == 16)
            with rows_of(16, 8192) as rows, engine(busy.keeper.socket_path, rows, layout_of()) as a:
                await a.connected()
                await a.store(range(14), ACME)
                await until(lambda: floor_chunks(idle) == 4)
        await until(lambda: floor_chunks(idle) == 16)
        await admin.set_tier("acme", "volume", {"floor": 0.0})
        await until(lambda: floor_chunks(idle) == 0)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    volume = Volume(tmp_path, capacity_bytes=1 << 20, eviction=TenantRetention(1 << 20))
    volume.open()
    yield volume
    volume.close()


async def nothing() -> None:
    pass


async def test_reports_that_cannot_be_read_are_passed_over_and_old_ones_removed(volume: Volume) -> None:
    records, clock = MemoryMembership(MemoryRegistry()).records, Clock()
    floors = ClusterFloors(records, "n", clock)
    many = FloorReport(node="x" * MAX_RECORD_BYTES, version=1, capacity=1)
    for name, value in (
        ("bad", b"{"),
        ("huge", msgspec.json.encode(many)),
        ("odd", b'{"node":"o","version":0,"capacity":1}'),
    ):
        await records.write(f"{FLOORS}/{name}", value, 0)
    await floors.step(PARTS, [volume], nothing)
    assert floors.floors_of(volume, PARTS) == {"a": 1 << 19}
    found = await records.read_all(FLOORS)
    own = f"{volume.volume_id}-{volume.writer}"
    assert set(found) == {"bad", "huge", "odd", own}
    assert msgspec.json.decode(found[own].value, type=FloorReport).seen == {}
    clock.now_s = floor_reports.FORGET_S
    for num_left in (3, 2, 1):  # one in each step
        await floors.step(PARTS, [volume], nothing)
        assert len(await records.read_all(FLOORS)) == num_left
    assert set(await records.read_all(FLOORS)) == {own}


async def test_without_the_registry_floors_become_even(volume: Volume) -> None:
    """Others may count for a while on what the last process of this keeper had offered."""
    registry, clock = MemoryRegistry(), Clock()
    floors = ClusterFloors(MemoryMembership(registry).records, "n", clock)
    with registry.outage():
        async with asyncio.timeout(SOON_S):
            await floors.step(PARTS, [volume], nothing)
            assert floors.floors_of(volume, PARTS) == {"a": 1 << 17}
            clock.now_s = DROP_S
            await floors.step(PARTS, [volume], nothing)
    assert floors.floors_of(volume, PARTS) == {"a": 1 << 19}


async def test_without_floors_nothing_is_written(volume: Volume) -> None:
    records = MemoryMembership(MemoryRegistry()).records
    floors = ClusterFloors(records, "n")
    await floors.step({}, [volume], nothing)
    assert await records.read_all(FLOORS) == {}
    assert floors.floors_of(volume, PARTS) == floors.floors_of(volume, {}) == {}


async def test_floors_are_applied_before_others_hear_of_them(volume: Volume) -> None:
    records = MemoryMembership(MemoryRegistry()).records
    floors = ClusterFloors(records, "n")
    seen: list[int] = []

    async def apply() -> None:
        seen.append(len(await records.read_all(FLOORS)))

    await floors.step(PARTS, [volume], apply)
    assert (seen, len(await records.read_all(FLOORS))) == ([0], 1)


@pytest.mark.parametrize(
    ("last", "part"),
    [
        (FloorReport(node="n", version=3, capacity=1 << 20, offers={"a": {"m": 5}}), 0.25),
        (FloorReport(node="n", version=3, capacity=1 << 20), 1.0),
        (None, 0.25),
    ],
    ids=["offers", "no offers", "unreadable"],
)
@pytest.mark.parametrize("volume_id", ["", "one that opens late"])
async def test_a_keeper_that_starts_anew_keeps_to_what_it_never_offers(
    volume: Volume, volume_id: str, last: FloorReport | None, part: float
) -> None:
    records, clock = MemoryMembership(MemoryRegistry()).records, Clock()
    name = f"{FLOORS}/{volume_id or volume.volume_id}-{volume.writer}"
    await records.write(name, b"{" if last is None else msgspec.json.encode(last), 0)
    floors = ClusterFloors(records, "n+", clock)
    await floors.step(PARTS, [volume], nothing)
    assert floors.floors_of(volume, PARTS) == {"a": part * (1 << 19)}
    clock.now_s = DROP_S
    await floors.step(PARTS, [volume], nothing)
    assert floors.floors_of(volume, PARTS) == {"a": 1 << 19}
