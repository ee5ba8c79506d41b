"""A prefill engine that only keeps pages looks after them now and then, not all the time.

While a prefill engine keeps pages for a decode engine, vLLM steps it every millisecond, without anything to compute, to
see whether they were read. Each step is a message to its worker, an answer, and statistics to whoever asked: 0.9 cores
(seen) for as long as one prompt is kept. On the CPU device those are the cores that the decode engine reads the pages
with: on two of them reads took twice as long.

Slower looks cost little: pages become free a nap later, and a prompt that comes in between waits for the rest of it.
"""

from __future__ import annotations

import time
from typing import Any

# Well below what a prompt takes to compute on the CPU device.
IDLE_STEP_PAUSE_S = 0.01


def slow_idle_steps(scheduler: Any) -> None:
    """Have a prefill engine's steps that compute nothing and have nothing to tell its worker take a nap first."""
    build_connector_meta = scheduler.build_connector_meta

    def build(scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens and not scheduler_output.finished_req_ids:
            time.sleep(IDLE_STEP_PAUSE_S)
        return build_connector_meta(scheduler_output)

    scheduler.build_connector_meta = build
