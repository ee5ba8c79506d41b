"""Releases kept pages at once; vLLM 0.32 leaves them to their lease.

vLLM mixes this `worker_extension_cls` into its worker. It runs between two steps, on the thread that reaps leases.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group


class ReleaseExtension:
    """Methods that vLLM mixes into its worker; prefixed, because vLLM refuses names that its worker has."""

    def kvferry_release(self, request_id: str) -> bool:
        """Return False if there is no lease (yet)."""
        if not has_kv_transfer_group():
            return False
        return any(end_lease(worker, request_id) for worker in _connector_workers(get_kv_transfer_group()))


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
