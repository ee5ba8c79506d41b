"""Answers that a worker took apart."""

from __future__ import annotations

from kvferry.engine.base import AnswerDelta, EngineOutput
from kvferry.gateway.choices import ParsedChoice
from kvferry.gateway.http.openai_responses import message_json


def test_text_that_the_parser_made_nothing_of_counts_and_is_not_shown() -> None:
    choice = ParsedChoice()
    choice.add(EngineOutput([1, 2], "<think>why", delta=AnswerDelta(reasoning="why")))
    choice.add_text([3], "</think>")
    choice.add(EngineOutput([4], "so", delta=AnswerDelta("so")))
    assert choice.num_tokens == 4
    assert message_json(choice) == {"role": "assistant", "content": "so", "refusal": None, "reasoning": "why"}
