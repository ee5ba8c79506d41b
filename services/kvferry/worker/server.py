"""Serves one engine to gateways, with one session per gateway."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping

from kvferry import __version__, mutual_tls
from kvferry.config import TlsConfig
from kvferry.engine.base import Engine, EngineRequest, EngineStats
from kvferry.errors import KvferryError, Overloaded, TenantOverloaded, WorkerDraining
from kvferry.link import codec
from kvferry.link.engine_admission import FirstOutputs, ImageRoom
from kvferry.link.frame_server import FrameServer
from kvferry.link.gateway_session import GatewaySession, SessionTransport
from kvferry.link.grpc_server import GrpcServer
from kvferry.link.identity import POOLS, Identity, identity_of, why_incompatible
from kvferry.link.tenants import TenantMeter
from kvferry.membership.base import MemberKind
from kvferry.util.task_set import TaskSet
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker.metrics import RequestInstrumentation
from kvferry.worker.quarantine_relay import QuarantineRelay
from kvferry.worker.turns import OnEngine, TenantTimes, Turns

# Ended requests that `_retry_after_s` looks at.
_NUM_ENDS = 64
MAX_RETRY_AFTER_S = 60
TELLING_S = 3.0  # gateways tell of other workers once a second
# Factor on `max_requests`, up to which requests that lost another worker are accepted.
_RESUMED_SHARE = 2
_MAX_REFUSED = 256  # gateways that are remembered as refused

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0  # gateways give up a worker after 15 s of silence
_AT_ONCE = contextlib.nullcontext(OnEngine())


class WorkerServer:
    """Listens on `port` (gRPC, for tools) and on `frame_port` (links); with `tls`, clients need certificates.

    `on_snapshot_wanted` gets the session of a gateway that asks for all held pages.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        worker_id: str,
        role: str,
        host: str,
        max_requests: int,
        heartbeat_s: float = HEARTBEAT_S,
        tls: TlsConfig | None = None,
        identity: Identity | None = None,
        turns: Turns | None = None,
        pool: str = "",
        has_pools: bool = False,
        instrumentation: RequestInstrumentation | None = None,
        on_snapshot_wanted: Callable[[GatewaySession], None] = lambda session: None,
    ) -> None:
        """`has_pools`: the cluster has named ones, so gateways that do not know pools are refused."""
        self.identity = identity or Identity()
        is_metered = turns is not None and role == MemberKind.DECODE.value
        self.meter = TenantMeter() if is_metered else None
        self.image_room = ImageRoom()
        self.first_outputs = FirstOutputs()
        self._engine = engine
        self._turns = turns
        self._worker_id = worker_id
        self._pool = pool
        self._has_pools = has_pools
        self._role = role
        self._host = host
        self._max_requests = max_requests
        self._heartbeat_s = heartbeat_s
        self._tls = tls if tls is not None and tls.enabled else None
        self._grpc = GrpcServer(self.welcome)
        self._frames = FrameServer(self.attach, self.detach)
        self._sessions: set[GatewaySession] = set()
        self._ending = TaskSet()
        self._idle = asyncio.Event()
        self._idle.set()
        self._telling: dict[str, float] = {}  # gateways that tell of other workers, and when they last did
        self._num_outputs = 0
        self._num_ended = 0
        self._end_times_s: deque[float] = deque(maxlen=_NUM_ENDS)
        self._num_requests_before = 0
        self._on_trial: object = None  # the one suspect that may be on this worker
        self._quarantine = QuarantineRelay()
        self._refused_gateways: dict[str, None] = {}  # of another cluster, model or protocol; oldest first
        self.draining = False
        self.instrumentation = instrumentation or RequestInstrumentation(role)
        self.died = asyncio.Event()  # set once the engine is known to be dead
        self.why_died = ""
        self._on_snapshot_wanted = on_snapshot_wanted

    def __repr__(self) -> str:
        return (
            f"<WorkerServer {self._worker_id} port={self.port} frame_port={self.frame_port} "
            f"sessions={len(self._sessions)} requests={self.num_requests}{' draining' if self.draining else ''}>"
        )

    @property
    def port(self) -> int:
        """0 before `start`."""
        return self._grpc.port

    @property
    def frame_port(self) -> int:
        """0 before `start`."""
        return self._frames.port

    @property
    def num_requests(self) -> int:
        """Requests, and places reserved for requests."""
        return sum(session.num_requests for session in self._sessions)

    @property
    def is_busy(self) -> bool:
        """Whether the engine has requests."""
        return any(session.tasks for session in self._sessions)

    @property
    def is_full(self) -> bool:
        """Whether new requests are refused."""
        return self.num_requests >= self._max_requests or self._on_trial is not None

    @property
    def sessions(self) -> tuple[GatewaySession, ...]:
        return tuple(self._sessions)

    async def start(self) -> None:
        """Raises ConfigError for unusable TLS files."""
        await self._grpc.start(self._host, self._tls)
        await self._frames.start(self._host, mutual_tls.server_context(self._tls) if self._tls is not None else None)

    def refuse_new(self) -> None:
        """Also notifies every gateway."""
        self.draining = True
        for session in self._sessions:
            session.send_stats()

    async def drain(self, timeout_s: float) -> bool:
        """Return True when running requests finished in time."""
        self.refuse_new()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float = 1.0) -> None:
        """Idempotent."""
        # Each stops whatever happens to the other: a gRPC server that is left would outlive its event loop.
        try:
            await self._frames.stop(grace_s)
        finally:
            try:
                await self._grpc.stop(grace_s)
            finally:
                await self._ending.wait()

    def progress(self) -> Hashable:
        # Not what waits: requests that come to a hung engine are no progress.
        return (self._num_outputs, self._num_ended, self._engine_stats().num_steps)

    def engine_died(self, reason: str) -> None:
        """End every request with EngineDead. Idempotent."""
        if self.died.is_set():
            return
        self.why_died = reason
        self.died.set()
        for session in self._sessions:
            session.engine_died(reason)

    # Called by transports and sessions

    def attach(self, transport: SessionTransport, hello: pb.Hello) -> GatewaySession:
        session = GatewaySession(self, transport, hello, self._on_snapshot_wanted)
        self._sessions.add(session)
        self._quarantine.attach(session, asyncio.get_running_loop().time())
        return session

    def detach(self, session: GatewaySession) -> asyncio.Task[None]:
        """The session's requests count until they are gone."""

        async def end() -> None:
            try:
                await session.abort_all()
            finally:
                self._sessions.discard(session)
                self.requests_changed()

        session.end()
        self._quarantine.detach(session)
        return self._ending.spawn(end())

    def welcome(self, hello: pb.Hello | None = None) -> pb.Welcome:
        """`hello` is that of the gateway; a tool that asks says none."""
        info = self._engine.info
        refusal = ""
        if hello is not None:
            gateway = identity_of(hello)
            refusal = why_incompatible(self.identity, gateway)
            if not refusal and self._has_pools and POOLS not in gateway.features:
                # It would send requests of tenants with a pool to the workers of any.
                refusal = "this cluster has pools of workers, and that gateway is of a release that knows none"
            if refusal:
                # A refused gateway dials again and again.
                level = logging.DEBUG if hello.gateway_id in self._refused_gateways else logging.WARNING
                log.log(level, "gateway %s is refused: %s", hello.gateway_id, refusal)
                self._refused_gateways[hello.gateway_id] = None
                if len(self._refused_gateways) > _MAX_REFUSED:
                    del self._refused_gateways[next(iter(self._refused_gateways))]
            elif hello.version != __version__:
                log.info("gateway %s runs %s, this worker %s", hello.gateway_id, hello.version, __version__)
        return pb.Welcome(
            protocol=self.identity.protocol(),
            cluster=self.identity.cluster,
            served=self.identity.model.to_wire(),
            refusal=refusal,
            worker_id=self._worker_id,
            version=__version__,
            role=self._role,
            pool=self._pool,
            engine_id=info.engine_id,
            model=info.model,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            page_bytes=info.page_bytes,
            adapters=sorted(info.adapters),
            load=self.stats(),
        )

    def stats(self) -> pb.Load:
        return codec.stats_to_wire(self._engine_stats(), draining=self.draining, full=self.is_full)

    def refusal(self, tenant: str = "", *, is_resumed: bool = False, has_place: bool = False) -> KvferryError | None:
        if self.draining and not has_place:
            return WorkerDraining("a worker is draining")
        if self.died.is_set():
            # Not EngineDead: this request had no part in it, and is not to be counted among those that had.
            return WorkerDraining(f"a worker leaves: {self.why_died}")
        if self._on_trial is not None and not (has_place or is_resumed):
            return Overloaded("a worker has a request under which an engine was lost, and no other")
        # Answers that lost their worker are there already, and their clients have part of them.
        limit = _RESUMED_SHARE * self._max_requests if is_resumed else self._max_requests
        if not has_place and self.num_requests >= limit:
            return Overloaded(
                f"a worker has {self._max_requests} requests, its limit",
                retry_after_s=self._retry_after_s(),
            )
        if self._turns is None or not tenant or has_place or is_resumed:
            return None
        # So the places never run out for those who come later, whatever one tenant sends.
        room = self._max_requests - self.num_requests
        if room * 2 <= self._max_requests:
            num_held = sum(session.num_requests_of(tenant) for session in self._sessions)
            if num_held >= room:
                return TenantOverloaded(
                    f"a worker has {num_held} requests of this tenant, as many as places are left for others or more",
                    retry_after_s=self._retry_after_s(),
                )
        return None

    def requests_changed(self) -> None:
        num_requests = self.num_requests
        now_s = asyncio.get_running_loop().time()
        for _ in range(self._num_requests_before - num_requests):
            self._num_ended += 1
            self._end_times_s.append(now_s)
        had_room, has_room = self._num_requests_before < self._max_requests, num_requests < self._max_requests
        self._num_requests_before = num_requests
        if has_room and not had_room:
            self._tell_room()
        if num_requests:
            self._idle.clear()
        else:
            self._idle.set()

    def _tell_room(self) -> None:
        for session in self._sessions:
            if session.believes_full:
                session.believes_full = False
                session.send_stats()

    def turn(self, request: EngineRequest) -> contextlib.AbstractAsyncContextManager[OnEngine]:
        if self._turns is None:
            return _AT_ONCE
        turn = self._turns.turn(request)
        return turn if request.transfer_params is None else self._turn_or_decline(turn, request)

    @contextlib.asynccontextmanager
    async def _turn_or_decline(
        self, turn: contextlib.AbstractAsyncContextManager[OnEngine], request: EngineRequest
    ) -> AsyncIterator[OnEngine]:
        async with contextlib.AsyncExitStack() as stack:
            try:
                on_engine = await stack.enter_async_context(turn)
            except asyncio.CancelledError:
                # The engine never gets the request, so it tells nothing to the one that keeps its pages.
                self._ending.spawn(self._engine.decline(request))
                raise
            yield on_engine

    @property
    def tenant_times(self) -> Mapping[str, TenantTimes]:
        return {} if self._turns is None else self._turns.counts

    def served_ms(self) -> Mapping[str, float]:
        return {} if self._turns is None else self._turns.served_ms

    def prompt_tokens(self) -> Mapping[str, int]:
        return {} if self._turns is None else self._turns.prompt_tokens

    def elsewhere(self, message: pb.Elsewhere, source: GatewaySession) -> None:
        # All gateways see all workers: the same work must not count once for each of them.
        now_s = asyncio.get_running_loop().time()
        self._telling[source.gateway_id] = now_s
        self._telling = {each: told_s for each, told_s in self._telling.items() if now_s - told_s < TELLING_S}
        if self._turns is not None and source.gateway_id == min(self._telling):
            got_ms = {entry.tenant: entry.ms for entry in message.served if 0 <= entry.ms < math.inf}
            self._turns.elsewhere(got_ms, message.num_workers)

    def begin_trial(self, owner: object) -> bool:
        if self._on_trial not in (None, owner):
            return False
        self._on_trial = owner
        return True

    def end_trial(self, owner: object) -> None:
        if self._on_trial is not None and self._on_trial == owner:
            self._on_trial = None
            self._tell_room()

    def quarantine(self, message: pb.Downward, source: GatewaySession) -> None:
        self._quarantine.receive(message, source, asyncio.get_running_loop().time())

    def note_output(self) -> None:
        self._num_outputs += 1

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def heartbeat_s(self) -> float:
        return self._heartbeat_s

    def _engine_stats(self) -> EngineStats:
        try:
            stats = self._engine.stats()
        except KvferryError:
            return EngineStats()
        if self._turns is None or not (self._turns.num_waiting or self._turns.num_prompts):
            return stats
        tokens = stats.queued_prompt_tokens
        return dataclasses.replace(
            stats,
            num_waiting=stats.num_waiting + self._turns.num_waiting,
            num_prompts=self._turns.num_prompts,
            queued_prompt_tokens=None if tokens is None else tokens + self._turns.waiting_tokens,
            backlogs=self._turns.backlogs(),
        )

    def _retry_after_s(self) -> int:
        ends = self._end_times_s
        if len(ends) < 2:
            return 1
        span_s = asyncio.get_running_loop().time() - ends[0]
        seconds = span_s / len(ends) * (1 + self._engine_stats().num_waiting)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(seconds)))
