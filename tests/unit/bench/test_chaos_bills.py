"""Each way in which bills, receipts and engines' work can disagree is found; each known difference has its cause."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.chaos.bills import LOSS_S, Audit, audit
from bench.chaos.receipts import Ending, Receipt
from bench.chaos.work import Attempt, End, WorkFile, read_attempts
from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, PromptSources, RequestId, Sampling, Turn
from kvferry.errors import EngineDead
from kvferry.gateway.usage.usage_log import UsageRecord

URL, ACME = "http://127.0.0.1:1", "acme"
NUM_PROMPT = 100
BEGUN_S = 1_000_000.0


class Books:
    """One answer that went well: 96 of 100 prompt tokens moved from prefill to decode, and 20 tokens generated."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.receipt = Receipt(
            ACME, URL, BEGUN_S, BEGUN_S + 2, Ending.WHOLE, "cmpl-a", NUM_PROMPT, 20, _times(BEGUN_S, 20)
        )
        self.receipts = [self.receipt]
        self.record = UsageRecord(BEGUN_S + 2, ACME, "cmpl-a", "completions", "ok", NUM_PROMPT, 0, 20, 2.0)
        self.records = [self.record]
        self.prefill = attempt("prefill-1", BEGUN_S, computed=NUM_PROMPT, generated=1)
        self.decode = attempt("decode-1", BEGUN_S + 0.1, computed=4, transferred=96, generated=20)
        self.attempts = [self.prefill, self.decode]
        self.kills_s: dict[str, list[float]] = {URL: []}
        monkeypatch.setattr("bench.chaos.bills.read_attempts", lambda folder: iter(self.attempts))

    def audit(self) -> Audit:
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in self.records)
        (self._folder / "usage-2026-01-01-gateway-1.jsonl").write_bytes(lines)
        return audit(self.receipts, self._folder, self._folder, self.kills_s)

    def fault(self) -> str:
        (fault,) = self.audit().faults
        return fault

    def not_billed(self, kind: str) -> dict[str, int]:
        compared = self.audit()
        assert compared.faults == []
        sums: dict[str, Any] = compared.figures["tenants"][ACME][kind]
        assert sums["computed"] == sums["billed"] + sum(sums["not_billed"].values())
        not_billed: dict[str, int] = sums["not_billed"]
        return not_billed


def _times(begun_s: float, count: int) -> array[float]:
    return array("d", (begun_s + 0.1 * i for i in range(count)))


def attempt(
    worker: str,
    begun_s: float,
    *,
    request_id: str = "cmpl-a-0",
    prompt: int = NUM_PROMPT,
    computed: int = 0,
    transferred: int = 0,
    generated: int = 0,
    end: End = End.FINISHED,
) -> Attempt:
    ended_s = 0.0 if end is End.DIED else begun_s + 1
    cached = prompt - computed - transferred if computed or transferred else 0
    return Attempt(worker, request_id, ACME, begun_s, ended_s, prompt, computed, cached, transferred, generated, end)


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Books:
    return Books(tmp_path, monkeypatch)


def test_an_answer_that_went_well_is_billed_whole(books: Books) -> None:
    assert books.not_billed("tokens_of_engines") == {"first_token_of_prefill": 1}
    assert books.not_billed("prompt_tokens_of_engines") == {"last_page_at_handover": 4}
    sums = books.audit().figures["tenants"][ACME]
    assert sums["tokens_of_answers"] == {"delivered": 20, "billed": 20, "records_lost_with_gateway": 0}
    assert sums["prompt_tokens_of_answers"] == {"asked": 100, "billed": 100, "records_lost_with_gateway": 0}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"generated_tokens": 19}, "billed ('ok', 100, 19), its client got ('ok', 100, 20)"),
        ({"outcome": "cancelled"}, "billed ('cancelled', 100, 20)"),
        ({"cached_tokens": 96}, "4 prompt tokens are billed as computed, and 100 were for its first output"),
    ],
)
def test_a_bill_that_differs_from_what_the_client_got_or_engines_did(
    books: Books, changes: dict[str, Any], fault: str
) -> None:
    books.records = [msgspec.structs.replace(books.record, **changes)]
    assert any(fault in each for each in books.audit().faults)


