"""Gateways and workers of other clusters, models and releases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.engine.base import EngineOutput, EngineRequest
from kvferry.link.identity import CONTINUE, FEATURES, Identity, ServedModel
from kvferry.membership.base import MemberKind
from kvferry_sim import SimEngine
from support.beside import answered, beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import bearer
from .test_tenants import tenant_with_key

BODY: dict[str, Any] = {"model": MODEL, "prompt": "one two three", "max_tokens": 8, "temperature": 0}


def changed(cluster: SimCluster, **values: Any) -> ClusterConfig:
    dumped = cluster.config.model_dump()
    for name, value in values.items():
        dumped[name] = {**dumped[name], **value} if isinstance(value, dict) else value
    return configuration.parse(dumped)


async def ask(cluster: SimCluster, headers: dict[str, str] | None = None, **values: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        headers = {"x-kvferry-debug": "1", **(headers or {})}
        return await http.post("/v1/completions", json={**BODY, **values}, headers=headers)


async def readiness(cluster: SimCluster) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.url) as http:
        values: dict[str, Any] = (await http.get("/readyz")).json()
        return values


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (
            {"name": "another", "membership": {"prefix": "/kvferry/clusters/another"}},
            "its cluster is 'another', and here it is 'kvferry'",
        ),
        ({"model": {"served_name": "other-model"}}, "its model is 'other-model', and here it is 'sim-model'"),
        ({"model": {"revision": "r2"}}, "its weights revision is 'r2', and here it is 'r1'"),
    ],
)
async def test_a_foreign_worker_gets_no_request_and_is_named(values: dict[str, Any], named: str) -> None:
    async with running(0, 1, model={"path": MODEL, "revision": "r1"}) as cluster:
        (own,) = cluster.hosts(MemberKind.DECODE)
        foreign, engine = await cluster.add_worker(MemberKind.DECODE, changed(cluster, **values))
        gateway = cluster.gateway
        assert gateway is not None
        await until(lambda: bool(gateway.worker_pool.incompatible()), what="the handshake is refused")
        for _ in range(4):
            answer = await ask(cluster)
            assert answer.status_code == 200
            assert answer.json()["kvferry"]["decode_worker"] == own.worker_id
        assert engine.stats().prompt_tokens.total == 0
        assert (await readiness(cluster))["left_out"] == [f"{foreign.worker_id}: {named}"]


async def test_a_gateway_without_weights_keeps_to_those_of_its_first_worker() -> None:
    """The other ones get its requests when every worker of the first ones has left."""
    async with running(0, 0, model={"path": MODEL, "revision": ""}) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        first, _ = await cluster.add_worker(MemberKind.DECODE, changed(cluster, model={"revision": "r1"}))
        await until(lambda: bool(gateway.worker_pool.usable(MemberKind.DECODE)))
        second, engine = await cluster.add_worker(MemberKind.DECODE, changed(cluster, model={"revision": "r2"}))
        await until(lambda: bool(gateway.worker_pool.incompatible()))
        for _ in range(4):
            assert (await ask(cluster)).json()["kvferry"]["decode_worker"] == first.worker_id
        assert (await readiness(cluster))["left_out"] == [
            f"{second.worker_id}: its weights revision is 'r2', and here it is 'r1'"
        ]
        await first.stop()
        await until(lambda: bool(gateway.worker_pool.usable(MemberKind.DECODE)), what="the other weights' turn")
        assert (await ask(cluster)).json()["kvferry"]["decode_worker"] == second.worker_id
        assert engine.stats().prompt_tokens.total > 0


@pytest.mark.parametrize("which", ["kvferry.worker.lifecycle", "kvferry.gateway.lifecycle"])
async def test_either_end_that_compares_is_enough(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one says its cluster and compares nothing."""
    monkeypatch.setattr(f"{which}.identity", lambda config, folder: Identity("another"))
    monkeypatch.setattr(
        "kvferry.link.worker_link.why_incompatible"
        if which == "kvferry.gateway.lifecycle"
        else "kvferry.worker.server.why_incompatible",
        lambda own, peer: "",
    )
    async with running(0, 0) as cluster:
        await cluster.add_worker(MemberKind.DECODE)
        gateway = cluster.gateway
        assert gateway is not None
        await until(lambda: bool(gateway.worker_pool.incompatible()))
        (link,) = gateway.worker_pool.incompatible()
        assert "its cluster is" in link.why_incompatible
        assert (await ask(cluster)).status_code == 503


PREVIOUS_RELEASE = Identity("", ServedModel(), 1, 1, frozenset())


