"""Keepers of several nodes on one machine: hosts in this process or their own, and a registry that both can read."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvferry import config as configuration
from kvferry.config import ClusterConfig, TlsConfig
from kvferry.membership.base import Member, MemberChange, Membership, Snapshot
from kvferry.util.addresses import ucx_environment
from kvferry_keeper.lifecycle import KeeperHost
from kvferry_sim.membership import MemoryMembership, MemoryRecords, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.child_imports import import_environment
from support.tier_keeper import KeeperProcess, StallingIo, tier_config
from support.waiting import until


def node_config(folder: Path, *, tls: TlsConfig | None = None, **options: Any) -> ClusterConfig:
    """A node with its volumes below `folder`."""
    config = configuration.parse({"model": {"path": "m"}, "engine": {"kind": "sim"}})
    worker = config.worker.model_copy(update={"tls": tls}) if tls is not None else config.worker
    return config.model_copy(update={"tier": tier_config(folder, **options), "worker": worker})


@contextlib.asynccontextmanager
async def hosting(config: ClusterConfig, membership: Membership, node: str) -> AsyncIterator[KeeperHost]:
    async with _running(KeeperHost(config, membership, node=node)) as host:
        yield host


@contextlib.asynccontextmanager
async def _running(host: KeeperHost) -> AsyncIterator[KeeperHost]:
    try:
        await host.start()
        yield host
    finally:
        await host.stop()


class FolderRegistration:
    def __init__(self, file: Path) -> None:
        self._file = file
        self.fenced = False

    async def update(self, member: Member) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(member))
        draft.rename(self._file)

    async def revoke(self) -> None:
        self._file.unlink(missing_ok=True)


class FolderMembership:
    """Membership as files, without leases: a killed process stays a member. Records are of this process alone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tenants = MemoryMembership(MemoryRegistry())

    @property
    def records(self) -> MemoryRecords:
        return self._tenants.records

    async def add_tenants(self, terms: Mapping[str, Mapping[str, float]]) -> None:
        """Create tenants with these terms on volumes."""
        admin = TenantAdmin(self._tenants, now_unix_s=lambda: 0.0)
        for tenant, of_volumes in terms.items():
            await admin.create(tenant)
            await admin.set_tier(tenant, "volume", dict(of_volumes))

    async def register(self, member: Member) -> FolderRegistration:
        registration = FolderRegistration(self._folder / f"{member.member_id}.json")
        await registration.update(member)
        return registration

    async def members(self) -> tuple[Member, ...]:
        members = []
        for file in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                members.append(msgspec.json.decode(file.read_bytes(), type=Member))
        return tuple(members)

    async def watch(self) -> AsyncIterator[MemberChange]:
        known: tuple[Member, ...] | None = None
        while True:
            members = await self.members()
            if members != known:
                known = members
                yield Snapshot(members)
            await asyncio.sleep(0.2)

    async def close(self) -> None:
        pass


class NodeProcess(KeeperProcess):
    """A host in a process of its own. It reports readiness once it knows every registered keeper.

    The option `tenants` has terms on volumes, by tenant; without it, volumes have one order of eviction for all.
    """

    def __init__(self, folder: Path, registry: Path, node: str, **options: Any) -> None:
        super().__init__(folder, **{name: value for name, value in options.items() if name != "tenants"})
        folder.mkdir(exist_ok=True)
        self._command = [
            sys.executable,
            "-m",
            "support.tier_node",
            str(folder),
            str(registry),
            node,
            json.dumps(options),
        ]
        self.member: Member

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True, env=import_environment())
        assert self.process.stdout is not None
        self.member = msgspec.json.decode(self.process.stdout.readline(), type=Member)

    @property
    def volume_id(self) -> str:
        return self.member.volumes[0]


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("registry", type=Path)
    parser.add_argument("node")
    parser.add_argument("options", type=json.loads)
    arguments = parser.parse_args()
    tenants = arguments.options.pop("tenants", {})
    config = node_config(arguments.folder, **arguments.options)
    membership = FolderMembership(arguments.registry)
    if tenants:
        await membership.add_tenants(tenants)
        config = config.model_copy(update={"gateway": config.gateway.model_copy(update={"tenants_in_etcd": True})})
    others = {member.address for member in await membership.members()}
    host = KeeperHost(config, membership, node=arguments.node)
    for volume in host._volumes:
        volume._files.io = StallingIo(arguments.folder)
    async with _running(host):
        await until(lambda: others <= host._others.addresses, what="the other keepers")
        if host._warming is not None:
            await host._warming
        print(msgspec.json.encode(host.member).decode(), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    for name, value in ucx_environment("127.0.0.1").items():
        os.environ.setdefault(name, value)
    asyncio.run(_main())