def test_an_answer_that_is_billed_twice_or_not_at_all(books: Books) -> None:
    books.records = [books.record, books.record]
    faults = books.audit().faults
    assert any("billed 2 times" in each for each in faults)
    assert any(
        "kvferry tenant usage says (200, 40) tokens of acme, its answers have (100, 20)" in each for each in faults
    )
    books.records = []
    assert any("it has no record, and its gateway was not killed" in each for each in books.audit().faults)


def test_more_than_engines_computed(books: Books) -> None:
    books.attempts = [books.prefill, attempt("decode-1", BEGUN_S + 0.1, computed=4, transferred=96, generated=19)]
    faults = books.audit().faults
    assert any("20 generated tokens are billed, and engines computed 19" in each for each in faults)


def test_work_that_nothing_explains(books: Books) -> None:
    books.attempts = [books.prefill, attempt("decode-1", BEGUN_S + 0.1, computed=4, transferred=96, generated=23)]
    assert "3 generated tokens are neither billed nor explained" in books.fault()


def test_refused_requests_are_not_billed(books: Books) -> None:
    refused = Receipt(ACME, URL, BEGUN_S, BEGUN_S, Ending.REFUSED, "cmpl-b")
    record = msgspec.structs.replace(
        books.record, request_id="cmpl-b", outcome="refused", prompt_tokens=0, generated_tokens=0
    )
    books.receipts.append(refused)
    books.records.append(record)
    assert books.audit().faults == []
    books.records[-1] = msgspec.structs.replace(record, prompt_tokens=NUM_PROMPT)
    assert any("it was refused, and 100 prompt tokens" in each for each in books.audit().faults)
    # Refused before it was rendered: it has no id.
    books.records[-1] = msgspec.structs.replace(record, request_id="", prompt_tokens=NUM_PROMPT)
    assert any("not dispatched is billed" in each for each in books.audit().faults)


@pytest.mark.parametrize(("end", "cause"), [(End.STOPPED, "preempted"), (End.DIED, "lost_worker")])
def test_an_answer_that_went_on_elsewhere(books: Books, end: End, cause: str) -> None:
    """Of 12 tokens the gateway got 10; the second engine computes a page of the prompt once more."""
    first = attempt("decode-1", BEGUN_S + 0.1, computed=4, transferred=96, generated=12, end=end)
    second = attempt(
        "decode-2", BEGUN_S + 1, request_id="cmpl-a-0-c1", prompt=NUM_PROMPT + 10, computed=14, generated=10
    )
    books.attempts = [books.prefill, first, second]
    assert books.not_billed("tokens_of_engines") == {"first_token_of_prefill": 1, cause: 2}
    assert books.not_billed("prompt_tokens_of_engines") == {"last_page_at_handover": 4, cause: 14}


def test_a_prompt_whose_decode_worker_died_before_its_first_output(books: Books) -> None:
    again = attempt("prefill-2", BEGUN_S + 1, computed=NUM_PROMPT, generated=1)
    died = attempt("decode-1", BEGUN_S + 0.1, end=End.DIED)
    second = attempt("decode-2", BEGUN_S + 1.1, computed=4, transferred=96, generated=20)
    books.attempts = [books.prefill, died, again, second]
    assert books.not_billed("prompt_tokens_of_engines") == {"last_page_at_handover": 4, "lost_worker": 100}


def test_a_killed_gateway_may_lose_ten_seconds_of_a_stream(books: Books) -> None:
    books.receipt.ending, books.receipt.ended_s = Ending.CUT, BEGUN_S + 3
    books.kills_s[URL] = [BEGUN_S + 2]
    books.records = []
    assert books.not_billed("tokens_of_engines") == {"first_token_of_prefill": 1, "gateway_killed": 20}
    figures = books.audit().figures
    assert (figures["answers_without_last_record"], figures["longest_unbilled_s"]) == (1, 2.0)
    books.kills_s[URL] = [BEGUN_S + LOSS_S + 0.05]
    books.receipt.ended_s = BEGUN_S + LOSS_S + 1
    assert "tokens are not billed that its client had 10.1 s before its gateway was killed" in books.fault()
    books.records = [msgspec.structs.replace(books.record, outcome="unfinished", generated_tokens=1)]
    assert books.not_billed("tokens_of_engines") == {"first_token_of_prefill": 1, "gateway_killed": 19}


