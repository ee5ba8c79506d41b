"""vLLM's OffloadingConnector with what vLLM 0.32 lacks (see ADR 11).

It adds route keys, namespaces, volume hints, the order behind KV transfer, and load timeouts.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvferry.engine.vllm.plugins.core_fields import CACHED_PARAMETER
from kvferry.engine.vllm.plugins.exchange_fields import layout_fields
from kvferry.engine.vllm.plugins.tier.cpu_tier import refuse_second_region
from kvferry.engine.vllm.plugins.tier.cpu_tier_events import CpuTierEvents
from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState
from kvferry.engine.vllm.plugins.tier.tenant_policy import keep_contracts
from kvferry.engine.vllm.plugins.transfer_times import LOAD_TIMES, TransferTimes

log = logging.getLogger(__name__)

# A chunk has at least this many bytes, so that a drive reads it at its full rate ...
_MIN_CHUNK_BYTES = 1 << 20
# ... but no more tokens than this: a partial chunk is not stored.
_MAX_CHUNK_TOKENS = 256

# How long an idle step waits for the keeper on the CPU device, where idle steps take cores from computing
# (cpu_device.py).
_IDLE_STEP_WAIT_S = 0.01


def blocks_per_chunk(block_bytes: int, tokens_per_block: int) -> int:
    """`block_bytes` is a page over all layers and workers."""
    wanted = math.ceil(_MIN_CHUNK_BYTES / block_bytes)
    return max(1, min(wanted, _MAX_CHUNK_TOKENS // tokens_per_block))


def register_connectors(connectors: Mapping[str, str]) -> None:
    """A MultiConnector finds its children's statistics by class name."""
    for name, module in connectors.items():
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)


class TierConnector(OffloadingConnector):  # type: ignore[misc]
    """Extra configuration: `keeper_socket` (empty: no volumes) and others of `arguments.tier_connector`.

    Sets `blocks_per_chunk` if it is not given.
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
                    "module_path": "kvferry.engine.vllm.plugins.tier.keeper_tier",
                    "socket_path": settings["keeper_socket"],
                    "pool": settings["volume_pool"],
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
        self._times = TransferTimes(LOAD_TIMES)
        self._block_size = block_size
        self._manager: Any = self.scheduler.manager
        self._load_timeout_s = float(settings["load_timeout_s"])
        self._waits_when_idle = vllm_config.device_config.device_type == "cpu"
        self._is_region_verified = False
        groups = self.scheduler.config.kv_group_configs
        reported = next((group for group in groups if group.sliding_window_size_in_chunks is None), groups[0])
        self._events = CpuTierEvents(
            reported.group_idx, reported.tokens_per_chunk, block_size, self.scheduler.config.tokens_per_hash
        )
        self.blocks_per_chunk = int(settings["blocks_per_chunk"])
        self.tenant_policy = keep_contracts(self._manager.primary_tier)
        self._record_stored_chunks(self._manager.primary_tier)

    def _record_stored_chunks(self, primary: Any) -> None:
        """Hook both ways into the tier: from the device, and from volumes."""
        complete_store = primary.complete_store

        def complete(keys: Collection[bytes], context: Any, success: bool = True) -> None:
            if success:
                self._events.record_stored(keys, context)
            complete_store(keys, context, success)

        primary.complete_store = primary.complete_write = complete

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        status = self.scheduler._req_status[request.request_id]
        status.req_context.set_state(RequestTierState(request, self._block_size))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        params, limit = request.kv_transfer_params, None
        state = self._tier_state(request)
        if params and params.get("do_remote_prefill"):
            limit = 0  # stays set until KV transfer has begun or failed
        elif state.overdue:
            limit = self._num_ready(self.scheduler._req_status[request.request_id], num_computed_tokens)
        num_tokens: int | None
        if limit is not None:
            num_tokens, is_async = self.scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens=limit
            )
        else:
            num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if num_tokens is not None:
            state.waited_since_s, state.waiting_since_s = state.waiting_since_s, None
        elif state.waiting_since_s is None:
            state.waiting_since_s = time.monotonic()
        elif not state.overdue and time.monotonic() - state.waiting_since_s > self._load_timeout_s:
            log.warning("request %s computes what its tiers did not bring in time", request.request_id)
            state.overdue = True
        return num_tokens, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            state = self._tier_state(request)
            self._times.started(request.request_id, num_external_tokens, state.waited_since_s)
            if state.loaded_tokens is None:
                by_source = self.scheduler.get_external_cache_hit_sources(request, num_external_tokens)
                state.loaded_tokens = {
                    "cpu": by_source.get(CacheHitSource.HOST, 0),
                    "volume": by_source.get(CacheHitSource.DISK, 0),
                }

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self._times.arrived(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._with_tier_results(request, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._with_tier_results(request, super().request_finished_all_groups(request, block_ids))

    def _with_tier_results(self, request: Any, answer: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = self._times.attach_to(request.request_id, answer)
        status = self.scheduler._req_status.get(request.request_id)
        state = status.req_context.get_state(RequestTierState) if status is not None else None
        if state is not None and state.loaded_tokens is not None:
            params = {**(params or {}), CACHED_PARAMETER: state.loaded_tokens}
        return kept, params

    def _tier_state(self, request: Any) -> RequestTierState:
        state: RequestTierState = self.scheduler._req_status[request.request_id].req_context.get_state(RequestTierState)
        return state

    def _num_ready(self, status: Any, num_computed_tokens: int) -> int:
        if self.scheduler._sliding_window_groups:
            return 0  # not a prefix
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
            if not self._is_region_verified:
                self._is_region_verified = True
                refuse_second_region(self._manager.primary_tier._mmap_region)
        elif self._waits_when_idle and not scheduler_output.finished_req_ids:
            for tier in self._manager.secondary_tiers:
                tier.wait_for_jobs(_IDLE_STEP_WAIT_S)
        return super().build_connector_meta(scheduler_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._events.translate(self._manager.take_events())

    def reset_cache(self) -> bool | None:
        self._events.clear()
        done: bool | None = super().reset_cache()
        return done
