"""Slows the steps of a prefill engine that only keeps pages for KV transfer.

vLLM steps such an engine every millisecond to see whether the pages were read: 0.9 cores for as long as it keeps a
prompt. On the CPU device decode engines read pages with those cores; on two cores reads took twice as long. The cost is
small: pages are freed, and prompts start, one pause later.
"""

from __future__ import annotations

import time
from typing import Any

# Well below a prompt's computing time on the CPU device.
IDLE_STEP_PAUSE_S = 0.01


def slow_idle_steps(scheduler: Any) -> None:
    """Pause before steps that neither compute nor notify the worker."""
    build_connector_meta = scheduler.build_connector_meta

    def build(scheduler_output: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens and not scheduler_output.finished_req_ids:
            time.sleep(IDLE_STEP_PAUSE_S)
        return build_connector_meta(scheduler_output)

    scheduler.build_connector_meta = build
