"""The life of a worker: start, registration, drain, and leaving when its engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from kvferry import __version__
from kvferry.config import ClusterConfig
from kvferry.engine.base import Engine
from kvferry.engine.hang_detector import HangDetector
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.errors import EngineDead, KvferryError
from kvferry.link.served_model import identity
from kvferry.membership.base import Member, MemberId, MemberKind, Membership, Registration
from kvferry.observability.exposition import SpanCounts
from kvferry.observability.metrics_listener import MetricsListener
from kvferry.observability.tracing import Tracing, start_tracing
from kvferry.pages.exchange import exchange_digest
from kvferry.tenancy.terms import CPU_TIER, DEVICE_TIER
from kvferry.util import satellites
from kvferry.util.addresses import POD_UID_VARIABLE, join_host_port
from kvferry.util.shared_memory import record_shared_memory
from kvferry.worker.engine_terms import EngineTerms
from kvferry.worker.metrics import RequestInstrumentation, WorkerMetrics
from kvferry.worker.residency_publisher import ResidencyPublisher
from kvferry.worker.server import HEARTBEAT_S, WorkerServer
from kvferry.worker.turns import Turns

log = logging.getLogger(__name__)

HEALTH_PERIOD_S = 0.5


def build_engine(
    config: ClusterConfig,
    kind: MemberKind,
    model_folder: str,
    *,
    keeper_socket: str = "",
    pool: str = "",
    argument_keys: Mapping[str, str] | None = None,
) -> Engine:
    """`keeper_socket` is empty without a keeper. `argument_keys` are the configuration's own by default."""
    engine = config.engine_of(kind.value, pool)
    volume_pool = config.volumes_of(pool)
    if volume_pool is None:
        keeper_socket = ""
    if engine.kind == "sim":
        simulated: Engine = satellites.simulator().build_engine(
            config, engine, model_folder, keeper_socket=keeper_socket, volume_pool=volume_pool or ""
        )
        return simulated
    return VllmEngine(
        model_folder,
        config.model,
        engine,
        producer=kind is MemberKind.PREFILL,
        tier=config.tier,
        keeper_socket=keeper_socket,
        volume_pool=volume_pool or "",
        has_tenants=config.gateway.tenants_in_etcd,
        adapters=config.adapters,
        argument_keys=config.argument_keys(kind.value, pool) if argument_keys is None else argument_keys,
    )


def build_turns(config: ClusterConfig, kind: MemberKind, pool: str = "") -> Turns | None:
    """Return None where tenants have no shares."""
    if not config.gateway.tenants_in_etcd:
        return None
    return Turns(None if kind is MemberKind.PREFILL else config.engine_of(kind.value, pool).max_num_seqs)


