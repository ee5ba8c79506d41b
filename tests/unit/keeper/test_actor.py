"""The actor of a node's keeper: what it says of a start that fails."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvferry_keeper import actor
from kvferry_keeper.actor import KeeperActor
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.tier_node import node_config
from support.waiting import SOON_S, until


async def test_it_says_why_it_cannot_be_made_and_tries_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "RETRY_S", 0.01)
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"*": "ab" * 32}))
    file.chmod(0o644)
    config = node_config(tmp_path, encryption_keys_file=file)
    keeper = KeeperActor.__new__(KeeperActor)
    await keeper.__init__(  # type: ignore[misc]  # as Ray does
        {},
        "settings",
        read_config=lambda values: config,
        membership=lambda config: MemoryMembership(MemoryRegistry()),
        is_deployed=lambda: True,
        end_actor=lambda: None,
    )
    try:
        async with asyncio.timeout(SOON_S):
            fault = await keeper.started()
        assert str(file) in fault
        assert "chmod 600" in fault
        file.chmod(0o600)
        await until(lambda: not keeper._fault)
    finally:
        await keeper.stop()
