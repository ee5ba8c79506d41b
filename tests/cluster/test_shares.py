"""Shares of tenants that come through different gateways."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx
import pytest

from kvferry.engine.base import Backlogs
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.membership.base import WORKER_KINDS, MemberKind
from kvferry.router import usage
from kvferry.tenancy.limits import LimitName
from kvferry.worker import turns
from kvferry.worker.turns import Turns
from support.beside import beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import bearer
from .test_tenants import admin_of, status_of

# A slow machine refuses nothing here, and takes longer.
IN_ETCD: dict[str, Any] = {"tenants_in_etcd": True, "placement": "priced", "queue_timeout_s": 120.0}
# A prompt of 500 tokens takes 25 ms.
SIM = {"step_ms": 1.0, "prefill_tokens_per_s": 20_000.0}
# Of a tenant: their prompts take 1.6 s, so that some of each tenant wait at any time, also where clients get no core.
NUM_CLIENTS = 64


async def flood(
    gateway: GatewayHost, key: str, name: str, done: Counter[str], num_clients: int, body: dict[str, Any]
) -> None:
    """Send prompts that nobody sent before, from so many clients, until cancelled."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=PATIENCE_S) as http:

        async def client(number: int) -> None:
            turn = 0
            while True:
                turn += 1
                prompt = f"{name}{number}-{turn} " + " ".join(f"w{i}" for i in range(499))
                answer = await http.post("/v1/completions", json={**body, "prompt": prompt}, headers=bearer(key))
                assert answer.status_code == 200, answer.text
                done[name] += 1

        async with beside(*(client(number) for number in range(num_clients))):
            await asyncio.Event().wait()


async def two_gateways(cluster: SimCluster) -> tuple[GatewayHost, GatewayHost]:
    first, second = cluster.gateway, await cluster.add_gateway()
    assert first is not None
    await until(lambda: len(second.readiness().members) == len(cluster.workers) and second.readiness().ready)
    return first, second


async def measured_shares(cluster: SimCluster, body: dict[str, Any], num_answers: int) -> float:
    """Return the premium tenant's part of the answers, all its requests on one gateway, the others on another one."""
    admin = admin_of(cluster)
    keys = {}
    for name, class_name in (("gold", "premium"), ("noise", "standard")):
        await admin.create(name)
        await admin.set_contract(name, class_name=class_name)
        keys[name] = await admin.add_key(name, "ci")
    first, second = await two_gateways(cluster)
    for gateway, key in ((first, keys["gold"]), (second, keys["noise"])):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as http:
            assert await status_of(http, key) == 200
    done: Counter[str] = Counter()
    floods = [
        flood(first, keys["gold"], "gold", done, NUM_CLIENTS, body),
        flood(second, keys["noise"], "noise", done, NUM_CLIENTS, body),
    ]
    async with beside(*floods):
        await until(lambda: min(done["gold"], done["noise"]) > 8)
        before = Counter(done)
        await until(lambda: (done - before).total() >= num_answers)
        since = done - before
    return since["gold"] / since.total()


async def test_prompts_get_their_tenants_shares_through_different_gateways() -> None:
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with running(gateway=IN_ETCD, sim=SIM) as cluster:
        share = await measured_shares(cluster, body, 500)
    assert 0.75 < share < 0.85


