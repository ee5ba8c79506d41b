"""How long requests waited for pages; vLLM 0.32 counts that as queueing.

The times travel beside the transfer parameters, within the worker's process.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from kvferry.engine.time_shares import TransferShares

KV_TRANSFER_TIMES = "kvferry_ferry_times"
LOAD_TIMES = "kvferry_load_times"


class TransferTimes:
    """Each connector needs its own `parameter`."""

    def __init__(self, parameter: str) -> None:
        self._parameter = parameter
        self._shares = TransferShares()
        self._began: dict[str, tuple[float, int]] = {}  # (since, tokens) of waits under way
        self._ended: dict[str, tuple[float, float, float | None]] = {}  # (begin, end, share), of unfinished requests

    def __len__(self) -> int:
        return len(self._began) + len(self._ended)

    def started(self, request_id: str, num_tokens: int, since_s: float | None = None) -> None:
        if request_id not in self._began:
            now_s = time.monotonic()
            self._began[request_id] = (now_s if since_s is None else since_s, num_tokens)
            self._shares.begin(request_id, now_s)

    def arrived(self, request_ids: Iterable[str]) -> None:
        """End these waits. Ignores other connectors' ids."""
        began = {request_id: self._began.pop(request_id) for request_id in request_ids if request_id in self._began}
        if not began:
            return
        now_s = time.monotonic()
        shares = self._shares.end({request_id: num_tokens for request_id, (_, num_tokens) in began.items()}, now_s)
        for (request_id, (since_s, _)), share in zip(began.items(), shares, strict=True):
            self._ended[request_id] = (since_s, now_s, share)

    def attach_to(
        self, request_id: str, answer: tuple[bool, dict[str, Any] | None]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._began.pop(request_id, None)
        self._shares.cancel(request_id)
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