class WorkerHost:
    """Owns a worker's engine, server and registration. `start` it once."""

    def __init__(
        self,
        config: ClusterConfig,
        kind: MemberKind,
        engine: Engine,
        membership: Membership,
        pool: str = "",
        member_pool: str | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """`member_pool` is what members and requests call `pool`, where that is another name."""
        self._config = config
        self._pool = pool if member_pool is None else member_pool
        self._kind = kind
        self._engine = engine
        self._membership = membership
        self._registration: Registration | None = None
        self._health_task: asyncio.Task[None] | None = None
        role = f"{kind.value}-{pool}" if pool else kind.value
        self.worker_id = MemberId(f"{role}-{secrets.token_hex(4)}")
        self.residency = ResidencyPublisher(engine, lambda: self.server.sessions)
        self._tracing: Tracing | None = None
        self.metrics = WorkerMetrics(
            engine,
            lambda: self.server,
            worker_id=self.worker_id,
            role=kind.value,
            read_span_counts=self._span_counts,
        )
        self.server = WorkerServer(
            engine,
            worker_id=self.worker_id,
            role=kind.value,
            host=config.worker.host,
            max_requests=config.worker.max_requests,
            heartbeat_s=heartbeat_s,
            tls=config.worker.tls,
            turns=build_turns(config, kind, pool),
            pool=self._pool,
            has_pools=bool(config.pools),
            instrumentation=RequestInstrumentation(kind.value, self.metrics, lambda: self._tracing),
            on_snapshot_wanted=self.residency.send_snapshot,
        )
        self._listener = MetricsListener(config.metrics, config.metrics.worker_port, self.metrics.render)
        self._terms: EngineTerms | None = None

    @property
    def member(self) -> Member:
        info = self._engine.info
        host = self._config.worker.host
        return Member(
            kind=self._kind,
            member_id=self.worker_id,
            address=join_host_port(host, self.server.port),
            link_address=join_host_port(host, self.server.frame_port),
            model=info.model,
            version=__version__,
            node=socket.gethostname(),
            pod_uid=os.environ.get(POD_UID_VARIABLE, ""),
            pid=os.getpid(),
            engine_id=info.engine_id,
            block_size=info.block_size,
            page_bytes=info.page_bytes,
            kv_cache_dtype=info.kv_cache_dtype,
            device=info.device,
            without_tiers=info.without_tiers,
            pool=self._pool,
            exchange=info.exchange,
            exchange_digest=exchange_digest(info.exchange),
            metrics_address=self._listener.address,
            started_unix_s=time.time(),
        )

    async def start(self) -> None:
        await self._engine.start()
        self.server.identity = await asyncio.to_thread(identity, self._config, self._engine.info.model)
        if run_dir := os.environ.get("KVFERRY_RUN_DIR"):
            record_shared_memory(Path(run_dir), self.worker_id, os.getpid())
        # After the engine, which may fork: this starts a thread.
        self._tracing = start_tracing(self._config.tracing, service=self._kind.value, instance=self.worker_id)
        self.residency.start()
        await self.server.start()
        await self._listener.start()
        if self._config.gateway.tenants_in_etcd:  # before requests come
            self._terms = self._make_terms()
            self._terms.start()
        self._registration = await self._membership.register(self.member)
        self._health_task = asyncio.create_task(self._watch_health())
        log.info("%s serves on %s", self.worker_id, self.member.address)

    async def check_health(self) -> None:
        await self._engine.check_health()
        if self.server.died.is_set():
            raise EngineDead(self.server.why_died or "the engine failed a request as dead")

    async def drain(self) -> bool:
        """True when all requests finished in time."""
        # First, because links notify gateways at once and the registry may be slow.
        self.server.refuse_new()
        if self._registration is not None:
            await self._registration.revoke()
        return await self.server.drain(self._config.worker.drain_timeout_s)

    async def stop(self) -> None:
        """Idempotent; also after a failed start."""
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        if self._registration is not None:
            await self._registration.revoke()
        if self._terms is not None:
            await self._terms.close()
        await self.server.stop()
        await self.residency.stop()
        await self._listener.stop()
        await self._engine.stop()
        if self._tracing is not None:
            await self._tracing.close()
        await self._membership.close()

    def _make_terms(self) -> EngineTerms:
        info = self._engine.info
        return EngineTerms(
            self._membership.records,
            role=self._kind.value,
            worker_id=self.worker_id,
            capacities={
                DEVICE_TIER: info.pool_bytes or info.num_pages * info.page_bytes,
                CPU_TIER: info.num_cpu_pages * info.page_bytes,
            },
            prompt_tokens=self.server.prompt_tokens,
            apply=self._engine.set_terms,
        )

    def _span_counts(self) -> SpanCounts:
        return self._tracing.counts if self._tracing is not None else SpanCounts()

    async def _watch_health(self) -> None:
        """Leave when the engine dies or hangs, before the lease ends.

        Gateways and Serve's health check notice a hung process.
        """
        timeout_s = self._config.worker.hang_timeout_s
        hang_detector = HangDetector(timeout_s)
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self.check_health()
                if hang_detector.is_hung(loop.time(), self.server.progress(), busy=self.server.is_busy):
                    raise EngineDead(f"the engine is hung: requests wait and no step finished for {timeout_s:g} s")
            except EngineDead as error:
                log.error("%s leaves: %s", self.worker_id, error.message)
                self.server.engine_died(error.message)
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_PERIOD_S):
                    await self.server.died.wait()
        self.server.refuse_new()
        if self._registration is not None:
            try:
                async with asyncio.timeout(2.0):
                    await self._registration.revoke()
            except (TimeoutError, KvferryError):
                log.warning("%s could not deregister; its lease ends it", self.worker_id)
