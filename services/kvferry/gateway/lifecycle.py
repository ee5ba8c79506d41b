"""Life cycle of a gateway: listen at once, become ready, drain."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import uvicorn
from msgspec import structs

from kvferry import __version__
from kvferry.config import DEFAULT_POOL, ClusterConfig, ModelConfig, entry_of
from kvferry.engine.base import Renderer, RenderOutcomes
from kvferry.engine.fork_process import WALL_PER_CPU, ForkProcess, InheritedFile
from kvferry.engine.forks import ForkLimits
from kvferry.engine.image_chats import CPU_S, MAX_PREPARED_BYTES, ImageChats, ImageSettings, image_identity
from kvferry.engine.vllm.rendering.chat_template import read_chat_template
from kvferry.engine.vllm.rendering.renderer import VllmRenderer
from kvferry.errors import ConfigError, KvferryError
from kvferry.gateway.admission import OF_POOL, Admission, Readiness
from kvferry.gateway.bodies.chat_images import ChatImages
from kvferry.gateway.bodies.image_fetch import ImageFetcher
from kvferry.gateway.grpc.grpc_requests import Inference
from kvferry.gateway.grpc.grpc_server import GrpcEndpoint
from kvferry.gateway.http.asgi import HttpApp
from kvferry.gateway.http.openai_endpoint import OpenAI
from kvferry.gateway.http.tls_handshake import TlsHandshake
from kvferry.gateway.http.uvicorn_connection import HttpProtocol
from kvferry.gateway.identity.identification import Identification
from kvferry.gateway.identity.tenants import read_secret
from kvferry.gateway.intake import Intake
from kvferry.gateway.metrics import GatewayMetrics, ProofSample, Targets, VolumeSample, WorkerSample
from kvferry.gateway.models import AdapterNames, Models
from kvferry.gateway.timeouts import TokenTimeouts
from kvferry.gateway.tls import GatewayTls
from kvferry.gateway.usage.tenant_uses import TenantUses
from kvferry.gateway.usage.usage_log import UsageLog
from kvferry.link.served_model import identity
from kvferry.membership.base import WORKER_KINDS, Member, MemberId, MemberKind, Membership, Registration
from kvferry.model_folder import cache_folder
from kvferry.observability.exposition import SpanCounts
from kvferry.observability.metrics_listener import MetricsListener
from kvferry.observability.tracing import Tracing, start_tracing
from kvferry.proof.certificates import FOLDER, Certificates, EngineKind
from kvferry.proof.prover import PENDING, Prover
from kvferry.residency.index import ResidencyIndex
from kvferry.router.dispatch import Dispatcher
from kvferry.router.keeper_volumes import KeeperVolumes, follow_over, keeper_of
from kvferry.router.placement import why_unequal
from kvferry.router.placement_policy import Policy, PricedPolicy, RoundRobinPolicy
from kvferry.router.prices.pricing import VolumeCosts
from kvferry.router.residency_subscriber import ResidencySubscriber
from kvferry.router.usage import UsageExchange
from kvferry.router.worker_pool import WorkerPool
from kvferry.util import collector, satellites
from kvferry.util.addresses import join_host_port, reachable_host
from kvferry.util.http_server import HttpServer
from kvferry.util.log_limit import limit_log

log = logging.getLogger(__name__)

# GIL switch interval. Each write to a socket releases the GIL, and a thread that reads or renders a long body then
# holds it for one interval: 64 intervals per turn of the loop with 64 streams. Python's default is 5 ms.
SWITCH_INTERVAL_S = 0.00005

# libuv accepts one connection of a listening socket in each turn of the loop, and a turn takes milliseconds while
# hundreds of streams are written: of 256 clients that came at once the last waited 0.8 s to be read. So the socket is
# registered this many times.
ACCEPTS_PER_TURN = 32
IMAGE_CACHE_BYTES = 128 << 20  # prepared images that are kept, each for requests of the same tenant and salt

MAX_NAMED = 16  # workers in each list of /readyz


# Clients cause what they say: a line per bad request would fill a disk.
_REQUEST_LOGGERS = (
    "asyncio", "grpc._cython.cygrpc", "uvicorn.error", "kvferry.gateway.http.asgi", "kvferry.gateway.grpc.grpc_server",
    "kvferry.gateway.http.openai_endpoint", "kvferry.router.dispatch",
)  # fmt: skip


def _replicas(config: ClusterConfig) -> dict[tuple[str, MemberKind], int]:
    of_pools = {
        (pool, kind): config.role_of(kind.value, pool).replicas for pool in ("", *config.pools) for kind in WORKER_KINDS
    }
    return of_pools | {
        (entry.pool, kind): getattr(entry, kind.value).replicas for entry in config.models for kind in WORKER_KINDS
    }


def _pools(config: ClusterConfig) -> list[str]:
    default = [""] if config.serves_default else []
    return [*default, *config.pools, *(entry.pool for entry in config.models)]


def _policy(config: ClusterConfig, index: ResidencyIndex) -> Policy:
    return PricedPolicy(index) if config.gateway.placement == "priced" else RoundRobinPolicy()


def build_renderer(config: ClusterConfig, model_folder: str) -> Renderer:
    """Return the renderer of `config.engine.kind`, in seconds: call it off the event loop."""
    if config.engine.kind == "sim":
        simulated: Renderer = satellites.simulator().build_renderer(config)
        return simulated
    model, template = _with_kept_template(_of_engines(config))
    images = _image_chats(config, model_folder, model, template)
    try:
        return VllmRenderer(model_folder, config.served_name, model, images)
    except ConfigError as error:
        # The message names a copy of the template, whose path tells an operator nothing.
        message = error.message.replace(str(model.chat_template), str(config.model.chat_template))
        raise ConfigError(message, param=error.param) from None


def _with_kept_template(model: ModelConfig) -> tuple[ModelConfig, InheritedFile | None]:
    # The image process may start again after the file has changed: texts and images would have two templates.
    text = read_chat_template(model)
    if text is None:
        return model, None
    kept = InheritedFile(text.encode())
    return model.model_copy(update={"chat_template": kept.path}), kept


def _of_engines(config: ClusterConfig) -> ModelConfig:
    # Features of images are of the engines' dtype.
    return config.model.model_copy(update={"dtype": config.model_dtype})


def _image_chats(
    config: ClusterConfig, model_folder: str, model: ModelConfig, template: InheritedFile | None
) -> ImageChats | None:
    images = config.gateway.images
    if not images.max_per_request:
        return None
    settings = ImageSettings(max_pixels=images.max_pixels, max_prepared_bytes=MAX_PREPARED_BYTES)
    command = [
        *(sys.executable, "-m", "kvferry.engine.vllm.rendering.image_process"),
        *("--model-folder", model_folder),
        *("--served-name", config.served_name),
        *("--model", model.model_dump_json()),
        *("--settings", msgspec.json.encode(settings).decode()),
    ]
    limits = ForkLimits(cpu_s=CPU_S, wall_s=CPU_S * WALL_PER_CPU, memory_bytes=images.memory_mib << 20)
    return ImageChats(
        ForkProcess(command, limits, "images cannot be prepared now", [] if template is None else [template]),
        image_identity(model_folder, config.model_dtype),
        num_processes=images.processes,
        max_prepared_bytes=MAX_PREPARED_BYTES,
        cache_bytes=IMAGE_CACHE_BYTES,
    )


def _http_server(app: HttpApp) -> HttpServer:
    return HttpServer(
        uvicorn.Config(
            app,
            http=HttpProtocol if app.tls_context is None else TlsHandshake,
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,  # the client's address is used nowhere
            timeout_keep_alive=75,
        )
    )


class GatewayHost:
    def __init__(
        self,
        config: ClusterConfig,
        model_folder: str,
        membership: Membership,
        make_renderer: Callable[[ClusterConfig, str], Renderer] = build_renderer,
    ) -> None:
        """Raises ConfigError for keys or certificates that cannot be used."""
        self._config, self._model_folder, self._membership = config, model_folder, membership
        self._registration: Registration | None = None
        self._registering: asyncio.Task[None] | None = None
        self.gateway_id, self._started_unix_s = MemberId(f"gateway-{secrets.token_hex(4)}"), time.time()
        self.port = 0
        self._num_expected = _replicas(config)
        self.identification = Identification(config.gateway, membership.records, self._note_readiness)
        self._usage_log = self._make_usage_log()
        self.metrics = self._make_metrics()
        self._tracing: Tracing | None = None
        self._listener = MetricsListener(config.metrics, config.metrics.gateway_port, self._render_metrics)
        self.residency = ResidencySubscriber(ResidencyIndex())
        self.policy = _policy(config, self.residency.index)
        self._models = self._make_models(make_renderer)
        self.worker_pool = WorkerPool(
            membership,
            self.gateway_id,
            config.worker,
            identity_of=self._models.identity_of,
            max_queued_requests=config.gateway.max_queued_requests,
            on_up=self.residency.linked,
            on_down=self.residency.gone,
            on_residency=self.residency.received,
            on_gone=self.policy.forget,
            on_change=self._note_workers,
        )
        self.prover = self._make_prover()
        self.keeper_volumes = KeeperVolumes(membership, self.residency.index, follow_over(config.worker.tls))
        gateway, models, metrics = config.gateway, self._models, self.metrics
        adapters = AdapterNames(models, config.adapters)
        placing = (self.worker_pool, self.policy, metrics, gateway)
        self._dispatcher = Dispatcher(*placing, volumes=self._volumes_of, may_transfer=self._may_transfer)
        self.admission = Admission(
            *(gateway, metrics, self.readiness),
            by_tenant=self.identification.requests,
            limits=(limits := self.identification.limits),
            read_tracing=lambda: self._tracing,
        )
        self._usage = UsageExchange(self.worker_pool, limits) if limits is not None else None
        targets = Targets(membership, scheme="https" if config.metrics.tls.enabled else "http").read
        self._fetcher = ImageFetcher(gateway.images) if gateway.images.allowed_hosts else None
        self._tls = tls = GatewayTls(gateway.tls) if gateway.tls.enabled else None
        timeouts = TokenTimeouts(gateway.first_token_timeout_s, gateway.inter_token_timeout_s)
        images = ChatImages(gateway.images, self._fetcher)
        intake = Intake(self._dispatcher, metrics, models, adapters, timeouts, images)
        both = (metrics, self.admission, self.readiness, self.identification.access)
        openai, tls_context = OpenAI(intake, self._dispatcher), tls.http_context() if tls is not None else None
        self.app = HttpApp(gateway, models, adapters, *both, targets, openai, tls_context)
        self.grpc = GrpcEndpoint(gateway, models, *both, self.app.unread_answers, Inference(intake))
        self._readiness_changed = asyncio.Event()
        self._notifier: asyncio.Task[None] | None = None
        self._server = _http_server(self.app)

    async def start(self) -> None:
        """Listen, load the renderer, and return; workers may still be missing."""
        collector.collect_rarely()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        for name in _REQUEST_LOGGERS:
            limit_log(logging.getLogger(name))
        gateway = self._config.gateway
        # Gateways of one node share the port, also an old and a new one; the kernel spreads connections over them.
        listener = socket.create_server(
            (gateway.host, gateway.http_port), backlog=2048, reuse_port=gateway.http_port != 0
        )
        # Accepted sockets inherit it. Without it a chunk waits for the client's delayed acknowledgement, about 40 ms;
        # asyncio sets it only where the socket names its protocol, which create_server leaves open.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        listeners = [listener, *(listener.dup() for _ in range(ACCEPTS_PER_TURN - 1))]
        self._tracing = start_tracing(self._config.tracing, service=MemberKind.GATEWAY.value, instance=self.gateway_id)
        await self._server.start(listeners)
        await self._listener.start()
        if gateway.grpc_port is not None:
            await self.grpc.start(self._tls.grpc_credentials() if self._tls is not None else None)
            self._notifier = asyncio.create_task(self._notify_readiness())
        self.identification.start()
        if self._usage_log is not None:
            self._usage_log.start()
        # Before any link: a worker of another model must not get this gateway's tokens.
        await self._models.identify()
        self.worker_pool.start()
        if self._usage is not None:
            self._usage.start()
        self.keeper_volumes.start()
        await self._models.load()
        self.prover.start()
        self._note_readiness()
        self._registering = asyncio.create_task(self._register())
        log.info(
            "%s listens on %s:%d%s",
            self.gateway_id,
            gateway.host,
            self.port,
            f" and, for gRPC, on {gateway.host}:{self.grpc.port}" if self.grpc.port else "",
        )

    async def reconfigure(self, config: ClusterConfig) -> None:
        """Serve other models, names and counts of workers. All else stays as it was at the start."""
        self._config = self._config.with_models_of(config)
        self._num_expected = _replicas(config)
        self._models.apply(config)
        if self._registration is not None:
            await self._registration.update(self._member())

    def readiness(self) -> Readiness:
        waiting = self.identification.missing()
        knows_clients = not waiting
        if self._models.is_loaded:
            waiting += [f"renderer{OF_POOL}{label}" for label in self._models.missing()]
        else:
            waiting.append("renderer")
        for (pool, kind), num_expected in self._num_expected.items():
            missing = num_expected - len(self.worker_pool.usable(kind, pool))
            if missing > 0:
                what = f"{kind.value} worker" if num_expected == 1 else f"{missing} {kind.value} workers"
                waiting.append(f"{what}{OF_POOL}{entry_of(pool)}" if pool else what)
        return Readiness(
            ready=self._models.is_loaded
            and knows_clients
            and bool(self.worker_pool.usable(MemberKind.DECODE))
            and not (self.app.is_leaving or self.admission.draining),
            waiting_for=waiting,
            members=[link.member.member_id for kind in WORKER_KINDS for link in self.worker_pool.usable(kind)],
            left_out=[
                f"{link.member.member_id}: {link.why_incompatible}"
                for link in self.worker_pool.incompatible()[:MAX_NAMED]
            ],
            unpaired=[
                f"{worker.member_id} and {other.member_id} exchange no pages: {why_unequal(worker, other)}"
                for worker, other in itertools.islice(self.worker_pool.unpaired(), MAX_NAMED)
            ],
            unproven=list(itertools.islice(self._unproven(), MAX_NAMED)),
            pools={
                entry_of(pool) or DEFAULT_POOL: {
                    kind.value: len(self.worker_pool.usable(kind, pool)) for kind in WORKER_KINDS
                }
                for pool in _pools(self._config)
            },
        )

    async def drain(self) -> None:
        """Become unready, refuse new requests after `gateway.linger_s`, end others within `gateway.drain_timeout_s`.

        New connections go to gateways that share the port.
        """
        self.app.is_leaving = True
        self._note_readiness()
        await self._deregister()
        await asyncio.sleep(self._config.gateway.linger_s)
        self._server.drain()
        timeout_s = self._config.gateway.drain_timeout_s
        self.grpc.drain(timeout_s)
        self._refuse_new()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.admission.idle.wait()
                # Requests over HTTP end when their answers are written, which may be before they are read.
                await self.app.unread_answers.none_left.wait()

    async def stop(self) -> None:
        self._refuse_new()
        if self._notifier is not None:
            self._notifier.cancel()
            await asyncio.gather(self._notifier, return_exceptions=True)
        self._server.drain()
        await self.grpc.stop()
        await self.identification.close()
        if self._usage is not None:
            await self._usage.close()
        await self.prover.close()
        await self.worker_pool.close()
        await self.keeper_volumes.close()
        # Requests end with their workers' links; tasks that wait for a slow client would stay.
        await self._server.cancel_requests()
        await self._deregister()
        await self._models.close()
        if self._fetcher is not None:
            await self._fetcher.close()
        await self._listener.stop()
        await self._server.stop()
        if self._usage_log is not None:
            await self._usage_log.close()
        if self._tracing is not None:
            await self._tracing.close()
        await self._membership.close()

    def _refuse_new(self) -> None:
        self.admission.draining = True
        self._note_readiness()

    def _outcomes(self) -> tuple[RenderOutcomes, Mapping[str, int]]:
        return self._models.outcomes(), self._fetcher.outcomes if self._fetcher is not None else {}

    def _volumes_of(self, pool: str) -> Mapping[str, VolumeCosts]:
        return self.keeper_volumes.costs(self._models.volumes_of(pool))

    def _make_models(self, make_renderer: Callable[[ClusterConfig, str], Renderer]) -> Models:
        return Models(
            self._config,
            self._model_folder,
            make_renderer=make_renderer,
            make_identity=lambda config, folder: identity(config, folder),
            has_workers=lambda pool: bool(self.worker_pool.usable(MemberKind.DECODE, pool)),
            on_change=self._note_models,
        )

    def _make_prover(self) -> Prover:
        file = self._config.gateway.salt_secret_file
        secret = read_secret(file) if file is not None else b""
        return Prover(
            self._membership.records,
            Certificates(cache_folder() / FOLDER, secret),
            self.gateway_id,
            usable=self.worker_pool.usable,
            is_wanted=lambda pool: self._models.proof_of(pool) != "off",
            read_tokens=self._models.tokens_of_text,
            longest=self._models.longest_prompt,
            on_change=self._note_readiness,
        )

    def _may_transfer(self, prefill: EngineKind, decode: EngineKind, pool: str, has_adapter: bool) -> bool:
        is_required = self._models.proof_of(pool) == "required"
        return not is_required or self.prover.is_proven(prefill, decode, has_adapter=has_adapter)

    def _unproven(self) -> Iterator[str]:
        for subject, result in self.prover.results():
            if result is None or not result.is_proven:
                yield f"{subject}: {PENDING if result is None else result.reason}"
        for link in self.worker_pool.usable(MemberKind.DECODE):
            if link.member.without_tiers:
                yield f"tiers of {link.member.member_id}: {link.member.without_tiers}"

    def _sample_proofs(self) -> Sequence[ProofSample]:
        found: dict[tuple[str, str], ProofSample] = {}
        for subject, result in self.prover.results():
            pool, way = entry_of(subject.decode.member.pool) or DEFAULT_POOL, subject.way.value
            known = found.get((pool, way), ProofSample(pool, way, is_proven=True, distance=None))
            is_proven = known.is_proven and result is not None and result.is_proven
            measured = (known.distance, result.distance if result is not None else None)
            distances = [each for each in measured if each is not None]
            found[pool, way] = ProofSample(pool, way, is_proven, max(distances, default=None))
        return list(found.values())

    def _make_usage_log(self) -> UsageLog | None:
        folder = self._config.gateway.usage_dir
        if folder is None:
            return None
        return UsageLog(folder, self.gateway_id, read_unfinished=lambda: self.admission.unfinished_uses())

    def _make_metrics(self) -> GatewayMetrics:
        directory = self.identification.directory
        usage_log = self._usage_log
        tenants = TenantUses(log=usage_log)
        if directory is not None:
            tenants = TenantUses(directory.names, directory.has, usage_log)
        return GatewayMetrics(
            self._sample_workers,
            self._sample_volumes,
            read_proofs=self._sample_proofs,
            tenants=tenants,
            read_models=lambda: self._models.ready(),
            is_ready=lambda: self.readiness().ready,
            read_num_queued=lambda: self._dispatcher.num_queued,
            read_span_counts=self._span_counts,
            read_outcomes=self._outcomes,
            read_admitted=lambda: (self.admission.num_in_flight, *self.admission.in_flight),
            read_num_unread_bytes=lambda: self.app.unread_answers.num_bytes,
            read_num_image_bytes=lambda: self.admission.image_bytes.num_taken,
        )

    def _note_models(self) -> None:
        self.worker_pool.models_changed()
        self._note_readiness()

    def _note_workers(self) -> None:
        self.prover.workers_changed()
        self._note_readiness()

    def _note_readiness(self) -> None:
        self._readiness_changed.set()

    async def _notify_readiness(self) -> None:
        while True:
            await self._readiness_changed.wait()
            self._readiness_changed.clear()
            self.grpc.notify_readiness()

    async def _deregister(self) -> None:
        if self._registering is not None:
            self._registering.cancel()
            await asyncio.gather(self._registering, return_exceptions=True)
        if self._registration is not None:
            await self._registration.revoke()

    async def _register(self) -> None:
        """Register for tools; the gateway serves in any case."""
        while self._registration is None:
            try:
                self._registration = await self._membership.register(self._member())
            except KvferryError as error:
                log.warning("%s cannot register yet: %s", self.gateway_id, error.message)
                await asyncio.sleep(2.0)

    def _member(self) -> Member:
        return Member(
            kind=MemberKind.GATEWAY,
            member_id=self.gateway_id,
            address=join_host_port(reachable_host(self._config.gateway.host), self.port),
            model=self._model_folder,
            version=__version__,
            node=socket.gethostname(),
            pid=os.getpid(),
            pools=self._models.pools,
            metrics_address=self._listener.address,
            started_unix_s=self._started_unix_s,
        )

    async def _render_metrics(self) -> bytes:
        return self.metrics.render()

    def _span_counts(self) -> SpanCounts:
        return self._tracing.counts if self._tracing is not None else SpanCounts()

    def _sample_workers(self) -> Sequence[WorkerSample]:
        unpaired = {worker.member_id for worker, _ in self.worker_pool.unpaired()}
        return [
            WorkerSample(
                worker_id=link.member.member_id,
                role=kind.value,
                connected=link.connected,
                is_unpaired=link.member.member_id in unpaired,
                num_running=link.stats.num_running,
                num_waiting=link.stats.num_waiting,
                num_pages_used=link.stats.num_pages_used,
                num_pages=link.stats.num_pages,
                prompt_tokens_by_source=structs.asdict(link.stats.prompt_tokens),
                cached_tokens_by_tier=link.stats.cached_tokens.by_tier(),
                transferred_bytes=link.stats.transferred_bytes,
                num_generated_tokens=link.stats.num_generated_tokens,
            )
            for kind in WORKER_KINDS
            for link in self.worker_pool.links(kind)
        ]

    def _sample_volumes(self) -> Sequence[VolumeSample]:
        return [VolumeSample(keeper_of(name), state) for name, state in sorted(self.keeper_volumes.states().items())]
