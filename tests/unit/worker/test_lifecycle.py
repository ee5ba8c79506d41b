"""The life of a worker: it leaves at once when its engine is dead, and orderly when asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvferry import config as configuration
from kvferry.engine.base import EngineId, EngineRequest, RequestId, Sampling
from kvferry.engine.vllm.engine import VllmEngine
from kvferry.engine.vllm.start.engine_folder import EngineFolder
from kvferry.errors import EngineDead
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import MemberKind
from kvferry.tenancy.terms import TierTerms
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim import SimEngine
from kvferry_sim.engine import Faults
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.waiting import until


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry()


@pytest_asyncio.fixture
async def host(registry: MemoryRegistry) -> AsyncIterator[WorkerHost]:
    config = configuration.parse({"model": {"path": "m"}, "engine": {"kind": "sim"}, "worker": {"drain_timeout_s": 1}})
    engine = build_engine(config, MemberKind.DECODE, "m")
    host = WorkerHost(config, MemberKind.DECODE, engine, MemoryMembership(registry))
    await host.start()
    try:
        yield host
    finally:
        await host.stop()


def test_an_engine_of_a_pool_has_its_volumes(tmp_path: Path) -> None:
    volumes = [{"path": f"/v{i}", "capacity_gib": 1, "pool": pool} for i, pool in enumerate(("", "half"))]
    config = configuration.parse(
        {
            "model": {"path": "m", "dtype": "bfloat16"},
            "pools": {"half": {}, "alone": {"dedicated": True}},
            "tier": {"enabled": True, "volumes": volumes},
        }
    )
    arguments: dict[str, dict[str, Any]] = {}
    for pool in ("", "half", "alone"):
        engine = build_engine(config, MemberKind.DECODE, "m", keeper_socket="/s", pool=pool)
        assert isinstance(engine, VllmEngine)
        engine._folder = EngineFolder(tmp_path)
        arguments[pool] = engine._arguments(EngineId("e"))
        engine._folder.remove()
    tiers = {
        pool: values["kv_transfer_config"]["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
        for pool, values in arguments.items()
    }
    assert {pool: (tier["keeper_socket"], tier["volume_pool"]) for pool, tier in tiers.items()} == {
        "": ("/s", ""),
        "half": ("/s", "half"),
        "alone": ("", ""),
    }


async def test_a_worker_whose_engine_died_leaves_at_once(host: WorkerHost, registry: MemoryRegistry) -> None:
    assert len(registry.members()) == 1
    assert isinstance(host._engine, SimEngine)
    host._engine.kill()
    await until(lambda: not registry.members())
    assert host.server.draining
    with pytest.raises(EngineDead):
        await host.check_health()


async def test_a_request_that_finds_the_engine_dead_is_believed(host: WorkerHost, registry: MemoryRegistry) -> None:
    """Even while the engine says it is well: the worker leaves, is replaced, and does not spin."""
    await host.check_health()
    host.server.died.set()
    await until(lambda: not registry.members())
    assert host.server.draining
    with pytest.raises(EngineDead):
        await host.check_health()


async def test_a_worker_that_drains_refuses_before_the_registry_answers(
    host: WorkerHost, registry: MemoryRegistry
) -> None:
    answered = asyncio.Event()

    async def sleep(delay_s: float) -> None:
        await answered.wait()

    registry._sleep = sleep
    registry.delay_s = 1.0
    draining = asyncio.create_task(host.drain())
    await until(lambda: host.server.draining)
    assert not draining.done()
    answered.set()
    assert await draining
    assert not registry.members()


async def test_stop_may_be_repeated(host: WorkerHost, registry: MemoryRegistry) -> None:
    await host.stop()
    await host.stop()
    assert not registry.members()


async def test_a_hung_engine_fails_its_requests_and_its_worker_leaves(registry: MemoryRegistry) -> None:
    """It is alive and says it is well, and no step finishes."""
    config = configuration.parse({"model": {"path": "m"}, "engine": {"kind": "sim"}, "worker": {"hang_timeout_s": 1.0}})
    engine = build_engine(config, MemberKind.DECODE, "m")
    assert isinstance(engine, SimEngine)
    host = WorkerHost(config, MemberKind.DECODE, engine, MemoryMembership(registry), heartbeat_s=0.2)
    await host.start()
    link = WorkerLink(host.member, "g", lambda: None, config.worker)
    try:
        await until(lambda: link.usable)
        sampling = Sampling(max_tokens=5, temperature=0, ignore_eos=True)
        await link.submit(EngineRequest(RequestId("a"), [1, 2, 3], sampling), lambda output: None).wait()
        engine.faults = Faults(stalled=True)
        await host.check_health()
        with pytest.raises(EngineDead, match="the engine is hung"):
            await link.submit(EngineRequest(RequestId("b"), [1, 2, 3], sampling), lambda output: None).wait()
        await until(lambda: not registry.members())
        assert host.server.draining
        with pytest.raises(EngineDead, match="the engine is hung"):
            await host.check_health()
    finally:
        await link.close()
        await host.stop()


async def test_an_engine_has_its_tenants_terms_without_a_request(registry: MemoryRegistry) -> None:
    values = {"model": {"path": "m"}, "engine": {"kind": "sim"}, "gateway": {"tenants_in_etcd": True}}
    config = configuration.parse(values)
    engine = build_engine(config, MemberKind.PREFILL, "m")
    given: dict[str, TierTerms | None] = {}

    async def set_terms(terms: Mapping[str, Mapping[str, TierTerms | None]]) -> None:
        given.update(terms["device"])

    engine.set_terms = set_terms  # type: ignore[method-assign]
    admin = TenantAdmin(MemoryMembership(registry))
    await admin.create("acme")
    host = WorkerHost(config, MemberKind.PREFILL, engine, MemoryMembership(registry))
    await host.start()
    try:
        await until(lambda: given == {"acme": TierTerms()})
        await admin.set_tier("acme", "device", {"floor": 0.25, "ttl_s": 60.0})
        await until(lambda: given == {"acme": TierTerms(floor=0.25, ttl_s=60.0)})
        await admin.delete("acme")
        await until(lambda: given == {"acme": None})
    finally:
        await host.stop()


async def test_a_worker_registers_where_it_takes_links(host: WorkerHost) -> None:
    assert host.member.link_address == f"127.0.0.1:{host.server.frame_port}"
    assert host.member.link_address != host.member.address


async def test_a_worker_registers_its_pod(host: WorkerHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which it is told from one of a pod that had the same address."""
    monkeypatch.setenv("KVFERRY_POD_UID", "1f0c9a2e")
    assert host.member.pod_uid == "1f0c9a2e"
    monkeypatch.delenv("KVFERRY_POD_UID")
    assert host.member.pod_uid == ""
