"""Metrics of a gateway's requests and routing, and of workers and volumes it sees."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.engine.base import RenderOutcomes
from kvferry.errors import UnavailableError
from kvferry.gateway.usage.tenant_uses import ModelUses, TenantUses
from kvferry.keeper.volume_state import VolumeState
from kvferry.membership.base import Member, Membership
from kvferry.observability.exposition import Exposition, Reading, SpanCounts, read_spans
from kvferry.observability.telemetry import (
    BODY_BYTES_IN_FLIGHT,
    CHOICES_IN_FLIGHT,
    ENDPOINTS,
    GATEWAY_SPANS,
    GENERATED_TOKENS,
    GRAMMAR_CHECKS,
    HINTED_REQUESTS,
    IMAGE_BYTES_IN_FLIGHT,
    IMAGE_CHATS,
    IMAGE_FETCHES,
    IMAGES,
    INTER_TOKEN,
    MODELS_SEEN,
    PROMPT_TOKENS,
    PROMPT_TOKENS_IN_FLIGHT,
    PROOFS_SEEN,
    QUEUED_REQUESTS,
    READY,
    REFUSAL_CODES,
    REQUEST_SECONDS,
    REQUESTS,
    REQUESTS_CANCELLED,
    REQUESTS_IN_FLIGHT,
    REQUESTS_REFUSED,
    SLOW_CLIENTS,
    TENANTS_SEEN,
    TIME_TO_FIRST_TOKEN,
    TRANSFER_DISTANCE,
    TRANSFER_PROVEN,
    UNREAD_ANSWER_BYTES,
    USAGE_RECORDS_LOST,
    VOLUME_CAPACITY,
    VOLUME_PAGES,
    VOLUME_QUEUED,
    VOLUME_RATE,
    VOLUME_READABLE,
    VOLUME_TRIPS,
    VOLUME_USED,
    VOLUME_WRITABLE,
    VOLUMES_SEEN,
    WORKER_CACHED_TOKENS,
    WORKER_CONNECTED,
    WORKER_GENERATED_TOKENS,
    WORKER_PAGES,
    WORKER_PAGES_USED,
    WORKER_PROMPT_TOKENS,
    WORKER_RUNNING,
    WORKER_TRANSFERRED_BYTES,
    WORKER_UNPAIRED,
    WORKER_WAITING,
    WORKERS_SEEN,
    Exporter,
)
from kvferry.router.request_placer import RouterMetrics


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A worker's last report; totals count from its engine's start."""

    worker_id: str
    role: str
    connected: bool
    is_unpaired: bool
    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    prompt_tokens_by_source: dict[str, int]
    cached_tokens_by_tier: dict[str, int]
    transferred_bytes: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class ProofSample:
    """The proofs of one way in one pool."""

    pool: str
    way: str
    is_proven: bool
    distance: float | None  # None: nothing was measured


@dataclass(frozen=True, slots=True)
class VolumeSample:
    keeper_id: str
    state: VolumeState  # the last report of this keeper


