"""Fixtures of the seam tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import structs

from kvferry.engine import fork_process
from kvferry.engine.grammar_checks import LIMITS
from kvferry.engine.vllm.rendering import renderer
from kvferry.gateway import lifecycle
from support.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def without_wall_limits() -> Iterator[None]:
    """Let requests wait for starts and forks, however slow they are: CPU time alone limits them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(fork_process, "_SLOW_START_S", PATIENCE_S)
        patched.setattr(lifecycle, "WALL_PER_CPU", PATIENCE_S)
        patched.setattr(renderer, "LIMITS", structs.replace(LIMITS, wall_s=PATIENCE_S))
        yield
