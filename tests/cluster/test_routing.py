"""Requests go where their prefix lies: what workers hold is told, priced and used. Sim engines, real links."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from kvferry.engine.base import EngineDurations
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.membership.base import MemberKind
from kvferry.pages.keys import route_keys, seed_of
from kvferry.residency.index import Holder, Tier
from kvferry.router.placement_policy import Measured, PricedPolicy
from kvferry.util.addresses import free_port
from kvferry.worker.lifecycle import WorkerHost
from kvferry_sim import SimEngine
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running

PRICED = {"placement": "priced"}
SLOW = {"step_ms": 1.0, "prefill_tokens_per_s": 20_000.0}


def tokens(count: int, seed: int) -> list[int]:
    seeded = random.Random(seed)
    return [seeded.randrange(16, 50_000) for _ in range(count)]


async def ask(url: str, prompt: list[int], *, debug: str = "1", max_tokens: int = 4) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        answer = await http.post("/v1/completions", json=body, headers={"x-kvferry-debug": debug})
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


async def record(url: str, prompt: list[int], *, debug: str = "1", max_tokens: int = 4) -> dict[str, Any]:
    values: dict[str, Any] = (await ask(url, prompt, debug=debug, max_tokens=max_tokens))["kvferry"]
    return values


def told(gateway: GatewayHost, host: WorkerHost) -> frozenset[int]:
    return gateway.residency.index.keys_of(Holder(host.worker_id, Tier.GPU))


def computed(engines: list[SimEngine]) -> int:
    return sum(engine.stats().prompt_tokens.local_compute for engine in engines)


def account(cluster: SimCluster) -> PricedPolicy:
    assert cluster.gateway is not None
    assert isinstance(cluster.gateway.policy, PricedPolicy)
    return cluster.gateway.policy


async def test_gateways_hear_what_engines_hold() -> None:
    async with running(prefill=2, decode=2, gateway=PRICED, sim=SLOW) as cluster:
        first = cluster.gateway
        assert first is not None
        prompts = [tokens(200, seed) for seed in range(6)]
        for prompt in prompts:
            await record(cluster.url, prompt)

        def all_is_told(gateway: GatewayHost) -> bool:
            return all(
                host.residency.mirror is not None
                and told(gateway, host) == host.residency.mirror.keys_of(Tier.GPU) != frozenset()
                for host, _ in cluster.workers
                if host.residency.mirror is not None and host.residency.mirror.num_pages
            )

        await until(lambda: all_is_told(first), what="the index is what the mirrors hold")
        held = frozenset().union(*(told(first, host) for host, _ in cluster.workers))
        for prompt in prompts:
            assert set(route_keys(prompt, 16, seed_of(""))) <= held
        first.residency.index.check()

        # A gateway that comes later gets it all as a snapshot.
        second = await cluster.add_gateway()
        await cluster.ready()
        await until(lambda: all_is_told(second), what="the second gateway knows as much")
        assert second.residency.num_gaps == 0
        # A worker that is gone is forgotten.
        host = next(host for host, _ in cluster.workers if told(first, host))
        assert told(second, host)
        await host.stop()
        await until(lambda: not told(first, host) and not told(second, host), what="its pages are forgotten")
        await first.stop()


async def test_gateways_of_one_node_share_a_port() -> None:
    port = free_port("127.0.0.1")
    async with running(gateway={**PRICED, "replicas": 2, "http_port": port}, sim=SLOW) as cluster:
        first = cluster.gateway
        assert first is not None
        second = await cluster.add_gateway()
        await cluster.ready()
        assert first.port == second.port == port
        answered: set[GatewayHost] = set()
        for seed in range(64):
            await ask(cluster.url, tokens(40, seed))
            answered |= {gateway for gateway in (first, second) if _num_answered(gateway)}
            if len(answered) == 2:
                break
        assert len(answered) == 2
        await first.stop()
        for seed in range(8):
            await ask(cluster.url, tokens(40, seed))


def _num_answered(gateway: GatewayHost) -> float:
    name = 'kvferry_requests_total{endpoint="completions",status="200"} '
    lines = gateway.metrics.render().decode().splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


async def test_policies_learn_from_the_engines_own_times(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(prefill=1, decode=1, gateway=PRICED, sim=SLOW) as cluster:
        policy = account(cluster)
        prefills: list[tuple[float, EngineDurations | None]] = []
        decodes: list[Measured] = []

        def learn_prefill(worker: Any, tokens: int, elapsed_ms: float, placement: Any, durations: Any) -> None:
            prefills.append((elapsed_ms, durations))

        monkeypatch.setattr(policy, "learn_prefill", learn_prefill)
        monkeypatch.setattr(policy, "learn", lambda worker, measured: decodes.append(measured))
        await ask(cluster.url, tokens(800, 1), debug="disaggregate")
        await ask(cluster.url, tokens(20, 2))
        (elapsed_ms, durations), (pulled, aggregated) = prefills[0], decodes
        assert len(prefills) == 1
        assert durations is not None
        assert durations.prefill_ms is not None
        assert 0 < durations.prefill_ms <= elapsed_ms
        assert durations.prefill_share == 1.0
        assert durations.kv_transfer_ms is None
        assert pulled.durations is not None
        assert pulled.durations.kv_transfer_ms is not None
        assert 0 < pulled.durations.kv_transfer_ms <= pulled.first_token_ms
        assert pulled.durations.kv_transfer_share == 1.0
        assert aggregated.durations is not None
        assert aggregated.durations.kv_transfer_ms is None
        # Workers count what waits on them.
        assert cluster.gateway is not None
        links = cluster.gateway.worker_pool.links(MemberKind.PREFILL)
        await until(lambda: links[0].stats.queued_prompt_tokens == 0, what="a report of nothing queued")


async def test_the_same_beginning_goes_to_the_same_worker() -> None:
    async with running(prefill=4, decode=2, gateway=PRICED, sim=SLOW) as cluster:
        beginning = tokens(960, 1)
        first = await record(cluster.url, [*beginning, *tokens(40, 2)], debug="disaggregate")
        assert first["prefill_worker"] is not None
        before = computed(cluster.engines(MemberKind.PREFILL))
        for seed in range(3, 11):
            again = await record(cluster.url, [*beginning, *tokens(40, seed)], debug="disaggregate")
            assert again["prefill_worker"] == first["prefill_worker"]
        # Their own ends, and nothing of the beginning.
        assert computed(cluster.engines(MemberKind.PREFILL)) - before <= 8 * (40 + 16)
        assert account(cluster).placer.num_in_flight == 0
        account(cluster).placer.check()


async def test_a_burst_of_siblings_costs_one_prefill() -> None:
    async with running(prefill=4, decode=4, gateway=PRICED, sim=SLOW) as cluster:
        beginning = tokens(1600, 1)
        await asyncio.gather(*(record(cluster.url, [*beginning, *tokens(8, seed)]) for seed in range(2, 34)))
        everyone = [*cluster.engines(MemberKind.PREFILL), *cluster.engines(MemberKind.DECODE)]
        assert computed(everyone) < 1.5 * 1600 + 32 * 24
        assert cluster.metric('kvferry_placements_total{reason="sibling"}') > 0


async def test_disaggregation_is_chosen_by_price() -> None:
    async with running(prefill=2, decode=2, gateway=PRICED, sim=SLOW) as cluster:
        long = tokens(4000, 1)
        assert (await record(cluster.url, long))["prefill_worker"] is not None
        short = await record(cluster.url, tokens(20, 2))
        assert (short["prefill_worker"], short["reason"]) == (None, "short_tail")
        # What was decoded there is held there: the next turn of a conversation needs no prefill worker.
        turn = await record(cluster.url, [*long, *tokens(20, 3)])
        assert (turn["prefill_worker"], turn["reason"]) == (None, "prefix_on_decode")
        assert turn["prompt_tokens_by_source"]["local_cache_hit"] >= 3900


async def test_every_decision_can_be_explained() -> None:
    async with running(prefill=2, decode=2, gateway=PRICED, sim=SLOW) as cluster:
        answer = await ask(cluster.url, tokens(2000, 1), debug="disaggregate")
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            seen = await http.get(f"/kvferry/v1/requests/{answer['id']}")
            assert (await http.get("/kvferry/v1/requests/cmpl-unknown")).status_code == 404
        ((request,), (decision,)) = (lambda r: (r, r[0]["choices"]))(seen.json()["requests"])
        assert request["decode_worker"] == decision["decode"]
        assert decision["reason"] == "disaggregated"
        price = decision["price"]
        assert price["compute_ms"] > 0
        parts = ("queue_ms", "load_ms", "compute_ms", "others_ms", "ferry_ms", "streams_ms")
        assert abs(sum(price[part] for part in parts) - price["total_ms"]) < 0.01
        workers = {host.worker_id for host, _ in cluster.workers}
        assert {other["decode"] for other in decision["runners_up"]} <= workers
        assert any(other["prefill"] is None for other in decision["runners_up"])
