"""Prefill workers and gateways in virtual time, with the fair queue in front of every engine.

An engine computes steps of `step_tokens`, first come first; its speed differs from what gateways and queues estimate.
Gateways price the fair wait from reports each REPORT_S and from what they sent since. Left out: caches, decoding,
network latency.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvferry.tenancy.shares.expected_wait import BacklogCurve, fair_wait_ms
from kvferry.tenancy.shares.fair_queue import FairQueue, QueueParameters
from kvferry.tenancy.shares.tenant_queue import Slice

MS_PER_TOKEN = 0.1
STEP_FIXED_MS = 5.0
REPORT_S = 0.05
USAGE_S = 1.0
_MAX_EXACT = 100  # tenants; more are priced from the curve

OnEnd = Callable[["Prompt"], None]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), do))

    def every(self, interval_s: float, do: Callable[[], None]) -> None:
        def again() -> None:
            do()
            self.at(self.now_s + interval_s, again)

        self.at(self.now_s + interval_s, again)

    def run_until(self, time_s: float) -> None:
        while self._events and self._events[0][0] <= time_s:
            self.now_s, _, do = heapq.heappop(self._events)
            do()
        self.now_s = time_s


@dataclass(eq=False, slots=True)
class Prompt:
    tenant: str
    cost_ms: float  # without the fixed part of steps
    arrived_s: float
    on_end: OnEnd
    prefix: int = 0
    ended_s: float = 0.0

    @property
    def ttft_ms(self) -> float:
        return (self.ended_s - self.arrived_s) * 1e3


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    num_workers: int = 2
    num_gateways: int = 1
    step_tokens: int = 512
    depth_ms: float = 60.0
    speed: float = 1.0
    has_debts: bool = True
    has_fair_queue: bool = True  # else first come first served, priced by the queue's length
    estimates_off: float = 0.2  # at most; drawn for each slice
    seed: int = 0


@dataclass(slots=True)
class _Running:
    piece: Slice[Prompt]
    left_ms: float
    took_ms: float = 0.0


class Worker:
    def __init__(self, clock: Clock, settings: ClusterSettings, number: int) -> None:
        self._clock = clock
        self._settings = settings
        self._random = random.Random(f"{settings.seed} {number}")
        self._step_ms = settings.step_tokens * MS_PER_TOKEN
        self.queue: FairQueue[Prompt] = FairQueue(
            QueueParameters(slice_ms=self._step_ms, depth_ms=settings.depth_ms, max_requests=10_000_000)
        )
        self._plain: deque[Prompt] = deque()
        self._plain_ms = 0.0
        self._inside: deque[_Running] = deque()
        self._is_stepping = False
        self.served_ms: dict[str, float] = defaultdict(float)
        self.num_corrected = 0
        self.largest_debt = 0.0  # in dead bands
        self.curve = BacklogCurve()
        self.backlogs: dict[str, tuple[float, float]] = {}
        self.inside_ms = 0.0

    def submit(self, prompt: Prompt) -> None:
        if self._settings.has_fair_queue:
            refused = self.queue.add(prompt, self._clock.now_s)
            assert refused is None, refused
        else:
            self._plain.append(prompt)
            self._plain_ms += prompt.cost_ms
        self._feed()

    def report(self) -> None:
        if not self._settings.has_fair_queue:
            self.backlogs, self.inside_ms = {"": (self._plain_ms, 1.0)}, 0.0
            return
        self.backlogs = self.queue.backlogs()
        self.inside_ms = self.queue.inside_ms
        if len(self.backlogs) > _MAX_EXACT:
            self.curve = BacklogCurve.of(self.backlogs.values())

    def _feed(self) -> None:
        if not self._settings.has_fair_queue:
            while self._plain and len(self._inside) < 64:
                prompt = self._plain.popleft()
                piece = Slice(prompt, prompt.tenant, prompt.cost_ms, True, 1.0)
                self._inside.append(_Running(piece, self._true_ms(prompt.cost_ms)))
        else:
            while (piece_ := self.queue.next_slice()) is not None:
                self.num_corrected += piece_.factor != 1.0
                self._inside.append(_Running(piece_, self._true_ms(piece_.ms)))
        if not self._is_stepping and self._inside:
            self._step()

    def _true_ms(self, ms: float) -> float:
        off = self._settings.estimates_off
        return max(MS_PER_TOKEN, ms * self._random.uniform(1 - off, 1 + off))

    def _step(self) -> None:
        self._is_stepping = True
        left_ms, computed = self._step_ms, list[tuple[_Running, float]]()
        for running in self._inside:
            ms = min(left_ms, running.left_ms)
            computed.append((running, ms))
            left_ms -= ms
            if left_ms <= 0:
                break
        work_ms = self._step_ms - left_ms
        took_ms = (work_ms + STEP_FIXED_MS) / self._settings.speed

        def end() -> None:
            for running, ms in computed:
                running.left_ms -= ms
                running.took_ms += took_ms * ms / work_ms
            while self._inside and self._inside[0].left_ms <= 1e-9:
                self._finish(self._inside.popleft())
            self._is_stepping = False  # not before: what follows an end may be submitted here
            self._feed()

        self._clock.at(self._clock.now_s + took_ms / 1e3, end)

    def _finish(self, running: _Running) -> None:
        piece = running.piece
        self.served_ms[piece.tenant] += running.took_ms
        if self._settings.has_fair_queue:
            self.queue.measured(piece, running.took_ms, self._clock.now_s)
        else:
            self._plain_ms -= piece.ms
        if piece.is_last:
            piece.request.ended_s = self._clock.now_s
            piece.request.on_end(piece.request)


class Cluster:
    """`weights` by tenant; others weigh 1."""

    def __init__(self, settings: ClusterSettings, weights: dict[str, float]) -> None:
        self.clock = Clock()
        self.settings = settings
        self.weights = dict(weights)
        self.workers = [Worker(self.clock, settings, number) for number in range(settings.num_workers)]
        self._sent: list[list[dict[str, float]]] = [
            [defaultdict(float) for _ in self.workers] for _ in range(settings.num_gateways)
        ]
        self._random = random.Random(f"{settings.seed} cluster")
        self._reported: list[dict[str, float]] = [{} for _ in self.workers]
        for tenant, weight in weights.items():
            self.set_weight(tenant, weight)
        self.clock.every(REPORT_S, self._report)
        if settings.has_debts and settings.has_fair_queue and settings.num_workers > 1:
            self.clock.every(USAGE_S, self._exchange_usage)

    def set_weight(self, tenant: str, weight: float) -> None:
        self.weights[tenant] = weight
        for worker in self.workers:
            worker.queue.set_weight(tenant, weight)

    def submit(
        self, gateway: int, tenant: str, num_tokens: int, on_end: OnEnd, allowed: Sequence[int] | None = None
    ) -> None:
        """Place a prompt on the cheapest of the allowed workers."""
        cost_ms = num_tokens * MS_PER_TOKEN
        choice = min(
            allowed or range(len(self.workers)),
            key=lambda number: (self.price_ms(gateway, number, tenant, cost_ms), self._random.random()),
        )
        self._sent[gateway][choice][tenant] += cost_ms
        self.workers[choice].submit(Prompt(tenant, cost_ms, self.clock.now_s, on_end))

    def price_ms(self, gateway: int, number: int, tenant: str, cost_ms: float) -> float:
        worker, sent = self.workers[number], self._sent[gateway][number]
        if not self.settings.has_fair_queue:
            return worker.backlogs.get("", (0.0, 1.0))[0] + sum(sent.values())
        weight, weights = self.weights.get(tenant, 1.0), self.weights
        own_ms, _ = worker.backlogs.get(tenant, (0.0, weight))
        if len(worker.backlogs) > _MAX_EXACT:
            reported_ms = worker.curve.wait_ms(own_ms, sent[tenant] + cost_ms, weight) + sent[tenant]
            others = [(ms, weights.get(name, 1.0)) for name, ms in sent.items() if name != tenant]
            return worker.inside_ms + reported_ms + fair_wait_ms(0.0, own_ms + sent[tenant] + cost_ms, weight, others)
        own_ms += sent[tenant]
        names = (worker.backlogs.keys() | sent.keys()) - {tenant}
        others = [
            (worker.backlogs.get(name, (0.0, 1.0))[0] + sent.get(name, 0.0), weights.get(name, 1.0)) for name in names
        ]
        return worker.inside_ms + fair_wait_ms(own_ms, cost_ms, weight, others)

    def served_ms(self, tenant: str) -> float:
        return sum(worker.served_ms.get(tenant, 0.0) for worker in self.workers)

    @property
    def all_served_ms(self) -> float:
        return sum(sum(worker.served_ms.values()) for worker in self.workers)

    def _report(self) -> None:
        for worker in self.workers:
            worker.report()
        for gateway in self._sent:
            for sent in gateway:
                sent.clear()

    def _exchange_usage(self) -> None:
        total: dict[str, float] = defaultdict(float)
        for worker in self.workers:
            for tenant, ms in worker.queue.served_ms.items():
                total[tenant] += ms
        for number, worker in enumerate(self.workers):
            elsewhere = {tenant: ms - worker.queue.served_ms.get(tenant, 0.0) for tenant, ms in total.items()}
            before, self._reported[number] = self._reported[number], elsewhere
            news = {tenant: ms - before.get(tenant, 0.0) for tenant, ms in elsewhere.items()}
            worker.queue.elsewhere(news, len(self.workers), self.clock.now_s)
            worker.largest_debt = max(worker.largest_debt, worker.queue.debts.largest_of_band)


# Loads


@dataclass(frozen=True, slots=True)
class Load:
    tenant: str
    gateways: Sequence[int]
    tokens: tuple[int, int]  # of a prompt: from, to
    workers: Sequence[int] | None = None  # that it may use


def keep_busy(cluster: Cluster, load: Load, num_requests: int, seed: int, until_s: float = float("inf")) -> None:
    """Keep so many requests of a tenant in flight: a new one follows each end."""
    chance = random.Random(f"{seed} {load.tenant} closed")

    def send(_: Prompt | None = None) -> None:
        if cluster.clock.now_s < until_s:
            cluster.submit(chance.choice(load.gateways), load.tenant, chance.randint(*load.tokens), send, load.workers)

    for _ in range(num_requests):
        cluster.clock.at(cluster.clock.now_s + chance.uniform(0, 0.2), send)


def send_poisson(
    cluster: Cluster, load: Load, work_ms_per_s: float, seed: int, until_s: float = float("inf")
) -> list[Prompt]:
    """Send prompts worth so much work a second; return the list that ended ones are added to."""
    chance = random.Random(f"{seed} {load.tenant} open")
    mean_ms = sum(load.tokens) / 2 * MS_PER_TOKEN
    ended: list[Prompt] = []

    def send() -> None:
        if cluster.clock.now_s >= until_s:
            return
        cluster.submit(
            chance.choice(load.gateways), load.tenant, chance.randint(*load.tokens), ended.append, load.workers
        )
        cluster.clock.at(cluster.clock.now_s + chance.expovariate(work_ms_per_s / mean_ms), send)

    cluster.clock.at(chance.expovariate(work_ms_per_s / mean_ms), send)
    return ended


def shares_in_windows(cluster: Cluster, tenant: str, begin_s: float, end_s: float, window_s: float) -> list[float]:
    """Run on; return the tenant's shares of the work in each window."""
    cluster.clock.run_until(begin_s)
    shares: list[float] = []
    for _ in range(round((end_s - begin_s) / window_s)):
        own, every = cluster.served_ms(tenant), cluster.all_served_ms
        cluster.clock.run_until(cluster.clock.now_s + window_s)
        shares.append((cluster.served_ms(tenant) - own) / (cluster.all_served_ms - every))
    return shares


def percentile_ms(prompts: Sequence[Prompt], share: float, since_s: float = 0.0) -> float:
    """Return a percentile of the time to the first token; the prompts must be there."""
    times = sorted(prompt.ttft_ms for prompt in prompts if prompt.arrived_s >= since_s)
    return times[min(len(times) - 1, int(share * len(times)))]