def test_an_answer_that_ended_long_before_its_gateway_was_killed_must_have_its_record(books: Books) -> None:
    books.records = []
    books.kills_s[URL] = [books.receipt.ended_s + 1]
    assert books.audit().faults == []
    books.kills_s[URL] = [books.receipt.ended_s + 5]
    assert any("it has no record" in each for each in books.audit().faults)
    books.kills_s = {URL: [], "http://127.0.0.1:2": [books.receipt.ended_s + 1]}
    assert any("it has no record" in each for each in books.audit().faults)


def test_a_client_that_left_is_billed_what_it_got(books: Books) -> None:
    books.receipt.ending = Ending.LEFT
    books.records = [msgspec.structs.replace(books.record, outcome="cancelled")]
    books.attempts[1] = attempt("decode-1", BEGUN_S + 0.1, computed=4, transferred=96, generated=22, end=End.STOPPED)
    assert books.not_billed("tokens_of_engines") == {"first_token_of_prefill": 1, "client_left": 2}
    books.records = [msgspec.structs.replace(books.record, outcome="cancelled", generated_tokens=18)]
    assert "billed 18 tokens, its client got 20" in books.fault()


def test_a_bill_for_which_no_client_asked(books: Books) -> None:
    books.receipts.clear()
    assert "billed as ok, and no client asked for it" in books.fault()


class ScriptedEngine:
    """Gives its outputs, then fails, ends after a last one, or goes on for ever."""

    def __init__(self, outputs: list[EngineOutput], error: Exception | None = None) -> None:
        self._outputs = outputs
        self._error = error

    async def generate(self, request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        for output in self._outputs:
            await asyncio.sleep(0)
            yield output
            if output.finish_reason is not None:
                return
        if self._error is not None:
            raise self._error
        await asyncio.Event().wait()


async def test_a_worker_writes_what_its_engine_computes(tmp_path: Path) -> None:
    first = EngineOutput((7,), " a", sources=PromptSources(4, 32, 64))
    last = EngineOutput((8, 9), " b c", finish_reason=FinishReason.LENGTH)
    file = WorkFile(tmp_path, "decode-1")

    async def run(name: str, engine: Any, most: int) -> None:
        file.record(engine)
        request = EngineRequest(RequestId(name), range(NUM_PROMPT), Sampling(max_tokens=3), turn=Turn(ACME, 1.0))
        outputs = engine.generate(request)
        for _ in range(most):
            await anext(outputs, None)
        await outputs.aclose()

    await run("cmpl-whole-0", ScriptedEngine([first, last]), 3)
    await run("cmpl-stopped-0", ScriptedEngine([first, last]), 1)
    with pytest.raises(EngineDead):
        await run("cmpl-failed-0", ScriptedEngine([first], EngineDead("gone")), 2)
    running = ScriptedEngine([first])
    file.record(running)  # type: ignore[arg-type]
    outputs = running.generate(EngineRequest(RequestId("cmpl-on-0"), range(8), Sampling(max_tokens=3)))
    await anext(outputs)
    seen = {row.answer_id: (row.num_generated, row.end) for row in read_attempts(tmp_path)}
    assert seen == {
        "cmpl-whole": (3, End.FINISHED),
        "cmpl-stopped": (1, End.STOPPED),
        "cmpl-failed": (1, End.FAILED),
        "cmpl-on": (1, End.DIED),
    }
    row = next(read_attempts(tmp_path))
    assert (row.worker, row.tenant, row.num_prompt, row.num_computed) == ("decode-1", ACME, NUM_PROMPT, 4)
    assert (row.num_cached, row.num_transferred) == (32, 64)
    await outputs.aclose()  # type: ignore[attr-defined]
