"""A live cluster in one process: real gateways, workers, links and HTTP, tenants in a registry.

Engines are simulated, or vLLM in processes of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvferry import config as configuration
from kvferry import model_folder
from kvferry.config import ClusterConfig
from kvferry.engine.base import Engine, Renderer
from kvferry.gateway.lifecycle import GatewayHost, build_renderer
from kvferry.membership.base import WORKER_KINDS
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin

MODEL = "sim-model"
TOKENS_PER_S = 10_000  # of a prefill engine
SAMPLE_S = 0.01
START_TIMEOUT_S = 120.0  # a real renderer takes 10 s of CPU time


def config_of(
    speed: float = 1.0,
    *,
    step_ms: float = 1.0,
    num_pages: int = 4096,
    max_requests: int = 4096,
    max_num_seqs: int = 64,
    has_tenants: bool = True,
) -> ClusterConfig:
    """Return two prefill and two decode workers of `num_pages` each; `max_requests` is each gateway's."""
    return configuration.parse(
        {
            "model": {"path": MODEL},
            "engine": {"kind": "sim", "block_size": 16, "max_num_seqs": max_num_seqs},
            "prefill": {"replicas": 2},
            "decode": {"replicas": 2},
            "worker": {"max_requests": 2048},
            "sim": {"step_ms": step_ms, "num_pages": num_pages, "prefill_tokens_per_s": TOKENS_PER_S * speed},
            "gateway": {
                "http_port": 0,
                "grpc_port": None,
                "tenants_in_etcd": has_tenants,
                "max_requests": max_requests,
            },
        }
    )


def real_config() -> ClusterConfig:
    """Return a prefill and a decode worker of the default model on the CPU."""
    return configuration.parse(
        {
            "model": {"path": str(model_folder.resolve("default")), "max_model_len": 2048},
            "engine": {"kind": "vllm", "threads": 1, "max_num_batched_tokens": 256},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1},
            "gateway": {"http_port": 0, "grpc_port": None, "tenants_in_etcd": True},
        }
    )


@dataclass
class Cluster:
    registry: MemoryRegistry
    model: str
    workers: list[tuple[WorkerHost, Engine]] = field(default_factory=list)
    gateways: list[GatewayHost] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admin = TenantAdmin(MemoryMembership(self.registry))

    def served_ms(self) -> dict[str, float]:
        """Return the work of all engines by tenant."""
        served: dict[str, float] = {}
        for host, _ in self.workers:
            for tenant, ms in host.server.served_ms().items():
                served[tenant] = served.get(tenant, 0.0) + ms
        return served

    async def idle_with_backlog(self, stop: asyncio.Event) -> float:
        """Return the part of the time in which an engine has nothing while prompts wait in its queue."""
        num_idle = num_samples = 0
        while not stop.is_set():
            for host, engine in self.workers:
                if host.server.stats().backlogs:
                    num_samples += 1
                    stats = engine.stats()
                    num_idle += not (stats.num_running or stats.num_waiting)
            await asyncio.sleep(SAMPLE_S)
        return num_idle / max(1, num_samples)


@asynccontextmanager
async def running(
    config: ClusterConfig,
    num_gateways: int,
    make_renderer: Callable[[ClusterConfig, str], Renderer] = build_renderer,
) -> AsyncIterator[Cluster]:
    """Start a cluster and yield it once all gateways are ready; `make_renderer` is called for each gateway."""
    cluster = Cluster(MemoryRegistry(), Path(config.model.path).name)
    try:
        for pool in ("", *config.pools):
            for kind in (each for each in WORKER_KINDS for _ in range(config.role_of(each.value, pool).replicas)):
                engine = build_engine(config, kind, config.model.path, pool=pool)
                host = WorkerHost(config, kind, engine, MemoryMembership(cluster.registry), pool)
                await host.start()
                cluster.workers.append((host, engine))
        for _ in range(num_gateways):
            gateway = GatewayHost(config, config.model.path, MemoryMembership(cluster.registry), make_renderer)
            cluster.gateways.append(gateway)
            await gateway.start()
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all(gateway.readiness().ready for gateway in cluster.gateways):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield cluster
    finally:
        for gateway in cluster.gateways:
            await gateway.stop()
        for host, _ in cluster.workers:
            await host.stop()
