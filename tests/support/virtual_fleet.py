"""A fleet in virtual time behind the real policies: engines that compute in steps, links of one transfer at a time.

Times are in seconds and start at 0. Nothing sleeps.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvferry.engine.base import EngineDurations, EngineStats, EngineTimes, PromptSources, RequestId
from kvferry.engine.time_shares import PromptShares, PromptTime, TransferShares
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.residency.index import ResidencyIndex
from kvferry.router.placement import Candidate, PlacementRequest
from kvferry.router.placement_policy import Measured, PricedPolicy
from kvferry.router.priced_placement import Decision
from kvferry.router.prices.pricing import NO_VOLUMES
from kvferry.router.prices.rates import CostDefaults

BLOCK_SIZE = 16
REPORT_S = 0.05
STEP_TOKENS = 2048


@dataclass
class Truth:
    """What the rates of a worker should be learned as."""

    prefill_ms_per_token: float = 0.1
    kv_transfer_page_ms: float = 0.05
    step_scale: float = 1.0
    slowdown: float = 1.0  # of everything, for now


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), do))

    def run_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        self.now_s = max(self.now_s, time_s)

    def run_out(self) -> None:
        while self._events:
            self.run_until(self._events[0][0])


@dataclass(eq=False)
class Prompt:
    num_tokens: int
    on_end: Callable[[EngineTimes], None]
    queued_s: float
    num_left: int
    scheduled_s: float = 0.0


class VirtualWorker:
    """An engine: prompts in steps of up to STEP_TOKENS, first come first; transfers in one at a time; streams."""

    def __init__(self, name: str, kind: MemberKind, truth: Truth, clock: Clock, defaults: CostDefaults) -> None:
        self.member = Member(
            kind=kind,
            member_id=MemberId(name),
            address="127.0.0.1:1",
            model="m",
            version="0",
            block_size=BLOCK_SIZE,
            kv_cache_dtype="auto",
        )
        self.truth = truth
        self.num_streams = 0
        self.num_served = 0  # prompts computed here, and transfers to here
        self.num_pages, self.num_pages_used = 0, 0  # 0: of no account
        self._clock = clock
        self._defaults = defaults
        self._waiting: list[Prompt] = []
        self._is_stepping = False
        self._step_ends_s = 0.0
        self._shares = PromptShares()
        self._transfers = TransferShares()
        self._numbers = itertools.count()
        self._link_free_s = 0.0
        self._num_transfers = 0
        self._sources = PromptSources()

    @property
    def id(self) -> MemberId:
        return self.member.member_id

    @property
    def busy_until_s(self) -> float:
        """End of the step and of the transfers that have begun."""
        return max(self._step_ends_s if self._is_stepping else 0.0, self._link_free_s)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.num_streams + min(1, len(self._waiting)),
            num_waiting=max(0, len(self._waiting) - 1),
            num_pages=self.num_pages,
            num_pages_used=self.num_pages_used,
            prompt_tokens=self._sources,
            queued_prompt_tokens=sum(prompt.num_tokens for prompt in self._waiting),
        )

    def compute(self, num_tokens: int, on_end: Callable[[EngineTimes], None]) -> None:
        self._waiting.append(Prompt(num_tokens, on_end, self._clock.now_s, num_tokens))
        if not self._is_stepping:
            self._step()

    def transfer(self, num_pages: int, on_end: Callable[[EngineTimes], None]) -> None:
        begin_s = self._clock.now_s
        transfer_id = str(next(self._numbers))
        self._transfers.begin(transfer_id, begin_s)
        slowdown = self.truth.slowdown / 1e3
        ready_s = begin_s + self._defaults.kv_transfer_fixed_ms * slowdown
        took_s = num_pages * self.truth.kv_transfer_page_ms * slowdown
        self._link_free_s = end_s = max(ready_s, self._link_free_s) + took_s

        def end() -> None:
            self.num_served += 1
            [share] = self._transfers.end({transfer_id: num_pages}, end_s)
            on_end(EngineTimes(begin_s, end_s, end_s, end_s, kv_transfer=(begin_s, end_s), kv_transfer_share=share))

        self._clock.at(end_s, end)

    def step_ms(self) -> float:
        step_ms = self._defaults.step_ms + self._defaults.step_ms_per_stream * self.num_streams
        return step_ms * self.truth.step_scale * self.truth.slowdown

    def _step(self) -> None:
        self._is_stepping = bool(self._waiting)
        budget = STEP_TOKENS
        ended: list[Prompt] = []
        for prompt in self._waiting:
            if budget == 0:
                break
            prompt.scheduled_s = prompt.scheduled_s or self._clock.now_s
            num_now = min(budget, prompt.num_left)
            budget -= num_now
            prompt.num_left -= num_now
            if not prompt.num_left:
                ended.append(prompt)
        if not self._is_stepping:
            return
        tokens_ms = (STEP_TOKENS - budget) * self.truth.prefill_ms_per_token
        took_s = (self._defaults.prefill_fixed_ms + tokens_ms) * self.truth.slowdown / 1e3
        self._step_ends_s = self._clock.now_s + took_s
        self._clock.at(self._step_ends_s, lambda: self._end_step(ended))

    def _end_step(self, ended: list[Prompt]) -> None:
        now_s = self._clock.now_s
        if not ended:
            self._step()
            return
        for prompt in ended:
            self._waiting.remove(prompt)
            self._sources += PromptSources(local_compute=prompt.num_tokens)
            self.num_served += 1
        shares = self._shares.divide([PromptTime(each.scheduled_s, now_s, each.num_tokens) for each in ended])
        self._step()
        for prompt, share in zip(ended, shares, strict=True):
            prompt.on_end(EngineTimes(prompt.queued_s, prompt.scheduled_s, now_s, now_s, prefill_share=share))


@dataclass
class Fleet:
    """Workers, and gateways that place requests in turn. With `is_old`, engines send no durations."""

    num_prefill: int
    num_decode: int
    num_gateways: int = 1
    seed: int = 0
    defaults: CostDefaults = field(default_factory=CostDefaults)
    is_old: bool = False

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.clock = Clock()
        self.prefill = [self._worker(f"p{i}", MemberKind.PREFILL) for i in range(self.num_prefill)]
        self.decode = [self._worker(f"d{i}", MemberKind.DECODE) for i in range(self.num_decode)]
        self.gateways = [
            PricedPolicy(ResidencyIndex(), self.defaults, seed=self.seed + i) for i in range(self.num_gateways)
        ]
        self.num_unfinished = 0
        self.ways: collections.Counter[str] = collections.Counter()  # reasons of placements
        self._numbers = itertools.count()
        self._reports: dict[MemberId, Candidate] = {}

    @property
    def workers(self) -> list[VirtualWorker]:
        return [*self.prefill, *self.decode]

    def ask(self, num_tokens: int, max_tokens: int = 16) -> Decision:
        """Place a request now, and let it run."""
        number, now_s = next(self._numbers), self.clock.now_s
        policy = self.gateways[number % self.num_gateways]
        num_pages = num_tokens // BLOCK_SIZE
        first_key = self.random.getrandbits(60)
        keys = range(first_key, first_key + num_pages)
        request = PlacementRequest(RequestId(f"r{number}"), keys, num_tokens, BLOCK_SIZE, max_tokens)
        decision = policy.place(
            request,
            [self._report(worker) for worker in self.prefill],
            [self._report(worker) for worker in self.decode],
            now_s,
            volumes=NO_VOLUMES,
            may_be_aggregated=True,
        )
        assert decision is not None
        policy.began(request, decision, now_s)
        self.num_unfinished += 1
        self.ways[decision.reason.value] += 1
        _Run(self, policy, request, decision).start()
        return decision

    def serve(self, num_requests: int, interval_s: float, sizes: Sequence[int], max_tokens: int = 16) -> None:
        """Requests at random times, this far apart on average."""
        for _ in range(num_requests):
            self.clock.run_until(self.clock.now_s + self.random.expovariate(1 / interval_s))
            self.ask(self.random.choice(sizes), max_tokens)

    def worker(self, member_id: MemberId) -> VirtualWorker:
        return next(worker for worker in self.workers if worker.id == member_id)

    def check(self) -> None:
        for policy in self.gateways:
            policy.placer.check()

    def _worker(self, name: str, kind: MemberKind) -> VirtualWorker:
        return VirtualWorker(name, kind, Truth(), self.clock, self.defaults)

    def _report(self, worker: VirtualWorker) -> Candidate:
        report = self._reports.get(worker.id)
        if report is None or self.clock.now_s - report.reported_s >= REPORT_S:
            report = self._reports[worker.id] = Candidate(worker.member, worker.stats(), self.clock.now_s)
        return report


class _Run:
    """One request's way, as the dispatcher leads it."""

    def __init__(self, fleet: Fleet, policy: PricedPolicy, request: PlacementRequest, decision: Decision) -> None:
        self._fleet = fleet
        self._policy = policy
        self._request = request
        self._decision = decision
        self._decode = fleet.worker(decision.decode)
        self._began_s = self._submitted_s = fleet.clock.now_s

    def start(self) -> None:
        num_tokens = self._request.num_tokens
        if self._decision.prefill is None:
            self._decode.compute(num_tokens, self._first_token)
        else:
            self._fleet.worker(self._decision.prefill).compute(num_tokens, self._prefilled)

    def _durations(self, times: EngineTimes) -> EngineDurations | None:
        return None if self._fleet.is_old else times.durations()

    def _prefilled(self, times: EngineTimes) -> None:
        now_s, prefill = self._fleet.clock.now_s, self._decision.prefill
        assert prefill is not None
        self._policy.prefilled(self._request.request_id, now_s)
        elapsed_ms = (now_s - self._began_s) * 1e3
        durations = self._durations(times)
        self._policy.learn_prefill(prefill, self._request.num_tokens, elapsed_ms, self._decision, durations)
        self._submitted_s = now_s
        self._decode.transfer(self._decision.lacking_pages, self._first_token)

    def _first_token(self, times: EngineTimes) -> None:
        now_s, worker = self._fleet.clock.now_s, self._decode
        self._policy.first_token(self._request.request_id, now_s)
        worker.num_streams += 1
        step_ms, num_streams = worker.step_ms(), worker.num_streams
        end_s = now_s + self._request.max_tokens * step_ms / 1e3
        first_token_ms = (now_s - self._submitted_s) * 1e3
        self._fleet.clock.at(end_s, lambda: self._end(times, first_token_ms, step_ms, num_streams))

    def _end(self, times: EngineTimes, first_token_ms: float, step_ms: float, num_streams: int) -> None:
        decision = self._decision
        is_aggregated = decision.prefill is None
        self._decode.num_streams -= 1
        measured = Measured(
            first_token_ms=first_token_ms,
            load_ms=0.0,
            computed_tokens=self._request.num_tokens if is_aggregated else 1,
            transferred_pages=decision.lacking_pages,
            queue_tokens=decision.queue_tokens if is_aggregated else 0,
            step_ms=step_ms,
            num_streams=num_streams,
            durations=self._durations(times),
        )
        self._policy.learn(self._decode.id, measured)
        self._policy.ended(self._request.request_id, self._fleet.clock.now_s, self._request.max_tokens)
        self._fleet.num_unfinished -= 1


def slowed(fleet: Fleet, workers: Sequence[VirtualWorker], slowdown: float) -> None:
    for worker in workers:
        worker.truth = dataclasses.replace(worker.truth, slowdown=slowdown)
