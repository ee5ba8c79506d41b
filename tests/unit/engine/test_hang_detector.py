"""When an engine counts as hung."""

from __future__ import annotations

from kvferry.engine.hang_detector import MAX_GAP_S, HangDetector


def test_an_engine_that_stands_still_while_requests_wait_is_hung() -> None:
    detector = HangDetector(10.0)
    seen = [detector.is_hung(float(now_s), "same", busy=True) for now_s in range(13)]
    assert seen.index(True) == 10
    assert all(seen[10:])


def test_an_idle_engine_is_not_hung() -> None:
    detector = HangDetector(10.0)
    assert not any(detector.is_hung(float(now_s), "same", busy=False) for now_s in range(100))
    # And its time begins with its first request.
    assert not detector.is_hung(101.0, "same", busy=True)
    assert not detector.is_hung(102.0, "same", busy=True)


def test_a_long_prefill_is_many_steps_and_not_a_hang() -> None:
    detector = HangDetector(10.0)
    assert not any(detector.is_hung(float(now_s), now_s // 9, busy=True) for now_s in range(200))


def test_a_worker_that_was_stopped_itself_says_nothing_about_its_engine() -> None:
    detector = HangDetector(10.0)
    detector.is_hung(0.0, "same", busy=True)
    assert not detector.is_hung(3600.0, "same", busy=True)
    assert MAX_GAP_S < 10.0
