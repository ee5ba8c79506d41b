"""When the harness says that it was the bottleneck."""

from __future__ import annotations

import asyncio
import gc
import os
import time

from kvferry_loadtest.watch import Watch, judge, punctual


def test_punctual_is_fine() -> None:
    assert judge([0.001] * 100, [0.2] * 100, cpu_share=0.4, stall_s=0.003).ok


def test_one_in_a_hundred_late_is_too_much() -> None:
    late = sorted([0.001] * 98 + [0.02] * 2)
    verdict = judge(late, [0.1] * 100, cpu_share=0.4, stall_s=0.02)
    assert not verdict.ok
    assert verdict.reason.startswith("1 % of the requests left 20.0 ms or more after they were due; 5.0 ms would do")
    assert verdict.lateness_p99_ms == 20.0


def test_lateness_is_judged_beside_what_is_measured() -> None:
    assert judge([0.02] * 100, [2.0] * 100, cpu_share=0.4, stall_s=0.0).ok
    assert not judge([0.05] * 100, [2.0] * 100, cpu_share=0.4, stall_s=0.0).ok


def test_a_core_that_is_full_has_a_queue() -> None:
    verdict = judge([], [], cpu_share=0.97, stall_s=0.0)
    assert (verdict.ok, verdict.reason) == (False, "the harness used 97% of a core")


async def test_a_loop_that_stands_still_is_seen() -> None:
    watch = Watch()
    watch.begin()
    await asyncio.sleep(0.02)
    time.sleep(0.2)  # noqa: ASYNC251
    await asyncio.sleep(0.02)
    watch.end()
    assert watch.verdict([]).loop_stall_max_ms >= 190


def test_punctuality_ends_with_the_run() -> None:
    before = os.sched_getscheduler(0)
    with punctual():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert os.sched_getscheduler(0) == before
