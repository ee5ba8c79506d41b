"""Finds workers for each attempt of one request, and waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kvferry.config import entry_of, is_of_entry
from kvferry.engine.base import RequestId
from kvferry.errors import NoDecodeWorker, Overloaded, Quarantined, UnavailableError
from kvferry.link.identity import CONTINUE, IMAGES
from kvferry.link.quarantine import QUARANTINE_S
from kvferry.link.worker_link import Place, WorkerLink
from kvferry.membership.base import Member, MemberKind
from kvferry.observability.exposition import Exposition
from kvferry.observability.telemetry import (
    CONTINUED_REQUESTS,
    DECODE_RETRIES,
    PLACEMENT_SECONDS,
    PLACEMENTS,
    PREEMPTED_REQUESTS,
    PREFILL_FALLBACKS,
    PREFILL_SECONDS,
    QUARANTINED_REQUESTS,
    SKIPPED_VOLUME_LOADS,
    TRANSFERRED_PAGES,
)
from kvferry.pages.keys import page_images, route_keys, seed_of
from kvferry.proof.certificates import EngineKind, kind_of
from kvferry.router.engine_losses import digest_of
from kvferry.router.placement import Candidate, Placement, PlacementRequest, Reason, can_exchange, why_unequal
from kvferry.router.placement_policy import Policy
from kvferry.router.priced_placement import Decision
from kvferry.router.prices.pricing import VolumeCosts
from kvferry.router.request import Answer, Request
from kvferry.router.request_run import RequestRun
from kvferry.router.worker_pool import WorkerPool

RESERVE_TIMEOUT_S = 1.0
MAX_REFUSALS = 8  # of workers that said they had room, before the request waits in line

NOT_PROVEN = "no transfer from a prefill worker is proven; `kvferry prove` says why, as does /readyz to operators"
NOT_TRIED = f"the same request is not tried again for {QUARANTINE_S / 60:g} minutes"


class RouterMetrics:
    def __init__(self, exposition: Exposition) -> None:
        placements = exposition.counter(PLACEMENTS)
        self.placements = {reason: placements.labels(reason=reason.value) for reason in Reason}
        self.placement_seconds = exposition.histogram(PLACEMENT_SECONDS)
        self.skipped_volume_loads = exposition.counter(SKIPPED_VOLUME_LOADS)
        self.prefill_seconds = exposition.histogram(PREFILL_SECONDS)
        self.prefill_fallbacks = exposition.counter(PREFILL_FALLBACKS)
        self.continued_requests = exposition.counter(CONTINUED_REQUESTS)
        self.preempted_requests = exposition.counter(PREEMPTED_REQUESTS)
        self.quarantined = exposition.counter(QUARANTINED_REQUESTS)
        self.decode_retries = exposition.counter(DECODE_RETRIES)
        self.transferred_pages = exposition.counter(TRANSFERRED_PAGES)


@dataclass(frozen=True, slots=True)
class Router:
    workers: WorkerPool
    policy: Policy
    metrics: RouterMetrics
    prefill_timeout_s: float
    volumes: Callable[[str], Mapping[str, VolumeCosts]]  # by pool
    attempt_numbers: Iterator[int]
    queue_timeout_s: float
    # Whether a transfer between engines of two kinds, in a pool, may be used; True for one with an adapter.
    may_transfer: Callable[[EngineKind, EngineKind, str, bool], bool]

    def refuse_quarantined(self, request: Request) -> None:
        """Raises Quarantined."""
        quarantined, now_s = self.workers.quarantined, time.monotonic()
        if not quarantined.is_empty(now_s) and quarantined.contains(digest_of(request), now_s):
            self.metrics.quarantined.labels(when="again").inc()
            raise Quarantined(f"workers were lost while they computed this request; {NOT_TRIED}")


@dataclass(slots=True)
class PlacedAttempt:
    id: RequestId
    placement: Placement
    place: Place | None = None  # on the decode worker, while a prefill worker computes the prompt
    submitted_s: float = 0.0  # to the decode worker
    first_output_s: float | None = None
    num_tokens_before: int = 0  # of the answer, from earlier attempts
    num_generated: int | None = None  # of the whole answer; None unless it ended by itself


class RequestPlacer:
    def __init__(self, router: Router, run: RequestRun, *, may_be_aggregated: bool) -> None:
        request = run.answer.request
        self.queue = router.workers.queues.of(request.pool)
        self._pool = request.pool  # outside of which no attempt is placed
        self._adapter = request.prompt.adapter  # that each worker of an attempt has
        self._turn = request.contract.turn
        self._router = router
        self._run = run
        self._answer = run.answer
        # Decode workers encode images only where no prefill worker can.
        self._may_be_aggregated = may_be_aggregated and not request.prompt.images

    async def place(self) -> PlacedAttempt:
        """Place an attempt, with its place on the decode worker; the caller calls the policy's `ended`.

        A request waits for room in line. It waits for workers to come only if it lost one.
        """
        router, run = self._router, self._run
        attempt: PlacedAttempt | None = None
        if not run.begin_placing() and (not self.queue.num_before(self._turn) or run.has_begun):
            attempt = await self._reserve()
        while attempt is None:
            if run.losses.is_suspect and router.workers.losses.has_trials:
                # Other suspects occupy the workers that are left. They wait beside the line, not in it.
                await self._wait_for_trial()
                attempt = await self._reserve()
            elif self._is_room_short():
                attempt = await self._wait_in_line()
            elif run.losses.workers or run.last_error is not None:
                attempt = await self._wait_for_worker()
            else:
                raise NoDecodeWorker(self._nobody())
        run.place()
        return attempt

    async def _wait_for_trial(self) -> None:
        """Raises Overloaded at the end of the time to wait for another worker."""
        try:
            async with self._loss_wait():
                await self._router.workers.losses.trial_end()
        except TimeoutError:
            raise self.queue.refusal("other requests under which engines were lost are tried first") from None

    def _is_room_short(self) -> bool:
        """Whether workers that could take the request are connected: then it is room that is missing."""
        return any(self._run.may_try(link) for link in self._usable_decode())

    def _usable_decode(self) -> list[WorkerLink]:
        links = self._router.workers.usable(MemberKind.DECODE, self._pool)
        return [link for link in links if self._has_what_it_needs(link)]

    def _has_what_it_needs(self, link: WorkerLink) -> bool:
        # A worker of an earlier release would take the placeholder tokens of images for text.
        takes_images = not self._answer.request.prompt.images or IMAGES in link.features
        # It would begin penalties and a seed's noise anew.
        goes_on = not self._answer.token_ids or CONTINUE in link.features
        return takes_images and goes_on and (not self._adapter or self._adapter in link.adapters)

    def _nobody(self) -> str:
        return no_decode_worker(self._pool, self._adapter, has_images=bool(self._answer.request.prompt.images))

    async def _wait_in_line(self) -> PlacedAttempt | None:
        """Place the request when its turn has come and a worker has room.

        None when workers went away meanwhile. Raises Overloaded.
        """
        queue, run, error = self.queue, self._run, self._run.last_error
        ends_s = run.line_ends_s(time.monotonic(), self._router.queue_timeout_s)
        waiter = queue.enter(ends_s, self._turn, is_resumed=run.has_begun)
        try:
            while True:
                await waiter.turn()
                # Reserve the place before the next request's turn: else all would ask workers for the same one.
                attempt = await self._reserve(always=True)
                is_held_up = run.losses.is_suspect and self._router.workers.losses.has_trials
                if attempt is not None or is_held_up or not self._is_room_short():
                    return attempt
        except TimeoutError:
            retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
            raise queue.refusal("all workers are full, and none had room in time", retry_after_s) from None
        finally:
            waiter.leave()

    def _loss_wait(self) -> asyncio.Timeout:
        now_s = time.monotonic()
        return asyncio.timeout(max(0.0, self._run.loss_wait_ends_s(now_s) - now_s))

    async def _wait_for_worker(self) -> PlacedAttempt | None:
        """Place the request when a worker comes. None when it is room that is missing.

        Raises NoDecodeWorker after WORKER_WAIT_S since the request's last loss.
        """
        attempt: PlacedAttempt | None = None
        try:
            async with self._loss_wait():
                while attempt is None:
                    await self._router.workers.change()
                    attempt = await self._reserve()
                    if attempt is None and self._is_room_short():
                        return None
        except TimeoutError:
            error = self._run.last_error
            why = f"; the last one failed: {error.message}" if error is not None else ""
            raise NoDecodeWorker(f"{self._nobody()}{why}") from None
        return attempt

    async def _reserve(self, *, always: bool = False) -> PlacedAttempt | None:
        """Place the request. Reserve its place, if `always` or where another worker computes its prompt.

        None when no worker takes it now.
        """
        workers = self._router.workers
        for _ in range(MAX_REFUSALS):
            attempt = self._place_now()
            if attempt is None or (attempt.placement.prefill is None and not always):
                return attempt
            is_placed = False
            decode = workers.link(attempt.placement.decode)
            try:
                if decode is not None:
                    async with asyncio.timeout(RESERVE_TIMEOUT_S):
                        attempt.place = await decode.reserve(
                            self._turn, is_resumed=bool(self._answer.token_ids), pool=self._pool
                        )
                    is_placed = True
                    return attempt
            except TimeoutError:
                assert decode is not None
                decode.is_full = True  # until it says otherwise: a worker that is silent takes nothing
            except (Overloaded, UnavailableError) as error:
                assert decode is not None
                self._run.refuse_place(decode, error)
            finally:
                if not is_placed:
                    self._router.policy.ended(attempt.id, time.monotonic(), None)
        return None

    def _place_now(self) -> PlacedAttempt | None:
        """Prefer decode workers that can use the kept pages; None without any."""
        router, run, kept = self._router, self._run, self._run.kept
        decode, _ = self._candidates(MemberKind.DECODE)
        if kept is not None:
            exchanging = [each for each in decode if self._may_pull(each, kept.holder)]
            decode, kept = (exchanging, kept) if exchanging else (decode, None)
        if not decode:
            return None
        prefill: list[Candidate] = []
        has_full_prefill, why_no_prefill = False, Reason.NO_PREFILL_WORKER
        if kept is None and run.may_prefill:
            prefill, full = self._candidates(MemberKind.PREFILL)
            if not prefill and full:
                # Their queues are priced all the same: the decode worker may be cheaper.
                prefill, has_full_prefill = full, True
            if prefill:
                prefill, decode = self._proven(prefill, decode)
                why_no_prefill = Reason.NO_PREFILL_WORKER if prefill else Reason.UNPROVEN
        began_ns = time.perf_counter_ns()
        now_s = time.monotonic()
        to_place = _placement_request(self._answer, decode[0].member.block_size, next(router.attempt_numbers))
        placement = router.policy.place(
            to_place,
            prefill,
            decode,
            now_s,
            volumes=router.volumes(self._pool),
            may_be_aggregated=self._may_be_aggregated,
            why_no_prefill=why_no_prefill,
        )
        assert placement is not None
        if has_full_prefill and placement.prefill is not None:
            return None
        router.policy.began(to_place, placement, now_s)
        if isinstance(placement, Decision) and placement.load.skipped_pages:
            router.metrics.skipped_volume_loads.inc()
        if kept is None:
            self.release_kept()
            run.record.reason = placement.reason.value
            router.metrics.placements[placement.reason].inc()
            run.record.unequal_pages = NOT_PROVEN if placement.reason is Reason.UNPROVEN else ""
            if placement.reason is Reason.UNEQUAL_PAGES:
                chosen = next(each.member for each in decode if each.member_id == placement.decode)
                run.record.unequal_pages = why_unequal(prefill[0].member, chosen)
        took_ns = time.perf_counter_ns() - began_ns
        router.metrics.placement_seconds.observe(took_ns / 1e9)
        run.record.note_placement(placement, took_ns)
        return PlacedAttempt(to_place.request_id, placement)

    def _may_pull(self, decode: Candidate, holder: Member) -> bool:
        return can_exchange(decode.member, holder) and self._router.may_transfer(
            kind_of(holder), decode.engine_kind, self._pool, bool(self._adapter)
        )

    def _proven(self, prefill: list[Candidate], decode: list[Candidate]) -> tuple[list[Candidate], list[Candidate]]:
        """Return prefill workers that may transfer to each of these decode workers that could read their pages."""
        # Decode workers to which no transfer is proven are left out, if they are fewer than the others.
        senders, readers = ({each.engine_kind for each in some} for some in (prefill, decode))
        pairs = {(one, other) for one in senders for other in readers if one.exchange_digest == other.exchange_digest}
        unproven = {pair for pair in pairs if not self._router.may_transfer(*pair, self._pool, bool(self._adapter))}
        if not unproven:
            return prefill, decode
        unreached = {other for _, other in unproven} - {other for _, other in pairs - unproven}
        kept = [each for each in decode if each.engine_kind not in unreached]
        if 2 * len(kept) <= len(decode):
            kept, unreached = decode, set()
        excluded = {one for one, other in unproven if other not in unreached}
        proven = [each for each in prefill if each.engine_kind not in excluded]
        return proven, kept if proven else decode

    def _candidates(self, kind: MemberKind) -> tuple[list[Candidate], list[Candidate]]:
        """Return workers that did not fail this request: those with room, and those without.

        A worker with a request on trial takes no other one but answers that go on.
        """
        router, losses, is_resumed = self._router, self._run.losses, bool(self._answer.token_ids)
        candidates = router.workers.candidates(kind, self._pool)
        if losses.is_suspect and router.workers.losses.is_copy_on_trial(self._run.digest, losses):
            return [], []
        has_trials = router.workers.losses.has_trials and not is_resumed
        with_room: list[Candidate] = []
        full: list[Candidate] = []
        quiet: list[Candidate] = []  # chosen if there are no others
        for link, candidate in candidates:
            if not (self._run.may_try(link) and self._has_what_it_needs(link)):
                continue
            if has_trials and router.workers.losses.is_occupied(link.member.member_id, losses):
                continue
            if not (is_resumed or link.has_room_for(self._turn)):
                full.append(candidate)
            else:
                (quiet if losses.workers and link.is_quiet else with_room).append(candidate)
        return with_room or quiet, full

    def release_kept(self) -> None:
        kept = self._run.drop_kept()
        link = self._router.workers.link(kept.holder.member_id) if kept is not None else None
        if kept is not None and link is not None:
            link.release(kept.params)


def no_decode_worker(pool: str, adapter: str, *, has_images: bool = False) -> str:
    kind = "model" if is_of_entry(pool) else "pool"
    of_pool = f" of {kind} {entry_of(pool)!r}" if pool else ""
    name, _, digest = adapter.partition("@")
    same_files = ", with the files that the request began with," if digest else ""
    with_adapter = f" that has the adapter {name[:64]!r}{same_files}" if adapter else ""
    with_images = " that takes images" if has_images else ""
    return f"no decode worker{of_pool}{with_adapter}{with_images} is connected"


def _placement_request(answer: Answer, block_size: int, number: int) -> PlacementRequest:
    request, prompt, tokens = answer.request, answer.request.prompt, answer.all_token_ids
    return PlacementRequest(
        RequestId(f"{answer.request_id}/{number}"),
        route_keys(
            tokens,
            block_size,
            seed_of(prompt.page_salt),
            page_images(prompt.image_spans, block_size, len(tokens) // block_size) if prompt.images else None,
        ),
        len(tokens),
        block_size,
        request.sampling.max_tokens,
        request.contract.turn,
        prompt.adapter,
    )
