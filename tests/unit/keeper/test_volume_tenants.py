"""What tenants' records do to volumes: chunks of epochs that are over leave, floors hold, chunks expire."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import ClusterConfig
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.pages.outcome import Cause
from kvferry_keeper import lifecycle, volume_tenants
from kvferry_keeper.store import fsck
from kvferry_keeper.store.chunk_file import chunk_file_bytes
from kvferry_keeper.store.volume import Volume
from kvferry_keeper.volumes import breaker
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.tier_keeper import engine
from support.tier_node import hosting, node_config
from support.tier_rows import key_of, layout_of, rows_of
from support.waiting import SOON_S, until, until_async

ACME, BETA = Namespace("acme"), Namespace("beta")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_tenants, "REPEAT_S", 0.2)


def watching(config: ClusterConfig) -> ClusterConfig:
    return config.model_copy(update={"gateway": config.gateway.model_copy(update={"tenants_in_etcd": True})})


def tenants_of(folder: Path) -> list[str]:
    return sorted(chunk.chunk.namespace.tenant for chunk in fsck.list_chunks(folder / "v0"))


def damage_one_chunk(folder: Path, namespace: Namespace) -> None:
    path = next(each.path for each in fsck.list_chunks(folder) if each.chunk.namespace == namespace)
    Path(path).write_bytes(bytes(chunk_file_bytes(8192)))


async def test_a_deleted_tenants_chunks_go_and_it_can_store_no_more(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
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
            assert list(refused.failed.values()) == [breaker.Cause.EPOCH_OVER] * 2
            refused = await a.load(range(3, 5), namespace=ACME)
            assert not refused.succeeded
            assert len((await a.store(range(5, 7), Namespace("acme", record.epoch))).succeeded) == 2
            assert (await a.load(range(3, 5), namespace=BETA)).succeeded
            assert a.holds(range(3, 5))

            async def reported() -> bool:
                done, left = await admin.purges(record)
                return not left and [purge.num_chunks for purge in done] == [3]

            await until_async(reported)
        assert tenants_of(tmp_path) == ["acme"] * 2 + ["beta"] * 2


async def test_a_keeper_that_was_away_removes_them_when_it_comes(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
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


async def test_another_clusters_volume_is_refused_and_no_tenant_of_it_loses_pages(tmp_path: Path) -> None:
    """Both clusters have a tenant of one name, and the second one's epoch is later."""
    config = watching(node_config(tmp_path, volume={"shared": True}))
    blue, red = MemoryRegistry(), MemoryRegistry()
    for registry, epochs in ((blue, 1), (red, 2)):
        admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
        await admin.create("acme")
        for _ in range(1, epochs):
            await admin.raise_epoch("acme")
    async with hosting(config.model_copy(update={"name": "blue"}), MemoryMembership(blue), "n1") as host:
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(3), ACME)
    async with hosting(config.model_copy(update={"name": "red"}), MemoryMembership(red), "n2") as host:
        await until(lambda: bool(host.member.volume_faults), what="the volume is refused")
        assert "v0 is of the cluster 'blue', and this one is 'red'" in host.member.volume_faults[0]
        assert host.member.volumes == ()
    assert tenants_of(tmp_path) == ["acme"] * 3


async def test_files_that_come_late_are_found_too(tmp_path: Path) -> None:
    """As from another node of a shared volume, which knew of the new epoch a moment later."""
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
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
            for _ in range(100):
                # The keeper goes on removing empty folders: one may go between its making and its use.
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(tmp_path / "late", kept)
                    break
            else:
                raise AssertionError("the file could not be put back")
            await until(lambda: tenants_of(tmp_path) == [], what="the late file to go")
            assert record.epoch == 1


