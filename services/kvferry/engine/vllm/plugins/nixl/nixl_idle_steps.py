"""Slows the idle steps of a prefill engine that keeps pages for KV transfer (see ADR 5)."""

from __future__ import annotations

import time
from typing import Any

# Well below a prompt's computing time on the CPU device.
IDLE_STEP_PAUSE_S = 0.01


def slow_idle_steps(scheduler: Any) -> None:
    build_connector_meta = scheduler.build_connector_meta

    def build(scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens and not scheduler_output.finished_req_ids:
            time.sleep(IDLE_STEP_PAUSE_S)
        return build_connector_meta(scheduler_output)

    scheduler.build_connector_meta = build