class GatewayMetrics(RouterMetrics):
    def __init__(
        self,
        read_workers: Callable[[], Sequence[WorkerSample]] = tuple,
        read_volumes: Callable[[], Sequence[VolumeSample]] = tuple,
        *,
        tenants: TenantUses | None = None,
        read_proofs: Callable[[], Sequence[ProofSample]] = tuple,
        read_models: Callable[[], Mapping[str, bool]] = dict,
        is_ready: Callable[[], bool] = lambda: False,
        read_num_queued: Callable[[], int] = lambda: 0,
        read_span_counts: Callable[[], SpanCounts] = SpanCounts,
        read_outcomes: Callable[[], tuple[RenderOutcomes, Mapping[str, int]]] = lambda: (RenderOutcomes(), {}),
        read_admitted: Callable[[], tuple[int, int, int, int]] = lambda: (0, 0, 0, 0),
        read_num_unread_bytes: Callable[[], int] = lambda: 0,
        read_num_image_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`read_models` returns which models are ready, `read_outcomes` those of renderers and of fetches of images.

        `read_admitted` returns the requests, choices, prompt tokens and body bytes in flight.
        """
        self.exposition = exposition = Exposition(Exporter.GATEWAY)
        super().__init__(exposition)
        requests = exposition.counter(REQUESTS)
        self.refused = exposition.counter(REQUESTS_REFUSED)
        self.cancelled = exposition.counter(REQUESTS_CANCELLED)
        request_seconds = exposition.histogram(REQUEST_SECONDS)
        # Looking a series up costs more than counting.
        self.requests = functools.lru_cache(256)(lambda endpoint, status: requests.labels(endpoint, status))
        self.request_seconds = {endpoint: request_seconds.labels(endpoint=endpoint) for endpoint in ENDPOINTS}
        self.time_to_first_token = exposition.histogram(TIME_TO_FIRST_TOKEN)
        self.inter_token = exposition.histogram(INTER_TOKEN)
        self.prompt_tokens = exposition.counter(PROMPT_TOKENS)
        self.generated_tokens = exposition.counter(GENERATED_TOKENS)
        self.hinted_requests = exposition.counter(HINTED_REQUESTS)
        self.slow_clients = exposition.counter(SLOW_CLIENTS)
        exposition.read((QUEUED_REQUESTS,), lambda: [Reading(QUEUED_REQUESTS, (), float(read_num_queued()))])
        exposition.read((READY,), lambda: [Reading(READY, (), float(is_ready()))])
        admitted = (REQUESTS_IN_FLIGHT, CHOICES_IN_FLIGHT, PROMPT_TOKENS_IN_FLIGHT, BODY_BYTES_IN_FLIGHT)
        exposition.read(admitted, lambda: map(Reading, admitted, itertools.repeat(()), read_admitted()))
        exposition.read((UNREAD_ANSWER_BYTES,), lambda: [Reading(UNREAD_ANSWER_BYTES, (), read_num_unread_bytes())])
        exposition.read((IMAGE_BYTES_IN_FLIGHT,), lambda: [Reading(IMAGE_BYTES_IN_FLIGHT, (), read_num_image_bytes())])
        exposition.read((GATEWAY_SPANS,), lambda: read_spans(GATEWAY_SPANS, read_span_counts()))
        exposition.read((GRAMMAR_CHECKS, IMAGE_CHATS, IMAGES, IMAGE_FETCHES), lambda: _of_rendering(*read_outcomes()))
        self.tenants = tenants or TenantUses()
        exposition.read(TENANTS_SEEN, self.tenants.readings)
        self.models = ModelUses(read_models)
        exposition.read(MODELS_SEEN, self.models.readings)
        exposition.read((USAGE_RECORDS_LOST,), lambda: [Reading(USAGE_RECORDS_LOST, (), self.tenants.num_lost)])
        exposition.read(WORKERS_SEEN, lambda: _of_workers(read_workers()))
        exposition.read(PROOFS_SEEN, lambda: _of_proofs(read_proofs()))
        exposition.read(VOLUMES_SEEN, lambda: _of_volumes(read_volumes()))

    def note_refusal(self, code: str | None) -> None:
        if code in REFUSAL_CODES:
            self.refused.labels(code=code).inc()

    def render(self) -> bytes:
        return self.exposition.render()


def _of_workers(workers: Iterable[WorkerSample]) -> Iterator[Reading]:
    for worker in workers:
        key = (worker.worker_id, worker.role)
        yield Reading(WORKER_CONNECTED, key, float(worker.connected))
        yield Reading(WORKER_UNPAIRED, key, float(worker.is_unpaired))
        yield Reading(WORKER_RUNNING, key, worker.num_running)
        yield Reading(WORKER_WAITING, key, worker.num_waiting)
        yield Reading(WORKER_PAGES_USED, key, worker.num_pages_used)
        yield Reading(WORKER_PAGES, key, worker.num_pages)
        for source, tokens in worker.prompt_tokens_by_source.items():
            yield Reading(WORKER_PROMPT_TOKENS, (*key, source), tokens)
        for tier, tokens in worker.cached_tokens_by_tier.items():
            yield Reading(WORKER_CACHED_TOKENS, (*key, tier), tokens)
        yield Reading(WORKER_TRANSFERRED_BYTES, key, worker.transferred_bytes)
        yield Reading(WORKER_GENERATED_TOKENS, key, worker.num_generated_tokens)


def _of_proofs(proofs: Iterable[ProofSample]) -> Iterator[Reading]:
    for proof in proofs:
        key = (proof.pool, proof.way)
        yield Reading(TRANSFER_PROVEN, key, float(proof.is_proven))
        if proof.distance is not None:
            yield Reading(TRANSFER_DISTANCE, key, proof.distance)


def _of_volumes(volumes: Iterable[VolumeSample]) -> Iterator[Reading]:
    for volume in volumes:
        state = volume.state
        key = (state.volume_id, volume.keeper_id)
        yield Reading(VOLUME_READABLE, key, float(state.is_readable))
        yield Reading(VOLUME_WRITABLE, key, float(state.is_writable))
        yield Reading(VOLUME_TRIPS, key, state.trips)
        yield Reading(VOLUME_PAGES, key, state.num_chunks)
        yield Reading(VOLUME_USED, key, state.used_bytes)
        yield Reading(VOLUME_CAPACITY, key, state.capacity_bytes)
        yield Reading(VOLUME_QUEUED, key, state.queue_bytes)
        yield Reading(VOLUME_RATE, key, state.read_bytes_per_s)


def _of_rendering(rendering: RenderOutcomes, fetches: Mapping[str, int]) -> Iterator[Reading]:
    counted = {
        GRAMMAR_CHECKS: rendering.grammars,
        IMAGE_CHATS: rendering.image_chats,
        IMAGES: rendering.images,
        IMAGE_FETCHES: fetches,
    }
    for metric, outcomes in counted.items():
        for outcome, num in outcomes.items():
            yield Reading(metric, (outcome,), num)


class Targets:
    """Members that expose metrics. While etcd is away, the last known ones."""

    def __init__(self, membership: Membership, *, scheme: str) -> None:
        self._membership = membership
        self._scheme = scheme
        self._members: tuple[Member, ...] = ()

    async def read(self) -> bytes:
        """Return JSON for `http_sd_configs`. Raises UnavailableError while no member was ever known."""
        try:
            self._members = await self._membership.members()
        except UnavailableError:
            if not self._members:
                raise
        members = sorted(self._members, key=lambda member: (member.kind, member.member_id))
        return msgspec.json.encode([self._target(member) for member in members if member.metrics_address])

    def _target(self, member: Member) -> dict[str, Any]:
        labels = {
            "__scheme__": self._scheme,
            "member": member.member_id,
            "kind": member.kind.value,
            "node": member.node,
        }
        return {"targets": [member.metrics_address], "labels": labels}
