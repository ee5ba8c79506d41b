"""vLLM's OffloadingConnector as kvferry needs it: it knows each request's route keys, namespace and volume hints.

What vLLM 0.32 does not do for its tiers:
- Tell gateways what is where. Events of its CPU tier carry no salt, and name a chunk of several pages by its last one.
  Ours name every page by its route key, so that they need nothing before them.
- Say whose a page is, and what is known of it elsewhere. `TierHints` come as KV hints, beside the transfer parameters,
  which belong to the ferry.
- Leave a ferried prompt alone. Joined by a MultiConnector, every connector is asked for every request, and the tier
  would read from NVMe what NIXL brings. Here it has nothing to offer until the ferry has had its turn with a request;
  if that failed, it has.
- Give up on a page that does not come. A read that hangs cannot be cancelled, and vLLM has every request that wants the
  page wait for it. Here a request waits so long, and then computes what is not there.
"""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import LookupResult, Medium, get_offload_group_idx
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.engine.base import TierHints
from kvferry.engine.vllm.plugins.chunk_layout import layout_fields
from kvferry.engine.vllm.plugins.cpu_tier import refuse_a_second_region
from kvferry.engine.vllm.plugins.load_times import LOAD_TIMES, LoadTimes
from kvferry.engine.vllm.plugins.side_channel import CACHED_PARAMETER, ROUTE_KEYS_TAG
from kvferry.pages.keys import pack_keys, route_keys, seed_of
from kvferry.tenancy.namespace import Namespace
from kvferry.tracing import TraceContext

log = logging.getLogger(__name__)

# A page of the tiers has at least this many bytes, so that a drive reads it at its full rate ...
_MIN_CHUNK_BYTES = 1 << 20
# ... but no more tokens than this: what does not fill a page is computed again.
_MAX_CHUNK_TOKENS = 256

_HINT_TYPE = "kvferry.tier"
_HINT_VERSION = "1"

# What a step that computes nothing waits for the keeper, on the CPU device: each is a message to the worker and back,
# and takes cores from whatever else runs there (nixl_keeping.py).
_NAP_S = 0.01


