"""NIXL's progress thread, made to wait instead of spin.

NIXL 1.5 polls its UCX workers with the timeout `pthrDelay`, and its Python API sets that to 0: each agent keeps one
core busy for as long as it lives, idle or not (seen: 100 % of a core an agent; with 1 ms 1 to 2 %, and transfers no
slower, because arriving data wakes the poll). On a machine whose cores compute, that halves what two engines have.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from nixl._api import nixl_agent

# Some UCX transports need a look now and then even when nothing woke the poll.
PROGRESS_PERIOD_US = 1000


@contextlib.contextmanager
def blocking_progress_thread() -> Iterator[None]:
    """Agents made inside have a progress thread that sleeps until data arrives, at most PROGRESS_PERIOD_US."""
    bindings: Any = sys.modules[nixl_agent.__module__].nixlBind
    plain = bindings.nixlAgentConfig

    class Waiting(plain):  # type: ignore[misc, valid-type]
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, PROGRESS_PERIOD_US if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = Waiting
    try:
        yield
    finally:
        bindings.nixlAgentConfig = plain
