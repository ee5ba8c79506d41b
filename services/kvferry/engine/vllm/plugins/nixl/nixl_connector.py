"""vLLM's NixlConnector with repairs of vLLM 0.32 (see ADR 3)."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvferry.engine.vllm.plugins.absent_images import end_requests_of_absent_images
from kvferry.engine.vllm.plugins.cpu_device import (
    blocking_progress_thread,
    count_without_compiled_code,
    slow_idle_steps,
)
from kvferry.engine.vllm.plugins.drafts import (
    constrain_steps_with_drafts,
    count_drafts_for_min_tokens,
    expand_settings_of_drafts,
)
from kvferry.engine.vllm.plugins.given_tokens import count_given_tokens, sample_after_given_tokens
from kvferry.engine.vllm.plugins.grammars import fill_word_caches_of_grammars, limit_grammars
from kvferry.engine.vllm.plugins.lora import hash_adapters_by_name, leave_other_rows_alone, look_patterns_up
from kvferry.engine.vllm.plugins.nixl.nixl_exchange import compare_exchange_digests
from kvferry.engine.vllm.plugins.nixl.nixl_handshake_port import retry_taken_handshake_ports
from kvferry.engine.vllm.plugins.nixl.nixl_lease import refuse_reads_after_lease, send_lease_ends
from kvferry.engine.vllm.plugins.seeded_noise import draw_by_position
from kvferry.engine.vllm.plugins.transfer_times import KV_TRANSFER_TIMES, TransferTimes


class KvTransferConnector(NixlPullConnector):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        affinity = os.sched_getaffinity(0)
        on_cpu = vllm_config.device_config.device_type == "cpu"
        if role == KVConnectorRole.WORKER:
            compare_exchange_digests()
            count_drafts_for_min_tokens()
            constrain_steps_with_drafts()
            sample_after_given_tokens()
            draw_by_position()
            if on_cpu:
                count_without_compiled_code()
                expand_settings_of_drafts()
            if vllm_config.lora_config is not None:
                look_patterns_up()
                if on_cpu:
                    leave_other_rows_alone()
        try:
            with blocking_progress_thread() if on_cpu else contextlib.nullcontext():
                super().__init__(vllm_config, role, kv_cache_config)
        finally:
            os.sched_setaffinity(0, affinity)
        self._times = TransferTimes(KV_TRANSFER_TIMES)
        if role == KVConnectorRole.WORKER:
            refuse_unequal_block_sizes(self.connector_worker)
            refuse_reads_after_lease(self.connector_worker)
        else:
            retry_taken_handshake_ports(self.connector_scheduler)
            send_lease_ends(self.connector_scheduler)
            # This runs in the engine core's process, before a model is loaded there.
            hash_adapters_by_name()
            end_requests_of_absent_images()
            limit_grammars()
            fill_word_caches_of_grammars()
            count_given_tokens()
            if on_cpu and not vllm_config.kv_transfer_config.is_kv_consumer:
                slow_idle_steps(self.connector_scheduler)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self._times.started(request.request_id, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self._times.arrived(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._times.attach_to(request.request_id, super().request_finished(request, block_ids))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self._times.attach_to(request.request_id, super().request_finished_all_groups(request, block_ids))


def refuse_unequal_block_sizes(worker: NixlBaseConnectorWorker) -> None:
    """Fail the handshake if the remote engine's pages hold another number of tokens."""
    add_remote_agent = worker.add_remote_agent

    def checked(remote: Any, *args: Any, **kwargs: Any) -> Any:
        here = worker.block_size * worker._physical_blocks_per_logical_kv_block
        there = remote.block_size * remote.physical_blocks_per_logical_kv_block
        if there != here:
            raise RuntimeError(
                f"engine {remote.engine_id} has {there} tokens per page, this engine has {here}: "
                "prefill and decode workers must be configured with the same engine.block_size"
            )
        return add_remote_agent(remote, *args, **kwargs)

    worker.add_remote_agent = checked
