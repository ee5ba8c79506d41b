"""Makes NIXL's progress thread wait instead of spin (see ADR 5)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from nixl._api import nixl_agent

# Some UCX transports need polls even when no data arrives.
PROGRESS_PERIOD_US = 1000


@contextlib.contextmanager
def blocking_progress_thread() -> Iterator[None]:
    """Agents made inside sleep until data arrives, at most PROGRESS_PERIOD_US."""
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
