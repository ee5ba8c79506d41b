from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvferry.tenancy.shares.tenant_queue import TenantQueue, nothing_cached


@dataclass(eq=False)
class Prompt:
    prefix: int = 0
    cost_ms: float = 10.0
    tenant: str = "a"


def queue_of(*prompts: Prompt) -> TenantQueue[Prompt]:
    queue: TenantQueue[Prompt] = TenantQueue()
    for prompt in prompts:
        queue.add(prompt, is_continued=False)
    return queue


def cached(prefix: object) -> int:
    assert isinstance(prefix, int)
    return prefix


def test_the_longest_cached_prefix_goes_first_and_the_oldest_among_equal_ones() -> None:
    prompts = [Prompt(prefix) for prefix in (0, 2, 1, 2)]
    queue = queue_of(*prompts)
    taken = [queue.take(50.0, cached)[0] for _ in prompts]
    assert taken == [prompts[1], prompts[3], prompts[2], prompts[0]]


def test_only_the_oldest_48_are_compared() -> None:
    late = Prompt(9)
    queue = queue_of(*[Prompt() for _ in range(48)], late)
    assert queue.take(50.0, cached)[0] is not late
    assert queue.take(50.0, cached)[0] is late


def test_the_oldest_goes_after_32_others_at_the_latest() -> None:
    oldest = Prompt(0)
    queue = queue_of(oldest, *[Prompt(1) for _ in range(100)])
    taken = [queue.take(50.0, cached)[0] for _ in range(33)]
    assert taken.index(oldest) == 32


def test_a_request_that_has_begun_goes_on_first_even_before_continuations() -> None:
    long = Prompt(1, 90.0)
    queue = queue_of(long, Prompt(0))
    assert queue.take(50.0, cached) == (long, 50.0, False)
    continued, better = Prompt(0), Prompt(9)
    queue.add(continued, is_continued=True)
    queue.add(better, is_continued=False)
    assert queue.backlog_ms == 40.0 + 3 * 10.0
    assert queue.take(50.0, cached) == (long, 40.0, True)
    assert queue.take(50.0, cached)[0] is continued
    assert queue.take(50.0, cached)[0] is better


def test_the_estimate_is_read_again_when_a_request_begins() -> None:
    prompt = Prompt(cost_ms=100.0)
    queue = queue_of(prompt, Prompt())
    prompt.cost_ms = 5.0
    assert queue.take(50.0, nothing_cached) == (prompt, 5.0, True)
    assert queue.backlog_ms == 10.0
    queue.check()


def test_requests_leave_from_any_place() -> None:
    begun, continued, new = Prompt(cost_ms=90.0), Prompt(), Prompt()
    queue = queue_of(begun, new)
    queue.take(50.0, nothing_cached)
    queue.add(continued, is_continued=True)
    for prompt in (continued, begun, new):
        assert queue.remove(prompt)
        assert not queue.remove(prompt)
        queue.check()
    assert queue.backlog_ms == 0.0


def test_a_request_is_added_once() -> None:
    prompt = Prompt()
    queue = queue_of(prompt)
    with pytest.raises(ValueError, match="twice"):
        queue.add(prompt, is_continued=True)
    queue.check()
