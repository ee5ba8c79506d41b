"""Reasons for a failed chunk that are not answers of its volume."""

from __future__ import annotations

import enum


class Cause(enum.StrEnum):
    """Metric labels, beside those of Outcome."""

    TIMEOUT = "timeout"  # waited or ran for longer than the deadline
    UNAVAILABLE = "unavailable"  # the volume's breaker is open, or the volume is unknown
    QUEUE_FULL = "queue_full"
    BUDGET = "budget"
    ENGINE_GONE = "engine_gone"
    EPOCH_OVER = "epoch_over"  # the tenant was deleted, or its pages were reset
    FAULT = "fault"  # a bug of ours, with a traceback in the log
