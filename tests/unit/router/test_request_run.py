"""What each event makes of a request, and that no order of events breaks its rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.base import RequestId, Sampling
from kvferry.errors import (
    EngineDead,
    KvferryError,
    Overloaded,
    PagesNotMoved,
    Preempted,
    WorkerDraining,
    WorkerLost,
)
from kvferry.membership.base import MemberId
from kvferry.router.request import Answer, Prompt, Request, RequestRecord, RequestState
from kvferry.router.request_run import MAX_PREFILL_ATTEMPTS, WORKER_WAIT_S, KeptPages, RequestRun, engine_of


def a_run(*, deadline_s: float | None = None) -> RequestRun:
    request = Request(RequestId("r"), Prompt([1, 2, 3]), Sampling(max_tokens=9), deadline_s=deadline_s)
    record = RequestRecord()
    return RequestRun(Answer(request, lambda output: None, record), record)


def a_link(name: str, generation: int = 1) -> Any:
    return SimpleNamespace(member=SimpleNamespace(member_id=MemberId(name)), generation=generation)


PREFILL, DECODE = a_link("p"), a_link("d")


def prefilled() -> RequestRun:
    run = a_run()
    run.place()
    run.begin_prefill()
    run.keep(KeptPages(PREFILL.member, engine_of(PREFILL), {"id": 1}))
    return run


def decoding() -> RequestRun:
    run = prefilled()
    run.begin_decode(DECODE)
    assert run.kept is not None
    run.kept.is_given = True
    return run


@pytest.mark.parametrize(
    ("error", "are_pages_kept", "may_try_decode", "may_try_prefill"),
    [
        (WorkerLost("lost"), False, False, True),
        (EngineDead("dead"), False, False, True),
        (WorkerDraining("drains"), True, False, True),
        (Overloaded("full"), True, True, True),
        (PagesNotMoved("not moved"), False, True, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KvferryError) else str(value),
)
def test_a_failed_decode(error: Any, are_pages_kept: bool, may_try_decode: bool, may_try_prefill: bool) -> None:
    run = decoding()
    run.fail_decode(DECODE, error)
    assert run.record.state is RequestState.QUEUED
    assert run.last_error is error
    assert run.may_try(DECODE) is may_try_decode
    assert run.may_try(PREFILL) is may_try_prefill
    assert run.may_try(a_link("d", 2)), "a worker that returned"
    assert run.may_try(a_link("p", 2)), "so may the one that kept the pages"
    kept = run.drop_kept()
    assert (kept is not None) is are_pages_kept, "pages that an engine may read are not released"


def test_a_preempted_answer_may_go_on_where_it_was_and_its_pages_are_not_released() -> None:
    run = decoding()
    run.preempt(DECODE, Preempted("another tenant"))
    assert run.record.num_preemptions == 1
    assert run.has_begun
    assert run.may_try(DECODE)
    assert run.drop_kept() is None


def test_after_failed_prefills_the_decode_worker_computes_the_prompt() -> None:
    run = a_run()
    for number in range(MAX_PREFILL_ATTEMPTS):
        assert run.may_prefill
        run.place()
        run.begin_prefill()
        run.fail_prefill(a_link(f"p{number}"))
        is_last = number == MAX_PREFILL_ATTEMPTS - 1
        assert run.record.state is (RequestState.PLACED if is_last else RequestState.QUEUED)
    assert not run.may_prefill
    run.begin_decode(DECODE)


def test_a_prefill_that_takes_too_long_is_the_last_one_and_one_without_room_is_none() -> None:
    run = a_run()
    run.place()
    run.begin_prefill()
    run.refuse_prefill(Overloaded("full"))
    assert (run.record.state, run.may_prefill) == (RequestState.QUEUED, True)
    run.place()
    run.begin_prefill()
    run.give_up_prefill()
    assert (run.record.state, run.may_prefill) == (RequestState.PLACED, False)


def test_only_an_answer_that_goes_on_waits_for_news_of_room() -> None:
    run = a_run()
    for tokens, must_wait in (([], False), ([7], True)):
        run.answer.token_ids[:] = tokens
        run.place()
        run.begin_decode(DECODE)
        run.fail_decode(DECODE, Overloaded("full"))
        assert run.begin_placing() is must_wait
        assert run.begin_placing() is False, "once"


def test_the_time_in_line_begins_once_and_anew_after_a_preemption_or_a_loss() -> None:
    run = a_run()
    assert run.line_ends_s(100.0, 30.0) == 130.0
    assert run.line_ends_s(120.0, 30.0) == 130.0
    run.place()
    run.begin_decode(DECODE)
    run.preempt(DECODE, Preempted("another tenant"))
    run.begin_placing()
    assert run.line_ends_s(200.0, 30.0) == 230.0

    run.losses.workers.append(MemberId("d"))
    run.note_loss(MemberId("d"))
    assert run.record.lost_workers == ("d",)
    assert run.line_ends_s(300.0, 30.0) == 300.0 + WORKER_WAIT_S
    assert run.loss_wait_ends_s(310.0) == 300.0 + WORKER_WAIT_S
    run.note_loss(MemberId("e"))
    assert run.loss_wait_ends_s(320.0) == 320.0 + WORKER_WAIT_S

    assert a_run(deadline_s=110.0).line_ends_s(100.0, 30.0) == 110.0


def test_a_refused_place_is_asked_for_again_unless_the_worker_failed() -> None:
    run = a_run()
    run.refuse_place(DECODE, Overloaded("full"))
    assert run.may_try(DECODE)
    run.refuse_place(DECODE, WorkerLost("lost"))
    assert not run.may_try(DECODE)


EVENTS = {
    RequestState.QUEUED: ("place", "end"),
    RequestState.PLACED: ("lose_placement", "begin_prefill", "begin_decode", "end"),
    RequestState.PREFILLING: ("keep", "fail_prefill", "give_up_prefill", "refuse_prefill", "end"),
    RequestState.DECODING: ("preempt", "fail_decode", "end"),
}
FAILURES = (WorkerLost("lost"), WorkerDraining("drains"), Overloaded("full"), PagesNotMoved("not moved"))


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_order_of_events_releases_pages_at_most_once_and_none_that_an_engine_may_read(data: st.DataObject) -> None:
    run, readable, released, number = a_run(), set(), [], 0
    while run.record.state is not RequestState.ENDED:
        number += 1
        event = data.draw(st.sampled_from(EVENTS[run.record.state])) if number < 40 else "end"
        link = data.draw(st.sampled_from([a_link("a"), a_link("b"), a_link("b", 2)]))
        if event == "place":
            if run.kept is not None and data.draw(st.booleans()) and (dropped := run.drop_kept()):
                released.append(dropped.params["number"])  # no decode worker can read them
            run.place()
        elif event == "begin_prefill":
            if run.may_prefill and run.kept is None:
                run.begin_prefill()
        elif event == "keep":
            run.keep(KeptPages(link.member, engine_of(link), {"number": number}))
        elif event == "begin_decode":
            if not run.may_try(link):
                continue
            run.begin_decode(link)
            assert not run.may_try(link)
            decode = link
            if run.kept is not None:
                run.kept.is_given = True
        elif event == "fail_decode":
            error = data.draw(st.sampled_from(FAILURES))
            given = run.kept
            run.fail_decode(decode, error)
            if given is not None and not isinstance(error, (WorkerDraining, Overloaded)):
                readable.add(given.params["number"])
        elif event == "preempt":
            if run.kept is not None:
                readable.add(run.kept.params["number"])
            run.preempt(decode, Preempted("another tenant"))
        elif event in ("lose_placement", "refuse_prefill"):
            getattr(run, event)(Overloaded("full"))
        elif event == "fail_prefill":
            run.fail_prefill(link)
        else:
            getattr(run, event)()
    kept = run.drop_kept()
    if kept is not None:
        released.append(kept.params["number"])
    assert len(released) == len(set(released))
    assert not readable & set(released)
    assert run.drop_kept() is None


@pytest.mark.parametrize("event", ["place", "begin_prefill", "give_up_prefill"])
def test_an_event_out_of_order_is_a_fault(event: str) -> None:
    run = a_run()
    run.end()
    with pytest.raises(AssertionError, match="after ended"):
        getattr(run, event)()
