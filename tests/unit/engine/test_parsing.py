"""An answer's deltas add up to the same, whatever part was delivered before."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest

from kvferry.engine.base import AnswerDelta
from kvferry.engine.parsing import ParsedAnswer
from kvferry_sim.answer import SimParser, parse_of

WORDS = [" one", " two", " three", " four", " five", " six", " seven", " eight"]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


class Echo:
    """A parser that returns its input, one call late."""

    def __init__(self) -> None:
        self.fed: list[tuple[list[int], str, bool]] = []
        self._late = ""

    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        self.fed.append((list(token_ids), text, finished))
        shown, self._late = self._late, text
        if finished:
            shown, self._late = shown + self._late, ""
        return AnswerDelta(shown) if shown else None


def joined(deltas: Iterable[AnswerDelta | None]) -> str:
    return "".join(delta.content for delta in deltas if delta is not None)


def test_an_answer_from_its_start_goes_straight_through() -> None:
    parser = Echo()
    answer = ParsedAnswer(parser)
    deltas = [answer.on_output([1], "a", finished=False), answer.on_output([2], "b", finished=True)]
    assert joined(deltas) == "ab"
    assert parser.fed == [([1], "a", False), ([2], "b", True)]


@pytest.mark.parametrize("num_given", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_simulators_parts_are_the_same_in_whatever_pieces_they_come(num_given: int, size: int) -> None:
    parse = parse_of({"tools": TOOLS}, "sim", "sim")
    assert parse is not None
    first = ParsedAnswer(SimParser(parse))
    deltas = [first.on_output([i], WORDS[i], finished=False) for i in range(num_given)]
    again = ParsedAnswer(SimParser(parse))
    again.resume([(i, WORDS[i]) for i in range(num_given)], len("".join(WORDS[:num_given])))
    for start in range(num_given, 8, size):
        token_ids = list(range(start, min(start + size, 8)))
        text = "".join(WORDS[i] for i in token_ids)
        deltas.append(again.on_output(token_ids, text, finished=token_ids[-1] == 7))
    said = [delta for delta in deltas if delta is not None]
    assert "".join(delta.reasoning for delta in said) == " one two three"
    assert joined(said) == " four five"
    calls = list(itertools.chain.from_iterable(delta.tool_calls for delta in said))
    assert [call.name for call in calls if call.name] == ["f"]
    assert json.loads("".join(call.arguments for call in calls)) == {"words": " six seven eight"}


def test_a_continued_answer_is_fed_what_its_prompt_holds() -> None:
    parser = Echo()
    answer = ParsedAnswer(parser)
    answer.resume([(1, "ab"), (2, ""), (3, "cd")], 3)
    # The engine gives what was not delivered with its next output.
    assert joined([answer.on_output([4], "de", finished=True)]) == "cde"
    assert parser.fed == [([1], "ab", False), ([2], "", False), ([3], "c", False), ([4], "de", True)]


def test_a_continued_answer_is_fed_the_outputs_that_it_was_given_in() -> None:
    """A parser says of two tokens at a time what it does not say of each."""
    parser = Echo()
    answer = ParsedAnswer(parser)
    answer.resume([(1, "ab"), (2, ""), (3, "cd"), (4, "e")], 3, (3, 1))
    assert parser.fed == [([1, 2, 3], "abc", False), ([4], "", False)]
    parser.fed.clear()
    answer.resume([(1, "ab"), (2, "c")], 3, (3, 1))
    assert parser.fed == [([1], "ab", False), ([2], "c", False)], "sizes of another answer"
