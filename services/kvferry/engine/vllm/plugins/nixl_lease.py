"""No page is read from a prefill engine after that engine was free to reuse it.

A prefill engine keeps pages for a lease and then frees them, read or not. In vLLM 0.32 nothing tells the decode engine:
it reads whatever the pages hold by then and answers from it. A decode engine that is busy for longer than the lease
(heartbeats extend it, but wait for both engines' steps) is all it takes.

So the end of the lease travels with the transfer parameters, in the prefill engine's clock, and the decode engine
checks it before a read begins and again when it is done. What came too late is a failed load: computed anew
(kv_load_failure_policy: recompute). Heartbeats only lengthen a lease, so the first end is always safe.
"""

from __future__ import annotations

import logging
import time
from typing import Any

log = logging.getLogger(__name__)

# For the error of the clock offset, which vLLM measures at the handshake (half a round trip of at most 5 s), and for
# what is already on its way when the lease ends.
MARGIN_S = 5.0

EXPIRY_PARAMETER = "remote_blocks_expiry_time"


def send_lease_ends(scheduler: Any) -> None:
    """Have the prefill engine's answers carry the end of their lease, seconds of its scheduler's perf_counter."""
    request_finished = scheduler.request_finished

    def stamped(request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        kept, params = request_finished(request, block_ids)
        if kept and params is not None and params.get("do_remote_prefill"):
            params[EXPIRY_PARAMETER] = scheduler._reqs_need_send[request.request_id]
        return kept, params

    scheduler.request_finished = stamped


def refuse_reads_after_lease(worker: Any) -> None:
    """Have the decode engine fail a load whose lease ends before the read is done."""
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
