"""A message that outside input causes is written a bounded number of times."""

from __future__ import annotations

import logging

import pytest

from kvferry.util.log_limit import MAX_PER_WINDOW, WINDOW_S, LogLimit


def test_what_repeats_itself_is_dropped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    logger = logging.getLogger("kvferry.tests.log_limit")
    limit = LogLimit(clock=lambda: now_s)
    logger.addFilter(limit)

    def fail(who: str) -> None:
        logger.warning("a request of %s failed", who)

    try:
        for i in range(MAX_PER_WINDOW + 100):
            fail(f"client {i}")
        logger.warning("something else")
        now_s = WINDOW_S
        fail("another")
        fail("a last one")
    finally:
        logger.removeFilter(limit)
    assert caplog.messages == [
        *(f"a request of client {i} failed" for i in range(MAX_PER_WINDOW)),
        "something else",
        "a request of another failed (100 records like it were dropped)",
        "a request of a last one failed",
    ]
