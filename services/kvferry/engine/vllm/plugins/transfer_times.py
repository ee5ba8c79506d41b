"""When a request waited for pages from elsewhere, told with its last output.

vLLM 0.32 counts that wait as queueing: a request is scheduled, by its statistics, when its pages are there. A connector
knows better. What it saw goes beside the transfer parameters, which travel from the scheduler to whoever asked, and
stays in that process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

KV_TRANSFER_TIMES = "kvferry_ferry_times"
LOAD_TIMES = "kvferry_load_times"


class TransferTimes:
    """Of one connector, in its scheduler. `parameter` names its entry; two connectors may not use one name."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._began: dict[str, float] = {}  # loads that run
        self._ended: dict[str, tuple[float, float]] = {}  # of requests that have not finished

    def __len__(self) -> int:
        return len(self._began) + len(self._ended)

    def started(self, request_id: str, since_s: float | None = None) -> None:
        """Pages come, or have been waited for since `since_s`."""
        self._began.setdefault(request_id, time.monotonic() if since_s is None else since_s)

    def arrived(self, request_ids: Iterable[str]) -> None:
        """They are there, or will not come; ids of other connectors' requests are ignored."""
        for request_id in request_ids:
            began_s = self._began.pop(request_id, None)
            if began_s is not None:
                self._ended[request_id] = (began_s, time.monotonic())

    def attach_to(
        self, request_id: str, answer: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What a connector answers to the end of a request, with the times if there are any. Forgets the request."""
        self._began.pop(request_id, None)
        times = self._ended.pop(request_id, None)
        if times is None:
            return answer
        is_kept, params = answer
        return is_kept, {**(params or {}), self._parameter: times}


def pop_times(params: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Any, Any]:
    """The transfer parameters alone, then the times of the ferry and of the tiers, None where there are none."""
    if params is None:
        return None, None, None
    kv_transfer, load = params.pop(KV_TRANSFER_TIMES, None), params.pop(LOAD_TIMES, None)
    return params or None, kv_transfer, load