async def test_streams_get_their_tenants_shares_of_the_batch() -> None:
    """Decode alone: prompts are short, answers long, and the batch has few slots."""
    body = {"model": MODEL, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    values = {
        "sim": {"step_ms": 1.0, "prefill_tokens_per_s": 10_000_000.0},
        "engine": {"kind": "sim", "block_size": 16, "max_num_seqs": 10},
    }
    async with running(gateway=IN_ETCD, **values) as cluster:
        share = await measured_shares(cluster, body, 500)
    assert 0.75 < share < 0.85


async def test_a_share_that_is_changed_counts_for_requests_from_then_on() -> None:
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with running(gateway=IN_ETCD, sim=SIM) as cluster:
        assert await measured_shares(cluster, body, 200) > 0.7
        done: Counter[str] = Counter()
        admin = admin_of(cluster)
        await admin.set_contract("gold", share=0.25)
        keys = {name: await admin.add_key(name, "again") for name in ("gold", "noise")}
        await until(lambda: all(knows_share(gateway, "gold", 0.25, num_keys=2) for gateway in cluster.gateways))
        await until(lambda: all(knows_share(gateway, "noise", 1.0, num_keys=2) for gateway in cluster.gateways))
        floods = [
            flood(gateway, keys[name], name, done, NUM_CLIENTS, body)
            for gateway, name in zip(cluster.gateways, keys, strict=True)
        ]
        async with beside(*floods):
            # Requests that were queued with the old share are gone.
            await until(lambda: min(done["gold"], done["noise"]) > 24)
            before = Counter(done)
            await until(lambda: (done - before).total() >= 400)
            since = done - before
        assert 0.14 < since["gold"] / since.total() < 0.27


async def test_a_tenant_under_its_share_does_not_wait_behind_anothers_queue() -> None:
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with running(prefill=2, gateway=IN_ETCD, sim=SIM) as cluster:
        admin = admin_of(cluster)
        keys = {}
        for name in ("gold", "noise"):
            await admin.create(name)
            keys[name] = await admin.add_key(name, "ci")
        first, second = await two_gateways(cluster)
        done: Counter[str] = Counter()
        passed = []
        async with (
            beside(flood(second, keys["noise"], "noise", done, 60, body)),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{first.port}", timeout=PATIENCE_S) as http,
        ):
            await until(lambda: done["noise"] > 60)
            for number in range(20):
                before = done["noise"]
                prompt = f"gold{number} " + " ".join(f"w{i}" for i in range(499))
                answer = await http.post(
                    "/v1/completions", json={**body, "prompt": prompt}, headers=bearer(keys["gold"])
                )
                assert answer.status_code == 200
                passed.append(done["noise"] - before)
    # Three engines compute about three prompts each before the one that came last. Behind the queue there were 60.
    assert sorted(passed)[10] <= 15, passed
    assert max(passed) <= 40, passed


async def test_reports_of_what_waits_are_small_however_many_tenants_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "MAX_NAMED", 4)
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    async with running(gateway=IN_ETCD, sim=SIM | {"prefill_tokens_per_s": 2_000.0}) as cluster:
        admin = admin_of(cluster)
        names = [f"t{number}" for number in range(12)]
        keys = {}
        for name in names:
            await admin.create(name)
            keys[name] = await admin.add_key(name, "ci")
        gateway = cluster.gateway
        assert gateway is not None
        done: Counter[str] = Counter()

        def reports() -> list[Backlogs]:
            links = [link for kind in WORKER_KINDS for link in gateway.worker_pool.links(kind)]
            return [link.stats.backlogs for link in links if link.stats.backlogs is not None]

        async with beside(*(flood(gateway, keys[name], name, done, 4, body) for name in names)):
            await until(lambda: any(report.others for report in reports()))
            for report in reports():
                assert len(report.by_tenant) <= 4
        await until(lambda: not reports(), what="no backlog is left")


async def test_workers_hear_what_tenants_got_elsewhere_from_one_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "PERIOD_S", 0.1)
    heard: list[tuple[Turns, dict[str, float], int]] = []
    note = Turns.elsewhere

    def elsewhere(self: Turns, got_ms: dict[str, float], num_workers: int) -> None:
        heard.append((self, dict(got_ms), num_workers))
        note(self, got_ms, num_workers)

    monkeypatch.setattr(Turns, "elsewhere", elsewhere)
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    # Decode workers compute no prompts: only prefill workers have queues.
    async with running(prefill=2, gateway=IN_ETCD | {"placement": "round_robin"}, sim=SIM) as cluster:
        admin = admin_of(cluster)
        await admin.create("gold")
        key = await admin.add_key("gold", "ci")
        first, second = await two_gateways(cluster)
        done: Counter[str] = Counter()
        queues = {host.worker_id: host.server._turns for host in cluster.hosts(MemberKind.PREFILL)}
        one, other = (queue for queue in queues.values() if queue is not None)

        def told(queue: Turns) -> float:
            return sum(got.get("gold", 0.0) for each, got, _ in heard if each is queue)

        def hears_of(queue: Turns, elsewhere: Turns) -> bool:
            return told(queue) > max(300.0, elsewhere.served_ms.get("gold", 0.0) / 3)

        # Workers are told while requests of the tenant wait there, and of nothing afterwards. What was done before a
        # gateway's first exchange is not told: the longer the flood, the smaller that is.
        async with beside(*(flood(gateway, key, "gold", done, NUM_CLIENTS, body) for gateway in (first, second))):
            await until(lambda: hears_of(one, other) and hears_of(other, one))
        assert {each for each, _, _ in heard} == set(queues.values())
        assert {num for _, _, num in heard} == {2}
        await until(lambda: not any(host.server.num_requests for host, _ in cluster.workers))

        def knows_all_work(gateway: GatewayHost) -> bool:
            links = gateway.worker_pool.links(MemberKind.PREFILL)
            queue_of = {link: queues[link.member.member_id] for link in links}
            return all(queue and link.tenants.served_ms == queue.served_ms for link, queue in queue_of.items())

        # Each gateway exchanges once more, after it has heard of all work.
        for gateway in (first, second):
            assert gateway._usage is not None
            await until(lambda gateway=gateway: knows_all_work(gateway))
            gateway._usage.exchange()
        for queue, elsewhere_ms in ((one, other.served_ms["gold"]), (other, one.served_ms["gold"])):
            assert told(queue) <= elsewhere_ms, "no work counts twice"


