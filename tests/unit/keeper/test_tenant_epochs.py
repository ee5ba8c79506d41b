"""Chunks of tenants that were deleted, or whose pages were reset, leave every volume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvferry.config import ClusterConfig
from kvferry.keeper import tenant_epochs
from kvferry.keeper.failure_cause import Cause
from kvferry.membership.memory import MemoryMembership, MemoryRegistry
from kvferry.membership.tenant_admin import TenantAdmin
from kvferry.store import fsck
from kvferry.tenancy.namespace import Namespace
from support.tier_keeper import engine
from support.tier_node import hosting, node_config
from support.tier_rows import layout_of, rows_of
from support.waiting import until

ACME, BETA = Namespace("acme"), Namespace("beta")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_epochs, "REPEAT_S", 0.2)


def watching(config: ClusterConfig) -> ClusterConfig:
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"tenants_in_etcd": True})})


def tenants_of(folder: Path) -> list[str]:
    return sorted(chunk.chunk.namespace.tenant for chunk in fsck.list_chunks(folder / "v0"))


async def test_a_deleted_tenants_chunks_go_and_it_can_store_no_more(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry))
    await admin.create("acme")
    await admin.create("beta")
    async with hosting(watching(node_config(tmp_path)), MemoryMembership(registry), "n1") as host:
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(3), ACME)
            await a.store(range(3, 5), BETA)
            assert tenants_of(tmp_path) == ["acme"] * 3 + ["beta"] * 2
            record = await admin.delete("acme")
            await until(lambda: tenants_of(tmp_path) == ["beta"] * 2)
            await a.misses(range(3))
            refused = await a.store(range(5, 7), ACME)
            assert list(refused.failed.values()) == [Cause.EPOCH_OVER] * 2
            refused = await a.load(range(3, 5), namespace=ACME)
            assert not refused.succeeded
            assert len((await a.store(range(5, 7), Namespace("acme", record.epoch))).succeeded) == 2
            assert (await a.load(range(3, 5), namespace=BETA)).succeeded
            assert a.holds(range(3, 5))

            async def reported() -> bool:
                done, left = await admin.purges(record)
                return not left and [purge.num_chunks for purge in done] == [3]

            while not await reported():
                pass
        assert tenants_of(tmp_path) == ["acme"] * 2 + ["beta"] * 2


async def test_a_keeper_that_was_away_removes_them_when_it_comes(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry))
    await admin.create("acme")
    config = watching(node_config(tmp_path))
    async with hosting(config, MemoryMembership(registry), "n1") as host:
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(3), ACME)
    await admin.raise_epoch("acme")
    assert tenants_of(tmp_path) == ["acme"] * 3
    async with hosting(config, MemoryMembership(registry), "n1"):
        await until(lambda: tenants_of(tmp_path) == [])


async def test_files_that_come_late_are_found_too(tmp_path: Path) -> None:
    """As from another node of a shared volume, which knew of the new epoch a moment later."""
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry))
    await admin.create("acme")
    config = watching(node_config(tmp_path))
    async with hosting(config, MemoryMembership(registry), "n1") as host:
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(2), ACME)
            kept = Path(next(iter(fsck.list_chunks(tmp_path / "v0"))).path)
            shutil.copy(kept, tmp_path / "late")
            record = await admin.delete("acme")
            await until(lambda: tenants_of(tmp_path) == [])
            kept.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "late", kept)
            await until(lambda: tenants_of(tmp_path) == [], what="the late file to go")
            assert record.epoch == 1


async def test_without_tenants_in_etcd_nothing_is_removed(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry))
    await admin.create("acme")
    await admin.raise_epoch("acme")
    async with hosting(node_config(tmp_path), MemoryMembership(registry), "n1") as host:
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            assert len((await a.store(range(3), ACME)).succeeded) == 3
        assert host._epochs is None
