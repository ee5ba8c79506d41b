"""Waiting for a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from kvferry.errors import UnavailableError
from kvferry.hub_model.marker import why_not_whole

REPORT_S = 15.0
_LOOK_S = 1.0


def wait(
    model: str, revision: str, folder: Path, *, report: Callable[[str], None], timeout_s: float = math.inf
) -> None:
    """Raises ConfigError if the folder holds something else, UnavailableError after `timeout_s`."""
    started_s = time.monotonic()
    reported_s = -math.inf
    while why := why_not_whole(folder, model, revision):
        now_s = time.monotonic()
        if now_s - started_s >= timeout_s:
            raise UnavailableError(f"after {timeout_s:g} s: {why}")
        if now_s - reported_s >= REPORT_S:
            report(f"waiting for {model} at {revision}: {why}")
            reported_s = now_s
        time.sleep(min(_LOOK_S, max(0.01, timeout_s - (now_s - started_s))))
    report(f"{folder} holds {model} at {revision}")
