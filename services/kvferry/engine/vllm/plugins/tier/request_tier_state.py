"""State of one request in the tiers."""

from __future__ import annotations

from array import array
from typing import Any

from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvferry.engine.base import TierHints
from kvferry.observability.tracing import TraceContext
from kvferry.pages.keys import route_keys, seed_of
from kvferry.tenancy.namespace import Namespace

_HINT_TYPE = "kvferry.tier"
_HINT_VERSION = "1"


def to_kv_hints(
    request_id: str,
    hints: TierHints,
    trace: TraceContext | None = None,
) -> KvHintsEnvelope:
    payload = {
        "tenant": hints.namespace.tenant,
        "epoch": hints.namespace.epoch,
        "volumes": dict(hints.volumes),
        "load": hints.load,
        "wanted_s": hints.wanted_s,
        "trace": None if trace is None else [trace.traceparent, trace.tracestate],
    }
    return KvHintsEnvelope("1", request_id, [KvHintAction("0", _HINT_TYPE, _HINT_VERSION, payload)])


class RequestTierState:
    """Route keys, hints and loads by a page's end position in tokens.

    vLLM keeps it with the request (`ReqContext.get_state`).
    """

    __slots__ = (
        "_block_size",
        "_keys",
        "_request",
        "_tail",
        "failed",
        "hints",
        "loaded_tokens",
        "num_transferred_tokens",
        "overdue",
        "trace",
        "waited_since_s",
        "waiting_since_s",
    )

    def __init__(self, request: Any, block_size: int) -> None:
        self._request = request
        self._block_size = block_size
        self._keys = array("Q")
        self._tail = seed_of(request.cache_salt or "")
        self.hints, self.trace = hints_of(request)
        params = request.kv_transfer_params or {}
        # Read now, because vLLM changes the parameters.
        self.num_transferred_tokens = len(request.prompt_token_ids) if params.get("do_remote_prefill") else 0
        self.failed: set[bytes] | None = None  # keys that failed to load: not tried again
        self.waiting_since_s: float | None = None  # for loads, by the scheduler's monotonic clock
        self.waited_since_s: float | None = None  # start of the last wait that ended
        self.overdue = False  # waited longer than the load timeout
        self.loaded_tokens: dict[str, int] | None = None  # by tier, at the first placement

    def route_key(self, end_token: int | None) -> int:
        """Key of the page that ends there, or 0."""
        if end_token is None or end_token % self._block_size:
            return 0
        num_pages = end_token // self._block_size
        return self._known(num_pages)[num_pages - 1] if self._reaches(num_pages) else 0

    def route_keys(self, first_page: int, end_page: int) -> array[int]:
        return self._known(end_page)[first_page:end_page]

    def page_hashes(self, first_page: int, end_page: int, tokens_per_hash: int) -> list[Any]:
        """vLLM's hashes, as in its events."""
        hashes, per_page = self._request.block_hashes, self._block_size // tokens_per_hash
        return [maybe_convert_block_hash(hashes[(i + 1) * per_page - 1]) for i in range(first_page, end_page)]

    def volume_of(self, end_token: int | None) -> str | None:
        """A volume whose hint covers that page."""
        if end_token is not None:
            for volume_id, num_pages in self.hints.volumes.items():
                if end_token <= num_pages * self._block_size:
                    return volume_id
        return None

    def _reaches(self, num_pages: int) -> bool:
        return 0 < num_pages <= int(self._request.num_tokens) // self._block_size

    def _known(self, num_pages: int) -> array[int]:
        if len(self._keys) < num_pages:
            tokens = self._request.all_token_ids[len(self._keys) * self._block_size : num_pages * self._block_size]
            new = route_keys(tokens, self._block_size, self._tail)
            if new:
                self._keys.extend(new)
                self._tail = new[-1]
        return self._keys


def hints_of(request: Any) -> tuple[TierHints, TraceContext | None]:
    payload = _payload_of(request)
    if payload is None:
        return TierHints(), None
    namespace = Namespace(payload["tenant"], payload["epoch"])
    trace = TraceContext(*payload["trace"]) if payload["trace"] is not None else None
    return TierHints(namespace, payload["volumes"], payload["load"], payload["wanted_s"]), trace


def _payload_of(request: Any) -> Any:
    for action in request.kv_hints.actions if request.kv_hints is not None else ():
        if (action.action_type, action.action_version) == (_HINT_TYPE, _HINT_VERSION):
            return action.payload
    return None
