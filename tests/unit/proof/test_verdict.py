"""What distances say about a transfer."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proof.verdict import (
    CONTROL_FACTOR,
    EXACT,
    FARTHEST,
    FINE_FACTOR,
    FINEST,
    LONGEST_ON_CPU,
    LONGEST_ON_GPU,
    MIN_PROMPT,
    NOISE_FACTOR,
    NUM_LIKELIEST,
    Distances,
    Outcome,
    View,
    distance,
    judge,
    lengths,
    longest_prompt,
    prompts,
    wrong_prompts,
)

LIKELIHOODS = {token: -0.5 * (token + 1) for token in range(NUM_LIKELIEST + 3)}


def measured(
    transferred: float = 0.0,
    noise: float = 0.0,
    controls: tuple[float, ...] = (5.0, 6.0),
    *,
    prompt: int = 0,
    view: View = View.DIRECT,
) -> Distances:
    return Distances(prompt, 100, view, transferred, noise, controls)


# Distances


def test_equal_log_probabilities_are_at_no_distance_in_any_order() -> None:
    turned = dict(reversed(LIKELIHOODS.items()))
    assert distance([LIKELIHOODS, turned], [turned, LIKELIHOODS]) == 0.0


def test_only_the_likeliest_tokens_of_the_engines_own_answer_count() -> None:
    other = dict(LIKELIHOODS)
    other[NUM_LIKELIEST] = -90.0
    assert distance([LIKELIHOODS], [other]) == 0.0
    assert distance([other], [LIKELIHOODS]) == 0.0
    other[NUM_LIKELIEST - 1] = LIKELIHOODS[NUM_LIKELIEST - 1] - 1.0
    other = dict(reversed(other.items()))
    assert distance([LIKELIHOODS], [other]) == pytest.approx(1.0 / NUM_LIKELIEST)


def test_differences_do_not_cancel_and_count_at_each_position() -> None:
    assert distance([{1: -1.0, 2: -2.0}], [{1: -2.0, 2: -1.0}]) == 1.0
    assert distance([{1: -1.0}, {1: -1.0}], [{1: -1.0}, {1: -4.0}]) == 1.5
    with pytest.raises(ValueError, match="zip"):
        distance([LIKELIHOODS], [LIKELIHOODS, LIKELIHOODS])


def test_a_token_that_the_other_does_not_name_counts_as_its_least_likely_one() -> None:
    assert distance([{1: -1.0}], [{2: -0.1, 3: -4.0}]) == 3.0


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ([], []),
        ([{}], [{}]),
        ([{1: -1.0}], [{}]),
        ([{1: math.nan}], [{1: -1.0}]),
        ([{1: -1.0}], [{1: math.nan}]),
        ([{1: -1.0, 2: -2.0}], [{1: -1.0, 2: math.nan}]),
        ([{1: -1.0}], [{1: -math.inf}]),
        ([{1: -math.inf}], [{1: -math.inf}]),
        ([{1: -1.0}, {1: -1.0}], [{1: -1.0}, {1: math.nan}]),
        ([{1: -1.0}], [{1: -1e300}]),
    ],
)
def test_what_is_no_number_is_as_far_away_as_can_be(own: list[dict[int, float]], other: list[dict[int, float]]) -> None:
    assert distance(own, other) == FARTHEST < math.inf  # JSON has no inf


# Verdicts


@pytest.mark.parametrize(
    ("of_prompts", "outcome"),
    [
        ([], Outcome.UNDECIDED),
        ([measured()], Outcome.PROVEN),
        ([measured(EXACT)], Outcome.PROVEN),
        ([measured(EXACT, 10.0)], Outcome.PROVEN),
        ([measured(1.01 * EXACT)], Outcome.REFUTED),
        ([measured(0.1, 0.1)], Outcome.PROVEN),
        ([measured(NOISE_FACTOR * 0.1, 0.1)], Outcome.PROVEN),
        ([measured(1.01 * NOISE_FACTOR * 0.1, 0.1)], Outcome.REFUTED),
        # Each is below the largest noise of all prompts.
        ([measured(0.15, 0.0), measured(0.15, 0.0), measured(0.15, 0.1)], Outcome.REFUTED),
        ([measured(0.15, 0.0), measured(0.0, 0.1), measured(0.0, 0.0)], Outcome.PROVEN),
        ([measured(0.0015, 0.001), measured(0.0009), measured(0.0004)], Outcome.PROVEN),
        # One bad prompt, first, last and in the middle.
        ([measured(1.0), measured(), measured()], Outcome.REFUTED),
        ([measured(), measured(1.0), measured()], Outcome.REFUTED),
        ([measured(), measured(), measured(1.0)], Outcome.REFUTED),
        ([measured(0.01, 0.01), measured(0.01, 0.01), measured(1.0, 0.01)], Outcome.REFUTED),
        ([measured(FARTHEST)], Outcome.REFUTED),
        ([measured(math.inf)], Outcome.REFUTED),
        # What cannot fail proves nothing.
        ([measured(controls=())], Outcome.UNDECIDED),
        ([measured(controls=(0.0, 5.0))], Outcome.UNDECIDED),
        ([measured(controls=(5.0, 0.0))], Outcome.UNDECIDED),
        ([measured(EXACT, controls=(CONTROL_FACTOR * EXACT,))], Outcome.UNDECIDED),
        ([measured(controls=(1.01 * CONTROL_FACTOR * EXACT,))], Outcome.PROVEN),
        # Controls that are near, as of models with random weights: the transfer has to be far nearer.
        ([measured(controls=(CONTROL_FACTOR * EXACT,))], Outcome.PROVEN),
        ([measured(1e-6, controls=(1e-5, 5.0))], Outcome.PROVEN),
        ([measured(1e-5 / FINE_FACTOR, controls=(1e-5,))], Outcome.PROVEN),
        ([measured(1.1e-6, controls=(1e-5, 5.0))], Outcome.UNDECIDED),
        ([measured(0.0, 5e-6, (1e-5,))], Outcome.UNDECIDED),
        ([measured(0.0, 0.0, (1e-5,)), measured(0.0, 5e-6)], Outcome.UNDECIDED),
        ([measured(0.0, 0.0, (1e-5,)), measured(0.0, 5e-6, view=View.HELD)], Outcome.PROVEN),
        ([measured(0.0, 4.9e-6, (1e-5,))], Outcome.PROVEN),
        ([measured(controls=(2 * FINEST,))], Outcome.UNDECIDED),
        ([measured(controls=(2.1 * FINEST,))], Outcome.PROVEN),
        ([measured(0.1, 0.1, (0.3, 5.0))], Outcome.UNDECIDED),
        ([measured(0.1, 0.1, (CONTROL_FACTOR * NOISE_FACTOR * 0.1,))], Outcome.UNDECIDED),
        ([measured(0.1, 0.1, (0.41,))], Outcome.PROVEN),
        ([measured(), measured(controls=(0.0,)), measured()], Outcome.UNDECIDED),
        ([measured(0.1, FARTHEST, (FARTHEST,))], Outcome.UNDECIDED),
        ([measured(0.1, math.inf, (math.inf,))], Outcome.UNDECIDED),
        ([measured(0.1, math.inf)], Outcome.UNDECIDED),
        # A difference for which nothing but its size speaks does not hide behind one that says nothing.
        ([measured(controls=(0.0,)), measured(1.0)], Outcome.REFUTED),
        ([measured(1.0, controls=(0.5, 5.0)), measured()], Outcome.REFUTED),
        ([measured(1.0, 0.2, (0.5, 5.0)), measured(0.0, 0.2)], Outcome.REFUTED),
    ],
)
def test_the_outcome(of_prompts: list[Distances], outcome: Outcome) -> None:
    verdict = judge(of_prompts)
    assert verdict.outcome is outcome
    assert (verdict.reason == "") is (outcome is Outcome.PROVEN)


def test_a_verdict_says_why_and_by_which_limits() -> None:
    assert judge([]).reason == "nothing was measured"
    refuted = judge([measured(1.0)])
    assert refuted.reason.startswith(
        "transferred pages differ from the engine's own at 100 tokens (direct): wrong ones by 5 or"
    )
    assert refuted.limits == judge([measured()]).limits == {"direct": EXACT, "held": EXACT}


def test_each_view_has_its_own_noise() -> None:
    direct, held = measured(0.0, 0.1), measured(0.1, 0.0, view=View.HELD)
    assert judge([direct, held]).outcome is Outcome.REFUTED
    assert judge([measured(0.1, 0.1), measured(0.0, 0.0, view=View.HELD)]).outcome is Outcome.PROVEN
    limits = judge([measured(0.1, 0.1), measured(view=View.HELD)]).limits
    assert limits == {"direct": pytest.approx(0.2), "held": EXACT}


@given(
    st.lists(
        st.builds(
            measured,
            st.floats(0, 10),
            st.floats(0, 10),
            st.lists(st.floats(0, 10), max_size=2).map(tuple),
            view=st.sampled_from(View),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_proven_is_only_what_is_nearer_than_every_control(of_prompts: list[Distances]) -> None:
    if judge(of_prompts).outcome is Outcome.PROVEN:
        for each in of_prompts:
            assert each.controls
            assert each.transferred < min(each.controls)
            assert min(each.controls) > CONTROL_FACTOR * FINEST
            noise = max(other.noise for other in of_prompts if other.view is each.view)
            assert each.transferred <= max(EXACT, NOISE_FACTOR * noise)


# Prompts


@pytest.mark.parametrize("block_size", [16, 32, 128, 1024])
@pytest.mark.parametrize("longest", [MIN_PROMPT - 1, MIN_PROMPT, 17, 40, 161, 4200])
def test_lengths(block_size: int, longest: int) -> None:
    found = lengths(block_size, longest)
    assert found == sorted(set(found))
    assert longest - block_size < found[-1] <= longest
    assert found[0] >= min(MIN_PROMPT, longest)
    if longest > 5 * block_size + 1:
        assert found[0] < block_size, "no whole page"
        assert any((each - 1) % block_size for each in found[1:]), "a partial page after whole ones"
        assert any((each - 1) % block_size == 0 for each in found), "whole pages alone"


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("block_size", [16, 32, 128, 1024])
def test_the_longest_prompt_has_several_pages_and_leaves_room_for_a_token(block_size: int, on_gpu: bool) -> None:
    assert longest_prompt(10**6, block_size, on_gpu=on_gpu) >= 5 * block_size + 1
    assert longest_prompt(100, block_size, on_gpu=on_gpu) == 99


@pytest.mark.parametrize(
    ("block_size", "longest", "expected"),
    [
        (32, 161, [30, 112, 161]),
        (16, 4200, [14, 56, 81, 4193]),
        (528, 2046, [526, 1585, 1600]),
        (128, 641, [126, 400, 641]),
        (36, 181, [34, 124, 181]),
        (16, 17, [8, 14, 17]),
        (16, 16, [16]),
        (1024, 40, [40]),
    ],
)
def test_lengths_of_some_pages(block_size: int, longest: int, expected: list[int]) -> None:
    assert lengths(block_size, longest) == expected


@pytest.mark.parametrize(
    ("max_model_len", "block_size", "on_gpu", "expected"),
    [
        (8192, 32, False, LONGEST_ON_CPU),
        (8192, 32, True, LONGEST_ON_GPU),
        (8192, 1024, False, 5121),
        (8192, 1024, True, 5121),
        (2048, 1024, True, 2047),
    ],
)
def test_the_longest_prompt(max_model_len: int, block_size: int, on_gpu: bool, expected: int) -> None:
    assert longest_prompt(max_model_len, block_size, on_gpu=on_gpu) == expected


def test_prompts_have_tokens_of_the_text_and_differ_with_the_seed() -> None:
    tokens = list(range(100, 160))
    made = prompts(tokens, 16, 161, 7)
    assert [len(each) for each in made] == lengths(16, 161)
    assert {token for each in made for token in each} <= set(tokens)
    assert made == prompts(tokens, 16, 161, 7)
    assert made != prompts(tokens, 16, 161, 8)
    follows = [[second == first + 1 for first, second in itertools.pairwise(each)] for each in made]
    assert all(sum(each) > len(each) / 2 for each in follows[::2]), "pieces of the text"
    assert all(sum(each) < len(each) / 2 for each in follows[1::2]), "tokens in any order"


@pytest.mark.parametrize("block_size", [16, 32, 1024])
@pytest.mark.parametrize("num_different", [2, 16, 60])
def test_the_pages_of_wrong_prompts_are_wrong(block_size: int, num_different: int) -> None:
    draw = random.Random(num_different)
    tokens = [100 + draw.randrange(num_different) for _ in range(60)] + [100, 101]
    sizes = {8, 15, 16, 17, 18, 32, 33, 40, 56, 81, 161, *range(block_size - 1, block_size + 3)}
    sizes |= {factor * block_size + extra for factor in (2, 3) for extra in (0, 1, 2, 7)}
    for size in sorted(sizes):
        prompt = [draw.choice(tokens) for _ in range(size)]
        wrong = wrong_prompts(prompt, block_size, tokens, size)
        assert wrong == wrong_prompts(prompt, block_size, tokens, size)
        whole = (size - 1) // block_size * block_size
        for each in wrong:
            differs = [place for place in range(size) if each[place] != prompt[place]]
            assert len(each) == size
            assert set(each) <= set(tokens)
            # The decode engine computes the last token itself, and has only whole pages for its next request.
            assert differs
            assert max(differs) < (whole or size - 1), size
        changed = [[place for place in range(size) if each[place] != prompt[place]] for each in wrong]
        end = whole or size - 1
        assert changed == [[end - 2], [*range(max(0, end - block_size), end)]]
