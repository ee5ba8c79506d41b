"""The accounts of requests in flight, by themselves."""

from __future__ import annotations

import pytest

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId
from kvferry.router.prices import ledger as ledger_module
from kvferry.router.prices.ledger import Ledger, WorkerAccount

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
P, D = MemberId("p"), MemberId("d")


def begin(
    ledger: Ledger, request_id: RequestId, prefill: MemberId | None, decode: MemberId, missing: int, now_s: float
) -> None:
    """A fifth of the prompt is cached, and the decode worker lacks 10 pages."""
    num_pages = 0 if prefill is None else 10
    ledger.begin(request_id, prefill, decode, missing, now_s, num_tokens=missing * 5 // 4, lacking_pages=num_pages)


def test_a_disaggregated_request_moves_from_prefill_to_a_stream() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 100, 1.0)
    assert ledger.account(P).queued_tokens == 100
    assert ledger.account(D).incoming == {A}
    ledger.prefilled(A, 2.0)
    assert ledger.account(P).is_idle
    assert ledger.account(D).streams == {A: 2.0}
    assert ledger.end(A, 3.0)
    assert not ledger.end(A, 3.0)
    assert ledger.is_idle
    ledger.check()


def test_an_aggregated_request_is_a_stream_from_its_beginning() -> None:
    ledger = Ledger()
    begin(ledger, A, None, D, 100, 1.0)
    account = ledger.account(D)
    assert (account.queued_tokens, account.streams) == (100, {A: 1.0})
    ledger.prefilled(A, 2.0)
    assert (account.queued_tokens, account.streams) == (0, {A: 1.0})
    ledger.check()


def test_prompts_that_a_report_may_not_know_are_told_apart() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 100, 1.0)
    begin(ledger, B, P, D, 1000, 2.0)
    account = ledger.account(P)
    assert account.unreported_ms(0.5, 0.1, 2.0) == pytest.approx(12.0 + 102.0)
    assert account.unreported_ms(1.5, 0.1, 2.0) == pytest.approx(102.0)
    assert account.unreported_ms(3.0, 0.1, 2.0) == 0.0
    ledger.prefilled(B, 3.0)
    assert account.unreported_ms(0.5, 0.1, 2.0) == pytest.approx(12.0)
    ledger.check()


def test_the_queue_is_what_is_left_of_the_first_prompt_and_all_others() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 1000, 0.0)
    begin(ledger, B, P, D, 2048, 0.1)
    account = ledger.account(P)
    assert account.queue_ms(0.1, 5.0, 0.05) == pytest.approx(105 - 50 + 204.8 + 5)
    # As long again as it is late.
    assert account.queue_ms(0.1, 5.0, 0.205) == pytest.approx(100 + 204.8 + 5)
    ledger.prefilled(A, 0.205)
    assert account.queue_ms(0.1, 5.0, 0.205) == pytest.approx(5 + 204.8)


@pytest.mark.parametrize(("others", "num_steps"), [([512] * 4, 1), ([2048], 1), ([8192], 1), ([8192, 4096], 2)])
def test_prompts_behind_the_first_one_take_a_step_each_or_fewer_where_several_fit(
    others: list[int], num_steps: int
) -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 1000, 0.0)
    for number, missing in enumerate(others):
        begin(ledger, RequestId(f"r{number}"), P, D, missing, 0.0)
    rest_ms = sum(others) * 0.1 + num_steps * 5.0
    assert ledger.account(P).queue_ms(0.1, 5.0, 0.0) == pytest.approx(105 + rest_ms)


def test_streams_are_counted_from_a_time_on() -> None:
    ledger = Ledger()
    for number in range(4):
        begin(ledger, RequestId(f"r{number}"), None, D, 10, float(number))
    assert [ledger.account(D).num_streams_since(since_s) for since_s in (-1.0, 0.0, 1.5, 3.0)] == [4, 3, 2, 0]


def test_a_report_may_not_know_prompts_that_began_shortly_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_UNREPORTED_S", 0.25)
    ledger = Ledger()
    begin(ledger, A, P, D, 100, 1.0)
    account = ledger.account(P)
    assert account.unreported_ms(1.2, 0.1, 2.0) == pytest.approx(12.0)
    assert account.unreported_ms(1.25, 0.1, 2.0) == 0.0


