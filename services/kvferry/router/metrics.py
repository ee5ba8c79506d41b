"""Metrics of routing, in a gateway's exposition."""

from __future__ import annotations

from kvferry.observability.exposition import Exposition
from kvferry.observability.telemetry import (
    CONTINUED_REQUESTS,
    DECODE_RETRIES,
    PLACEMENT_SECONDS,
    PLACEMENTS,
    PREEMPTED_REQUESTS,
    PREFILL_FALLBACKS,
    PREFILL_SECONDS,
    QUARANTINED_REQUESTS,
    SKIPPED_VOLUME_LOADS,
    TRANSFERRED_PAGES,
)
from kvferry.router.placement import Reason


class RouterMetrics:
    def __init__(self, exposition: Exposition) -> None:
        placements = exposition.counter(PLACEMENTS)
        self.placements = {reason: placements.labels(reason=reason.value) for reason in Reason}
        self.placement_seconds = exposition.histogram(PLACEMENT_SECONDS)
        self.skipped_volume_loads = exposition.counter(SKIPPED_VOLUME_LOADS)
        self.prefill_seconds = exposition.histogram(PREFILL_SECONDS)
        self.prefill_fallbacks = exposition.counter(PREFILL_FALLBACKS)
        self.continued_requests = exposition.counter(CONTINUED_REQUESTS)
        self.preempted_requests = exposition.counter(PREEMPTED_REQUESTS)
        self.quarantined = exposition.counter(QUARANTINED_REQUESTS)
        self.decode_retries = exposition.counter(DECODE_RETRIES)
        self.transferred_pages = exposition.counter(TRANSFERRED_PAGES)