async def test_workers_of_the_previous_release_serve_a_new_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.worker.lifecycle.identity", lambda config, folder: PREVIOUS_RELEASE)
    async with running(1, 2) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        assert all(link.features == frozenset() for link in gateway.worker_pool.usable(MemberKind.DECODE))
        answers = await asyncio.gather(*(ask(cluster) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert {answer.json()["kvferry"]["reason"] for answer in answers} == {"disaggregated"}
        cluster.hosts(MemberKind.DECODE)[0].server._max_requests = 0
        assert (await ask(cluster)).status_code == 200
        await cluster.until_quiet()


async def test_an_answer_goes_on_only_where_workers_go_on_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of an earlier release would begin penalties anew, and is not asked to give a slot away."""
    old = Identity(features=frozenset(FEATURES) - {CONTINUE})
    seen: list[EngineRequest] = []
    generate = SimEngine.generate

    def noting(engine: SimEngine, request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        seen.append(request)
        return generate(engine, request, **of_worker)

    monkeypatch.setattr(SimEngine, "generate", noting)
    monkeypatch.setattr("kvferry.worker.lifecycle.identity", lambda config, folder: old)
    async with running(0, 2, gateway={"tenants_in_etcd": True}) as cluster:
        headers = bearer(await tenant_with_key(cluster, "acme"))
        engines = cluster.engines(MemberKind.DECODE)
        asking = ask(cluster, headers, max_tokens=2000, presence_penalty=0.5, ignore_eos=True)
        async with beside(answered(asking)) as (asked,):
            await until(lambda: any(engine.stats().num_generated_tokens > 20 for engine in engines))
            next(engine for engine in engines if engine.stats().num_running).kill()
            await until(lambda: cluster.metric("kvferry_continued_requests_total") == 1)
            monkeypatch.setattr("kvferry.worker.lifecycle.identity", lambda config, folder: Identity())
            await cluster.add_worker(MemberKind.DECODE)
            answer = await asked
        assert answer.json()["usage"]["completion_tokens"] == 2000
        assert [request.turn is not None for request in seen] == [True, True]
        assert [request.continued is not None for request in seen] == [False, True]
        assert [request.is_preemptible for request in seen] == [False, True]


async def test_gateways_of_two_releases_share_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(1, 2) as cluster:
        new = cluster.gateway
        monkeypatch.setattr("kvferry.gateway.lifecycle.identity", lambda config, folder: PREVIOUS_RELEASE)
        old = await cluster.add_gateway()
        await cluster.ready()
        sessions = [session for host, _ in cluster.workers for session in host.server.sessions]
        features = [session.features for session in sessions]
        assert (features.count(frozenset()), features.count(frozenset(FEATURES))) == (3, 3)
        for gateway in (new, old):
            cluster.gateway = gateway
            answers = await asyncio.gather(*(ask(cluster) for _ in range(8)))
            assert [answer.status_code for answer in answers] == [200] * 8
        await cluster.until_quiet()


async def test_a_model_change_never_answers_with_the_wrong_model() -> None:
    """Rolling: old and new workers and gateways side by side, then the old ones leave."""
    async with running(1, 2, model={"path": MODEL, "revision": "old"}) as cluster:
        old = cluster.gateway
        assert old is not None
        old_workers = list(cluster.workers)
        served: dict[str, set[str]] = {"old": set(), "new": set()}

        async def load(url: str, revision: str) -> None:
            async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
                while True:
                    answer = await http.post("/v1/completions", json=BODY, headers={"x-kvferry-debug": "1"})
                    assert answer.status_code == 200, answer.text
                    record = answer.json()["kvferry"]
                    served[revision] |= {record["decode_worker"], record["prefill_worker"]} - {None}

        async with beside(load(cluster.url, "old")):
            cluster.config = changed(cluster, model={"revision": "new"})
            new_workers = [
                await cluster.add_worker(kind) for kind in (MemberKind.PREFILL, MemberKind.DECODE, MemberKind.DECODE)
            ]
            new = await cluster.add_gateway()
            await until(lambda: len(new.readiness().members) == 3)
            async with beside(load(cluster.url, "new")):
                await until(lambda: len(served["new"]) >= 2 and len(served["old"]) >= 2)
        assert served["old"] <= {host.worker_id for host, _ in old_workers}
        assert served["new"] <= {host.worker_id for host, _ in new_workers}


async def test_workers_whose_pages_mean_different_things_are_not_paired_and_named() -> None:
    async with running(1, 0) as cluster:
        (prefill,) = cluster.hosts(MemberKind.PREFILL)
        config = changed(cluster, sim={"max_model_len": 4096})
        unpaired = f'kvferry_worker_unpaired{{role="prefill",worker="{prefill.worker_id}"}}'
        other, _ = await cluster.add_worker(MemberKind.DECODE, config)
        await cluster.ready()
        answer = await ask(cluster)
        assert answer.json()["kvferry"]["reason"] == "unequal_pages"
        difference = "max_model_len is 8192 and 4096"
        status = await readiness(cluster)
        assert status["ready"]
        assert status["unpaired"][0] == f"{prefill.worker_id} and {other.worker_id} exchange no pages: {difference}"
        assert len(status["unpaired"]) == 2
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            explained = (await http.get(f"/kvferry/v1/requests/{answer.json()['id']}")).json()["requests"]
        assert explained[0]["unequal_pages"] == difference
        assert cluster.metric(unpaired) == 1
        await cluster.add_worker(MemberKind.DECODE)
        await until(lambda: cluster.metric(unpaired) == 0)
        assert [line.split()[0] for line in (await readiness(cluster))["unpaired"]] == [other.worker_id]