async def test_a_flood_leaves_places_for_others_on_workers_and_in_the_line() -> None:
    """Over one gateway and over another: the flood has more clients than all have places."""
    body = {"model": MODEL, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    values = {"worker": {"drain_timeout_s": 5, "max_requests": 16}, "sim": SIM}
    gateway = IN_ETCD | {"max_queued_requests": 32, "queue_timeout_s": 30}
    async with running(gateway=gateway, **values) as cluster:
        admin = admin_of(cluster)
        keys = {}
        for name in ("gold", "noise"):
            await admin.create(name)
            keys[name] = await admin.add_key(name, "ci")
        first, second = await two_gateways(cluster)
        statuses: Counter[int] = Counter()

        async def noise(gateway: GatewayHost, number: int) -> None:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=PATIENCE_S) as http:
                for turn in range(1000):
                    prompt = f"noise{number}-{turn} " + " ".join(f"w{i}" for i in range(199))
                    sent = {**body, "prompt": prompt}
                    answer = await http.post("/v1/completions", json=sent, headers=bearer(keys["noise"]))
                    statuses[answer.status_code] += 1
                    if answer.status_code == 429:
                        await asyncio.sleep(0.05)

        async with beside(*(noise(each, number) for each in (first, second) for number in range(60))):
            await until(lambda: statuses[200] > 50 and statuses[429] > 20)
            for gateway in (first, second):
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=PATIENCE_S) as http:
                    for number in range(10):
                        before = statuses[200]
                        sent = {**body, "prompt": f"gold{number} " + " ".join(f"w{i}" for i in range(199))}
                        answer = await http.post("/v1/completions", json=sent, headers=bearer(keys["gold"]))
                        assert answer.status_code == 200, answer.text
                        assert statuses[200] - before < 40
        assert set(statuses) == {200, 429}
        for host, _ in cluster.workers:
            await until(lambda host=host: not host.server.num_requests)


async def test_a_limit_of_a_tenant_holds_over_two_gateways_and_for_it_alone() -> None:
    body = {"model": MODEL, "max_tokens": 1, "temperature": 0, "ignore_eos": True, "prompt": "a b c d"}
    async with running(gateway=IN_ETCD) as cluster:
        admin = admin_of(cluster)
        keys = {}
        for name in ("acme", "beta"):
            await admin.create(name)
            keys[name] = await admin.add_key(name, "ci")
        # A burst of 20 requests, then one in half a second.
        await admin.set_limits("acme", {"requests_per_minute": 120.0})
        first, second = await two_gateways(cluster)
        await until(lambda: all(knows_limit(gateway, "acme") for gateway in (first, second)))

        async def send(gateway: GatewayHost, name: str) -> httpx.Response:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}", timeout=PATIENCE_S) as http:
                return await http.post("/v1/completions", json=body, headers=bearer(keys[name]))

        for _ in range(18):
            assert (await send(first, "acme")).status_code == 200
        limits = second.identification.limits
        assert limits is not None
        # The other gateway has admitted none of them, and knows of them within seconds.
        await until(lambda: level_of(second) < 10, what="the other gateway to hear of the requests")
        answers = [await send(second, "acme") for _ in range(20)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert refused
        assert refused[0].json()["error"]["code"] == "tenant_limited"
        assert "requests_per_minute is 120" in refused[0].json()["error"]["message"]
        assert int(refused[0].headers["retry-after"]) >= 1
        others = [await send(gateway, "beta") for gateway in (first, second) for _ in range(20)]
        assert [answer.status_code for answer in others] == [200] * 40


def knows_share(gateway: GatewayHost, tenant: str, share: float, *, num_keys: int) -> bool:
    directory = gateway.identification.directory
    record = directory.record(tenant) if directory is not None else None
    return record is not None and record.share == share and len(record.keys) == num_keys


def knows_limit(gateway: GatewayHost, tenant: str) -> bool:
    directory = gateway.identification.directory
    limits = directory.limits(tenant) if directory is not None else None
    return limits is not None and limits.requests_per_minute is not None


def level_of(gateway: GatewayHost) -> float:
    limits = gateway.identification.limits
    assert limits is not None
    known = limits._by_tenant.get("acme")
    return 1e9 if known is None else known._buckets[LimitName.REQUESTS]._level
