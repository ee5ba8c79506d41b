"""Random schedules of the fair queue, and how far two waiting tenants drift apart in them.

Some tenants always have requests on every worker; others come, cancel and leave. For two of the first, S is the work
that was charged, in ms; within any stretch of constant weights

    |S_i/w_i - S_j/w_j| <= M x (Q + L) x (1/w_i + 1/w_j) + M x 2E x (1/w_i + 1/w_j)

with M workers, turns of Q ms, slices of at most L ms, and estimates that are wrong by E ms over all slices inside one
engine. Work that the engine finished differs from it by what is inside.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from kvferry.tenancy.shares.fair_queue import FairQueue, QueueParameters
from kvferry.tenancy.shares.tenant_queue import Slice


@dataclass(eq=False, slots=True)
class Prompt:
    tenant: str
    cost_ms: float
    prefix: int


@dataclass(slots=True)
class Drift:
    """Extremes of S_i/w_i - S_j/w_j."""

    lowest: float = 0.0
    highest: float = 0.0

    def note(self, value: float) -> None:
        self.lowest = min(self.lowest, value)
        self.highest = max(self.highest, value)

    @property
    def ms_per_weight(self) -> float:
        return self.highest - self.lowest


@dataclass(slots=True)
class Outcome:
    """Largest drifts of one schedule, relative to their bounds."""

    of_bound: float = 0.0
    of_first_term: float = 0.0  # M x (Q + L) x (1/w_i + 1/w_j)
    finished_of_bound: float = 0.0  # with what is inside the engines
    are_estimates_right: bool = True
    is_corrected: bool = False  # by debts: the bound says nothing then


@dataclass(eq=False)
class Schedule:
    """A random schedule; equal seeds give equal ones."""

    seed: str
    num_slices: int = 120
    _finished: dict[str, float] = field(default_factory=dict)
    _charged: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chance = self._random = random.Random(self.seed)
        self._num_workers = chance.choice((1, 1, 2, 3, 4))
        self._steady = [f"steady{number}" for number in range(chance.choice((2, 2, 3, 4)))]
        self._visitors = [f"visitor{number}" for number in range(chance.choice((0, 0, 1, 3, 8)))]
        self._weights = {name: chance.choice((1.0, 4.0, 2 ** chance.uniform(-3, 4))) for name in self._steady}
        self._weights |= {name: 2 ** chance.uniform(-3, 4) for name in self._visitors}
        self._parameters = QueueParameters(
            turn_ms=chance.choice((50.0, 100.0, 200.0, 200.0, 400.0)),
            slice_ms=chance.choice((10.0, 50.0, 50.0, 200.0, 10_000.0)),
            depth_ms=chance.choice((1.0, 60.0, 60.0, 250.0)),
        )
        self._sizes = {
            name: chance.choice(((5.0, 5.0), (1.0, 100.0), (20.0, 2000.0), (0.0, 300.0)))
            for name in (*self._steady, *self._visitors)
        }
        self._error = chance.choice((0.0, 0.0, 0.1, 0.5))
        self._fixed_ms = chance.choice((0.0, 5.0)) if self._error else 0.0
        self._cached = {prefix: chance.randrange(4) for prefix in range(16)}
        self._queues = [self._queue() for _ in range(self._num_workers)]
        self._inside: list[deque[tuple[Slice[Prompt], float]]] = [deque() for _ in self._queues]
        self._inside_ms = dict.fromkeys((*self._steady, *self._visitors), 0.0)
        self._free_s = [0.0] * self._num_workers
        self._waiting: list[deque[Prompt]] = [deque() for _ in self._queues]
        self._reported = [dict[str, float]() for _ in self._queues]
        self._largest_ms = self._wrong_ms = self._full_ms = 0.0
        self._now_s = 0.0

    def run(self) -> Outcome:
        chance, outcome = self._random, Outcome(are_estimates_right=not self._error)
        for name in self._weights:
            self._charged[name] = self._finished[name] = 0.0
        change_at = chance.randrange(self.num_slices) if chance.random() < 0.2 else None
        self._begin_stretch()
        for number in range(self.num_slices):
            if number == change_at:
                self._judge(outcome)
                self._change_weight()
                self._begin_stretch()
            worker = min(range(self._num_workers), key=self._free_s.__getitem__)
            self._now_s = self._free_s[worker]
            self._visit(worker)
            self._feed(worker, outcome)
            self._step(worker)
            if self._num_workers > 1 and number % 16 == 15:
                self._report(worker)
        self._judge(outcome)
        for queue in self._queues:
            queue.check()
        return outcome

    def _queue(self) -> FairQueue[Prompt]:
        queue: FairQueue[Prompt] = FairQueue(self._parameters, lambda prefix: self._cached.get(hash(prefix), 0))
        for name, weight in self._weights.items():
            queue.set_weight(name, weight)
        return queue

    def _begin_stretch(self) -> None:
        names = self._steady
        self._drifts = {(i, j): (Drift(), Drift()) for i in names for j in names if i < j}
        self._charged_before, self._finished_before = dict(self._charged), dict(self._finished)

    def _note(self) -> None:
        for (i, j), (charged, finished) in self._drifts.items():
            w_i, w_j = self._weights[i], self._weights[j]
            for drift, work, before in (
                (charged, self._charged, self._charged_before),
                (finished, self._finished, self._finished_before),
            ):
                drift.note((work[i] - before[i]) / w_i - (work[j] - before[j]) / w_j)

    def _judge(self, outcome: Outcome) -> None:
        for (i, j), (charged, finished) in self._drifts.items():
            per_ms = self._num_workers * (1 / self._weights[i] + 1 / self._weights[j])
            first = per_ms * (self._parameters.turn_ms + self._largest_ms)
            bound = first + per_ms * 2 * self._wrong_ms
            if not first:
                continue
            outcome.of_first_term = max(outcome.of_first_term, charged.ms_per_weight / first)
            outcome.of_bound = max(outcome.of_bound, charged.ms_per_weight / bound)
            outcome.finished_of_bound = max(
                outcome.finished_of_bound, finished.ms_per_weight / (bound + per_ms * self._full_ms)
            )

    def _change_weight(self) -> None:
        name = self._random.choice(self._steady)
        self._weights[name] = 2 ** self._random.uniform(-3, 4)
        for queue in self._queues:
            queue.set_weight(name, self._weights[name])

    def _prompt(self, tenant: str) -> Prompt:
        return Prompt(tenant, self._random.uniform(*self._sizes[tenant]), self._random.randrange(16))

    def _visit(self, worker: int) -> None:
        chance, queue, waiting = self._random, self._queues[worker], self._waiting[worker]
        while self._visitors and chance.random() < 0.3:
            prompt = self._prompt(chance.choice(self._visitors))
            queue.add(prompt, self._now_s, is_continued=chance.random() < 0.1)
            waiting.append(prompt)
        while waiting and chance.random() < 0.2:
            queue.cancel(waiting.popleft(), self._now_s)

    def _feed(self, worker: int, outcome: Outcome) -> None:
        queue, inside, chance = self._queues[worker], self._inside[worker], self._random
        while True:
            backlogs = queue.backlogs()
            for name in self._steady:
                if name not in backlogs or backlogs[name][0] <= self._parameters.slice_ms:
                    for _ in range(chance.choice((1, 1, 6))):
                        queue.add(self._prompt(name), self._now_s, is_continued=chance.random() < 0.05)
            piece = queue.next_slice()
            if piece is None:
                break
            true_ms = piece.ms * chance.uniform(1 - self._error, 1 + self._error) + self._fixed_ms
            inside.append((piece, true_ms))
            outcome.is_corrected |= piece.factor != 1.0 and piece.tenant in self._steady
            self._largest_ms = max(self._largest_ms, piece.ms, true_ms)
            self._charged[piece.tenant] += piece.ms
            self._note()
        self._wrong_ms = max(self._wrong_ms, sum(abs(true_ms - piece.ms) for piece, true_ms in inside))
        self._full_ms = max(self._full_ms, sum(true_ms for _, true_ms in inside))

    def _step(self, worker: int) -> None:
        queue, inside = self._queues[worker], self._inside[worker]
        if not inside:
            self._free_s[worker] += 0.01
            return
        piece, true_ms = inside.popleft()
        self._free_s[worker] += (true_ms + 0.01) / 1e3
        queue.measured(piece, true_ms, self._free_s[worker])
        self._charged[piece.tenant] += true_ms - piece.ms
        self._finished[piece.tenant] += true_ms
        self._note()

    def _report(self, worker: int) -> None:
        got: dict[str, float] = {}
        for number, queue in enumerate(self._queues):
            if number != worker:
                for name, ms in queue.served_ms.items():
                    got[name] = got.get(name, 0.0) + ms
        before, self._reported[worker] = self._reported[worker], got
        news = {name: ms - before.get(name, 0.0) for name, ms in got.items()}
        self._queues[worker].elsewhere(news, self._num_workers, self._now_s)
