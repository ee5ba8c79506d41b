"""Fixtures and settings of all tests.

`make test` runs tests in several processes (pytest-xdist). What a test starts is said by its marker, and
`support/suite_schedule.py` keeps what runs at a time within the machine's cores and memory.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest
import pytest_asyncio

import kvferry.engine.vllm.engine
import kvferry.engine.vllm.start.arguments
from bench.engine_device import model_config
from bench.tiny_models import make_short_model
from bench.vllm_engines import VllmPair, start_pair
from kvferry.util.addresses import free_port
from support.engine_forks import forked_engines
from support.suite_report import SuiteReport
from support.suite_schedule import UnitScheduling, this_machine, write_units

# A machine that does other work too is slow, not wrong. Tests with many examples take these numbers, or a part of them.
hypothesis.settings.register_profile("kvferry", deadline=None, max_examples=100)
hypothesis.settings.register_profile("kvferry-full", deadline=None, max_examples=300)
hypothesis.settings.load_profile("kvferry-full" if os.environ.get("KVFERRY_FULL") == "1" else "kvferry")


_exit_status = 0
_UNITS = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    # No environment variable: tests run pytest themselves, which would write to the same file.
    parser.addoption("--report", type=Path, metavar="FILE", help="write the seconds of each test, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        descriptor, name = tempfile.mkstemp(prefix="kvferry-tests-", suffix=".json")
        os.close(descriptor)
        config.stash[_UNITS] = Path(name)
        file: Path | None = config.getoption("report")
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(SuiteReport(file))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["units"] = str(node.config.stash[_UNITS])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> UnitScheduling:
    return UnitScheduling(config, log, units=config.stash[_UNITS], machine=this_machine())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if not has_vllm and {"model", "vllm"} & {marker.name for marker in item.iter_markers()}:
            item.add_marker(pytest.mark.skip("vLLM is not installed"))
        if "vllm_pair" in getattr(item, "fixturenames", ()) and item.get_closest_marker("shared_pair") is None:
            raise pytest.UsageError(f"{item.nodeid} uses vllm_pair: it needs the marker shared_pair")
    worker = getattr(config, "workerinput", None)
    if worker is not None and worker["workerid"] == "gw0":
        write_units(items, Path(worker["units"]))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    global _exit_status
    _exit_status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """A process that had NIXL loaded ends without destructors: those of the libnl in its wheel (1.5.1) crash."""
    if _UNITS in config.stash:
        config.stash[_UNITS].unlink(missing_ok=True)
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
async def vllm_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmPair]:
    """Real engines with a short model, started once for the whole session (about a minute).

    Another process has the port that the prefill engine chose for handshakes when its listener starts.
    """
    with socket.socket() as other, pytest.MonkeyPatch.context() as patch, forked_engines():
        other.bind(("127.0.0.1", 0))
        other.listen()
        ports = iter([other.getsockname()[1]])
        patch.setattr(kvferry.engine.vllm.engine, "free_port", lambda host: next(ports, None) or free_port(host))
        # A machine may stand still for minutes. Longer costs: an engine polls while it keeps pages.
        patch.setattr(kvferry.engine.vllm.start.arguments, "TRANSFER_LEASE_S", 300)
        folder = await asyncio.to_thread(make_short_model, tmp_path_factory.mktemp("short-model"))
        pair = await start_pair(model_config(path=str(folder)))
    try:
        assert next(ports, None) is None
        yield pair
    finally:
        await pair.stop()
