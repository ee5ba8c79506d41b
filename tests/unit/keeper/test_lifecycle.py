"""The life of a keeper: registered while it serves, and gone without a trace."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import threading
from pathlib import Path

import pytest

from kvferry.config import ClusterConfig
from kvferry.errors import ConfigError, TierError
from kvferry.membership.base import Joined, Left, Member, MemberId, MemberKind, Snapshot
from kvferry.membership.follower import MemberFollower
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.lifecycle import KeeperHost, _OtherKeepers
from kvferry_keeper.store import folder
from kvferry_keeper.store.folder import MAX_WRITER_CHARS
from kvferry_keeper.store.fsck import key_usage
from kvferry_keeper.store.keyring import load_keyring
from kvferry_keeper.store.volume import Volume
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.tier_keeper import engine
from support.tier_node import hosting, node_config
from support.tier_rows import layout_of, rows_of
from support.tier_volumes import opened_volumes
from support.waiting import until


def beside(config: ClusterConfig, folder: Path) -> ClusterConfig:
    """Return the configuration of another keeper of the same volumes, with a socket of its own."""
    return config.model_copy(update={"tier": config.tier.model_copy(update={"socket_dir": folder / "t"})})


async def test_it_is_registered_while_it_serves(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    async with hosting(node_config(tmp_path, num_volumes=2), MemoryMembership(registry), "n1") as host:
        (member,) = registry.members()
        assert member.kind is MemberKind.KEEPER
        assert member.volumes == tuple(volume.volume_id for volume in host._volumes)
        assert len(set(member.volumes)) == 2
        assert (member.node, member.pid) == ("n1", os.getpid())
        assert host.keeper.socket_path.is_socket()
        assert member.address == f"127.0.0.1:{host.server.port}"
        await host.check_health()
        with rows_of(8, 8192) as rows, engine(member.socket_path, rows, layout_of()) as a:
            await a.connected()
            assert len((await a.store(range(8))).succeeded) == 8
            await asyncio.to_thread(a.client.stop)
    assert not registry.members()
    assert not host.keeper.socket_path.exists()
    with pytest.raises(TierError):
        await host.check_health()
    await host.stop()


async def test_a_volume_that_is_taken_is_named_and_used_once_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry_keeper.lifecycle._REOPEN_FIRST_S", 0.02)
    config = node_config(tmp_path)
    registry = MemoryRegistry()
    async with contextlib.AsyncExitStack() as stack:
        async with hosting(config, MemoryMembership(registry), "n1") as first:
            volume_id = first.keeper.volume_ids[0]
            second = await stack.enter_async_context(
                hosting(beside(config, tmp_path), MemoryMembership(registry), "n2")
            )
            rows = stack.enter_context(rows_of(8, 8192))
            a = stack.enter_context(engine(second.keeper.socket_path, rows, layout_of()))
            await a.connected()
            (fault,) = second.member.volume_faults
            assert str(tmp_path / "v0") in fault
            assert "shared: true" in fault
            assert re.search(rb"kvferry_keeper_unusable_volumes{[^}]*} 1", await second.metrics.render())
        await until(lambda: [each.volumes for each in registry.members()] == [(volume_id,)])
        assert [each.volume_faults for each in registry.members()] == [()]
        assert len((await a.store(range(8))).succeeded) == 8
        await a.sees(range(8))
        await asyncio.to_thread(a.client.stop)


async def test_a_volume_that_cannot_be_opened_leaves_the_others(tmp_path: Path) -> None:
    config = node_config(tmp_path, num_volumes=2)
    (tmp_path / "v0").write_text("a file")
    registry = MemoryRegistry()
    async with hosting(config, MemoryMembership(registry), "n1") as host:
        (member,) = registry.members()
        assert len(member.volumes) == 1
        (fault,) = member.volume_faults
        assert fault == f"volume {tmp_path}/v0: {tmp_path}/v0/layouts: Not a directory"
        with rows_of(8, 8192) as rows, engine(host.keeper.socket_path, rows, layout_of()) as a:
            await a.connected()
            assert len((await a.store(range(8))).succeeded) == 8
            await asyncio.to_thread(a.client.stop)
        assert list((tmp_path / "v1" / "pages").rglob("*.page"))


async def test_volumes_are_closed_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed_in: list[threading.Thread] = []
    close = Volume.close

    def note(volume: Volume) -> None:
        closed_in.append(threading.current_thread())
        close(volume)

    monkeypatch.setattr(Volume, "close", note)
    async with hosting(node_config(tmp_path, num_volumes=2), MemoryMembership(MemoryRegistry()), "n1"):
        pass
    assert len(closed_in) == 2
    assert threading.current_thread() not in closed_in


async def test_nodes_write_apart_on_a_shared_volume(tmp_path: Path) -> None:
    registry = MemoryRegistry()
    config = node_config(tmp_path, volume={"shared": True})
    other = beside(config, tmp_path)
    async with (
        hosting(config, MemoryMembership(registry), "n/1") as a,
        hosting(other, MemoryMembership(registry), "n2") as b,
    ):
        assert a.keeper.volume_ids == b.keeper.volume_ids
        assert {each.name for each in (tmp_path / "v0" / "pages").iterdir()} == {"n-1", "n2"}
        await until(lambda: a._others.locate(a.keeper.volume_ids[0]) == b.member.address)


async def test_keepers_of_one_machine_write_apart_and_one_that_comes_again_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pods do, whose host names are new every time."""
    monkeypatch.setenv("KVFERRY_NODE_NAME", "machine-7")
    registry = MemoryRegistry()
    config = node_config(tmp_path, volume={"shared": True})
    other = beside(config, tmp_path)
    async with (
        hosting(config, MemoryMembership(registry), "pod-a") as a,
        hosting(other, MemoryMembership(registry), "pod-b") as b,
    ):
        assert {member.node for member in registry.members()} == {"pod-a", "pod-b"}
        assert [host._volumes[0]._writer for host in (a, b)] == ["machine-7", "machine-7.2"]
    async with hosting(config, MemoryMembership(registry), "pod-c") as c:
        assert c._volumes[0]._writer == "machine-7"
    assert {each.name for each in (tmp_path / "v0" / "pages").iterdir()} == {"machine-7", "machine-7.2"}


