"""Figures out of records that are known to the millisecond."""

from __future__ import annotations

import pytest

from kvferry_loadtest.measures import duration_s, errors_of, group_of, keeps_to, seconds_of
from kvferry_loadtest.record import Outcome
from kvferry_loadtest.result import Objective
from kvferry_loadtest.server_metrics import Sample
from support.load_records import record


def test_scheduled_latency_contains_what_the_harness_was_late() -> None:
    group = group_of([record(1.0, late_s=0.5, ttft_s=0.1)], Objective(), 2.0)
    assert group.latencies["ttft"].p50 == pytest.approx(600, rel=0.001)
    assert group.latencies["ttft_sent"].p50 == pytest.approx(100, rel=0.001)
    assert group.latencies["lateness"].max == pytest.approx(500)
    assert group.latencies["tpot"].p50 == pytest.approx(10, rel=0.001)
    assert group.latencies["itl"].count == 10
    assert group.latencies["e2e"].mean - group.latencies["e2e_sent"].mean == pytest.approx(500)


def test_every_request_that_was_planned_counts_for_goodput() -> None:
    records = [
        record(ttft_s=0.1),
        record(ttft_s=0.3),  # misses the objective
        record(itl_s=0.5),  # misses the other one
        record(outcome=Outcome.REFUSED, ttft_s=0.001),  # quick, and a miss all the same
        record(outcome=Outcome.FAILED),
        record(outcome=Outcome.TIMED_OUT),
        record(outcome=Outcome.SKIPPED),
        record(num_tokens=1, ttft_s=0.15),
    ]
    group = group_of(records, Objective(ttft_ms=200, tpot_ms=20), 4.0)
    assert group.goodput_share == 2 / 8
    assert group.goodput_requests_per_s == 2 / 4
    counts = group.counts
    assert (counts.planned, counts.ok, counts.refused, counts.failed) == (8, 4, 1, 1)
    assert (counts.timed_out, counts.skipped) == (1, 1)
    assert group.requests_per_s == 4 / 4
    assert group.output_tokens_per_s == (3 * 11 + 1) / 4
    assert group.prompt_tokens_per_s == 400 / 4
    assert group.latencies["ttft"].count == 4


def test_an_objective_that_cannot_be_checked_is_missed() -> None:
    without_usage = record(completion_tokens=None)
    assert keeps_to(without_usage, Objective(ttft_ms=200))
    assert not keeps_to(without_usage, Objective(tpot_ms=1000))
    assert keeps_to(record(), Objective())


def test_nothing_measured_is_no_figure() -> None:
    group = group_of([record(outcome=Outcome.SKIPPED)], Objective(), 0.0)
    assert group.latencies == {}
    assert group.requests_per_s == 0
    assert group.goodput_share == 0
    assert duration_s([record(outcome=Outcome.SKIPPED)]) == 0
    assert seconds_of([], []) == ()


def test_seconds() -> None:
    records = [record(0.2, ttft_s=0.1), record(0.4, ttft_s=1.5), record(2.1, ttft_s=0.2, outcome=Outcome.REFUSED)]
    samples = [Sample(t_s=1.01, waiting=3.0, kv_used_share=0.5)]
    first, second, third = seconds_of(records, samples)
    assert (first.sent, first.ok, first.missed, first.in_flight) == (2, 1, 0, 1)
    assert first.ttft_p50_ms == pytest.approx(100)
    assert first.ttft_p99_ms == pytest.approx(1500)
    assert (second.sent, second.ok, second.in_flight) == (0, 0, 1)
    assert (second.queue_depth, second.kv_utilisation) == (3.0, 0.5)
    assert second.ttft_p50_ms is None
    assert (third.sent, third.ok, third.missed, third.in_flight) == (1, 1, 1, 0)
    assert third.queue_depth is None


def test_errors_by_frequency() -> None:
    records = [record(outcome=Outcome.FAILED, error=text) for text in ("a", "b", "b")]
    assert list(errors_of([*records, record()]).items()) == [("b", 2), ("a", 1)]
