"""What workers are asked for: the first time, and where an answer goes on in another one."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from msgspec import structs

import kvferry
from kvferry.engine.base import (
    Continued,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Parse,
    PromptImage,
    RequestId,
    Sampling,
    TierHints,
    TokenLogprob,
    Turn,
)
from kvferry.errors import EngineError
from kvferry.membership.base import MemberId
from kvferry.router.placement import Placement, Reason
from kvferry.router.priced_placement import Decision
from kvferry.router.prices.pricing import NO_LOAD, VolumeLoad
from kvferry.router.request import MAX_NOTED, PROMPT_ONLY, Answer, Contract, Prompt, Request, RequestRecord
from kvferry.tenancy.namespace import Namespace

PROMPT = [10, 11, 12]
AGGREGATED = Placement(None, MemberId("d"), Reason.NO_PREFILL_WORKER)


class Client:
    """An answer, and what came through."""

    def __init__(self, parse: Parse | None = None, **sampling: object) -> None:
        values = {"max_tokens": 10, "temperature": 0.0, **sampling}
        self.asked = Request(RequestId("r"), Prompt(PROMPT), Sampling(**values), parse)  # type: ignore[arg-type]
        self.outputs: list[EngineOutput] = []
        self.record = RequestRecord()
        self.answer = Answer(self.asked, self.outputs.append, self.record)
        self.first = self.ask()

    def ask(self) -> EngineRequest:
        self.answer.begin_attempt()
        return self.answer.answer_request(AGGREGATED, None)

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
    both = Answer(
        client.asked, client.outputs.append, client.record, lambda token_ids, text: texts.append(([*token_ids], text))
    )
    for answer in (client.answer, both):
        answer.on_text([1], "b")
        answer.on_text([2, 3], "cd")
        assert answer.token_ids == [1, 2, 3]
        answer.begin_attempt()
        assert answer.answer_request(AGGREGATED, None).continued == Continued(3, 3)
    assert client.outputs == [EngineOutput([1], "b"), EngineOutput([2, 3], "cd")]
    assert texts == [([1], "b"), ([2, 3], "cd")]


def test_a_request_that_gave_nothing_is_asked_again_as_it_was() -> None:
    client = Client()
    assert client.ask() == client.first == EngineRequest(RequestId("r"), PROMPT, client.asked.sampling)
    assert client.record.resumed_after == []


def test_it_goes_on_from_prompt_and_tokens_so_far() -> None:
    client = Client(seed=3, temperature=0.7, stop=("x",))
    client.give(1, 2)
    client.give(3, text="")  # held back
    again = client.ask()
    assert again == structs.replace(
        client.first,
        request_id="r-c1",
        is_resumed=True,
        prompt_token_ids=array("I", [*PROMPT, 1, 2, 3]),
        continued=Continued(3, 2),
    )
    client.give(4, text="de", end=FinishReason.STOP)
    assert (client.token_ids, client.text) == ([1, 2, 3, 4], "bcde")
    assert client.record.resumed_after == [3]


def test_a_second_loss_counts_everything_given() -> None:
    client = Client()
    client.give(1, 2)
    client.ask()
    client.give(3)
    again = client.ask()
    assert (again.request_id, list(again.prompt_token_ids), again.continued) == (
        "r-c2",
        [*PROMPT, 1, 2, 3],
        Continued(3, 3),
    )
    assert client.record.resumed_after == [2, 3]


def test_a_continued_request_is_parsed_by_the_tokens_in_its_prompt() -> None:
    client = Client(Parse(b"{}"))
    client.give(1, 2)
    again = client.ask()
    assert (again.continued, again.parse) == (Continued(2, 2, (2,)), Parse(b"{}"))
    client.answer.on_text([3], "")
    client.answer.on_text([], "d")
    client.give(4, 5, 6)
    assert client.ask().continued == Continued(6, 6, (2, 1, 3))


def test_an_answer_with_all_its_tokens_and_no_end_is_an_error() -> None:
    """Workers tell the end with the last token: there is nothing left to ask another one for."""
    client = Client(max_tokens=3)
    client.give(1, 2, 3)
    with pytest.raises(EngineError, match="before it told how it ended"):
        client.ask()


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
    again = client.ask()
    assert (again.sampling, again.continued) == (client.asked.sampling, Continued(3, 3))


def test_a_record_names_a_limited_number_of_continuations() -> None:
    client = Client(max_tokens=1000)
    for token_id in range(MAX_NOTED + 5):
        client.give(token_id)
        again = client.ask()
    assert client.record.resumed_after == list(range(1, MAX_NOTED + 1))
    assert again.request_id == f"r-c{MAX_NOTED + 5}"


IMAGE = PromptImage("a", 0, 1, b"features")
WHOLE = Request(
    RequestId("r"),
    Prompt(PROMPT, "salt", "sql@00", (IMAGE,)),
    Sampling(max_tokens=9, min_tokens=3, logprobs=2, stop=("a",), stop_token_ids=(1,), bad_words=("b",), seed=4),
    Parse(b"{}"),
    Contract(Turn("acme", 2.0), Namespace("acme", 3)),
    wanted_s=60.0,
    deadline_s=5.0,
    pool="gold",
)


def answer_of(request: Request) -> Answer:
    return Answer(request, lambda output: None, RequestRecord())


def decided(prefill: str | None, load: VolumeLoad) -> Decision:
    worker = MemberId(prefill) if prefill is not None else None
    return Decision(worker, MemberId("d"), Reason.DISAGGREGATED, 7, 0, 0, 1.0, load, None)  # type: ignore[arg-type]


def test_a_prefill_worker_is_asked_for_pages_and_where_to_load_them() -> None:
    answer = answer_of(WHOLE)
    answer.begin_attempt(is_suspect=True)
    asked = answer.prompt_request(decided("p", VolumeLoad("disk", 5, 0)), None)
    assert asked == EngineRequest(
        RequestId("r"),
        PROMPT,
        PROMPT_ONLY,
        keep_for_transfer=True,
        cache_salt="salt",
        tier=TierHints(Namespace("acme", 3), {"disk": 5}, True, 60.0),
        deadline_s=5.0,
        is_suspect=True,
        turn=Turn("acme", 2.0, missing_tokens=7),
        pool="gold",
        adapter="sql@00",
        images=(IMAGE.span,),
        features=[b"features"],
    )
    assert asked.sampling == Sampling(max_tokens=1, temperature=0.0, ignore_eos=True), "its length alone ends it"


def test_a_decode_worker_that_pulls_pages_computes_and_loads_nothing() -> None:
    answer = answer_of(WHOLE)
    placement = decided("p", VolumeLoad("disk", 5, 0))
    asked = answer.answer_request(placement, None, transfer_params={"a": 1}, may_preempt=True)
    assert asked == EngineRequest(
        RequestId("r"),
        PROMPT,
        WHOLE.sampling,
        transfer_params={"a": 1},
        cache_salt="salt",
        parse=Parse(b"{}"),
        tier=TierHints(Namespace("acme", 3), {}, True, 60.0),
        deadline_s=5.0,
        is_preemptible=True,
        turn=Turn("acme", 2.0),
        pool="gold",
        adapter="sql@00",
        images=(IMAGE.span,),
    )


def test_a_decode_worker_that_computes_the_prompt_is_told_what_is_missing() -> None:
    asked = answer_of(WHOLE).answer_request(decided(None, VolumeLoad("", 0, skipped_pages=3)), None)
    assert (asked.turn, asked.features) == (Turn("acme", 2.0, missing_tokens=7), [b"features"])
    assert asked.tier == TierHints(Namespace("acme", 3), {}, False, 60.0)
    assert not asked.is_preemptible


@pytest.mark.parametrize(
    ("load", "wanted_s", "hints"),
    [
        (NO_LOAD, None, None),
        (NO_LOAD, 0.0, TierHints(wanted_s=0.0)),
        (VolumeLoad("", 0, skipped_pages=2), None, TierHints(load=False)),
        (VolumeLoad("disk", 4, skipped_pages=2), None, TierHints(volumes={"disk": 4})),
    ],
)
def test_engines_get_hints_where_there_are_any(
    load: VolumeLoad, wanted_s: float | None, hints: TierHints | None
) -> None:
    plain = Request(RequestId("r"), Prompt(PROMPT), Sampling(max_tokens=1), wanted_s=wanted_s)
    answer = answer_of(plain)
    assert answer.answer_request(decided(None, load), None, may_preempt=True).tier == hints
    asked = answer.answer_request(AGGREGATED, None, may_preempt=True)
    assert (asked.turn, asked.is_preemptible) == (None, False)


@pytest.mark.parametrize("package", ["gateway", "router", "link", "worker"])
def test_requests_are_composed_and_never_replaced(package: str) -> None:
    files = [*(Path(kvferry.__file__).parent / package).rglob("*.py")]
    assert files
    assert [file.name for file in files if "structs.replace" in file.read_text()] == []
