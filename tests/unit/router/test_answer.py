"""How an answer goes on in another worker: what is asked for, and what of it reaches the client."""

from __future__ import annotations

from array import array

import pytest
from msgspec import structs

from kvferry.engine.base import (
    Continued,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Parse,
    RequestId,
    Sampling,
    TokenLogprob,
)
from kvferry.errors import EngineError
from kvferry.router.answer import MAX_NOTED, AnswerSoFar
from kvferry.router.request_record import RequestRecord

PROMPT = [10, 11, 12]


class Client:
    """An answer, and what came through."""

    def __init__(self, parse: Parse | None = None, **sampling: object) -> None:
        values = {"max_tokens": 10, "temperature": 0.0, **sampling}
        self.asked = EngineRequest(RequestId("r"), PROMPT, Sampling(**values), parse=parse)  # type: ignore[arg-type]
        self.outputs: list[EngineOutput] = []
        self.record = RequestRecord()
        self.answer = AnswerSoFar(self.asked, self.outputs.append, self.record)
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


def test_a_continued_request_is_parsed_by_the_tokens_in_its_prompt() -> None:
    client = Client(Parse(b"{}"))
    client.give(1, 2)
    again = client.answer.next_request()
    assert (again.continued, again.parse) == (Continued(2, 2, (2,)), Parse(b"{}"))
    client.answer.on_text([3], "")
    client.answer.on_text([], "d")
    client.give(4, 5, 6)
    assert client.answer.next_request().continued == Continued(6, 6, (2, 1, 3))


def test_an_answer_with_all_its_tokens_and_no_end_is_an_error() -> None:
    """Workers tell the end with the last token: there is nothing left to ask another one for."""
    client = Client(max_tokens=3)
    client.give(1, 2, 3)
    with pytest.raises(EngineError, match="before it told how it ended"):
        client.answer.next_request()


@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "bad_words": ("x",), "min_tokens": 5},
        {"temperature": 1.0, "seed": 3, "logit_bias": {1: 2.0}},
        {"structured_outputs": "{}"},
    ],
)
def test_every_answer_goes_on_with_the_parameters_that_it_was_asked_with(sampling: dict[str, object]) -> None:
    client = Client(**sampling)
    client.give(1, 2, 2)
    again = client.answer.next_request()
    assert (again.sampling, again.continued) == (client.asked.sampling, Continued(3, 3))


def test_a_record_names_a_limited_number_of_continuations() -> None:
    client = Client(max_tokens=1000)
    for token_id in range(MAX_NOTED + 5):
        client.give(token_id)
        again = client.answer.next_request()
    assert client.record.continued_after == list(range(1, MAX_NOTED + 1))
    assert again.request_id == f"r-c{MAX_NOTED + 5}"
