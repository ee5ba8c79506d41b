"""A cluster with keepers: what one worker computed another one loads, from here or from another node."""

from __future__ import annotations

import dataclasses
import errno
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.gateway.identity.key_file import new_key
from kvferry.membership.base import MemberKind
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_keeper.lifecycle import KeeperHost
from kvferry_keeper.store.direct_io import Fault, Operation
from kvferry_keeper.store.fsck import list_chunks
from kvferry_keeper.volumes import volume_io
from kvferry_local.authority import make_certificates
from kvferry_sim import SimEngine
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.beside import beside
from support.tier_keeper import SwitchableIo
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster

PROMPT = " ".join(f"word{i}" for i in range(300))
PAGE = 16


@pytest.fixture
def sockets() -> Iterator[Path]:
    # Short: the path of a Unix socket has a limit.
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as folder:
        yield Path(folder)


def config_with(volume: Path, sockets: Path, **values: object) -> ClusterConfig:
    return configuration.parse(
        {
            "model": {"path": MODEL},
            "engine": {"kind": "sim", "block_size": PAGE},
            "prefill": {"replicas": 0},
            "decode": {"replicas": 1},
            "worker": {"drain_timeout_s": 5},
            "sim": {"step_ms": 1.0, "prefill_tokens_per_s": 2_000.0, "tier_page_ms": 0.05},
            "gateway": {"http_port": 0, "grpc_port": None},
            "tier": {
                "enabled": True,
                "volumes": [{"path": str(volume), "capacity_gib": 0.1}],
                "socket_dir": str(sockets),
                **values,
            },
        }
    )


@asynccontextmanager
async def keeper(config: ClusterConfig, registry: MemoryRegistry, node: str = "") -> AsyncIterator[KeeperHost]:
    host = KeeperHost(config, MemoryMembership(registry), node=node)
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


async def add_worker(cluster: SimCluster, kept: KeeperHost, pool: str = "") -> tuple[WorkerHost, SimEngine]:
    config = cluster.config
    engine = build_engine(config, MemberKind.DECODE, MODEL, keeper_socket=kept.member.socket_path, pool=pool)
    assert isinstance(engine, SimEngine)
    host = WorkerHost(config, MemberKind.DECODE, engine, MemoryMembership(cluster.registry), pool, heartbeat_s=0.2)
    await host.start()
    cluster.workers.append((host, engine))
    return host, engine


def has_keeper(engine: SimEngine) -> bool:
    return engine._cache.tier is not None and engine._cache.tier.connected


async def end_workers(cluster: SimCluster) -> None:
    for host, _ in cluster.workers:
        await host.stop()
    cluster.workers.clear()


async def ask(
    cluster: SimCluster, prompt: str = PROMPT, key: str = "", model: str = MODEL
) -> tuple[str, dict[str, object]]:
    headers = {"x-kvferry-debug": "1", **({"authorization": f"Bearer {key}"} if key else {})}
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        answered = await http.post("/v1/completions", json=body, headers=headers)
    assert answered.status_code == 200, answered.text
    values = answered.json()
    return values["choices"][0]["text"], values


@asynccontextmanager
async def gateway_over(config: ClusterConfig) -> AsyncIterator[SimCluster]:
    cluster = SimCluster(config, MemoryRegistry())
    try:
        yield cluster
    finally:
        await cluster.stop()


async def until_known(cluster: SimCluster, num_pages: int) -> None:
    gateway = cluster.gateway
    assert gateway is not None
    await until(
        lambda: (
            bool(gateway.keeper_volumes.costs())
            and sum(state.num_chunks for state in gateway.keeper_volumes.states().values()) >= num_pages
        )
    )
    index = gateway.residency.index
    await until(lambda: any(holder.tier.value == "volume" for holder in index.holders()))