def test_queued_tokens_in_a_report_are_those_of_prompts_that_had_not_ended_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "_REPORT_AGE_S", 0.25)
    ledger = Ledger()
    begin(ledger, A, P, D, 80, 0.0)
    begin(ledger, B, P, D, 800, 0.0)
    account = ledger.account(P)
    assert account.prompt_tokens_at(0.0) == 1100
    ledger.prefilled(A, 1.0)
    ledger.end(B, 2.0)
    begin(ledger, C, P, D, 8, 3.0)
    # The first report was looked at as late as it may be, after the worker had sent it.
    assert [account.prompt_tokens_at(reported_s) for reported_s in (1.2, 1.25, 2.2, 2.25)] == [1110, 1010, 1010, 10]
    ledger.end(C, 4.0)
    assert account.prompt_tokens_at(5.0) == 0


def test_ends_of_prompts_that_come_together_count_at_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "_REPORT_AGE_S", 0.0)
    monkeypatch.setattr(ledger_module, "_ENDS_TOGETHER_S", 0.25)
    account = WorkerAccount(P)
    for now_s, num_tokens in ((0.0, 5), (1.0, 10), (1.125, 20), (1.25, 40), (1.375, 80), (1.4375, 160), (1.5, 320)):
        account.note_prompt_end(num_tokens, now_s)
    known = {-1.0: 635, 0.0: 630, 1.0: 630, 1.1: 630, 1.125: 600, 1.25: 600, 1.4: 600, 1.4375: 320, 1.5: 0}
    assert {since_s: account.prompt_tokens_at(since_s) for since_s in known} == known


def test_as_many_ends_of_prompts_are_kept() -> None:
    account = WorkerAccount(P)
    for number in range(100):
        account.note_prompt_end(1, float(number))
    assert account.prompt_tokens_at(0.0) == 64


def test_pages_arrive_until_the_first_token() -> None:
    ledger = Ledger()
    for request_id, missing in ((A, 100), (B, 1000)):
        begin(ledger, request_id, P, D, missing, 1.0)
    ledger.check()
    account = ledger.account(D)
    ledger.prefilled(A, 2.0)
    ledger.first_token(B, 3.0)  # whose prompt's end was not reported
    assert account.streams == {A: 2.0, B: 3.0}
    assert account.arriving_pages == 10
    ledger.check()
    ledger.prefilled(RequestId("unknown"), 3.0)
    ledger.first_token(RequestId("unknown"), 3.0)
    ledger.pop_changed()
    for _ in range(2):
        ledger.first_token(A, 4.0)
        assert account.arriving_pages == 0
    assert ledger.pop_changed() == {D}
    ledger.check()


def test_pages_of_several_prompts_arrive_at_a_time() -> None:
    ledger = Ledger()
    for request_id in (A, B):
        begin(ledger, request_id, P, D, 100, 1.0)
        ledger.prefilled(request_id, 2.0)
    assert ledger.account(D).arriving_pages == 20
    ledger.check()
    for request_id in (A, B):
        ledger.end(request_id, 3.0)
    assert ledger.is_idle


def test_a_request_that_ends_while_its_prompt_is_computed_leaves_nothing() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 1000, 1.0)
    begin(ledger, B, P, D, 1000, 1.0)
    assert ledger.end(A, 2.0)
    ledger.check()
    assert ledger.account(P).queue_ms(0.1, 5.0, 2.0) == pytest.approx(105.0), "the next prompt begins then"
    assert ledger.account(D).incoming == {B}
    assert ledger.end(B, 3.0)
    assert ledger.is_idle


def test_a_request_in_flight_cannot_begin_again() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 10, 0.0)
    with pytest.raises(ValueError, match="request a is in flight already"):
        begin(ledger, A, P, D, 10, 0.0)


def test_a_worker_that_is_forgotten_begins_anew() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 10, 0.0)
    for _ in range(2):
        ledger.forget(P)
    assert ledger.pop_changed() == {D}
    assert ledger.account(P).is_idle
    assert ledger.end(A, 1.0)
    ledger.check()


def test_changes_are_reported_once() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 1, 0.0)
    assert ledger.pop_changed() == {P, D}
    assert ledger.pop_changed() == set()
    ledger.prefilled(A, 1.0)
    assert ledger.pop_changed() == {P, D}
    ledger.end(A, 2.0)
    assert ledger.pop_changed() == {D}


def test_check_names_what_is_broken() -> None:
    ledger = Ledger()
    begin(ledger, A, P, D, 10, 0.0)
    ledger.account(P).queued_tokens = 11
    with pytest.raises(AssertionError, match="p: 1 prefills of 11 tokens"):
        ledger.check()
