"""The fair queue of an engine: shares, bounds, orders and limits."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.tenancy.debts import Debts, dead_band_ms
from kvferry.tenancy.fair_queue import FairQueue, QueueLimit, QueueParameters, Slice


@dataclass(eq=False)
class Prompt:
    tenant: str
    cost_ms: float
    prefix: int = 0
    number: int = field(default_factory=itertools.count().__next__)


class Engine:
    """Serves one slice after another in virtual time, with times that differ from the estimates."""

    def __init__(self, queue: FairQueue[Prompt], rng: random.Random, error: float = 0.0) -> None:
        self.queue, self.now_s = queue, 0.0
        self.charged_ms: dict[str, float] = {}
        self._rng, self._error = rng, error
        self._inside: list[Slice[Prompt]] = []

    def step(self) -> Slice[Prompt] | None:
        """Serve the first slice inside; return it, or None when nothing waits."""
        while (piece := self.queue.next_slice()) is not None:
            self._inside.append(piece)
        if not self._inside:
            return None
        piece = self._inside.pop(0)
        ms = piece.ms * (1.0 + self._rng.uniform(-self._error, self._error))
        self.now_s += ms / 1e3
        self.charged_ms[piece.tenant] = self.charged_ms.get(piece.tenant, 0.0) + ms
        self.queue.measured(piece, ms, self.now_s)
        return piece


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.floats(0.25, 16.0), min_size=2, max_size=5),
    slice_ms=st.sampled_from([20.0, 51.2, float("inf")]),
    error=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32),
)
def test_work_per_weight_of_backlogged_tenants_never_parts_by_more_than_the_bound(
    weights: list[float], slice_ms: float, error: float, seed: int
) -> None:
    rng = random.Random(seed)
    parameters = QueueParameters(slice_ms=slice_ms)
    queue: FairQueue[Prompt] = FairQueue(parameters)
    engine = Engine(queue, rng, error)
    longest_ms = 300.0
    tenants = {f"t{i}": weight for i, weight in enumerate(weights)}
    for name, weight in tenants.items():
        queue.set_weight(name, weight)
        for _ in range(400):
            queue.add(Prompt(name, rng.uniform(1.0, longest_ms)), 0.0)
    piece_ms = min(slice_ms, longest_ms) * (1 + error)
    inside_ms = parameters.depth_ms + piece_ms
    num_steps = 0
    while len(queue.backlogs()) == len(tenants) and num_steps < 600:
        engine.step()
        num_steps += 1
        queue.check()
        for (a, weight_a), (b, weight_b) in itertools.combinations(tenants.items(), 2):
            lag_ms = abs(engine.charged_ms.get(a, 0.0) / weight_a - engine.charged_ms.get(b, 0.0) / weight_b)
            bound_ms = (parameters.turn_ms + piece_ms) * (1 / weight_a + 1 / weight_b)
            assert lag_ms <= bound_ms + inside_ms / min(weight_a, weight_b)
    assert num_steps > 300


def test_a_tenant_that_returns_goes_first_and_takes_no_credit_for_its_absence() -> None:
    queue: FairQueue[Prompt] = FairQueue(QueueParameters(depth_ms=1.0, slice_ms=50.0))
    engine = Engine(queue, random.Random(1))
    for _ in range(400):
        queue.add(Prompt("noise", 50.0), engine.now_s)
    for _ in range(200):
        engine.step()
    for _ in range(200):
        queue.add(Prompt("back", 50.0), engine.now_s)
    served = [piece.tenant for _ in range(40) if (piece := engine.step()) is not None]
    assert "back" in served[:2]
    assert 16 <= served.count("back") <= 24, "half of the time from now on, and nothing for the time before"


def test_inside_a_turn_the_longest_cached_prefix_goes_first_and_the_oldest_in_the_end() -> None:
    queue: FairQueue[Prompt] = FairQueue(QueueParameters(depth_ms=1.0), lambda prefix: prefix)  # type: ignore[arg-type,return-value]
    engine = Engine(queue, random.Random(1))
    oldest = Prompt("a", 10.0, prefix=0)
    queue.add(oldest, 0.0)
    for _ in range(60):
        queue.add(Prompt("a", 10.0, prefix=7), 0.0)
    served: list[Prompt] = []
    while (piece := engine.step()) is not None:
        served.append(piece.request)
    assert served[0].prefix == 7
    assert 20 < served.index(oldest) <= 33


def test_a_request_that_goes_on_is_first_of_its_tenant_and_never_refused() -> None:
    queue: FairQueue[Prompt] = FairQueue(QueueParameters(depth_ms=1.0, max_requests=2))
    assert queue.add(Prompt("a", 1.0), 0.0) is None
    assert queue.add(Prompt("b", 1.0), 0.0) is None
    assert queue.add(Prompt("b", 1.0), 0.0) is QueueLimit.REQUESTS
    resumed = Prompt("a", 1.0)
    assert queue.add(resumed, 0.0, is_continued=True) is None
    engine = Engine(queue, random.Random(1))
    served = [piece.request for _ in range(3) if (piece := engine.step()) is not None]
    assert next(each for each in served if each.tenant == "a") is resumed


def test_one_tenant_does_not_fill_the_queue_of_all() -> None:
    queue: FairQueue[Prompt] = FairQueue(QueueParameters(max_requests=100))
    num_taken = 0
    while queue.add(Prompt("greedy", 1.0), 0.0) is None:
        num_taken += 1
    assert num_taken == 50
    assert queue.add(Prompt("other", 1.0), 0.0) is None


def test_idle_engines_forgive_and_busy_ones_do_not() -> None:
    for pause_s, expected in ((0.2, "other"), (2.0, "first")):
        queue: FairQueue[Prompt] = FairQueue(QueueParameters(depth_ms=1.0))
        engine = Engine(queue, random.Random(1))
        queue.add(Prompt("first", 5_000.0), 0.0)
        while engine.step() is not None:
            pass
        now_s = engine.now_s + pause_s
        queue.add(Prompt("first", 10.0), now_s)
        queue.add(Prompt("other", 10.0), now_s)
        piece = queue.next_slice()
        assert piece is not None
        assert piece.tenant == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["add", "cancel", "step", "weight"])), max_size=200))
def test_any_order_of_operations_keeps_the_queue_whole(operations: list[tuple[str, str]]) -> None:
    queue: FairQueue[Prompt] = FairQueue(QueueParameters(max_tenants=3, max_requests=20))
    engine = Engine(queue, random.Random(1), 0.5)
    waiting: list[Prompt] = []
    for tenant, operation in operations:
        match operation:
            case "add":
                prompt = Prompt(tenant, 30.0)
                if queue.add(prompt, engine.now_s) is None:
                    waiting.append(prompt)
            case "cancel" if waiting:
                queue.cancel(waiting.pop(len(waiting) // 2), engine.now_s)
            case "step":
                engine.step()
            case "weight":
                queue.set_weight(tenant, 1.0 + len(waiting))
        queue.check()
        assert queue.num_requests <= 20
    while engine.step() is not None:
        queue.check()
    assert queue.num_requests == 0
    assert not queue.backlogs()


def test_a_tenant_that_gets_much_elsewhere_is_charged_more_here_until_it_is_even() -> None:
    debts = Debts(200.0)
    weights = {"a": 4.0, "b": 1.0}
    assert debts.factor("b") == 1.0
    for second in range(6):
        debts.elsewhere({"b": 1000.0}, weights, 2, float(second))
    assert debts.factor("b") == 4.0
    assert debts.factor("a") == 0.25
    assert debts.largest_ms <= 2 * debts.dead_band_ms
    debts.elsewhere({}, weights, 2, 500.0)
    assert (debts.factor("a"), debts.factor("b")) == (1.0, 1.0), "what was learned long ago is forgotten"


def test_the_dead_band_grows_with_workers_and_turns() -> None:
    assert dead_band_ms(200.0, 2) == dead_band_ms(200.0, 8) == 2000.0
    assert dead_band_ms(200.0, 16) == 4000.0
    assert dead_band_ms(400.0, 8) == 4000.0


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ValueError):
        FairQueue[Prompt]().set_weight("a", weight)
