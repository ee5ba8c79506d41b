"""kvferry's NIXL connector for vLLM with a NIXL agent that fails; loaded by the engines of `bench.fuzz_transfer`.

Faults are drawn per call, in the decode engine's process, by the seed and the odds in `FAULTS_VARIABLE`.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from bench.fuzz_transfer import FAULTS_VARIABLE
from kvferry.engine.vllm.plugins.nixl.nixl_connector import KvTransferConnector

# vLLM reads nothing from an engine whose transfers fail again and again for up to a minute: here that would be always.
MAX_BACKOFF_S = 0.2


class FaultyConnector(KvTransferConnector):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.WORKER and not vllm_config.kv_transfer_config.is_kv_producer:
            base_worker._INVALID_PEER_MIN_BACKOFF_S = base_worker._INVALID_PEER_MAX_BACKOFF_S = MAX_BACKOFF_S
            given = json.loads(os.environ[FAULTS_VARIABLE])
            worker = self.connector_worker
            worker.nixl_wrapper = FaultyAgent(worker.nixl_wrapper, random.Random(given["seed"]), given["odds"])


class FaultyAgent:
    """Delegates to a NIXL agent, or fails. A transfer that is said to have failed goes on, as it may with RDMA."""

    def __init__(self, agent: Any, draws: random.Random, odds: float) -> None:
        self._agent = agent
        self._draws = draws
        self._odds = odds
        self._failed: set[int] = set()
        self._held_until_s: dict[int, float] = {}  # transfers that say nothing, or that cannot be released, until then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *arguments: Any, **named: Any) -> Any:
        self._fail("make_prepped_xfer")
        return self._agent.make_prepped_xfer(*arguments, **named)

    def transfer(self, handle: Any, *arguments: Any) -> Any:
        self._fail("transfer")
        answer = self._agent.transfer(handle, *arguments)
        # It has begun, though the caller is told that it has not.
        self._fail("transfer, after its start")
        if self._is_drawn():
            self._held_until_s[id(handle)] = time.monotonic() + self._draws.uniform(0.01, 1.0)
        elif self._is_drawn():
            self._failed.add(id(handle))
            self._held_until_s[id(handle)] = time.monotonic() + self._draws.uniform(0.01, 0.5)
        return answer

    def check_xfer_state(self, handle: Any) -> str:
        if id(handle) in self._failed:
            return "ERR"
        if time.monotonic() < self._held_until_s.get(id(handle), 0.0):
            return "PROC"
        self._fail("check_xfer_state")
        return str(self._agent.check_xfer_state(handle))

    def get_xfer_telemetry(self, handle: Any) -> Any:
        self._fail("get_xfer_telemetry")
        return self._agent.get_xfer_telemetry(handle)

    def release_xfer_handle(self, handle: Any) -> Any:
        if time.monotonic() < self._held_until_s.get(id(handle), 0.0):
            raise RuntimeError("injected: release_xfer_handle while the transfer goes on")
        self._fail("release_xfer_handle")
        self._failed.discard(id(handle))
        self._held_until_s.pop(id(handle), None)
        return self._agent.release_xfer_handle(handle)

    def send_notif(self, *arguments: Any, **named: Any) -> Any:
        self._fail("send_notif")
        return self._agent.send_notif(*arguments, **named)

    def _fail(self, where: str) -> None:
        if self._is_drawn():
            raise RuntimeError(f"injected: {where}")

    def _is_drawn(self) -> bool:
        return self._draws.random() < self._odds
