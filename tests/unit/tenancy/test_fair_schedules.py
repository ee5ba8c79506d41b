"""The fair queue over random schedules; `make bench-fair-queue` runs 100,000 with other seeds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bench.fair_queue import bound
from bench.fair_schedules import Prompt, Schedule
from bench.results import BenchFailed, Results
from kvferry.tenancy.shares.fair_queue import FairQueue, QueueParameters
from kvferry.tenancy.shares.tenant_queue import Slice

NUM_SCHEDULES = 400


def test_two_waiting_tenants_never_drift_apart_further_than_the_bound() -> None:
    worst = worst_of_first_term = 0.0
    for number in range(NUM_SCHEDULES):
        outcome = Schedule(f"unit {number}").run()
        if outcome.is_corrected:
            continue
        assert outcome.of_bound <= 1 + 1e-9, number
        assert outcome.finished_of_bound <= 1 + 1e-9, number
        if outcome.are_estimates_right:
            worst_of_first_term = max(worst_of_first_term, outcome.of_first_term)
        worst = max(worst, outcome.of_bound)
    assert worst > 0.7  # schedules that never come near the bound would show nothing
    assert worst_of_first_term <= 1 + 1e-9


@given(st.integers(0, 1 << 40))
@settings(max_examples=50, deadline=None)
def test_the_bound_holds_whatever_the_seed(seed: int) -> None:
    outcome = Schedule(f"hypothesis {seed}", num_slices=60).run()
    assert outcome.is_corrected or max(outcome.of_bound, outcome.finished_of_bound) <= 1 + 1e-9


def test_the_bound_is_exceeded_without_fairness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FairQueue, "_charge", lambda self, tenant, ms, factor: None)
    assert max(Schedule(f"unit {number}").run().of_bound for number in range(20)) > 1


def test_the_first_schedule_beyond_its_bound_ends_the_benchmark_with_the_figures_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = Results()
    bound(3, "unit", results)
    assert results.figures["schedules"] == 3
    monkeypatch.setattr(FairQueue, "_charge", lambda self, tenant, ms, factor: None)
    with pytest.raises(BenchFailed, match="schedule unit 0: a drift of "):
        bound(3, "unit", results)
    assert results.figures["schedules"] == 1
    assert results.figures["worst_ratio_to_bound"] > 1


TENANTS = st.sampled_from("abcd")


class QueueMachine(RuleBasedStateMachine):
    """Every request is given whole, once, or leaves; what is charged is what was measured."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Prompt] = FairQueue(
            QueueParameters(turn_ms=100.0, slice_ms=30.0, depth_ms=50.0, max_tenants=3, max_requests=12)
        )
        self.waiting: dict[Prompt, float] = {}  # -> ms not given yet
        self.inside: list[Slice[Prompt]] = []
        self.measured_ms = 0.0
        self.now_s = 0.0

    @rule(tenant=TENANTS, cost_ms=st.floats(0, 100), is_continued=st.booleans())
    def add(self, tenant: str, cost_ms: float, is_continued: bool) -> None:
        prompt = Prompt(tenant, cost_ms, 0)
        limit = self.queue.add(prompt, self.now_s, is_continued=is_continued)
        assert limit is None or not is_continued
        if limit is None:
            self.waiting[prompt] = cost_ms

    @rule()
    def give(self) -> None:
        piece = self.queue.next_slice()
        inside_ms = sum(piece.ms for piece in self.inside)
        if piece is None:
            assert not self.waiting or inside_ms >= 50.0 - 1e-6
            return
        assert inside_ms <= 50.0 + 1e-6
        assert piece.ms <= 30.0
        self.inside.append(piece)
        self.waiting[piece.request] -= piece.ms
        if piece.is_last:
            assert abs(self.waiting.pop(piece.request)) < 1e-6

    @precondition(lambda self: self.inside)
    @rule(scale=st.floats(0, 3))
    def measure(self, scale: float) -> None:
        piece = self.inside.pop(0)
        self.queue.measured(piece, scale * piece.ms, self.now_s)
        self.measured_ms += scale * piece.ms

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        prompt = data.draw(st.sampled_from(list(self.waiting)))
        assert self.queue.cancel(prompt, self.now_s)
        del self.waiting[prompt]

    @rule(tenant=TENANTS, weight=st.sampled_from((0.1, 1.0, 16.0)))
    def weigh(self, tenant: str, weight: float) -> None:
        self.queue.set_weight(tenant, weight)

    @rule(tenant=TENANTS, ms=st.sampled_from((100.0, 1e5)))
    def report(self, tenant: str, ms: float) -> None:
        self.queue.elsewhere({tenant: ms}, 8, self.now_s)

    @rule(elapsed_s=st.sampled_from((0.1, 2.0)))
    def advance(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert self.queue.num_requests == len(self.waiting)
        assert self.queue.num_waiting == len({prompt.tenant for prompt in self.waiting})
        assert abs(sum(self.queue.served_ms.values()) - self.measured_ms) < 1e-3


QueueMachine.TestCase.settings = settings(max_examples=settings.default.max_examples // 3)
TestQueueMachine = QueueMachine.TestCase