async def test_without_tenants_in_etcd_nothing_is_removed(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.raise_epoch("acme")
    async with hosting(node_config(tmp_path), MemoryMembership(registry), "n1") as host:
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            assert len((await a.store(range(3), ACME)).succeeded) == 3
        assert host._tenants is None


# 64 chunks of 8 KiB and their headers.
SMALL = {"capacity_gib": 64 * chunk_file_bytes(8192) / (1 << 30)}


async def test_a_floor_survives_a_flood_of_ten_times_the_volume(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")
    await admin.set_tier("acme", "volume", {"floor": 0.25})
    await admin.set_tier("beta", "volume", {"cap": 1.0})
    config = watching(node_config(tmp_path, volume=SMALL))
    async with hosting(config, MemoryMembership(registry), "n1") as host:
        volume = host._volumes[0]
        await until(lambda: "acme" in volume.usages())
        with rows_of(16, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            for first in range(0, 24, 8):
                assert len((await a.store(range(first, first + 8), ACME)).succeeded) == 8
            for first in range(1000, 1640, 16):
                assert len((await a.store(range(first, first + 16), BETA)).succeeded) == 16
            usages = volume.usages()
            assert usages["acme"].used == 16 * chunk_file_bytes(8192), "what is above the floor was lent"
            assert usages["acme"].evicted[Cause.BORROWED] == 8
            assert usages["beta"].used == 48 * chunk_file_bytes(8192)
            loaded = await a.load(range(8, 24), namespace=ACME)
            assert len(loaded.succeeded) == 16
            assert a.holds(range(8, 24))
        metrics = (await host.metrics.render()).decode()
        assert f'kvferry_tier_tenant_used_bytes{{keeper="{host.keeper_id}",tenant="acme",volume=' in metrics
        assert 'cause="borrowed"' in metrics
        volume.check()


async def test_without_a_floor_the_same_flood_takes_all(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")
    await admin.set_tier("beta", "volume", {"cap": 1.0})
    async with hosting(watching(node_config(tmp_path, volume=SMALL)), MemoryMembership(registry), "n1") as host:
        await until(lambda: "acme" in host._volumes[0].usages())
        with rows_of(16, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(16), ACME)
            for first in range(1000, 1640, 16):
                await a.store(range(first, first + 16), BETA)
            assert host._volumes[0].usages()["acme"].used == 0
            await a.misses(range(16))


async def test_a_wanted_prefix_survives_its_tenants_flood_and_an_ended_session_goes_first(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")
    await admin.set_tier("acme", "volume", {"cap": 0.5})
    async with hosting(watching(node_config(tmp_path, volume=SMALL)), MemoryMembership(registry), "n1") as host:
        volume = host._volumes[0]
        await until(lambda: "acme" in volume.usages())
        with rows_of(16, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            for first in range(500, 532, 16):
                await a.store(range(first, first + 16), BETA)
            await a.store(range(8), ACME, 3600.0)  # a prompt that many will have
            await a.store(range(8, 16), ACME)
            await a.store(range(100, 108), ACME)
            await a.store(range(200, 208), ACME)
            a.client.touch([key_of(i) for i in range(100, 108)], 0.0)  # a session that ends
            await a.store(range(300, 308), ACME)
            await a.misses(range(100, 108))
            assert volume.usages()["acme"].evicted[Cause.ENDED] == 8, "before the older chunks of its tenant"
            for first in range(1000, 1160, 16):
                await a.store(range(first, first + 16), ACME)
            assert len((await a.load(range(8), namespace=ACME)).succeeded) == 8
            await a.misses(range(8, 16))
            assert volume.usages()["beta"].used == 32 * chunk_file_bytes(8192), "another tenant's chunks stay"
            assert volume.usages()["acme"].wanted == 8 * chunk_file_bytes(8192)
        volume.check()


async def test_chunks_that_were_not_used_for_their_time_leave_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_tenants, "EXPIRY_PERIOD_S", 0.05)
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")
    await admin.set_tier("acme", "volume", {"ttl_s": 1.0})
    async with hosting(watching(node_config(tmp_path)), MemoryMembership(registry), "n1") as host:
        await until(lambda: "acme" in host._volumes[0].usages())
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(3), ACME)
            await a.store(range(3, 5), BETA)
            await until(lambda: tenants_of(tmp_path) == ["beta"] * 2, what="the chunks to expire")
            await a.misses(range(3))
            assert host._volumes[0].usages()["acme"].evicted[Cause.EXPIRED] == 3


async def test_one_failure_ends_none_of_what_is_done_for_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("EXPIRY_PERIOD_S", "RETRY_S"):
        monkeypatch.setattr(volume_tenants, name, 0.05)
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")

    def fails_once(method: str) -> None:
        works = getattr(Volume, method)

        def fail(volume: Volume, *arguments: Any) -> Any:
            monkeypatch.setattr(Volume, method, works)
            raise RuntimeError(f"{method} meets what nobody thought of")

        monkeypatch.setattr(Volume, method, fail)

    async with hosting(watching(node_config(tmp_path)), MemoryMembership(registry), "n1") as host:
        volume = host._volumes[0]
        await until(lambda: floor_of(volume) == 0)
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(3), ACME)
            await a.store(range(3, 5), BETA)
        for method in ("configure", "expire", "purge_before"):
            fails_once(method)
        await admin.set_tier("acme", "volume", {"floor": 0.5, "ttl_s": 1.0})
        await until(lambda: floor_of(volume) == int(0.5 * volume.capacity_bytes), what="the floor")
        await until(lambda: tenants_of(tmp_path) == ["beta"] * 2, what="acme's chunks to expire")
        await admin.raise_epoch("beta")
        await until(lambda: tenants_of(tmp_path) == [], what="beta's chunks to be purged")
    for method in ("configure", "expire", "purge_before"):
        assert f"{method} meets what nobody thought of" in caplog.text


async def test_a_volume_that_cannot_be_configured_keeps_no_other_from_its_contracts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(volume_tenants, "RETRY_S", 0.02)
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    async with hosting(watching(node_config(tmp_path, num_volumes=3)), MemoryMembership(registry), "n1") as host:
        await until(lambda: all(floor_of(volume) == 0 for volume in host._volumes))
        works = Volume.configure

        def fail(volume: Volume, *arguments: Any) -> None:
            if volume.path.name == "v0":
                raise RuntimeError("of this test")
            works(volume, *arguments)

        monkeypatch.setattr(Volume, "configure", fail)
        await admin.set_tier("acme", "volume", {"floor": 0.5})
        wanted = int(0.5 * host._volumes[0].capacity_bytes)
        await until(lambda: [floor_of(volume) for volume in host._volumes] == [0, wanted, wanted], within_s=SOON_S)
        await until(lambda: "trying again" in caplog.text)
        assert "v0 does not have the contracts" in caplog.text
        assert "v1 does not" not in caplog.text
        monkeypatch.setattr(Volume, "configure", works)
        await until(lambda: [floor_of(volume) for volume in host._volumes] == [wanted] * 3)


async def test_a_purge_from_outside_frees_the_room_of_its_chunks(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    await admin.create("beta")
    async with hosting(watching(node_config(tmp_path, volume=SMALL)), MemoryMembership(registry), "n1") as host:
        volume = host._volumes[0]
        await until(lambda: "beta" in volume.usages())
        with rows_of(16, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            for first in range(0, 48, 16):
                assert len((await a.store(range(first, first + 16), ACME)).succeeded) == 16
            assert len((await a.store(range(48, 64), BETA)).succeeded) == 16
            damage_one_chunk(volume.path, ACME)
            for first in range(0, 48, 16):
                await a.load(range(first, first + 16), namespace=ACME)
            assert volume.stats.quarantined == 1
            assert fsck.purge(volume.path, "acme") == 47
            await until(lambda: volume.stats.bytes_used == 16 * chunk_file_bytes(8192), what="the keeper to know")
            assert volume.usages()["acme"].used == 0
            await a.misses(range(48))
            for first in range(100, 148, 16):
                assert len((await a.store(range(first, first + 16), ACME)).succeeded) == 16
            assert volume.stats.evicted == 0
            assert len((await a.load(range(48, 64), namespace=BETA)).succeeded) == 16
        volume.check()


async def test_a_volume_that_is_opened_late_gets_terms_and_purges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_REOPEN_FIRST_S", 0.02)
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    config = node_config(tmp_path)
    async with hosting(config, MemoryMembership(registry), "n1") as first:
        with rows_of(8, 8192) as rows, engine(first.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            await a.store(range(3), ACME)
    config = watching(config)
    (tmp_path / "v0").rename(tmp_path / "away")
    (tmp_path / "v0").touch()
    async with hosting(config, MemoryMembership(registry), "n1") as host:
        record = await admin.raise_epoch("acme")
        assert host.member.volume_faults
        (tmp_path / "v0").unlink()
        (tmp_path / "away").rename(tmp_path / "v0")
        await until(lambda: not host.member.volume_faults)
        await until(lambda: tenants_of(tmp_path) == [])
        await until(lambda: "acme" in host._volumes[0].usages())

        async def reported() -> bool:
            return not (await admin.purges(record))[1]

        await until_async(reported)


async def test_terms_of_a_living_tenant_change_without_a_restart(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry), now_unix_s=lambda: 0.0)
    await admin.create("acme")
    async with hosting(watching(node_config(tmp_path)), MemoryMembership(registry), "n1") as host:
        volume = host._volumes[0]
        for floor in (0.5, 0.25):
            await admin.set_tier("acme", "volume", {"floor": floor})
            await until(lambda floor=floor: floor_of(volume) == int(floor * volume.capacity_bytes))  # type: ignore[misc]
        await admin.delete("acme")
        await until(lambda: floor_of(volume) == 0)
        assert "acme" in volume.usages(), "its counts stay"


def floor_of(volume: Volume) -> int:
    usage = volume.usages().get("acme")
    return -1 if usage is None else usage.floor
