"""Reads end once NIXL writes nothing any more, not when it reports an error."""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvferry_keeper.remote.nixl_agent import NixlAgent, Read
from support.waiting import until

READS = [Read(0, 0, 4096)]


class Handle:
    """A transfer. While `is_busy`, it cannot be released."""

    def __init__(self) -> None:
        self.state = "PROC"
        self.is_busy = True
        self.num_refused = 0
        self.is_released = False

    def release(self) -> None:
        assert not self.is_released
        if self.is_busy:
            self.num_refused += 1
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.is_released = True


class Nixl:
    """As much of nixl_agent as a read uses."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.raises = False

    def get_xfer_descs(self, pieces: object, kind: str) -> object:
        return pieces

    def initialize_xfer(self, *args: object, **named: object) -> Handle:
        self.handles.append(Handle())
        return self.handles[-1]

    def transfer(self, handle: Handle) -> str:
        return handle.state

    def check_xfer_state(self, handle: Handle) -> str:
        if self.raises:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        return handle.state

    def get_new_notifs(self) -> None:
        pass


@pytest_asyncio.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[NixlAgent, Nixl]]:
    nixl = Nixl()
    api = types.ModuleType("nixl._api")
    api.nixl_agent = lambda name, config: nixl  # type: ignore[attr-defined]
    api.nixl_agent_config = lambda **settings: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    agent = NixlAgent("test")
    yield agent, nixl
    await agent.stop()


@pytest.mark.parametrize("how", ["reported", "raised", "late"])
async def test_a_failed_read_returns_when_nixl_has_let_go_of_it(agent: tuple[NixlAgent, Nixl], how: str) -> None:
    reader, nixl = agent
    reading = asyncio.create_task(reader.read("other", READS, 0.05 if how == "late" else 60.0))
    await until(lambda: bool(nixl.handles))
    (handle,) = nixl.handles
    if how == "reported":
        handle.state = "ERR"
    nixl.raises = how == "raised"
    # Several times: one attempt may be answered before the test looks.
    await until(lambda: handle.num_refused > 3)
    assert not reading.done(), "its row may still be written"
    assert reader.num_uncancelled == 1
    handle.is_busy = False
    assert await reading is False
    assert handle.is_released
    assert reader.num_uncancelled == 0


async def test_a_read_that_is_done_returns_at_once(agent: tuple[NixlAgent, Nixl]) -> None:
    reader, nixl = agent
    reading = asyncio.create_task(reader.read("other", READS, 60.0))
    await until(lambda: bool(nixl.handles))
    nixl.handles[0].state = "DONE"
    assert await reading is True
    assert reader.num_uncancelled == 0


async def test_others_go_on_beside_one_that_cannot_be_cancelled(agent: tuple[NixlAgent, Nixl]) -> None:
    reader, nixl = agent
    stuck = asyncio.create_task(reader.read("other", READS, 0.01))
    await until(lambda: reader.num_uncancelled == 1)
    reading = asyncio.create_task(reader.read("other", READS, 60.0))
    await until(lambda: len(nixl.handles) == 2)
    nixl.handles[1].state, nixl.handles[1].is_busy = "DONE", False
    assert await reading is True
    assert not stuck.done()
    nixl.handles[0].is_busy = False
    assert await stuck is False
