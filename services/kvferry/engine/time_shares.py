"""Divides an engine's time among requests that it serves at the same time. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

NUM_RECENT = 512  # intervals or transfers that one which took long may overlap
_SPEED_UNDER_WAY = 0.5
# Computed tokens of a prompt from which time is divided. The rest is mostly a step's fixed cost: that of a prompt whose
# pages were transferred must not shorten the time of one that is computed beside it.
MIN_TOKENS = 32


def share_of(part: float, whole: float) -> float | None:
    """Return a share above 0 and at most 1; None without any part."""
    return min(1.0, part / whole) if part > 0 and whole > 0 else None


class TransferShares:
    """Divides the time of KV transfers at the same time by what each brought."""

    # What a transfer brought came evenly between its begin and its end. One still under way is assumed to be half as
    # fast as the one that ends: the truth between a link that is shared, where all are as fast, and one that brings one
    # transfer after the other, where those behind have brought nothing.

    def __init__(self) -> None:
        self._begun_s: dict[str, float] = {}
        self._ended: deque[tuple[float, float, int]] = deque(maxlen=NUM_RECENT)  # (begin, end, size), by end

    def __len__(self) -> int:
        return len(self._begun_s)

    def begin(self, request_id: str, now_s: float) -> None:
        self._begun_s[request_id] = now_s

    def cancel(self, request_id: str) -> None:
        """Ignores unknown ids."""
        self._begun_s.pop(request_id, None)

    def end(self, ended: Mapping[str, int], now_s: float) -> list[float | None]:
        """Return the shares, above 0 and at most 1, that transfers had of their time; `ended` has what they brought.

        None for one that took no time or brought nothing. Raises KeyError for one that did not begin.
        """
        begins_s = [self._begun_s.pop(request_id) for request_id in ended]
        for begin_s, size in zip(begins_s, ended.values(), strict=True):
            if now_s > begin_s and size > 0:
                self._ended.append((begin_s, now_s, size))
        return [self._share(begin_s, now_s, size) for begin_s, size in zip(begins_s, ended.values(), strict=True)]

    def _share(self, begin_s: float, end_s: float, size: int) -> float | None:
        if end_s <= begin_s or size <= 0:
            return None
        under_way_s = sum(end_s - max(begin_s, other_s) for other_s in self._begun_s.values())
        whole = size * _SPEED_UNDER_WAY * under_way_s / (end_s - begin_s)
        for other_begin_s, other_end_s, other_size in reversed(self._ended):
            if other_end_s <= begin_s:
                break
            overlap_s = min(end_s, other_end_s) - max(begin_s, other_begin_s)
            whole += other_size * max(0.0, overlap_s) / (other_end_s - other_begin_s)
        return share_of(size, whole)


class PromptTime(NamedTuple):
    begin_s: float
    end_s: float
    num_tokens: int  # computed, without cached ones


class PromptShares:
    """Divides the time in which prompts are computed among them."""

    # Prompts are known when they end. Of the time of those that end in one step, the part that no earlier ones were
    # given is divided by their tokens: each second is given once, so the sum of all time over the sum of all tokens is
    # right, whatever chunks a step is made of.

    def __init__(self) -> None:
        self._given: deque[tuple[float, float]] = deque(maxlen=NUM_RECENT)  # intervals apart from each other, in order

    def divide(self, prompts: Sequence[PromptTime]) -> list[float | None]:
        """Return the share of each prompt's own time, above 0 and at most 1.

        None for one of fewer than MIN_TOKENS, which takes no time from others, and where no time is left.
        """
        counted = [prompt for prompt in prompts if prompt.num_tokens >= MIN_TOKENS]
        if not counted:
            return [None] * len(prompts)
        num_tokens = sum(prompt.num_tokens for prompt in counted)
        given_s = self._give(min(prompt.begin_s for prompt in counted), max(prompt.end_s for prompt in counted))
        return [
            share_of(given_s * prompt.num_tokens / num_tokens, prompt.end_s - prompt.begin_s)
            if prompt.num_tokens >= MIN_TOKENS
            else None
            for prompt in prompts
        ]

    def _give(self, begin_s: float, end_s: float) -> float:
        """Return the seconds between them that were not given before."""
        left_s = end_s - begin_s
        later: list[tuple[float, float]] = []
        while self._given and self._given[-1][1] >= begin_s:
            given = self._given.pop()
            if given[0] > end_s:
                later.append(given)
                continue
            left_s -= min(end_s, given[1]) - max(begin_s, given[0])
            begin_s, end_s = min(begin_s, given[0]), max(end_s, given[1])
        self._given.append((begin_s, end_s))
        self._given.extend(reversed(later))
        return max(0.0, left_s)
