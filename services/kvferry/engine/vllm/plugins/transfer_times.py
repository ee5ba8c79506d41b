"""How long requests waited for pages; vLLM 0.32 counts that as queueing.

The times travel beside the transfer parameters, within the worker's process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

KV_TRANSFER_TIMES = "kvferry_ferry_times"
LOAD_TIMES = "kvferry_load_times"


class TransferTimes:
    """Each connector needs its own `parameter`."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._began: dict[str, float] = {}  # waits under way
        self._ended: dict[str, tuple[float, float]] = {}  # waits of unfinished requests

    def __len__(self) -> int:
        return len(self._began) + len(self._ended)

    def started(self, request_id: str, since_s: float | None = None) -> None:
        self._began.setdefault(request_id, time.monotonic() if since_s is None else since_s)

    def arrived(self, request_ids: Iterable[str]) -> None:
        """End these waits. Ignores other connectors' ids."""
        for request_id in request_ids:
            began_s = self._began.pop(request_id, None)
            if began_s is not None:
                self._ended[request_id] = (began_s, time.monotonic())

    def attach_to(
        self, request_id: str, answer: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._began.pop(request_id, None)
        times = self._ended.pop(request_id, None)
        if times is None:
            return answer
        is_kept, params = answer
        return is_kept, {**(params or {}), self._parameter: times}


def pop_times(params: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Any, Any]:
    """Split the times of KV transfer and of loads from transfer parameters."""
    if params is None:
        return None, None, None
    kv_transfer, load = params.pop(KV_TRANSFER_TIMES, None), params.pop(LOAD_TIMES, None)
    return params or None, kv_transfer, load
