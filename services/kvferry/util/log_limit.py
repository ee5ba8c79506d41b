"""A limit on how often a logger repeats itself, for messages that outside input can cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

WINDOW_S = 60.0
MAX_PER_WINDOW = 20


class LogLimit(logging.Filter):
    """Passes `MAX_PER_WINDOW` records of each place in the code in a window; the next one says how many it dropped."""

    # Add it to the logger that is called: filters of a parent do not see its children's records.

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._place_to_window: dict[tuple[str, int], tuple[float, int]] = {}  # its beginning, and records in it

    def filter(self, record: logging.LogRecord) -> bool:
        place = record.pathname, record.lineno  # not the message: it may repeat what a client sent
        now_s = self._clock()
        begun_s, count = self._place_to_window.get(place, (now_s, 0))
        if now_s - begun_s >= WINDOW_S:
            if count > MAX_PER_WINDOW:
                record.msg = f"{record.msg} ({count - MAX_PER_WINDOW} records like it were dropped)"
            begun_s, count = now_s, 0
        self._place_to_window[place] = begun_s, count + 1
        return count < MAX_PER_WINDOW


def limit_log(logger: logging.Logger) -> None:
    """Idempotent."""
    if not any(isinstance(each, LogLimit) for each in logger.filters):
        logger.addFilter(LogLimit())
