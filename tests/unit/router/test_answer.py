"""How an answer goes on in another worker: what is asked for, and what of it reaches the client."""

from __future__ import annotations

from array import array

import pytest
from msgspec import structs

from kvferry.engine.base import (
    AnswerDelta,
    Continued,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Parse,
    RequestId,
    Sampling,
    TokenLogprob,
    Turn,
)
from kvferry.errors import EngineError
from kvferry.router.answer import AnswerSoFar, may_be_preempted, replayable
from kvferry.router.request_record import RequestRecord

PROMPT = [10, 11, 12]


class Client:
    """An answer, and what came through."""

    def __init__(self, parse: Parse | None = None, *, takes_bias: bool = True, **sampling: object) -> None:
        values = {"max_tokens": 10, "temperature": 0.0, **sampling}
        self.asked = EngineRequest(
            RequestId("r"),
            PROMPT,
            Sampling(**values),  # type: ignore[arg-type]
            parse=parse,
            takes_bias=takes_bias,
        )
        self.outputs: list[EngineOutput] = []
        self.record = RequestRecord()
        self.answer = AnswerSoFar(replayable(self.asked), self.outputs.append, self.record)
        self.first = self.answer.next_request()

    def give(self, *token_ids: int, text: str | None = None, end: FinishReason | None = None) -> None:
        text = "".join(chr(ord("a") + token_id) for token_id in token_ids) if text is None else text
        logprobs = [[TokenLogprob(token_id, "", -1.0)] for token_id in token_ids]
        self.answer.on_output(EngineOutput(token_ids, text, logprobs, end))

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def logprob_ids(self) -> list[int]:
        return [p[0].token_id for output in self.outputs for p in output.logprobs or ()]


def test_text_alone_counts_and_is_told_as_any_output() -> None:
    client = Client()
    texts: list[tuple[list[int], str]] = []
    both = AnswerSoFar(
        client.asked, client.outputs.append, client.record, lambda token_ids, text: texts.append(([*token_ids], text))
    )
    for answer in (client.answer, both):
        answer.on_text([1], "b")
        answer.on_text([2, 3], "cd")
        assert answer.token_ids == [1, 2, 3]
        assert answer.next_request().continued == Continued(3, 3)
    assert client.outputs == [EngineOutput([1], "b"), EngineOutput([2, 3], "cd")]
    assert texts == [([1], "b"), ([2, 3], "cd")]


def test_text_alone_that_comes_again_is_left_out() -> None:
    client = Client(presence_penalty=1.0)
    client.answer.on_text([1, 2], "bc")
    client.answer.next_request()
    client.answer.on_text([1], "b")
    client.answer.on_text([2, 3], "cd")
    assert (client.token_ids, client.text) == ([1, 2, 3], "bcd")
    client.answer.next_request()
    with pytest.raises(EngineError, match="does not give the same answer"):
        client.answer.on_text([7], "h")


def test_a_request_that_gave_nothing_is_asked_again_as_it_was() -> None:
    client = Client()
    assert client.answer.next_request() == client.asked == client.first
    assert client.record.continued_after == []


def test_it_goes_on_from_prompt_and_tokens_so_far() -> None:
    client = Client(seed=3, temperature=0.7, stop=("x",))
    client.give(1, 2)
    client.give(3, text="")  # held back
    again = client.answer.next_request()
    assert again == structs.replace(
        client.asked,
        request_id="r-c1",
        prompt_token_ids=array("I", [*PROMPT, 1, 2, 3]),
        continued=Continued(3, 2),
    )
    client.give(4, text="de", end=FinishReason.STOP)
    assert (client.token_ids, client.text) == ([1, 2, 3, 4], "bcde")
    assert client.record.continued_after == [3]


def test_a_second_loss_counts_everything_given() -> None:
    client = Client()
    client.give(1, 2)
    client.answer.next_request()
    client.give(3)
    again = client.answer.next_request()
    assert (again.request_id, list(again.prompt_token_ids), again.continued) == (
        "r-c2",
        [*PROMPT, 1, 2, 3],
        Continued(3, 3),
    )
    assert client.record.continued_after == [2, 3]


def test_the_last_token_is_asked_for_again_and_shown_once() -> None:
    """Everything came but the end: an engine must give at least one token, to say how it ended."""
    client = Client(max_tokens=3)
    client.give(1, 2, 3)
    again = client.answer.next_request()
    assert (list(again.prompt_token_ids), again.continued) == ([*PROMPT, 1, 2], Continued(2, 3))
    client.give(3, text="", end=FinishReason.LENGTH)  # its character was delivered, and the engine knows
    assert (client.token_ids, client.text, client.logprob_ids) == ([1, 2, 3], "bcd", [1, 2, 3])
    assert client.outputs[-1].finish_reason is FinishReason.LENGTH


