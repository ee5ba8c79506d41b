"""Settings of a gateway's whole process, read in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvferry.gateway.lifecycle import SWITCH_INTERVAL_S
from kvferry.util.collector import THRESHOLDS
from support.waiting import PATIENCE_S

PROGRAM = """
import asyncio, gc, json, sys
from kvferry import config as configuration
from kvferry.gateway.lifecycle import GatewayHost
from kvferry_sim.membership import MemoryMembership, MemoryRegistry

def settings():
    return {"gc": gc.get_threshold(), "switch_interval_s": sys.getswitchinterval()}

async def main():
    values = {"engine": {"kind": "sim"}, "gateway": {"http_port": 0, "grpc_port": None}}
    host = GatewayHost(configuration.parse({"model": {"path": "m"}} | values), "m", MemoryMembership(MemoryRegistry()))
    before = settings()
    await host.start()
    print(json.dumps([before, settings()]))
    await host.stop()

asyncio.run(main())
"""


def test_a_gateway_sets_garbage_collection_and_the_switch_interval() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    before, after = json.loads(result.stdout)
    assert after["gc"] == list(THRESHOLDS) != before["gc"]
    assert after["switch_interval_s"] == pytest.approx(SWITCH_INTERVAL_S)
    assert before["switch_interval_s"] > 2 * SWITCH_INTERVAL_S
