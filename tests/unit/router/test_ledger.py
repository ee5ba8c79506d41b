"""The accounts of requests in flight, by themselves."""

from __future__ import annotations

import pytest

from kvferry.engine.base import RequestId
from kvferry.membership.base import MemberId
from kvferry.router.ledger import Ledger

A, B = RequestId("a"), RequestId("b")
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
