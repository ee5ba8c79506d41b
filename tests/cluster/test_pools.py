"""Pools: workers of their own for some tenants and names, and no way from one pool to another."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import httpx
import pytest

from kvferry import config as configuration
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.link.identity import FEATURES, POOLS, Identity
from kvferry.membership.base import MemberKind
from kvferry_tenants.admin import TenantAdmin
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import BODY, bearer, grpc_to
from .test_gateway_grpc import stub_on
from .test_tenants import IN_ETCD, admin_of, events_of

ROLES = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
FINANCE = {**ROLES, "dedicated": True, "served_name": "finance-model"}
OPEN = {**ROLES, "served_name": "sim-open"}
POOLS_OF = {"finance": FINANCE, "open": OPEN}


async def key_of(cluster: SimCluster, name: str, pool: str = "", *, operator: bool = True) -> str:
    """Operators are shown names of workers."""
    admin: TenantAdmin = admin_of(cluster)
    await admin.create(name, pool=pool)
    return await admin.add_key(name, "ci", operator=operator)


def client(cluster: SimCluster, gateway: GatewayHost | None = None) -> httpx.AsyncClient:
    url = cluster.url if gateway is None else f"http://127.0.0.1:{gateway.port}"
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S)


async def ask(http: httpx.AsyncClient, key: str = "", **values: Any) -> httpx.Response:
    headers = {"x-kvferry-debug": "1", **(bearer(key) if key else {})}
    return await http.post("/v1/completions", json={**BODY, **values}, headers=headers)


def workers_of(answer: httpx.Response) -> set[str]:
    assert answer.status_code == 200, answer.text
    record = answer.json()["kvferry"]
    return {record["decode_worker"], record["prefill_worker"]} - {None}


def members(cluster: SimCluster, pool: str) -> set[str]:
    return {str(host.worker_id) for host, _ in cluster.workers if host.member.pool == pool}


async def settled(http: httpx.AsyncClient, key: str, status: int = 200) -> httpx.Response:
    """Ask until the gateway has read what was written about the tenant."""
    async with asyncio.timeout(SOON_S):
        while (answer := await ask(http, key)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return answer


async def test_a_dedicated_tenant_is_served_in_its_pool_and_nobody_else_is() -> None:
    async with running(1, 2, gateway=IN_ETCD, pools=POOLS_OF) as cluster, client(cluster) as http:
        bank, other = await key_of(cluster, "bank", "finance"), await key_of(cluster, "bystander")
        await settled(http, bank)
        seen: dict[str, set[str]] = {"bank": set(), "other": set()}
        for answer in await asyncio.gather(*(ask(http, bank, prompt=f"a {i}") for i in range(12))):
            seen["bank"] |= workers_of(answer)
            assert answer.json()["kvferry"]["pool"] == "finance"
        for answer in await asyncio.gather(*(ask(http, other, prompt=f"a {i}") for i in range(12))):
            seen["other"] |= workers_of(answer)
            assert "pool" not in answer.json()["kvferry"]
        assert seen == {"bank": members(cluster, "finance"), "other": members(cluster, "")}
        # The name of a dedicated pool lets nobody in, and a tenant with a pool does not get out by another's.
        assert (await ask(http, bank, model="finance-model")).status_code == 200
        for key, name in ((other, "finance-model"), (bank, "sim-open")):
            refused, unknown = await ask(http, key, model=name), await ask(http, key, model="no-such")
            assert refused.status_code == 404
            assert refused.json()["error"]["message"].replace(name, "no-such") == unknown.json()["error"]["message"]
        await cluster.until_quiet()
        for host, engine in cluster.workers:
            is_used = host.member.pool != "open"
            assert bool(engine.stats().prompt_tokens.total) == is_used, "no engine but those named saw a prompt"


async def test_a_name_leads_to_its_pool_and_is_listed_only_for_those_who_may_use_it() -> None:
    async with running(gateway=IN_ETCD, pools=POOLS_OF) as cluster, client(cluster) as http:
        bank, other = await key_of(cluster, "bank", "finance"), await key_of(cluster, "bystander")
        await settled(http, bank)
        answer = await ask(http, other, model="sim-open")
        assert workers_of(answer) == members(cluster, "open")
        assert answer.json()["model"] == "sim-open"
        explained = await http.get(f"/kvferry/v1/requests/{answer.json()['id']}", headers=bearer(other))
        assert explained.json()["requests"][0]["pool"] == "open"
        names = {bank: [MODEL, "finance-model"], other: [MODEL, "sim-open"]}
        async with grpc_to(cluster) as channel:
            for key, wanted in names.items():
                listed = (await http.get("/v1/models", headers=bearer(key))).json()["data"]
                assert [each["id"] for each in listed] == wanted
                metadata = tuple(bearer(key).items())
                over_grpc = await stub_on(channel).ListModels(pb.ListModelsRequest(), metadata=metadata)
                assert [each.name for each in over_grpc.models] == wanted
                for name in ("finance-model", "sim-open"):
                    status = (await http.get(f"/v1/models/{name}", headers=bearer(key))).status_code
                    assert status == (200 if name in wanted else 404)


async def test_the_grpc_endpoint_keeps_to_pools_too() -> None:
    async with running(gateway=IN_ETCD, pools=POOLS_OF) as cluster, client(cluster) as http:
        bank, other = await key_of(cluster, "bank", "finance"), await key_of(cluster, "bystander")
        await settled(http, bank)
        before = {host.worker_id: engine.stats().prompt_tokens.total for host, engine in cluster.workers}
        async with grpc_to(cluster) as channel:
            stub = stub_on(channel)

            async def generate(key: str, model: str) -> None:
                request = pb.GenerateRequest(model=model, text="a b c", sampling=pb.Sampling(max_tokens=4))
                await stub.Generate(request, metadata=tuple(bearer(key).items()))

            await generate(bank, MODEL)
            await cluster.until_quiet()
            grown = {
                host.member.pool
                for host, engine in cluster.workers
                if engine.stats().prompt_tokens.total > before[host.worker_id]
            }
            assert grown == {"finance"}
            for call in (
                lambda: generate(other, "finance-model"),
                lambda: stub.Tokenize(
                    pb.TokenizeRequest(model="finance-model", text="a"), metadata=tuple(bearer(other).items())
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call()
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            for host in [*cluster.in_pool("finance"), *cluster.in_pool("finance", MemberKind.PREFILL)]:
                await host.drain()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await generate(bank, MODEL)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "pool 'finance'" in str(refused.value.details())


async def test_a_pool_without_workers_is_named_and_no_other_pool_steps_in() -> None:
    async with running(1, 2, gateway=IN_ETCD, pools=POOLS_OF) as cluster, client(cluster) as http:
        bank, other = (
            await key_of(cluster, "bank", "finance", operator=False),
            await key_of(cluster, "bystander", operator=False),
        )
        await settled(http, bank)
        for host in cluster.in_pool("finance"):
            await host.drain()
        refused = await ask(http, bank)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no decode worker of pool 'finance' is connected"
        assert refused.json()["error"]["code"] == "no_decode_worker"
        assert (await ask(http, other)).status_code == 200
        await admin_of(cluster).create("staff")
        operator = await admin_of(cluster).add_key("staff", "ci", operator=True)
        await settled(http, operator)
        ready = (await http.get("/readyz", headers=bearer(operator))).json()
        assert ready["ready"]
        assert ready["waiting_for"] == ["decode worker of pool finance"]
        assert ready["pools"] == {
            "default": {"prefill": 1, "decode": 2},
            "finance": {"prefill": 1, "decode": 0},
            "open": {"prefill": 1, "decode": 1},
        }
        assert len(ready["members"]) == 6
        of_bank = (await http.get("/readyz", headers=bearer(bank))).json()
        assert (of_bank["waiting_for"], of_bank["members"]) == (["decode worker of pool finance"], [])
        assert of_bank["pools"] == {"finance": {"prefill": 1, "decode": 0}}
        of_other = (await http.get("/readyz", headers=bearer(other))).json()
        assert (of_other["ready"], of_other["waiting_for"], of_other["members"]) == (True, [], [])
        assert of_other["pools"] == {"default": {"prefill": 1, "decode": 2}}
        to_strangers = (await http.get("/readyz")).json()
        assert (to_strangers["pools"], to_strangers["waiting_for"]) == ({}, ["decode worker"])
        # And the other way: the default pool down, the dedicated one back.
        await cluster.add_worker(MemberKind.DECODE, pool="finance")
        for host in cluster.in_pool(""):
            await host.drain()
        await settled(http, bank)
        refused = await ask(http, other)
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no decode worker is connected"


async def test_a_full_pool_holds_up_no_other_and_borrows_none() -> None:
    quick = {**IN_ETCD, "queue_timeout_s": 0.3}
    async with running(gateway=quick, pools=POOLS_OF) as cluster, client(cluster) as http:
        bank, other = await key_of(cluster, "bank", "finance"), await key_of(cluster, "bystander")
        await settled(http, bank)
        for host in cluster.in_pool(""):
            host.server._max_requests = 0
        assert (await ask(http, other)).status_code == 429, "it waits for its own pool only"
        waiting = [asyncio.create_task(ask(http, other, model=name)) for name in (MODEL, "sim-open") for _ in range(3)]
        answers = await asyncio.gather(*(ask(http, bank) for _ in range(4)))
        assert [answer.status_code for answer in answers] == [200] * 4
        statuses = [answer.status_code for answer in await asyncio.gather(*waiting)]
        assert statuses == [429] * 3 + [200] * 3, "a line of the default pool is not in the way of another pool's"
        for host in cluster.in_pool("finance"):
            host.server._max_requests = 0
        for host in cluster.in_pool(""):
            host.server._max_requests = 512
        assert (await ask(http, bank)).status_code == 429
        await cluster.until_quiet()


@pytest.mark.usefixtures("short_worker_wait")
async def test_an_answer_whose_worker_is_killed_goes_on_in_its_pool_only() -> None:
    pools = {"finance": {**FINANCE, "decode": {"replicas": 2}}}
    async with running(1, 2, gateway=IN_ETCD, pools=pools) as cluster, client(cluster) as http:
        bank = await key_of(cluster, "bank", "finance")
        await settled(http, bank)
        headers, spared = bearer(bank), members(cluster, "")

        async def stream_killed_once() -> dict[str, Any]:
            """Kill the worker of the stream after 50 events, and return the last event."""
            body = {**BODY, "max_tokens": 1000, "stream": True}
            events: list[dict[str, Any]] = []
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                async for event in events_of(answer):
                    events.append(event)
                    if len(events) == 50:
                        ((host, engine),) = [
                            (host, engine)
                            for host, engine in cluster.workers
                            if host.member.kind is MemberKind.DECODE and engine.stats().num_running
                        ]
                        assert host.member.pool == "finance"
                        engine.kill()
            return events[-1]

        assert (await stream_killed_once())["choices"][0]["finish_reason"] == "length"
        last = await stream_killed_once()
        assert last["error"]["code"] == "no_decode_worker"
        assert last["error"]["message"].startswith("no decode worker of pool 'finance' is connected")
        for host, engine in cluster.workers:
            if host.worker_id in spared:
                assert not engine.stats().prompt_tokens.total, "workers of the default pool saw nothing of it"


async def test_a_change_of_the_pool_counts_for_the_next_requests() -> None:
    async with running(gateway=IN_ETCD, pools=POOLS_OF) as cluster, client(cluster) as http:
        admin, key = admin_of(cluster), await key_of(cluster, "bank")
        assert cluster.gateway is not None
        directory = cluster.gateway.identification.directory
        assert workers_of(await settled(http, key)) == members(cluster, "")
        for pool in ("finance", "open", ""):
            await admin.set_contract("bank", pool=pool)
            await until(lambda pool=pool: directory.record("bank").pool == pool)  # type: ignore[union-attr,misc]
            assert workers_of(await ask(http, key)) == members(cluster, pool)
        await admin.set_contract("bank", pool="elsewhere")
        refused = await settled(http, key, 503)
        assert "served by pool 'elsewhere'" in refused.json()["error"]["message"]
        assert (await http.get("/v1/models", headers=bearer(key))).status_code == 503
        assert await admin.unknown_pools(["finance", "elsewhere", ""]) == ["elsewhere"]


async def test_without_keys_names_lead_to_pools_that_are_not_dedicated() -> None:
    async with running(pools=POOLS_OF) as cluster, client(cluster) as http:
        assert workers_of(await ask(http)) == members(cluster, "")
        assert workers_of(await ask(http, model="sim-open")) == members(cluster, "open")
        assert (await ask(http, model="finance-model")).status_code == 404


async def test_workers_refuse_requests_of_other_pools() -> None:
    gateway_values = {**IN_ETCD, "queue_timeout_s": 0.3}
    async with running(gateway=gateway_values, pools=POOLS_OF) as cluster, client(cluster) as http:
        bank = await key_of(cluster, "bank", "finance")
        await settled(http, bank)
        gateway = cluster.gateway
        assert gateway is not None
        # A fault in a gateway: it takes all workers for candidates.
        candidates = gateway.worker_pool.candidates

        def of_all(kind: MemberKind, pool: str) -> list[Any]:
            return [each for every in ("", "open") for each in candidates(kind, every)]

        gateway.worker_pool.candidates = of_all  # type: ignore[method-assign]
        before = sum(engine.stats().prompt_tokens.total for _, engine in cluster.workers)
        refused = await ask(http, bank)
        assert refused.status_code == 429, "its own workers have room, and it never gets there"
        assert sum(engine.stats().prompt_tokens.total for _, engine in cluster.workers) == before


async def test_a_worker_whose_record_names_another_pool_than_it_says_gets_nothing() -> None:
    async with running(1, 0, pools={}) as cluster:
        config = configuration.parse({**cluster.config.model_dump(), "pools": {"x": ROLES}})
        worker, _ = await cluster.add_worker(MemberKind.DECODE, config, "x")
        worker.server._pool = "y"
        gateway = await cluster.add_gateway()
        await until(lambda: bool(gateway.worker_pool.incompatible()))
        assert gateway.readiness().left_out == [f"{worker.worker_id}: it is of pool 'y', and its record says pool 'x'"]


BEFORE_POOLS = frozenset(FEATURES) - {POOLS}


async def test_a_gateway_that_knows_no_pools_gets_no_worker_of_a_cluster_with_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running(gateway=IN_ETCD, pools=POOLS_OF) as cluster:
        bank = await key_of(cluster, "bank", "finance")
        monkeypatch.setattr(
            "kvferry.gateway.lifecycle.identity", lambda config, folder: Identity(features=BEFORE_POOLS)
        )
        old = await cluster.add_gateway()
        await until(lambda: len(old.worker_pool.incompatible()) == len(cluster.workers))
        assert all("of a release that knows none" in line for line in old.readiness().left_out)
        async with client(cluster, old) as http:
            await settled(http, bank, 503)
        for _, engine in cluster.workers:
            assert not engine.stats().prompt_tokens.total


async def test_a_gateway_that_knows_no_pools_serves_a_cluster_without() -> None:
    """And one that does serves workers of the release before: test_compatibility.py."""
    async with running(pools={}) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvferry.gateway.lifecycle.identity", lambda config, folder: Identity(features=BEFORE_POOLS))
            old = await cluster.add_gateway()
        await cluster.ready()
        async with client(cluster, old) as http:
            assert (await ask(http)).status_code == 200


@pytest.mark.usefixtures("short_worker_wait")
async def test_no_placement_crosses_pools_whatever_workers_come_and_go() -> None:
    """Random requests while workers of random pools join, drain and die."""
    rng = random.Random(20261124)
    pools = {name: {**ROLES, "dedicated": name == "a", "served_name": f"m-{name}"} for name in ("a", "b", "c")}
    async with (
        running(gateway={**IN_ETCD, "placement": "priced", "queue_timeout_s": 0.3}, pools=pools) as cluster,
        client(cluster) as http,
    ):
        tenants = {await key_of(cluster, f"t{i}", pool): pool for i, pool in enumerate(["a", "a", "b", "", ""])}
        for key in tenants:
            await settled(http, key)
        num_asked = num_served = 0

        async def request() -> None:
            nonlocal num_asked, num_served
            num_asked += 1
            key = rng.choice(list(tenants))
            names = {MODEL: tenants[key]}
            names |= {f"m-{tenants[key]}": tenants[key]} if tenants[key] else {"m-b": "b", "m-c": "c"}
            name = rng.choice([*names, "m-a", "m-b", "m-c"])
            answer = await ask(
                http, key, model=name, prompt="x " * rng.randrange(1, 80), max_tokens=rng.randrange(1, 40)
            )
            if name not in names:
                assert answer.status_code == 404
            elif answer.status_code == 200:
                num_served += 1
                assert workers_of(answer) <= members(cluster, names[name])
            else:
                assert answer.status_code in (429, 500, 502, 503), answer.text

        async def trouble() -> None:
            for turn in range(1, 13):
                await until(lambda turn=turn: num_asked >= 12 * turn)
                kind = rng.choice([MemberKind.PREFILL, MemberKind.DECODE])
                pool = rng.choice(["", "a", "b", "c"])
                alive = [(host, engine) for host, engine in cluster.workers if not host.server.draining]
                if rng.random() < 0.5:
                    await cluster.add_worker(kind, pool=pool)
                elif alive:
                    host, engine = rng.choice(alive)
                    if rng.random() < 0.5:
                        engine.kill()
                    else:
                        host.server.refuse_new()

        async def load() -> None:
            for _ in range(25):
                await request()

        await asyncio.gather(trouble(), *(load() for _ in range(6)))
        assert num_served > 20, "or the test proves nothing"
