"""The queue between an engine's core and its worker: looks again after a nap instead of at once.

For a second after each message vLLM's readers spin on `sched_yield` before they wait for a notification. On a GPU that
saves microseconds on cores that have nothing else to do. On the CPU device the core's spinning takes its share of the
very cores that the worker computes on. (Waiting for the notification at once is no way out: single steps then took
5 s, as if notifications sent while nobody polled were lost.)
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators import shm_broadcast

# A step of the CPU device takes tens of milliseconds.
POLL_PAUSE_S = 0.0002


def poll_shm_queues_slowly() -> None:
    """Applies to every queue of this process, those that exist included; may be repeated."""
    shm_broadcast.sched_yield = _pause


def _pause() -> None:
    time.sleep(POLL_PAUSE_S)
