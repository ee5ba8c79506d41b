"""Leases of a prefill engine's kept pages: no read after their end (see ADR 8), and their end at once."""

from __future__ import annotations

import logging
import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

log = logging.getLogger(__name__)

# Covers the error of the clock offset that vLLM measures at the handshake (half a round trip of at most 5 s), and reads
# under way when the lease ends.
MARGIN_S = 5.0

EXPIRY_PARAMETER = "remote_blocks_expiry_time"


def send_lease_ends(scheduler: Any) -> None:
    """Add the lease's end, by the scheduler's perf_counter, to the transfer parameters."""
    request_finished = scheduler.request_finished

    def stamped(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = request_finished(request, block_ids)
        if kept and params is not None and params.get("do_remote_prefill"):
            params[EXPIRY_PARAMETER] = scheduler._reqs_need_send[request.request_id]
        return kept, params

    scheduler.request_finished = stamped


def refuse_reads_after_lease(worker: Any) -> None:
    """Fail loads whose lease ends before the read is done."""
    read_blocks_for_req, pop_done_transfers = worker._read_blocks_for_req, worker._pop_done_transfers

    def ended(meta: Any) -> bool:
        expiry = meta.remote.blocks_expiry_time if meta is not None and meta.remote is not None else None
        if expiry is None:
            return False
        offset = worker._engine_clock_offset.get(meta.remote.engine_id)
        return offset is None or time.perf_counter() + MARGIN_S >= expiry - offset

    def read(req_id: str, meta: Any) -> None:
        known = meta.remote.engine_id in worker._remote_agents
        if known and any(len(group) for group in meta.local_block_ids) and ended(meta):
            log.warning("request %s: its prefill engine's lease has ended; its prompt is computed here", req_id)
            worker.xfer_stats.record_kv_expired_req()
            worker._handle_failed_transfer(req_id, None, worker._recv_failures, record_failed_transfer=False)
            return
        read_blocks_for_req(req_id, meta)

    def pop(transfers: Any) -> tuple[set[str], set[str]]:
        done, failed = pop_done_transfers(transfers)
        for req_id in done - failed:
            if ended(worker._recving_metadata.get(req_id)):
                log.warning("request %s: its prefill engine's lease ended during the read", req_id)
                worker.xfer_stats.record_kv_expired_req()
                failed.add(req_id)
        return done, failed

    worker._read_blocks_for_req = read
    worker._pop_done_transfers = pop


class ReleaseExtension:
    """Releases kept pages at once; vLLM 0.32 leaves them to their lease.

    vLLM mixes this `worker_extension_cls` into its worker, and refuses names that its worker has. It runs between two
    steps, on the thread that reaps leases.
    """

    def kvferry_release(self, request_id: str) -> bool:
        """Return False if there is no lease (yet)."""
        if not has_kv_transfer_group():
            return False
        return any(end_lease(worker, request_id) for worker in _connector_workers(get_kv_transfer_group()))

    def kvferry_pool_bytes(self) -> int:
        """Return the memory of all pages and states on this rank."""
        workers = _connector_workers(get_kv_transfer_group())
        caches = [each for worker in workers for each in worker.device_kv_caches.values()]
        tensors = [tensor for each in caches for tensor in (each if isinstance(each, list | tuple) else [each])]
        # Layers share memory.
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): int(storage.nbytes()) for storage in storages}.values())


def end_lease(worker: Any, request_id: str) -> bool:
    """The next step frees the pages."""
    leases: dict[str, float] = worker._reqs_to_send
    if request_id not in leases:
        return False
    leases[request_id] = time.perf_counter()
    return True


def _connector_workers(connector: Any) -> list[Any]:
    connectors = getattr(connector, "_connectors", None) or [connector]
    workers = [getattr(each, "connector_worker", None) for each in connectors]
    return [worker for worker in workers if hasattr(worker, "_reqs_to_send")]
