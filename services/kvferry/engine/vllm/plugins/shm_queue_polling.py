"""Polls the queue between engine core and worker with pauses instead of spinning (see ADR 5)."""

from __future__ import annotations

import time

from vllm.distributed.device_communicators import shm_broadcast

# A step of the CPU device takes tens of milliseconds.
POLL_PAUSE_S = 0.0002


def poll_shm_queues_slowly() -> None:
    """Affects all queues of this process. Idempotent."""
    shm_broadcast.sched_yield = _pause


def _pause() -> None:
    time.sleep(POLL_PAUSE_S)
