"""Giving kept pages back at once: what vLLM 0.32 leaves to a lease where no decode engine comes for them.

A `worker_extension_cls`: vLLM mixes it into the class of its worker, where `collective_rpc` finds the method. It runs
between two steps, on the thread that also reaps leases, so nothing is half done when it looks.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


class ReleaseExtension:
    """No attribute may have the name of one of vLLM's worker: it checks, and refuses to start."""

    def kvferry_release(self, request_id: str) -> bool:
        """End the lease of a finished request's pages. False when none is kept under this id (yet)."""
        if not has_kv_transfer_group():
            return False
        return any(end_lease(worker, request_id) for worker in _connector_workers(get_kv_transfer_group()))


def end_lease(worker: Any, request_id: str) -> bool:
    """The pages are freed when the connector next looks for expired leases, which is within the next step."""
    leases: dict[str, float] = worker._reqs_to_send
    if request_id not in leases:
        return False
    leases[request_id] = time.perf_counter()
    return True


def _connector_workers(connector: Any) -> list[Any]:
    """Of the NIXL connectors, alone or within a MultiConnector."""
    connectors = getattr(connector, "_connectors", None) or [connector]
    workers = [getattr(each, "connector_worker", None) for each in connectors]
    return [worker for worker in workers if hasattr(worker, "_reqs_to_send")]
