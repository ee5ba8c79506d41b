"""How long a request waited for pages, as its connector measured it."""

from __future__ import annotations

import time

import pytest

from kvferry.engine.vllm.plugins.transfer_times import KV_TRANSFER_TIMES, LOAD_TIMES, TransferTimes, pop_times


def test_a_wait_is_reported_once_with_the_end_of_its_request() -> None:
    times = TransferTimes(KV_TRANSFER_TIMES)
    before_s = time.monotonic()
    times.started("a", 100)
    times.arrived(["a", "of another connector"])
    after_s = time.monotonic()
    kept, params = times.attach_to("a", (False, None))
    assert not kept
    assert params is not None
    begin_s, end_s, share = params[KV_TRANSFER_TIMES]
    assert share in (None, 1.0)  # None where the clock did not move
    assert before_s <= begin_s <= end_s <= after_s
    assert times.attach_to("a", (False, None)) == (False, None)
    assert not len(times)


def test_transfers_under_way_at_once_share_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    times = TransferTimes(KV_TRANSFER_TIMES)
    for request_id in ("a", "b", "c", "gone"):
        times.started(request_id, 100)
    now_s = 13.0
    times.attach_to("gone", (False, None))
    times.arrived(["a", "b"])
    now_s = 14.0
    times.arrived(["c"])
    shares = [(times.attach_to(request_id, (False, None))[1] or {})[KV_TRANSFER_TIMES] for request_id in "abc"]
    # Of those under way as much as the half is counted, of those that are there all.
    assert shares == [(10.0, 13.0, 1 / 2.5), (10.0, 13.0, 1 / 2.5), (10.0, 14.0, 1 / 3)]


def test_what_the_connector_answers_stays() -> None:
    times = TransferTimes(LOAD_TIMES)
    times.started("a", 100, since_s=1.0)
    times.started("a", 100)
    times.arrived(["a"])
    kept, params = times.attach_to("a", (True, {"remote_engine_id": "e"}))
    assert kept
    assert params is not None
    assert params["remote_engine_id"] == "e"
    assert params[LOAD_TIMES][0] == 1.0, "since the first wait"


def test_a_request_that_ends_while_it_waits_leaves_nothing() -> None:
    times = TransferTimes(KV_TRANSFER_TIMES)
    times.started("a", 100)
    answer = (False, None)
    assert times.attach_to("a", answer) is answer
    times.arrived(["a"])
    assert not len(times)


def test_times_do_not_leave_the_worker() -> None:
    assert pop_times(None) == (None, None, None)
    assert pop_times({"remote_engine_id": "e"}) == ({"remote_engine_id": "e"}, None, None)
    assert pop_times({KV_TRANSFER_TIMES: [1.0, 2.0]}) == (None, [1.0, 2.0], None)
    params = {"remote_engine_id": "e", KV_TRANSFER_TIMES: [1.0, 2.0], LOAD_TIMES: [3.0, 4.0]}
    assert pop_times(params) == ({"remote_engine_id": "e"}, [1.0, 2.0], [3.0, 4.0])