async def test_a_machine_has_room_for_a_limited_number_of_keepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MAX_KEEPERS_OF_A_MACHINE", 2)
    name = "n" * 200
    with opened_volumes(tmp_path) as open_volume:
        for expected in ("n" * MAX_WRITER_CHARS, "n" * MAX_WRITER_CHARS + ".2"):
            assert folder.free_writer(tmp_path / "v", name[:MAX_WRITER_CHARS]) == expected
            open_volume(writer=expected, shared=True)
        taken = folder.free_writer(tmp_path / "v", name[:MAX_WRITER_CHARS])
        with pytest.raises(TierError, match="in use"):
            open_volume(writer=taken, shared=True)


async def test_keys_that_others_may_read_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"*": "00" * 32}))
    file.chmod(0o644)
    config = node_config(tmp_path, encryption_keys_file=file)
    with pytest.raises(ConfigError, match="others may read"):
        KeeperHost(config, MemoryMembership(MemoryRegistry()))


def test_the_youngest_of_a_volumes_keepers_is_asked() -> None:
    follower = MemberFollower(MemoryMembership(MemoryRegistry()), {MemberKind.KEEPER})
    others = _OtherKeepers(follower, MemberId("own"))
    own, old, young = member("own", 9.0), member("old", 1.0), member("young", 2.0)
    follower._apply(Snapshot((own, old, member("w", 5.0, MemberKind.DECODE))))
    assert others.locate("v") == "old"
    follower._apply(Joined(young))
    assert others.locate("v") == "young"
    assert others.locate("w") is None
    follower._apply(Left(MemberKind.KEEPER, young.member_id))
    assert others.locate("v") == "old"
    assert others.addresses == {"old"}
    follower._apply(Snapshot(()))
    assert others.locate("v") is None


def member(name: str, started_unix_s: float, kind: MemberKind = MemberKind.KEEPER) -> Member:
    return Member(
        kind=kind,
        member_id=MemberId(name),
        address=name,
        model="m",
        version="0",
        volumes=("v",),
        started_unix_s=started_unix_s,
    )


async def test_a_key_file_that_changes_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_keeper.lifecycle._KEYS_PERIOD_S", 0.02)
    file = tmp_path / "keys.json"
    old, new = "ab" * 32, "cd" * 32

    def say(*secrets: str) -> None:
        file.write_text(json.dumps({"*": secrets}))
        file.chmod(0o600)

    say(old)
    config = node_config(tmp_path, encryption_keys_file=file)
    async with hosting(config, MemoryMembership(MemoryRegistry()), "n1") as host:
        with rows_of(16, 8192) as rows, engine(host.member.socket_path, rows, layout_of()) as a:
            await a.connected()
            assert len((await a.store(range(4))).succeeded) == 4
            say(new, old)
            assert host._key_file is not None
            namespace, volume_id = Namespace(), host.keeper.volume_ids[0]
            await until(lambda: len(host._key_file.keys(namespace, volume_id)) == 2)  # type: ignore[union-attr]
            assert len((await a.store(range(4, 8))).succeeded) == 4
            await a.sees(range(8))
            assert len((await a.end_of(a.submit_load(range(8)))).succeeded) == 8
            await asyncio.to_thread(a.client.stop)
    usages = key_usage(tmp_path / "v0", load_keyring(file))
    assert sorted((usage.secret, usage.num_chunks) for usage in usages) == [(1, 4), (2, 4)]
