from __future__ import annotations

import random

import pytest

from kvferry.engine.time_shares import MIN_TOKENS, NUM_RECENT, PromptShares, PromptTime, TransferShares, share_of


def costs_of(begins_s: dict[str, float], ended: list[tuple[float, dict[str, int]]]) -> list[float]:
    """Return the seconds that each page costs, in the order of the ends: (time, sizes)."""
    shares = TransferShares()
    for request_id, begin_s in begins_s.items():
        shares.begin(request_id, begin_s)
    found = []
    for end_s, sizes in ended:
        for (request_id, size), share in zip(sizes.items(), shares.end(sizes, end_s), strict=True):
            assert share is not None
            assert 0 < share <= 1
            found.append(share * (end_s - begins_s[request_id]) / size)
    return found


def test_transfers_that_share_a_link_cost_about_what_they_cost_alone() -> None:
    """1 s a page. Each of n transfers under way goes at 1/n of the link's speed."""
    assert costs_of({"a": 0.0}, [(5.0, {"a": 5})]) == [1.0]
    assert costs_of(dict.fromkeys("abcd", 0.0), [(20.0, dict.fromkeys("abcd", 5))]) == pytest.approx([1.0] * 4)
    unequal = costs_of(dict.fromkeys("ab", 0.0), [(4.0, {"a": 2}), (10.0, {"b": 8})])
    assert unequal == pytest.approx([4 / 3, 1.0])
    num = 38
    names = [str(i) for i in range(num)]
    equal = costs_of(dict.fromkeys(names, 0.0), [(num * 5.0 + i * 1e-6, {name: 5}) for i, name in enumerate(names)])
    assert max(equal) < 2.0
    assert equal[-1] == pytest.approx(1.0)


@pytest.mark.parametrize("num_queued", [2, 38, 400])
def test_transfers_one_after_the_other_never_cost_the_time_of_the_queue(num_queued: int) -> None:
    names = [str(i) for i in range(num_queued)]
    costs = costs_of(dict.fromkeys(names, 0.0), [(5.0 * i, {name: 5}) for i, name in enumerate(names, 1)])
    assert costs == sorted(costs)
    assert costs[-1] == pytest.approx(1.0)
    assert costs[num_queued // 2] > 0.5


def test_only_the_last_transfers_are_remembered() -> None:
    shares = TransferShares()
    for i in range(2 * NUM_RECENT):
        shares.begin("a", float(i))
        assert shares.end({"a": 1}, i + 1.0) == [1.0]
    assert len(shares._ended) == NUM_RECENT
    shares.begin("b", 0.0)
    assert shares.end({"b": 1}, 2.0 * NUM_RECENT) == [pytest.approx(1 / (NUM_RECENT + 1), rel=0.01)]


def test_transfers_that_take_no_time_or_bring_nothing_have_no_share() -> None:
    shares = TransferShares()
    shares.begin("a", 5.0)
    assert shares.end({"a": 10}, 5.0) == [None]
    shares.begin("a", 5.0)
    assert shares.end({"a": 0}, 6.0) == [None]
    shares.begin("a", 5.0)
    assert shares.end({"a": 10}, 4.0) == [None]
    shares.begin("a", 5.0)
    shares.cancel("a")
    shares.cancel("a")
    assert not len(shares)
    assert share_of(0.0, 1.0) is None
    assert share_of(1.0, 0.0) is None
    assert share_of(1.0 + 1e-12, 1.0) == 1.0


def test_prompts_of_one_step_share_it_by_their_tokens() -> None:
    shares = PromptShares().divide([PromptTime(0.0, 1.0, 300), PromptTime(0.0, 1.0, 100)])
    assert shares == [pytest.approx(0.75), pytest.approx(0.25)]


def test_time_is_given_once() -> None:
    shares = PromptShares()
    assert shares.divide([PromptTime(0.0, 4.0, 1000)]) == [1.0]
    # It waited in the engine's batch while the first one was computed.
    assert shares.divide([PromptTime(2.0, 6.0, 500)]) == [pytest.approx(0.5)]
    assert shares.divide([PromptTime(1.0, 5.0, 500)]) == [None]
    # One that took long, around two others.
    assert shares.divide([PromptTime(-2.0, 10.0, 500)]) == [pytest.approx(6 / 12)]


def test_prompts_that_are_not_computed_take_no_time() -> None:
    shares = PromptShares()
    assert shares.divide([PromptTime(1.0, 2.0, 0), PromptTime(1.0, 2.0, 1)]) == [None, None]
    mixed = shares.divide([PromptTime(0.0, 3.0, MIN_TOKENS), PromptTime(2.0, 3.0, MIN_TOKENS - 1)])
    assert mixed == [1.0, None]


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_chunks_give_the_rate_of_the_whole(seed: int) -> None:
    """An engine that fills each step with 2,048 tokens, first come first."""
    seeded = random.Random(seed)
    waiting = [seeded.choice([100, 512, 3000, 8192]) for _ in range(400)]
    shares, now_s, spent_s, num_tokens = PromptShares(), 0.0, 0.0, 0
    current: list[tuple[float, int, int]] = []  # (begin, tokens, left)
    while waiting or current:
        begin_s, budget, ended = now_s, 2048, []
        now_s += 0.2048
        left = []
        for prompt_begin_s, tokens, num_left in [*current, *((begin_s, tokens, tokens) for tokens in waiting[:30])]:
            num_now = min(budget, num_left)
            budget -= num_now
            if num_now == num_left:
                ended.append(PromptTime(prompt_begin_s, now_s, tokens))
            elif num_now or num_left < tokens:
                left.append((prompt_begin_s, tokens, num_left - num_now))
        waiting = waiting[len(ended) + len(left) - len(current) :]
        current = left
        for prompt, share in zip(ended, shares.divide(ended) if ended else (), strict=True):
            spent_s += (share or 0.0) * (prompt.end_s - prompt.begin_s)
            num_tokens += prompt.num_tokens
    assert spent_s / num_tokens == pytest.approx(0.0001, rel=0.02)


def test_only_the_last_intervals_are_remembered() -> None:
    shares = PromptShares()
    for i in range(3 * NUM_RECENT):
        shares.divide([PromptTime(2.0 * i, 2.0 * i + 1, 100)])
    assert len(shares._given) == NUM_RECENT
    assert shares.divide([PromptTime(0.0, 6.0 * NUM_RECENT, 100)]) == [pytest.approx(1 - 1 / 6, rel=0.01)]
    assert len(shares._given) == 1
