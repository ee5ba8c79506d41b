"""Which prompts a step of the simulator computes."""

from __future__ import annotations

from kvferry.engine.base import EngineRequest, RequestId, Sampling, Turn
from kvferry_sim.block_pool import BlockPool
from kvferry_sim.scheduler import Scheduler
from kvferry_sim.sequence import to_sequence
from kvferry_sim.settings import SimConfig
from kvferry_sim.tokenizer import SimTokenizer

STEP_TOKENS = 10


class Steps:
    def __init__(self, num_pages: int = 100) -> None:
        self.scheduler = Scheduler(
            BlockPool(num_pages, 4), max_num_seqs=8, chunk_tokens=STEP_TOKENS, start_fetch=lambda sequence, first: False
        )

    def add(self, name: str, num_tokens: int, due_ms: float = 0.0, tenant: str = "a") -> None:
        tokens = [len(self.scheduler) + 1] * num_tokens
        request = EngineRequest(RequestId(name), tokens, Sampling(max_tokens=9), turn=Turn(tenant, 1.0))
        sequence = to_sequence(
            request, SimConfig(), SimTokenizer(), block_size=4, max_tokens_total=num_tokens + 9, seed=1, due_ms=due_ms
        )
        self.scheduler.add(sequence)

    def step(self) -> dict[str, int]:
        plan = self.scheduler.plan()
        for sequence, num_tokens in plan:
            sequence.num_computed += num_tokens
            if sequence.num_computed == sequence.num_tokens:
                self.scheduler.remove(sequence)
        self.scheduler.check()
        return {str(sequence.request.request_id): num_tokens for sequence, num_tokens in plan}


def test_prompts_are_computed_in_the_order_in_which_they_came() -> None:
    steps = Steps()
    steps.add("first", 15)
    steps.add("second", 15)
    assert [steps.step() for _ in range(3)] == [{"first": 10}, {"first": 5, "second": 5}, {"second": 10}]


def test_one_that_is_due_first_passes_one_that_has_begun() -> None:
    steps = Steps()
    steps.add("long", 30, due_ms=90.0)
    assert steps.step() == {"long": 10}
    steps.add("short", 12, due_ms=5.0)
    steps.add("last", 4, due_ms=99.0)
    assert [steps.step() for _ in range(3)] == [{"short": 10}, {"short": 2, "long": 8}, {"long": 10}]
    assert steps.step() == {"long": 2, "last": 4}


def test_one_that_does_not_fit_lets_what_has_begun_go_on() -> None:
    steps = Steps(num_pages=12)
    steps.add("long", 30, due_ms=90.0)
    assert steps.step() == {"long": 10}
    steps.add("first", 28, due_ms=5.0)
    assert [steps.step() for _ in range(2)] == [{"long": 10}, {"long": 10}]
    assert steps.step() == {"first": 10}


def test_one_that_does_not_fit_holds_up_only_tenants_that_hold_as_much() -> None:
    steps = Steps(num_pages=12)
    steps.add("running", 9, tenant="noise")
    assert steps.step() == {"running": 9}, "it has three pages"
    steps.add("running", 15, tenant="noise")
    steps.add("stuck", 36, tenant="noise")
    steps.add("its next", 4, tenant="noise")
    steps.add("another's", 4, tenant="gold")
    assert steps.step() == {"running": 10}
    assert steps.step() == {"running": 5, "another's": 4}
    assert steps.step() == {"stuck": 10}
    assert [steps.step() for _ in range(3)][-1] == {"stuck": 6, "its next": 4}