async def test_what_a_worker_computed_is_loaded_after_all_engines_were_restarted(tmp_path: Path, sockets: Path) -> None:
    config = config_with(tmp_path / "volume", sockets)
    async with gateway_over(config) as cluster, keeper(config, cluster.registry) as kept:
        _, engine = await add_worker(cluster, kept)
        await until(lambda: has_keeper(engine))
        await cluster.add_gateway()
        await cluster.ready(1)
        uncached, values = await ask(cluster)
        num_prompt = values["usage"]["prompt_tokens"]  # type: ignore[index]
        await until_known(cluster, num_prompt // PAGE)
        await end_workers(cluster)
        _, fresh = await add_worker(cluster, kept)
        await until(lambda: has_keeper(fresh))
        await cluster.ready(1)
        again, _ = await ask(cluster)
        assert again == uncached
        loaded = fresh.stats().cached_tokens.volume
        assert loaded >= 0.95 * num_prompt
        assert fresh.stats().prompt_tokens.local_compute == num_prompt - loaded
        await until(
            lambda: (
                sum(
                    cluster.metric(
                        f'kvferry_worker_cached_prompt_tokens_total{{role="decode",tier="volume",worker="{host.worker_id}"}}'
                    )
                    for host, _ in cluster.workers
                )
                == loaded
            )
        )


async def test_a_tenants_pages_on_a_volume_are_its_own(tmp_path: Path, sockets: Path) -> None:
    """With everything else of a cluster that strangers reach: keys, and mutual TLS to the keeper too."""
    keys = tmp_path / "keys.yaml"
    acme, beta = new_key(keys, "acme", "ci"), new_key(keys, "beta", "ci")
    plain = config_with(tmp_path / "volume", sockets).model_dump(mode="json")
    plain["gateway"]["keys_file"] = str(keys)
    plain["worker"]["tls"] = make_certificates(tmp_path / "tls").model_dump(mode="json")
    config = configuration.parse(plain)
    async with gateway_over(config) as cluster, keeper(config, cluster.registry) as kept:
        _, engine = await add_worker(cluster, kept)
        await until(lambda: has_keeper(engine))
        await cluster.add_gateway()
        await cluster.ready(1)
        uncached, values = await ask(cluster, key=acme)
        num_prompt = values["usage"]["prompt_tokens"]  # type: ignore[index]
        await until_known(cluster, num_prompt // PAGE)
        assert {chunk.chunk.namespace.tenant for chunk in list_chunks(tmp_path / "volume")} == {"acme"}
        await end_workers(cluster)
        _, fresh = await add_worker(cluster, kept)
        await until(lambda: has_keeper(fresh))
        await cluster.ready(1)
        # The same prompt of another tenant: neither the router nor the engine finds a page of it.
        others, _ = await ask(cluster, key=beta)
        assert others == uncached
        assert fresh.stats().cached_tokens.volume == 0
        assert fresh.stats().prompt_tokens.local_compute == num_prompt
        # Its owner's are there.
        assert (await ask(cluster, key=acme))[0] == uncached
        assert fresh.stats().cached_tokens.volume >= 0.95 * num_prompt
        await until(
            lambda: {chunk.chunk.namespace.tenant for chunk in list_chunks(tmp_path / "volume")} == {"acme", "beta"},
            what="the other tenant's pages are kept under its own name",
        )


async def test_a_keeper_started_again_finds_its_pages(tmp_path: Path, sockets: Path) -> None:
    config = config_with(tmp_path / "volume", sockets)
    async with gateway_over(config) as cluster:
        async with keeper(config, cluster.registry) as kept:
            _, engine = await add_worker(cluster, kept)
            await until(lambda: has_keeper(engine))
            await cluster.add_gateway()
            await cluster.ready(1)
            uncached, values = await ask(cluster)
            num_prompt = values["usage"]["prompt_tokens"]  # type: ignore[index]
            await until_known(cluster, num_prompt // PAGE)
            await end_workers(cluster)
        async with keeper(config, cluster.registry) as kept:
            _, fresh = await add_worker(cluster, kept)
            await until(lambda: has_keeper(fresh))
            await cluster.ready(1)
            assert (await ask(cluster))[0] == uncached
            assert fresh.stats().cached_tokens.volume >= 0.95 * num_prompt


async def test_pages_of_another_nodes_volume_come_through_its_keeper(tmp_path: Path, sockets: Path) -> None:
    here = config_with(tmp_path / "here", sockets / "here")
    there = config_with(tmp_path / "there", sockets / "there")
    async with (
        gateway_over(here) as cluster,
        keeper(there, cluster.registry, node="elsewhere") as far,
        keeper(here, cluster.registry) as near,
    ):
        _, engine = await add_worker(cluster, far)
        await until(lambda: has_keeper(engine))
        await cluster.add_gateway()
        await cluster.ready(1)
        uncached, values = await ask(cluster)
        num_prompt = values["usage"]["prompt_tokens"]  # type: ignore[index]
        await until_known(cluster, num_prompt // PAGE)
        await end_workers(cluster)
        _, fresh = await add_worker(cluster, near)
        await until(lambda: has_keeper(fresh))
        await cluster.ready(1)
        again, _ = await ask(cluster)
        assert again == uncached
        assert fresh.stats().cached_tokens.volume >= 0.95 * num_prompt
        assert near.keeper.stats.remote_loads.get("ok", 0) >= num_prompt // PAGE - 1


async def test_what_costs_less_to_compute_is_not_loaded(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_with(tmp_path / "volume", sockets)
    async with gateway_over(config) as cluster, keeper(config, cluster.registry) as kept:
        _, engine = await add_worker(cluster, kept)
        await until(lambda: has_keeper(engine))
        gateway = await cluster.add_gateway()
        await cluster.ready(1)
        _, values = await ask(cluster)
        num_prompt = values["usage"]["prompt_tokens"]  # type: ignore[index]
        await until_known(cluster, num_prompt // PAGE)
        await end_workers(cluster)
        (name,) = gateway.keeper_volumes.costs()
        slow = {name: gateway.keeper_volumes.costs()[name].__class__(frozenset(), 10_000.0, 0.0)}
        dispatcher = gateway.app.openai._dispatcher
        monkeypatch.setattr(dispatcher, "_router", dataclasses.replace(dispatcher._router, volumes=lambda pool: slow))
        _, fresh = await add_worker(cluster, kept)
        await until(lambda: has_keeper(fresh))
        await cluster.ready(1)
        await ask(cluster)
        assert fresh.stats().cached_tokens.volume == 0
        assert fresh.stats().prompt_tokens.local_compute == num_prompt
        assert cluster.metric("kvferry_skipped_volume_loads_total") == 1


class Load:
    """Clients that ask in turn for prompts that only the volume can hold all of, and for new ones."""

    NUM_PROMPTS = 8
    NUM_CLIENTS = 3

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._texts: dict[int, str] = {}
        self.num_answered = 0

    async def begin(self) -> None:
        for i in range(self.NUM_PROMPTS):
            self._texts[i], _ = await ask(self._cluster, self._prompt(i))

    async def some_more(self) -> None:
        """Requests were begun and answered from now on."""
        before = self.num_answered
        await until(lambda: self.num_answered >= before + 4 * self.NUM_CLIENTS)

    async def run(self, client: int) -> None:
        number = client
        while True:
            text, _ = await ask(self._cluster, self._prompt(number % self.NUM_PROMPTS))
            assert text == self._texts[number % self.NUM_PROMPTS]
            await ask(self._cluster, self._prompt(1_000_000 * (client + 1) + number))
            self.num_answered += 2
            number += self.NUM_CLIENTS

    @staticmethod
    def _prompt(number: int) -> str:
        return " ".join(f"{number}word{i}" for i in range(100))


async def test_a_volume_that_hangs_fills_or_disappears_under_load_fails_nobody(
    tmp_path: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And metrics say so while it lasts, and the volume is of use again afterwards, in the same keeper."""
    monkeypatch.setattr(volume_io, "BREAKER_RETRY_S", 0.2)
    config = config_with(tmp_path / "volume", sockets, io_timeout_s=0.3)
    config = config.model_copy(update={"sim": {**config.sim, "num_pages": 64, "cpu_pages": 64}})
    io = SwitchableIo()
    async with gateway_over(config) as cluster:
        host = KeeperHost(config, MemoryMembership(cluster.registry), node="here")
        host._volumes[0]._files.io = io
        await host.start()
        try:
            workers = [await add_worker(cluster, host) for _ in range(2)]
            await until(lambda: all(has_keeper(engine) for _, engine in workers))
            gateway = await cluster.add_gateway()
            await cluster.ready(2)
            load = Load(cluster)
            await load.begin()
            (volume_id,) = host.keeper.volume_ids

            def shown(name: str) -> float:
                return cluster.metric(f'kvferry_volume_{name}{{keeper="{host.keeper_id}",volume="{volume_id}"}}')

            def loaded() -> int:
                return sum(engine.stats().cached_tokens.volume for _, engine in workers)

            async def is_of_use() -> None:
                before = loaded()
                await until(lambda: loaded() > before, what="pages loaded from the volume")
                await until(lambda: shown("readable") == shown("writable") == 1, what="metrics of a volume of use")

            async with beside(*(load.run(client) for client in range(load.NUM_CLIENTS))):
                await until(lambda: bool(gateway.keeper_volumes.states()))
                await is_of_use()

                hanging = Fault(until=threading.Event())
                io.operation_to_fault = {Operation.READ: hanging, Operation.WRITE: hanging}
                await until(lambda: shown("readable") == shown("writable") == 0, what="metrics of a volume that hangs")
                await load.some_more()
                io.operation_to_fault = {}
                hanging.until.set()
                await until(lambda: shown("readable") == 1, what="the volume that hung")
                await load.some_more()
                await is_of_use()
                num_trips = shown("breaker_trips_total")
                assert num_trips >= 2

                io.operation_to_fault = {Operation.WRITE: Fault(errno.ENOSPC)}
                await until(lambda: shown("writable") == 0, what="metrics of a full drive")
                await load.some_more()
                assert shown("readable") == 1
                io.operation_to_fault = {}
                await until(lambda: shown("writable") == 1, what="the drive that was full")
                await is_of_use()

                (tmp_path / "volume").rename(tmp_path / "unmounted")
                await until(lambda: shown("readable") == 0, what="metrics of a volume that is gone")
                await load.some_more()
                (tmp_path / "unmounted").rename(tmp_path / "volume")
                await until(lambda: shown("readable") == 1, what="the volume that was gone")
                await load.some_more()
                await is_of_use()
                assert shown("breaker_trips_total") > num_trips
        finally:
            await host.stop()
        for volume in host._volumes:
            volume.check()


async def test_a_pools_pages_lie_on_its_own_volumes_and_are_loaded_by_its_engines_only(
    tmp_path: Path, sockets: Path
) -> None:
    role: dict[str, dict[str, Any]] = {"prefill": {"replicas": 0}, "decode": {"replicas": 1}}
    ranks = {"engine": {"tensor_parallel_size": 2}}
    plain = config_with(tmp_path / "common", sockets).model_dump(mode="json")
    plain["tier"]["volumes"].append({"path": str(tmp_path / "own"), "capacity_gib": 0.1, "pool": "own"})
    plain["pools"] = {
        "own": {**role, "served_name": "m-own"},
        "shared": {**role, "served_name": "m-shared"},
        "wide": {name: {**each, **ranks} for name, each in role.items()} | {"served_name": "m-wide"},
    }
    config = configuration.parse(plain)

    def chunks_on(name: str) -> int:
        return len(list(list_chunks(tmp_path / name)))

    async with gateway_over(config) as cluster, keeper(config, cluster.registry) as kept:

        async def add_workers() -> None:
            for pool in ("", *config.pools):
                _, engine = await add_worker(cluster, kept, pool)
                if pool != "wide":
                    await until(lambda engine=engine: has_keeper(engine))  # type: ignore[misc]
            await until(lambda: len(cluster.gateway.readiness().members) == 4)  # type: ignore[union-attr]

        await cluster.add_gateway()
        gateway = cluster.gateway
        assert gateway is not None
        await add_workers()
        assert not has_keeper(cluster.workers[-1][1]), "pages of other ranks need a volume of their own"
        _, values = await ask(cluster, model="m-own")
        num_pages = values["usage"]["prompt_tokens"] // PAGE  # type: ignore[index]
        await until(lambda: chunks_on("own") >= num_pages)
        assert chunks_on("common") == 0
        await until(lambda: any(holder.tier.value == "volume" for holder in gateway.residency.index.holders()))
        # All engines forget: what is left lies on the volume of the pool.
        await end_workers(cluster)
        await add_workers()
        by_pool = {host.member.pool: engine for host, engine in cluster.workers}
        await ask(cluster)
        await ask(cluster, model="m-shared")
        await ask(cluster, model="m-wide")
        assert [by_pool[pool].stats().cached_tokens.volume for pool in ("", "wide")] == [0, 0]
        await ask(cluster, model="m-own")
        assert by_pool["own"].stats().cached_tokens.volume >= 0.95 * num_pages * PAGE
        # A pool that has no volume of its own, and as many ranks, shares those of the default pool.
        await until(lambda: chunks_on("common") >= num_pages)
        assert set(gateway.keeper_volumes.costs("own")) != set(gateway.keeper_volumes.costs())


async def test_models_that_share_a_volume_find_none_of_each_others_pages(tmp_path: Path, sockets: Path) -> None:
    """Two of the same folder, one of them with a volume of its own: on gateways by route key, on keepers by chunk."""
    role = {"prefill": {"replicas": 0}, "decode": {"replicas": 1}}
    plain = config_with(tmp_path / "common", sockets).model_dump(mode="json")
    plain["tier"]["volumes"].append({"path": str(tmp_path / "own"), "capacity_gib": 0.1, "pool": "own"})
    plain["models"] = [
        {"name": "own", "model": {"path": MODEL}, **role},
        {"name": "twin", "model": {"path": MODEL}, **role},
    ]
    config = configuration.parse(plain)

    def chunks_on(name: str) -> int:
        return len(list(list_chunks(tmp_path / name)))

    async with gateway_over(config) as cluster, keeper(config.of_model("twin"), cluster.registry) as kept:

        async def add_workers() -> dict[str, SimEngine]:
            for name in ("", "own", "twin"):
                of_model = config.of_model(name)
                engine = build_engine(
                    of_model, MemberKind.DECODE, MODEL, keeper_socket=kept.member.socket_path, pool=name
                )
                assert isinstance(engine, SimEngine)
                member_pool = config.entry(name).pool if name else ""
                membership = MemoryMembership(cluster.registry)
                host = WorkerHost(of_model, MemberKind.DECODE, engine, membership, name, member_pool)
                await host.start()
                cluster.workers.append((host, engine))
                await until(lambda engine=engine: has_keeper(engine))  # type: ignore[misc]
            await until(lambda: len(cluster.gateway.readiness().members) == 3)  # type: ignore[union-attr]
            return {name: engine for name, (_, engine) in zip(("", "own", "twin"), cluster.workers, strict=True)}

        await cluster.add_gateway()
        gateway = cluster.gateway
        assert gateway is not None
        await add_workers()
        _, values = await ask(cluster)
        num_pages = values["usage"]["prompt_tokens"] // PAGE  # type: ignore[index]
        await until(lambda: chunks_on("common") >= num_pages)
        await until(lambda: any(holder.tier.value == "volume" for holder in gateway.residency.index.holders()))
        await end_workers(cluster)
        engines = await add_workers()
        on_common = chunks_on("common")
        await ask(cluster, model="twin")
        await ask(cluster, model="own")
        assert [engines[name].stats().cached_tokens.volume for name in ("twin", "own")] == [0, 0]
        # The twin's chunks lie beside the default model's, of the same tokens and layout.
        await until(lambda: chunks_on("common") >= on_common + num_pages)
        await until(lambda: chunks_on("own") >= num_pages)
        await end_workers(cluster)
        engines = await add_workers()
        for name in ("twin", "own"):
            await ask(cluster, model=name)
            assert engines[name].stats().cached_tokens.volume >= 0.95 * num_pages * PAGE, "its own are found"
        assert engines[""].stats().cached_tokens.volume == 0
