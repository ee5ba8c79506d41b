from __future__ import annotations

import math

import pytest

from kvferry.proof.verdict import (
    CONTROL_FACTOR,
    EXACT,
    MIN_PROMPT,
    NOISE_FACTOR,
    NUM_LIKELIEST,
    Distances,
    Outcome,
    View,
    distance,
    judge,
    lengths,
    prompts,
    wrong_prompts,
)

BLOCK_SIZES = (16, 32, 1024)


def measured(
    transferred: float = 0.0, noise: float = 0.0, *controls: float, prompt: int = 0, view: View = View.HELD
) -> Distances:
    return Distances(prompt, 100, view, transferred, noise, controls or (1.0,))


def test_a_distance_is_the_mean_at_the_likeliest_tokens_of_its_own_answer() -> None:
    own = {token: -float(token) for token in range(20)}
    other = {token: -float(token) - (1.0 if token < NUM_LIKELIEST else 9.0) for token in range(20)}
    assert distance([own], [other]) == 1.0
    assert distance([own, own], [other, own]) == 0.5
    assert distance([own], [dict(reversed(own.items()))]) == 0.0


def test_a_token_that_the_other_does_not_name_counts_as_its_least_likely_one() -> None:
    assert distance([{1: -1.0}], [{2: -3.0, 3: -5.0}]) == 4.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_infinitely_far(value: float) -> None:
    assert distance([{1: -1.0}], [{1: value}]) == math.inf
    assert distance([{1: value}], [{1: -1.0}]) == math.inf


def test_nothing_is_infinitely_far_from_anything() -> None:
    assert distance([], []) == math.inf
    assert distance([{1: -1.0}], [{}]) == math.inf


def test_answers_of_different_lengths_are_no_answers_to_compare() -> None:
    with pytest.raises(ValueError, match="shorter"):
        distance([{1: -1.0}, {1: -1.0}], [{1: -1.0}])


def test_pages_are_proven_where_they_are_exact_whatever_the_noise() -> None:
    assert judge([measured(0.0, 0.4, 0.01)]).outcome is Outcome.PROVEN
    assert judge([measured(EXACT, 0.0, 2.001 * EXACT)]).outcome is Outcome.PROVEN


def test_pages_are_proven_where_they_are_no_farther_than_noise() -> None:
    assert judge([measured(0.2, 0.1, 0.41)]).outcome is Outcome.PROVEN
    assert judge([measured(0.2001, 0.1, 0.41)]).outcome is Outcome.REFUTED
    assert (NOISE_FACTOR, CONTROL_FACTOR) == (2.0, 2.0)


def test_the_noise_of_one_prompt_is_that_of_others_in_the_same_view_alone() -> None:
    noisy = measured(0.0, 0.1, prompt=1)
    assert judge([measured(0.15, 0.05), noisy]).outcome is Outcome.PROVEN
    assert judge([measured(0.15, 0.05, view=View.DIRECT), noisy]).outcome is Outcome.REFUTED


def test_less_than_the_largest_noise_in_every_prompt_is_no_noise() -> None:
    found = [measured(0.09, 0.1 if number == 0 else 0.0, prompt=number) for number in range(5)]
    assert judge(found).outcome is Outcome.REFUTED


def test_a_control_that_is_near_proves_nothing() -> None:
    assert judge([measured(0.0, 0.0, 2 * EXACT)]).outcome is Outcome.UNDECIDED
    assert judge([measured(0.05, 0.1, 1.0, 0.4)]).outcome is Outcome.UNDECIDED
    assert judge([measured(0.3, 0.1, 0.0)]).outcome is Outcome.UNDECIDED
    assert judge([Distances(0, 100, View.HELD, 0.0, 0.0, ())]).outcome is Outcome.UNDECIDED


def test_infinite_noise_proves_nothing() -> None:
    assert judge([measured(0.5, math.inf, math.inf)]).outcome is Outcome.UNDECIDED
    assert judge([measured(math.inf, math.inf, math.inf)]).outcome is Outcome.UNDECIDED


def test_one_bad_prompt_among_good_ones_decides() -> None:
    good = [measured(prompt=number) for number in range(4)]
    assert judge(good).outcome is Outcome.PROVEN
    refuted = judge([*good, measured(0.5, 0.0, prompt=4)])
    assert refuted.outcome is Outcome.REFUTED
    assert "0.5" in refuted.reason
    assert judge([*good, measured(0.0, 0.0, EXACT, prompt=4)]).outcome is Outcome.UNDECIDED
    assert judge([measured(0.0, 0.0, EXACT), measured(0.5, 0.0, prompt=1)]).outcome is Outcome.REFUTED


def test_nothing_measured_proves_nothing() -> None:
    assert judge([]).outcome is Outcome.UNDECIDED


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_prompts_are_on_both_sides_of_a_pages_end(block_size: int) -> None:
    found = lengths(block_size, 8 * block_size)
    assert found[0] < block_size
    assert any(length % block_size == 1 for length in found)
    assert any(length % block_size > 1 and length > block_size for length in found)
    assert found[-1] == 8 * block_size
    assert [len(prompt) for prompt in prompts(range(50), block_size, 8 * block_size, 7)] == found


@pytest.mark.parametrize("longest", [MIN_PROMPT, 20, 100])
def test_no_prompt_is_longer_than_the_context(longest: int) -> None:
    assert all(MIN_PROMPT <= length <= longest for length in lengths(32, longest))


def test_prompts_are_others_with_another_seed() -> None:
    assert prompts(range(50), 32, 200, 1) == prompts(range(50), 32, 200, 1)
    assert prompts(range(50), 32, 200, 1) != prompts(range(50), 32, 200, 2)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_wrong_prompts_differ_within_what_is_transferred(block_size: int) -> None:
    tokens = [*range(40), *range(20)]  # some occur twice, as in a text
    for seed in range(20):
        for prompt in prompts(tokens, block_size, 8 * block_size, seed):
            wrong = wrong_prompts(prompt, block_size, tokens, seed)
            end = (len(prompt) - 1) // block_size * block_size or len(prompt) - 1
            changed = [
                [place for place, (one, other) in enumerate(zip(each, prompt, strict=True)) if one != other]
                for each in wrong
            ]
            assert changed == [[end - 2], [*range(max(0, end - block_size), end)]]
