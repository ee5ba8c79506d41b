"""Fixtures and settings of all tests.

`make test` runs tests in several processes (pytest-xdist). Tests with real engines are one group, so that one process
runs them all and at most one prefill and one decode engine exist at a time; tests that start Ray are another one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator

import hypothesis
import pytest
import pytest_asyncio

from bench.vllm_engines import VllmPair, start_pair

# A machine that does other work too is slow, not wrong.
hypothesis.settings.register_profile("kvferry", deadline=None)
hypothesis.settings.load_profile("kvferry")


_exit_status = 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, group in (("model", "engines"), ("cluster", "ray")):
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.xdist_group(group))
                break


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _exit_status
    _exit_status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that had NIXL loaded ends without destructors: those of the libnl in its wheel (1.5.1) crash."""
    if "nixl" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_status)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_pair() -> AsyncIterator[VllmPair]:
    """Real engines, started once for the whole session (about a minute)."""
    pair = await start_pair()
    try:
        yield pair
    finally:
        await pair.stop()
