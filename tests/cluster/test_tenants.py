"""Tenants in etcd: keys that come and go while gateways serve, and tenants that are deleted under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from click.testing import CliRunner

from kvferry.cli import main
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.observability.telemetry import TENANT_REQUESTS, TENANT_TOKEN_KINDS, TENANT_TOKENS
from kvferry_sim.membership import MemoryMembership
from kvferry_tenants.admin import TenantAdmin
from kvferry_tenants.usage_totals import totals
from support.beside import answered, beside
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import BODY, REQUEST, bearer, grpc_to
from .test_gateway_grpc import stub_on

IN_ETCD = {"tenants_in_etcd": True}
ENDLESS = {**BODY, "max_tokens": 4000, "stream": True}


def admin_of(cluster: SimCluster) -> TenantAdmin:
    return TenantAdmin(MemoryMembership(cluster.registry))


async def tenant_with_key(cluster: SimCluster, name: str, **fields: Any) -> str:
    admin = admin_of(cluster)
    await admin.create(name)
    return await admin.add_key(name, "ci", **fields)


async def status_of(http: httpx.AsyncClient, key: str) -> int:
    return (await http.get("/v1/models", headers=bearer(key))).status_code


async def events_of(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


async def test_a_key_works_as_soon_as_it_is_made_and_ends_as_soon_as_it_is_revoked() -> None:
    async with running(gateway=IN_ETCD) as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        assert await status_of(http, "kvf_unknown") == 401
        key = await tenant_with_key(cluster, "acme")
        assert await status_of(http, key) == 200
        answer = await http.post("/v1/completions", json=BODY, headers=bearer(key))
        assert answer.status_code == 200
        async with grpc_to(cluster) as channel:
            over_grpc = await stub_on(channel).Generate(REQUEST, metadata=tuple(bearer(key).items()))
            assert over_grpc.answers[0].text == answer.json()["choices"][0]["text"]
        await admin_of(cluster).revoke_key("acme", "ci")
        assert await status_of(http, key) == 401
        readiness = (await http.get("/readyz")).json()
        assert readiness["ready"]


async def test_during_an_outage_of_etcd_the_known_keys_work() -> None:
    async with running(gateway=IN_ETCD) as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        key = await tenant_with_key(cluster, "acme")
        assert await status_of(http, key) == 200
        with cluster.registry.outage():
            assert (await http.post("/v1/completions", json=BODY, headers=bearer(key))).status_code == 200
            assert await status_of(http, "kvf_unknown") == 401


async def test_a_gateway_that_starts_during_an_outage_is_not_ready_and_refuses_nobody_for_good() -> None:
    async with running(gateway=IN_ETCD) as cluster:
        key = await tenant_with_key(cluster, "acme")
        with cluster.registry.outage():
            other = await cluster.add_gateway()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.port}", timeout=PATIENCE_S) as http:
                answer = await http.get("/v1/models", headers=bearer(key))
                assert answer.status_code == 503
                assert "tenants" in answer.json()["error"]["message"]
                waiting = (await http.get("/readyz")).json()
                assert not waiting["ready"]
                assert "tenants" in waiting["waiting_for"]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{other.port}", timeout=PATIENCE_S) as http:

            async def works() -> bool:
                return await status_of(http, key) == 200

            async with asyncio.timeout(SOON_S):
                while not await works():  # noqa: ASYNC110
                    await asyncio.sleep(0.05)


async def test_a_tenant_that_is_deleted_under_load_ends_with_401_and_harms_no_other() -> None:
    async with (
        running(gateway=IN_ETCD, decode=2) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        assert cluster.gateway is not None
        doomed, other = await tenant_with_key(cluster, "doomed"), await tenant_with_key(cluster, "bystander")
        begun: asyncio.Queue[None] = asyncio.Queue()

        async def stream(key: str, max_tokens: int) -> dict[str, Any]:
            body = ENDLESS | {"max_tokens": max_tokens}
            last: dict[str, Any] = {}
            async with http.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
                assert answer.status_code == 200
                async for event in events_of(answer):
                    if not last:
                        begun.put_nowait(None)
                    last = event
            return last

        async def whole(key: str) -> httpx.Response:
            return await http.post("/v1/completions", json={**ENDLESS, "stream": False}, headers=bearer(key))

        async def over_grpc() -> grpc.StatusCode:
            request = pb.GenerateRequest(
                model=MODEL, text="a b c", sampling=pb.Sampling(max_tokens=4000, ignore_eos=True)
            )
            async with grpc_to(cluster) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub_on(channel).Generate(request, metadata=tuple(bearer(doomed).items()))
                return refused.value.code()

        async with (
            asyncio.timeout(PATIENCE_S),
            beside(*(stream(doomed, 4000) for _ in range(4))) as doomed_streams,
            beside(*(stream(other, 1000) for _ in range(4))) as other_streams,
            beside(answered(whole(doomed), 401), over_grpc()) as (doomed_whole, doomed_grpc),
        ):
            for _ in range(8):
                await begun.get()
            await until(lambda: cluster.gateway.admission.num_in_flight == 10)
            await admin_of(cluster).delete("doomed")
            for ended in await asyncio.gather(*doomed_streams):
                assert ended["error"]["code"] == "invalid_api_key"
                assert "deleted" in ended["error"]["message"]
            await doomed_whole
            assert await doomed_grpc == grpc.StatusCode.UNAUTHENTICATED
            assert await status_of(http, doomed) == 401
            for ended in await asyncio.gather(*other_streams):
                assert "error" not in ended, "another tenant's stream ends whole"
            await until(lambda: not cluster.gateway.admission.num_in_flight)
        assert not cluster.gateway.admission.by_tenant._by_tenant
        for _, engine in cluster.workers:
            await until(lambda engine=engine: not engine.stats().num_running)


async def cached_tokens(http: httpx.AsyncClient, key: str) -> int:
    answer = await http.post("/v1/completions", json=BODY, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_a_new_epoch_a_new_tenant_of_the_name_and_another_group_find_no_page() -> None:
    async with (
        running(gateway={**IN_ETCD, "placement": "priced"}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        admin, key = admin_of(cluster), await tenant_with_key(cluster, "acme")
        assert await cached_tokens(http, key) == 0
        assert await cached_tokens(http, key) > 0, "or nothing below shows anything"
        grouped = await admin.add_key("acme", "web", group="web")
        assert await cached_tokens(http, grouped) == 0
        assert await cached_tokens(http, grouped) > 0
        await admin.raise_epoch("acme")
        assert await cached_tokens(http, key) == 0
        assert await cached_tokens(http, key) > 0
        await admin.delete("acme")
        again = await tenant_with_key(cluster, "acme")
        assert await status_of(http, key) == 401
        assert await cached_tokens(http, again) == 0


async def test_tenants_keep_their_salts_over_gateways_and_no_salt_shows_their_name() -> None:
    async with running(gateway=IN_ETCD) as cluster:
        await tenant_with_key(cluster, "acme")
        first, second = cluster.gateway, await cluster.add_gateway()
        assert first is not None
        await until(lambda: not second.identification.missing())
        salts = {gateway.identification.tenants.named("acme").cache_salt for gateway in (first, second)}
        assert len(salts) == 1
        assert "acme" not in salts.pop()


async def test_sums_of_usage_records_equal_the_metrics(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    async with running(gateway={**IN_ETCD, "usage_dir": str(folder)}) as cluster:
        assert cluster.gateway is not None
        keys = {name: await tenant_with_key(cluster, name) for name in ("acme", "beta", "quiet")}
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            for name, count in (("acme", 3), ("beta", 2)):
                for _ in range(count):
                    answer = await http.post("/v1/completions", json={**BODY, "n": 2}, headers=bearer(keys[name]))
                    assert answer.status_code == 200
            refused = await http.post("/v1/completions", json={"model": 1}, headers=bearer(keys["acme"]))
            assert refused.status_code == 400
            assert (await http.post("/v1/completions", json=BODY, headers=bearer("kvf_no"))).status_code == 401
            async with http.stream("POST", "/v1/completions", json=ENDLESS, headers=bearer(keys["beta"])) as stream:
                events = events_of(stream)
                for _ in range(5):
                    await anext(events)
        async with grpc_to(cluster) as channel:
            await stub_on(channel).Generate(REQUEST, metadata=tuple(bearer(keys["acme"]).items()))
        await until(lambda: not cluster.gateway.admission.num_in_flight)  # type: ignore[union-attr]
        uses = {
            (reading.metric.name, *reading.labels): int(reading.value)
            for reading in cluster.gateway.metrics.tenants.readings()
            if reading.metric in (TENANT_REQUESTS, TENANT_TOKENS)
        }
        assert cluster.gateway.metrics.tenants.num_lost == 0
    rows = {row[1:3]: row[3:] for row in totals(folder, None, None, None).rows()}
    assert {key: row[0] for key, row in rows.items()} == {
        ("acme", "ok"): 4,
        ("acme", "refused"): 1,
        ("beta", "ok"): 2,
        ("beta", "cancelled"): 1,
    }
    for name in ("acme", "beta"):
        own = {outcome: row for (tenant, outcome), row in rows.items() if tenant == name}
        assert {outcome: uses[TENANT_REQUESTS.name, name, outcome] for outcome in own} == {
            outcome: row[0] for outcome, row in own.items()
        }
        counted = [uses[TENANT_TOKENS.name, name, kind] for kind in TENANT_TOKEN_KINDS]
        assert [sum(column) for column in list(zip(*own.values(), strict=True))[1:]] == counted
    assert rows["beta", "cancelled"][3] >= 5, "tokens of the cancelled stream are counted"
    assert not any(rows["acme", "refused"][1:])
    assert uses[TENANT_REQUESTS.name, "quiet", "ok"] == 0
    text = "".join(file.read_text() for file in folder.iterdir())
    assert not any(secret in text for secret in (*keys.values(), "kvf_", BODY["prompt"]))
    ran = CliRunner().invoke(main, ["tenant", "usage", "--dir", str(folder), "--csv", "--tenant", "acme"])
    assert ran.exit_code == 0, ran.output
    lines = ran.output.splitlines()
    assert lines[0] == "day,tenant,outcome,requests,prompt_tokens,cached_tokens,generated_tokens"
    assert [line.split(",")[1:] for line in lines[1:]] == [
        ["acme", outcome, *map(str, rows["acme", outcome])] for outcome in ("ok", "refused")
    ]
