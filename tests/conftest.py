"""Fixtures and settings of all tests.

`make test` runs tests in several processes (pytest-xdist). Tests with real engines are one group, so that one process
runs them all and at most one prefill and one decode engine exist at a time. Tests that need vLLM and start no engine
are a second group, since each process takes half a minute to import it; tests that start a whole local cluster with
simulated engines are a third.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import pytest_asyncio
from xdist.scheduler import LoadScopeScheduling

import kvferry.engine.vllm.engine
from bench.vllm_engines import VllmPair, start_pair
from kvferry.addresses import free_port

# A machine that does other work too is slow, not wrong.
hypothesis.settings.register_profile("kvferry", deadline=None)
hypothesis.settings.load_profile("kvferry")


_exit_status = 0


# Tests that start real engines, and tests that start Ray or many processes with simulated engines.
_ENGINE_TESTS = (
    "tests/model/",
    "tests/cluster/test_real_cluster.py",
    "tests/cluster/test_real_images.py",
    "tests/cluster/test_real_overrides.py",
    "tests/cluster/test_real_tenants.py",
    "tests/deploy/test_ray.py::test_real_engines_answer_over_both_protocols",
)
_VLLM_TESTS = (
    "tests/model/seams/",
    "tests/model/test_plain_prompts.py",
    "tests/model/test_vllm_parsing.py",
)
_RAY_TESTS = (
    "tests/cluster/test_local_cluster.py",
    "tests/cluster/test_keepers.py",
    "tests/cluster/test_chaos.py",
    "tests/deploy/test_ray.py",
    "tests/deploy/test_plan_emits.py::test_an_emitted_serve_file_starts_on_a_local_ray",
)


def _scope_of(nodeid: str) -> str:
    """Return the group of tests that one process runs in order; every other test is a group of its own."""
    if nodeid.startswith(_VLLM_TESTS):
        return "vllm"
    if nodeid.startswith(_ENGINE_TESTS) or "vllm" in nodeid.partition("[")[2]:
        return "engines"
    return "ray" if nodeid.startswith(_RAY_TESTS) else nodeid


class _GroupScheduling(LoadScopeScheduling):
    """Keeps each group in one process. (xdist_group of pytest-xdist 3.8 has no effect with pytest 9.2.)"""

    def _split_scope(self, nodeid: str) -> str:
        return _scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        scope = _scope_of(item.nodeid)
        if item.get_closest_marker("model") is not None and scope not in ("engines", "vllm"):
            raise pytest.UsageError(f"{item.nodeid} starts real engines: add it to _ENGINE_TESTS of tests/conftest.py")
        if item.get_closest_marker("cluster") is not None and scope == item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} starts engines or Ray: add its file to tests/conftest.py")


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


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Clients of httpx share the context of the system's authorities: each read them, 20 ms, for http:// too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpx._transports.default, "create_ssl_context", functools.cache(httpx.create_ssl_context))
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_pair() -> AsyncIterator[VllmPair]:
    """Real engines, started once for the whole session (about a minute).

    Another process has the port that the prefill engine chose for handshakes when its listener starts.
    """
    with socket.socket() as other, pytest.MonkeyPatch.context() as patch:
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = iter([other.getsockname()[1]])
        patch.setattr(kvferry.engine.vllm.engine, "free_port", lambda host: next(ports, None) or free_port(host))
        pair = await start_pair()
    try:
        assert next(ports, None) is None
        yield pair
    finally:
        await pair.stop()