def test_the_only_token_is_computed_again_from_the_prompt() -> None:
    client = Client(max_tokens=1)
    client.give(1)
    again = client.answer.next_request()
    assert (again.prompt_token_ids, again.continued) == (PROMPT, None)
    client.give(1, end=FinishReason.LENGTH)
    assert (client.token_ids, client.text) == ([1], "b")


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"bad_words": ("x",)},
    ],
)
def test_where_an_engine_would_begin_anew_the_answer_is_computed_again_and_compared(
    sampling: dict[str, object],
) -> None:
    client = Client(**sampling)
    client.give(1, 2, 3)
    again = client.answer.next_request()
    assert (again.prompt_token_ids, again.continued) == (PROMPT, None)
    assert again.sampling == client.first.sampling
    client.give(1)
    client.give(2, 3, 4)
    client.give(5, end=FinishReason.STOP)
    assert (client.token_ids, client.text, client.logprob_ids) == ([1, 2, 3, 4, 5], "bcdef", [1, 2, 3, 4, 5])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}])
def test_a_grammar_goes_on_where_workers_replay_it_and_is_computed_again_elsewhere(sampling: dict[str, object]) -> None:
    client = Client(structured_outputs="{}", **sampling)
    client.give(1, 2, 3)
    assert client.answer.next_request().continued == Continued(3, 3)
    again = client.answer.next_request(lambda: False)
    assert (again.prompt_token_ids, again.continued) == (PROMPT, None)
    assert again.sampling == client.first.sampling


def test_a_grammar_after_reasoning_is_computed_again() -> None:
    for reasons in (True, False):
        client = Client(Parse(b"{}", reasons=reasons), structured_outputs="{}")
        client.give(1, 2, 3)
        assert (client.answer.next_request().continued is None) == reasons


def test_another_answer_than_before_is_an_error_and_never_shown() -> None:
    client = Client(presence_penalty=0.5)
    client.give(1, 2, 3)
    client.answer.next_request()
    client.give(1)
    with pytest.raises(EngineError, match="does not give the same answer again"):
        client.give(7, 3)
    assert client.token_ids == [1, 2, 3]


def test_a_grammar_with_chance_gets_a_seed_so_that_it_can_be_computed_again() -> None:
    first, second = Client(structured_outputs="{}", temperature=1.0), Client(structured_outputs="{}", temperature=1.0)
    assert first.first.sampling.seed is not None
    assert first.first.sampling.seed != second.first.sampling.seed
    assert Client(structured_outputs="{}", temperature=1.0, seed=4).first.sampling.seed == 4
    assert Client(temperature=1.0).first.sampling.seed is None


def test_penalties_of_sampled_answers_go_on_as_a_bias() -> None:
    client = Client(temperature=0.8, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={1: 2.0})
    client.give(1, 2, 2)
    again = client.answer.next_request()
    assert again.continued == Continued(3, 3)
    assert again.sampling.logit_bias == {1: 2.0 - 0.75, 2: -1.0}


def test_where_engines_take_no_bias_penalties_of_sampled_answers_are_computed_again_with_a_seed() -> None:
    for change in ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}):
        client = Client(temperature=0.8, takes_bias=False, **change)
        assert client.first.sampling.seed is not None
        client.give(1, 2, 2)
        again = client.answer.next_request()
        assert (again.prompt_token_ids, again.continued) == (PROMPT, None)
        assert again.sampling == client.first.sampling
        assert not may_be_preempted(structs.replace(client.asked, turn=Turn("acme", 1.0)))
    client = Client(temperature=0.8, takes_bias=False)
    client.give(1)
    assert client.answer.next_request().continued == Continued(1, 1)


def test_a_continued_request_is_parsed_by_the_tokens_in_its_prompt() -> None:
    client = Client(Parse(b"{}"))
    client.give(1, 2)
    again = client.answer.next_request()
    assert (again.continued, again.parse) == (Continued(2, 2), Parse(b"{}"))


def test_a_request_that_begins_anew_tells_what_was_parsed_and_delivered() -> None:
    client = Client(Parse(b"{}"), structured_outputs="{}")
    client.give(1, 2, text="b")
    again = client.answer.next_request()
    assert (again.prompt_token_ids, again.parse) == (PROMPT, Parse(b"{}", 2, 1))
    # The worker leaves out what was told: what it says of an output that is old in part, is new.
    client.answer.on_output(EngineOutput([1, 2, 3], "bcd", delta=AnswerDelta("new")))
    last = client.outputs[-1]
    assert (list(last.token_ids), last.text, last.delta) == ([3], "cd", AnswerDelta("new"))
    assert client.answer.next_request().parse == Parse(b"{}", 3, 3)