def blocks_per_chunk(block_bytes: int, tokens_per_block: int) -> int:
    """How many pages of an engine make one of its tiers. `block_bytes` is a page over all layers and workers."""
    wanted = math.ceil(_MIN_CHUNK_BYTES / block_bytes)
    return max(1, min(wanted, _MAX_CHUNK_TOKENS // tokens_per_block))


def to_kv_hints(request_id: str, hints: TierHints, trace: TraceContext | None = None) -> KvHintsEnvelope:
    """What `RequestPages` reads in the engine's core."""
    payload = {
        "tenant": hints.namespace.tenant,
        "epoch": hints.namespace.epoch,
        "volumes": dict(hints.volumes),
        "load": hints.load,
        "trace": None if trace is None else [trace.traceparent, trace.tracestate],
    }
    return KvHintsEnvelope("1", request_id, [KvHintAction("0", _HINT_TYPE, _HINT_VERSION, payload)])


def register_connectors(connectors: Mapping[str, str]) -> None:
    """Class name -> module. A MultiConnector makes its statistics anew from the names of its connectors' classes."""
    for name, module in connectors.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)


class RequestPages:
    """What the tiers may ask about one request, by the end position (in tokens) of a page.

    vLLM keeps it with the request (`ReqContext.get_state`). Route keys grow with the answer, made when asked for.
    """

    __slots__ = (
        "_block_size",
        "_keys",
        "_request",
        "_tail",
        "brought",
        "failed",
        "hints",
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
        self.hints, self.trace = _hints_of(request)
        params = request.kv_transfer_params or {}
        # Of a prompt that comes by the ferry, whose prefill engine keeps its pages on volumes. (The parameters change.)
        self.num_transferred_tokens = len(request.prompt_token_ids) if params.get("do_remote_prefill") else 0
        self.failed: set[bytes] | None = None  # pages that could not be loaded for this request: not tried again
        self.waiting_since_s: float | None = None  # for pages that come, in its scheduler's monotonic clock
        self.waited_since_s: float | None = None  # the same, of a wait that is over
        self.overdue = False  # it waited long enough
        self.brought: dict[str, int] | None = None  # tokens that its tiers brought at first, by tier

    def route_key(self, end_token: int | None) -> int:
        """Of the page that ends there; 0 where no page of the engine does."""
        if end_token is None or end_token % self._block_size:
            return 0
        num_pages = end_token // self._block_size
        return self._known(num_pages)[num_pages - 1] if self._reaches(num_pages) else 0

    def route_keys(self, first_page: int, end_page: int) -> array[int]:
        """Of pages [first_page, end_page); fewer where not all of them are known yet."""
        return self._known(end_page)[first_page:end_page]

    def page_hashes(self, first_page: int, end_page: int, tokens_per_hash: int) -> list[Any]:
        """The engine's own hashes of these pages, as its events have them."""
        hashes, per_page = self._request.block_hashes, self._block_size // tokens_per_hash
        return [maybe_convert_block_hash(hashes[(i + 1) * per_page - 1]) for i in range(first_page, end_page)]

    def volume_of(self, end_token: int | None) -> str | None:
        """A volume that is said to have the page that ends there."""
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


def _hints_of(request: Any) -> tuple[TierHints, TraceContext | None]:
    for action in request.kv_hints.actions if request.kv_hints is not None else ():
        if (action.action_type, action.action_version) == (_HINT_TYPE, _HINT_VERSION):
            payload = action.payload
            namespace = Namespace(payload["tenant"], payload["epoch"])
            trace = TraceContext(*payload["trace"]) if payload["trace"] is not None else None
            return TierHints(namespace, payload["volumes"], load=payload["load"]), trace
    return TierHints(), None


class CpuTierEvents:
    """Tells of the CPU tier page by page, under route keys."""

    def __init__(self, group_index: int, tokens_per_chunk: int, block_size: int, tokens_per_hash: int) -> None:
        """Of one KV cache group: a page that has left one of them is of no use in the others."""
        self._group_index = group_index
        self._tokens_per_chunk = tokens_per_chunk
        self._block_size = block_size
        self._tokens_per_hash = tokens_per_hash
        self._names: dict[bytes, tuple[list[Any], array[int]]] = {}  # of chunks in the tier: hashes and route keys

    def __len__(self) -> int:
        return len(self._names)

    def note(self, keys: Collection[bytes], context: Any) -> None:
        """These chunks of a request are about to be in the tier: know their pages by name."""
        pages = context.get_state(RequestPages)
        if pages is None:
            return
        for key in keys:
            end_token = context.get_offload_key_position(key)
            if (
                end_token is None
                or end_token % self._tokens_per_chunk
                or get_offload_group_idx(key) != self._group_index
            ):
                continue
            end_page = end_token // self._block_size
            first_page = end_page - self._tokens_per_chunk // self._block_size
            known = pages.route_keys(first_page, end_page)
            if len(known) == end_page - first_page:
                self._names[key] = (pages.page_hashes(first_page, end_page, self._tokens_per_hash), known)

    def translate(self, events: Iterable[Any]) -> Iterator[KVCacheEvent]:
        """vLLM's events of its tiers. Chunks that nobody named are not told of."""
        for event in events:
            if event.medium is not Medium.CPU:
                continue
            hashes: list[BlockHash] = []
            told = array("Q")
            for key in event.keys:
                named = self._names.pop(key, None) if event.removed else self._names.get(key)
                if named is not None:
                    hashes += named[0]
                    told += named[1]
            if not hashes:
                continue
            if event.removed:
                yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=self._group_index)
            else:
                yield BlockStored(
                    block_hashes=hashes,
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=MEDIUM_CPU,
                    lora_name=None,
                    extra_keys=[(ROUTE_KEYS_TAG, pack_keys(told))],
                    group_idx=self._group_index,
                )

    def clear(self) -> None:
        self._names.clear()


class TierConnector(OffloadingConnector):  # type: ignore[misc]
    """vLLM's connector of its tiers, for both roles.

    Reads from its extra configuration, beside what vLLM reads: `keeper_socket` (empty: no volumes), `model_name`,
    `weights_revision` and `patience_s` (how long a request waits for pages that come). Sets `blocks_per_chunk` where it
    is not given.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        block_size = vllm_config.cache_config.block_size
        if settings.get("blocks_per_chunk") is None:
            settings.pop("blocks_per_chunk", None)
            config = build_offloading_config(vllm_config, kv_cache_config)
            row_bytes = config.worker_kv_bytes_per_block * config.parallel.world_size
            settings["blocks_per_chunk"] = blocks_per_chunk(row_bytes, block_size)
        if settings.get("keeper_socket"):
            settings["secondary_tiers"] = [
                {
                    "type": "KeeperTier",
                    "module_path": "kvferry.engine.vllm.plugins.keeper_tier",
                    "socket_path": settings["keeper_socket"],
                    "layout": layout_fields(
                        vllm_config,
                        model_name=settings["model_name"],
                        weights_revision=settings["weights_revision"],
                        blocks_per_chunk=settings["blocks_per_chunk"],
                    ),
                }
            ]
        super().__init__(vllm_config, role, kv_cache_config)
        if role != KVConnectorRole.SCHEDULER:
            return
        self._times = LoadTimes(LOAD_TIMES)
        self._block_size = block_size
        self._manager: Any = self.scheduler.manager
        self._patience_s = float(settings["patience_s"])
        self._nap = vllm_config.device_config.device_type == "cpu"
        self._checked = False
        groups = self.scheduler.config.kv_group_configs
        told = next((group for group in groups if group.sliding_window_size_in_chunks is None), groups[0])
        self._events = CpuTierEvents(
            told.group_idx, told.tokens_per_chunk, block_size, self.scheduler.config.tokens_per_hash
        )
        self._name_what_is_stored(self._manager.primary_tier)

    def _name_what_is_stored(self, primary: Any) -> None:
        """Both ways into the tier: from the device, and from volumes."""
        complete_store = primary.complete_store

        def complete(keys: Collection[bytes], context: Any, success: bool = True) -> None:
            if success:
                self._events.note(keys, context)
            complete_store(keys, context, success)

        primary.complete_store = primary.complete_write = complete

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        status = self.scheduler._req_status[request.request_id]
        status.req_context.set_state(RequestPages(request, self._block_size))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params, limit = request.kv_transfer_params, None
        pages = self._pages(request)
        if params and params.get("do_remote_prefill"):
            limit = 0  # until the ferry has begun, or given up, this stays set
        elif pages.overdue:
            limit = self._num_ready(self.scheduler._req_status[request.request_id], num_computed_tokens)
        num_tokens: int | None
        if limit is not None:
            num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens=limit
            )
        else:
            num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens is not None:
            pages.waited_since_s, pages.waiting_since_s = pages.waiting_since_s, None
        elif pages.waiting_since_s is None:
            pages.waiting_since_s = time.monotonic()
        elif not pages.overdue and time.monotonic() - pages.waiting_since_s > self._patience_s:
            log.warning("request %s computes what its tiers did not bring in time", request.request_id)
            pages.overdue = True
        return num_tokens, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            pages = self._pages(request)
            self._times.began(request.request_id, pages.waited_since_s)
            if pages.brought is None:
                by_source = self.scheduler.get_external_cache_hit_sources(request, num_external_tokens)
                pages.brought = {
                    "cpu": by_source.get(CacheHitSource.HOST, 0),
                    "volume": by_source.get(CacheHitSource.DISK, 0),
                }

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self._times.arrived(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._with_what_is_known(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._with_what_is_known(request, super().request_finished_all_groups(request, block_ids))

    def _with_what_is_known(self, request: Any, answer: Any) -> tuple[bool, dict[str, Any] | None]:
        """How long it waited for pages of the tiers, and how many tokens they brought."""
        kept, params = self._times.finished(request.request_id, answer)
        status = self.scheduler._req_status.get(request.request_id)
        pages = status.req_context.get_state(RequestPages) if status is not None else None
        if pages is not None and pages.brought is not None:
            params = {**(params or {}), CACHED_PARAMETER: pages.brought}
        return kept, params

    def _pages(self, request: Any) -> RequestPages:
        pages: RequestPages = self.scheduler._req_status[request.request_id].req_context.get_state(RequestPages)
        return pages

    def _num_ready(self, status: Any, num_computed_tokens: int) -> int:
        """Tokens after those computed whose pages are in the CPU tier now."""
        if self.scheduler._sliding_window_groups:
            return 0  # not a prefix: left to be computed
        ready: list[int] = []
        for group, state in zip(self.scheduler.config.kv_group_configs, status.group_states, strict=True):
            end_chunk = num_computed_tokens // group.tokens_per_chunk
            while end_chunk < len(state.offload_keys):
                key = state.offload_keys[end_chunk]
                if self._manager.primary_tier.lookup(key, status.req_context) is not LookupResult.HIT:
                    break
                end_chunk += 1
            ready.append(end_chunk * group.tokens_per_chunk - num_computed_tokens)
        return max(0, min(ready))

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            if not self._checked:
                self._checked = True
                refuse_a_second_region(self._manager.primary_tier._mmap_region)
        elif self._nap and not scheduler_output.finished_req_ids:
            for tier in self._manager.secondary_tiers:
                tier.nap(_NAP_S)
        return super().build_connector_meta(scheduler_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.translate(self._manager.take_events())

    def reset_cache(self) -> bool | None:
        self._events.clear()
        done: bool | None = super().reset_cache()
        return done
