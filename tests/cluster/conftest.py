"""A whole cluster in one process: real gRPC, real HTTP, sim engines, membership in memory. Starts in milliseconds."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.engine.base import Renderer
from kvferry.gateway.lifecycle import GatewayHost, build_renderer
from kvferry.membership.base import WORKER_KINDS, MemberKind
from kvferry.router import request_run
from kvferry.router.dispatch import Dispatcher
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim import SimEngine
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import PATIENCE_S, until

MODEL = "sim-model"


@dataclass
class SimCluster:
    config: ClusterConfig
    registry: MemoryRegistry
    workers: list[tuple[WorkerHost, SimEngine]] = field(default_factory=list)
    gateway: GatewayHost | None = None  # the last one
    gateways: list[GatewayHost] = field(default_factory=list)
    heartbeat_s: float = 0.2

    @property
    def url(self) -> str:
        assert self.gateway is not None
        return f"http://127.0.0.1:{self.gateway.port}"

    @property
    def dispatcher(self) -> Dispatcher:
        """That of the last gateway."""
        assert self.gateway is not None
        return self.gateway.app.openai._dispatcher

    def engines(self, kind: MemberKind) -> list[SimEngine]:
        return [engine for host, engine in self.workers if host.member.kind is kind]

    def hosts(self, kind: MemberKind) -> list[WorkerHost]:
        return [host for host, _ in self.workers if host.member.kind is kind]

    def in_pool(self, pool: str, kind: MemberKind = MemberKind.DECODE) -> list[WorkerHost]:
        return [host for host in self.hosts(kind) if host.member.pool == pool]

    async def add_model_worker(self, kind: MemberKind, name: str) -> tuple[WorkerHost, SimEngine]:
        """As Serve does for an entry of `models`."""
        config, entry = self.config.of_model(name), self.config.entry(name)
        return await self.add_worker(kind, config, name, entry.pool, entry.model.path)

    async def add_worker(
        self,
        kind: MemberKind,
        config: ClusterConfig | None = None,
        pool: str = "",
        member_pool: str | None = None,
        folder: str = MODEL,
    ) -> tuple[WorkerHost, SimEngine]:
        config = config or self.config
        engine = build_engine(config, kind, folder, pool=pool)
        assert isinstance(engine, SimEngine)
        host = WorkerHost(config, kind, engine, MemoryMembership(self.registry), pool, member_pool, self.heartbeat_s)
        await host.start()
        self.workers.append((host, engine))
        return host, engine

    async def add_gateway(
        self, make_renderer: Callable[[ClusterConfig, str], Renderer] = build_renderer
    ) -> GatewayHost:
        self.gateway = GatewayHost(self.config, MODEL, MemoryMembership(self.registry), make_renderer)
        # A server of gRPC that is left to the collector can stop this process for good.
        self.gateways.append(self.gateway)
        await self.gateway.start()
        return self.gateway

    async def ready(self, num_workers: int | None = None) -> None:
        gateway = self.gateway
        assert gateway is not None
        wanted = len(self.workers) if num_workers is None else num_workers
        await until(lambda: len(gateway.readiness().members) == wanted, what=f"{wanted} workers attached")

    async def renders(self) -> None:
        """Workers may be there before a model of `models` is loaded, whose requests get a 503 until then."""
        gateway = self.gateway
        assert gateway is not None
        await until(lambda: not any(each.startswith("renderer") for each in gateway.readiness().waiting_for))

    async def until_quiet(self) -> None:
        """Every engine has given everything back: nothing runs, waits, is in use or is kept for somebody."""

        def busy() -> list[SimEngine]:
            return [
                engine
                for host, engine in self.workers
                if not host.server.died.is_set() and any((engine.num_offers, *_in_use(engine)))
            ]

        await until(lambda: not busy(), what="every engine is quiet")
        for _, engine in self.workers:
            engine.check()

    def metric(self, line: str) -> float:
        """The value of one series, written as in the exposition."""
        assert self.gateway is not None
        for row in self.gateway.metrics.render().decode().splitlines():
            name, _, value = row.rpartition(" ")
            if name == line:
                return float(value)
        raise AssertionError(f"no series {line}")

    async def stop(self) -> None:
        for gateway in self.gateways:
            await gateway.stop()
        for host, _ in self.workers:
            await host.stop()


def _in_use(engine: SimEngine) -> tuple[int, int, int]:
    load = engine.stats()
    return load.num_running, load.num_waiting, load.num_pages_used


StartCluster = Callable[..., Awaitable[SimCluster]]


@asynccontextmanager
async def running(
    prefill: int = 1,
    decode: int = 1,
    *,
    clock: Callable[[], float] = time.monotonic,
    heartbeat_s: float = 0.2,
    gateway: Mapping[str, object] = MappingProxyType({}),
    **values: object,
) -> AsyncIterator[SimCluster]:
    """`clock` ages the registry's leases; `values` are sections of the configuration."""
    config = configuration.parse(
        {
            "model": {"path": MODEL},
            "engine": {"kind": "sim", "block_size": 16},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "worker": {"drain_timeout_s": 5},
            "sim": {"step_ms": 1.0, "prefill_tokens_per_s": 200_000.0},
            **values,
            # In turns: every prompt is prefilled on one worker and decoded on another, however short.
            "gateway": {"http_port": 0, "grpc_port": 0, "placement": "round_robin", **gateway},
        }
    )
    cluster = SimCluster(config, MemoryRegistry(clock=clock), heartbeat_s=heartbeat_s)
    try:
        for pool in ("", *config.pools):
            for kind in WORKER_KINDS:
                for _ in range(config.role_of(kind.value, pool).replicas):
                    await cluster.add_worker(kind, pool=pool)
        for entry in config.models:
            for kind in WORKER_KINDS:
                for _ in range(config.of_model(entry.name).role_of(kind.value, entry.name).replicas):
                    await cluster.add_model_worker(kind, entry.name)
        await cluster.add_gateway()
        await cluster.ready()
        await cluster.renders()
        yield cluster
    finally:
        await cluster.stop()


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[SimCluster]:
    """One prefill worker, one decode worker, one gateway."""
    async with running() as cluster:
        yield cluster


@pytest.fixture
def short_worker_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that lost its decode worker waits less than a second for another one."""
    monkeypatch.setattr(request_run, "WORKER_WAIT_S", 0.3)


@pytest.fixture
def small_send_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel holds little of what clients do not read: left alone, buffers grow to megabytes."""
    create = socket.create_server

    def create_small(*arguments: Any, **options: Any) -> socket.socket:
        listener = create(*arguments, **options)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)  # accepted sockets inherit it
        return listener

    monkeypatch.setattr(socket, "create_server", create_small)


async def connect(cluster: SimCluster) -> socket.socket:
    """A connection to the gateway with a small receive buffer."""
    assert cluster.gateway is not None
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", cluster.gateway.port))
    return client


@pytest_asyncio.fixture
async def http(cluster: SimCluster) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"content-type": "application/json"}  # also of bodies that httpx does not make
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S, headers=headers) as client:
        yield client
