from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.shares.step_order import Candidate, StepOrder, step_order

BUDGET = 100


def begun(name: str, due_ms: float, num_tokens: int) -> Candidate[str]:
    return Candidate(name, due_ms, num_tokens, has_begun=True)


def waiting(name: str, due_ms: float, num_tokens: int) -> Candidate[str]:
    return Candidate(name, due_ms, num_tokens, has_begun=False)


def engine_step(candidates: list[Candidate[str]], order: StepOrder[str]) -> dict[str, int]:
    """Return the tokens that an engine gives: to prompts that have begun, then to those that wait by `due_ms`."""
    left, given_tokens = BUDGET, {}
    first = [each for each in candidates if each.has_begun and each.prompt not in order.paused]
    for each in [*first, *sorted((each for each in candidates if not each.has_begun), key=lambda each: each.due_ms)]:
        num_tokens = min(each.num_tokens, left, BUDGET if order.max_tokens is None else order.max_tokens)
        if num_tokens:
            given_tokens[each.prompt] = num_tokens
            left -= num_tokens
    return given_tokens


def test_nothing_changes_unless_a_waiting_prompt_is_due_first() -> None:
    assert step_order([begun("a", 1.0, 500), waiting("b", 2.0, 10)], BUDGET) == StepOrder()
    assert step_order([begun("a", 2.0, 500), waiting("b", 2.0, 10)], BUDGET) == StepOrder()
    assert step_order([waiting("b", 2.0, 10)], BUDGET) == StepOrder()
    assert step_order([begun("a", 2.0, 50), waiting("b", 1.0, 50)], BUDGET) == StepOrder(), "there is room for both"


def test_a_prompt_that_is_due_first_gets_its_tokens_and_one_that_has_begun_the_rest() -> None:
    candidates = [begun("long", 9.0, 500), waiting("short", 1.0, 30)]
    assert engine_step(candidates, StepOrder()) == {"long": 100}
    assert engine_step(candidates, step_order(candidates, BUDGET)) == {"long": 70, "short": 30}


def test_a_prompt_that_has_begun_is_left_out_where_its_rest_would_limit_the_first() -> None:
    candidates = [begun("long", 9.0, 500), waiting("longer", 1.0, 800)]
    assert engine_step(candidates, step_order(candidates, BUDGET)) == {"longer": 100}
    candidates = [begun("long", 9.0, 500), waiting("most", 1.0, 80)]
    assert engine_step(candidates, step_order(candidates, BUDGET)) == {"most": 80}


def test_a_token_of_transferred_prompts_costs_a_long_one_a_token() -> None:
    candidates = [begun("long", 9.0, 500), *(waiting(f"pulled {number}", 0.0, 1) for number in range(3))]
    assert step_order(candidates, BUDGET) == StepOrder((), 97)


PROMPTS = st.lists(
    st.tuples(st.sampled_from((0.0, 1.0, 2.0, 5.0)), st.sampled_from((1, 10, 40, 99, 100, 300)), st.booleans()),
    max_size=8,
)


@given(PROMPTS)
def test_every_step_computes_and_no_prompt_waits_for_one_that_is_due_later(
    prompts: list[tuple[float, int, bool]],
) -> None:
    candidates = [
        Candidate(str(number), due_ms, num_tokens, has_begun=has_begun)
        for number, (due_ms, num_tokens, has_begun) in enumerate(prompts)
    ]
    order = step_order(candidates, BUDGET)
    got = engine_step(candidates, order)
    assert bool(got) == bool(candidates)
    assert set(order.paused) <= {each.prompt for each in candidates if each.has_begun}
    for each in candidates:
        num_before = sum(
            other.num_tokens
            for other in candidates
            if other is not each and (other.due_ms, not other.has_begun) <= (each.due_ms, not each.has_begun)
        )
        if not each.has_begun:
            assert got.get(each.prompt, 0) >= min(each.num_tokens, max(0, BUDGET - num_before))
