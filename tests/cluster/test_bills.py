"""What is billed is what workers did and clients got, also where workers are lost, requests wait, or are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.membership.base import MemberKind
from kvferry.tenancy.limits import LimitName, Limits
from kvferry_sim.step_loop import Faults
from kvferry_tenants.usage_totals import totals
from support.beside import answered, beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import bearer, grpc_to, refused
from .test_gateway_grpc import stub_on
from .test_tenants import admin_of, events_of, tenant_with_key

PROMPT = " ".join(f"w{i}" for i in range(305))
NUM_PROMPT_TOKENS = 306  # with bos
ASKED: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True}


def in_records(folder: Path, **gateway: Any) -> dict[str, Any]:
    return {"tenants_in_etcd": True, "usage_dir": str(folder), **gateway}


def rows(folder: Path) -> list[tuple[object, ...]]:
    """Outcome, requests, prompt, cached and generated tokens of the tenant acme."""
    return [row[2:] for row in totals(folder, None, None, "acme").rows()]


def busy(cluster: SimCluster) -> Any:
    return next(engine for engine in cluster.engines(MemberKind.DECODE) if engine.stats().num_running)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_an_answer_that_goes_on_elsewhere_has_the_cached_tokens_of_its_first_worker(
    tmp_path: Path, prefill: int
) -> None:
    """A prompt that was cold stays so, though its second worker finds its pages, or gets them once more."""
    async with (
        running(prefill=prefill, decode=2, gateway=in_records(tmp_path)) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        key = await tenant_with_key(cluster, "acme")

        async def ask(*, lose_worker: bool = False) -> int:
            body = {**ASKED, "max_tokens": 300, "stream": True, "stream_options": {"include_usage": True}}
            num_events, usage = 0, None
            async with http.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
                async for event in events_of(answer):
                    num_events += 1
                    usage = event.get("usage") or usage
                    if num_events == 20 and lose_worker:
                        busy(cluster).kill()
            assert usage is not None
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (NUM_PROMPT_TOKENS, 300)
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await ask(lose_worker=True) == 0
        assert cluster.metric("kvferry_continued_requests_total") == 1
        cached = await ask()
        assert 0 < cached < NUM_PROMPT_TOKENS
    assert rows(tmp_path) == [("ok", 2, 2 * NUM_PROMPT_TOKENS, cached, 600)]


@pytest.mark.usefixtures("short_worker_wait")
async def test_a_prompt_that_no_worker_took_is_neither_billed_nor_counted_against_limits(tmp_path: Path) -> None:
    """Also where its client comes back again and again, as it is told to."""
    async with (
        running(decode=0, prefill=0, gateway=in_records(tmp_path)) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        gateway = cluster.gateway
        assert gateway is not None
        admin, key = admin_of(cluster), await tenant_with_key(cluster, "acme")
        await admin.set_limits("acme", {"tokens_per_minute": 12 * NUM_PROMPT_TOKENS, "requests_per_minute": 60})
        await until(lambda: gateway.identification.directory.limits("acme") not in (None, Limits()))  # type: ignore[union-attr]
        for _ in range(6):
            answer = await http.post("/v1/completions", json={**ASKED, "max_tokens": 2}, headers=bearer(key))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_decode_worker")
        limits = gateway.identification.limits
        assert limits is not None
        assert all(bucket._level == bucket._capacity for bucket in limits._by_tenant["acme"]._buckets.values())
        await cluster.add_worker(MemberKind.DECODE)
        await cluster.ready()
        answer = await http.post("/v1/completions", json={**ASKED, "max_tokens": 2}, headers=bearer(key))
        assert answer.status_code == 200
        level = limits._by_tenant["acme"]._buckets[LimitName.TOKENS]._level
        assert level < 2 * NUM_PROMPT_TOKENS - NUM_PROMPT_TOKENS / 2, "what was computed counts"
    assert rows(tmp_path) == [("failed", 6, 0, 0, 0), ("ok", 1, NUM_PROMPT_TOKENS, 0, 2)]


async def test_requests_that_a_full_cluster_refuses_are_not_billed(tmp_path: Path) -> None:
    slow = {"step_ms": 20.0, "prefill_tokens_per_s": 200_000.0}
    gateway = in_records(tmp_path, max_queued_requests=2)
    async with (
        running(prefill=0, gateway=gateway, sim=slow, worker={"max_requests": 3}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        key = await tenant_with_key(cluster, "acme")
        body = {**ASKED, "max_tokens": 50}
        asked = [http.post("/v1/completions", json=body, headers=bearer(key)) for _ in range(16)]
        statuses = [answer.status_code for answer in await asyncio.gather(*asked)]
    num_refused = statuses.count(429)
    num_answered = statuses.count(200)
    assert num_refused >= 8
    assert num_refused + num_answered == 16
    by_outcome = {row[0]: row[1:] for row in rows(tmp_path)}
    assert by_outcome["refused"] == (num_refused, 0, 0, 0)
    assert by_outcome["ok"][:2] == (num_answered, num_answered * NUM_PROMPT_TOKENS)
    assert by_outcome["ok"][3] == num_answered * 50


async def test_what_a_client_got_before_it_left_is_billed(tmp_path: Path) -> None:
    async with (
        running(gateway=in_records(tmp_path)) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        gateway = cluster.gateway
        assert gateway is not None
        key = await tenant_with_key(cluster, "acme")
        body = {**ASKED, "max_tokens": 4000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body, headers=bearer(key)) as answer:
            events = events_of(answer)
            for _ in range(20):
                await anext(events)
            (so_far,) = gateway.admission.unfinished_uses()
            assert (so_far.outcome, so_far.tenant, so_far.prompt_tokens) == ("unfinished", "acme", NUM_PROMPT_TOKENS)
            assert so_far.generated_tokens >= 20
            assert so_far.request_id.startswith("cmpl-")
        await until(lambda: not gateway.admission.num_in_flight)
    ((outcome, num_requests, num_prompt, num_cached, num_generated),) = rows(tmp_path)
    assert (outcome, num_requests, num_prompt, num_cached) == ("cancelled", 1, NUM_PROMPT_TOKENS, 0)
    assert isinstance(num_generated, int)
    assert num_generated >= 20


async def test_what_a_prefill_worker_found_cached_is_billed_so_where_no_output_came(tmp_path: Path) -> None:
    """Its client left while it waited for the decode worker: its prompt was billed as if all of it was computed."""
    async with (
        running(prefill=1, decode=1, gateway=in_records(tmp_path)) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        gateway = cluster.gateway
        assert gateway is not None
        headers = {**bearer(await tenant_with_key(cluster, "acme")), "x-kvferry-debug": "disaggregate"}
        assert (await http.post("/v1/completions", json={**ASKED, "max_tokens": 2}, headers=headers)).status_code == 200
        (decode,) = cluster.engines(MemberKind.DECODE)
        decode.faults = Faults(stalled=True)
        asking = http.post("/v1/completions", json={**ASKED, "max_tokens": 3}, headers=headers)
        async with beside(answered(asking)):
            await until(lambda: any(use.prompt_tokens for use in gateway.admission.unfinished_uses()))
        await until(lambda: not gateway.admission.num_in_flight)
    by_outcome = {row[0]: row[1:] for row in rows(tmp_path)}
    block_size = decode.info.block_size
    num_cached = (NUM_PROMPT_TOKENS - 1) // block_size * block_size
    assert by_outcome == {"ok": (1, NUM_PROMPT_TOKENS, 0, 2), "cancelled": (1, NUM_PROMPT_TOKENS, num_cached, 0)}


async def test_texts_that_are_refused_and_tokenized_count_against_limits() -> None:
    """Each cost the gateway time, and 400s counted nowhere."""
    async with (
        running(gateway={"tenants_in_etcd": True}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        grpc_to(cluster) as channel,
    ):
        gateway = cluster.gateway
        assert gateway is not None
        directory = gateway.identification.directory
        assert directory is not None
        admin = admin_of(cluster)
        keys = {name: await tenant_with_key(cluster, name) for name in ("acme", "beta")}
        for name in keys:
            await admin.set_limits(name, {"requests_per_minute": 6})
        await until(lambda: all(directory.limits(name) == Limits(requests_per_minute=6) for name in keys))
        too_long = {**ASKED, "prompt": PROMPT, "max_tokens": 10**6}
        answers = [await http.post("/v1/completions", json=too_long, headers=bearer(keys["acme"])) for _ in range(2)]
        assert [answer.json()["error"]["code"] for answer in answers] == ["context_length_exceeded", "tenant_limited"]
        tokenize = pb.TokenizeRequest(model=MODEL, text="a")
        metadata = tuple(bearer(keys["beta"]).items())
        assert (await stub_on(channel).Tokenize(tokenize, metadata=metadata)).token_ids
        error = await refused(stub_on(channel).Tokenize(tokenize, metadata=metadata))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_later_tenant_of_the_name_and_another_group_read_no_record_of_an_answer() -> None:
    async with (
        running(gateway={"tenants_in_etcd": True}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        admin, key = admin_of(cluster), await tenant_with_key(cluster, "acme")
        grouped = await admin.add_key("acme", "web", group="web")
        answer = await http.post("/v1/completions", json={**ASKED, "max_tokens": 2}, headers=bearer(key))
        path = f"/kvferry/v1/requests/{answer.json()['id']}"
        assert (await http.get(path, headers=bearer(key))).status_code == 200
        assert (await http.get(path, headers=bearer(grouped))).status_code == 404
        await admin.delete("acme")
        again = await tenant_with_key(cluster, "acme")
        assert (await http.get(path, headers=bearer(again))).status_code == 404


async def test_a_deadline_of_the_clients_own_gives_nothing_back_to_its_limits(tmp_path: Path) -> None:
    """What a worker computed until then is kept, and a client could ask again and again until it has all of it."""
    slow = {"step_ms": 1.0, "prefill_tokens_per_s": 300.0}
    async with running(prefill=0, gateway=in_records(tmp_path), sim=slow) as cluster, grpc_to(cluster) as channel:
        gateway = cluster.gateway
        assert gateway is not None
        key = await tenant_with_key(cluster, "acme")
        await admin_of(cluster).set_limits("acme", {"requests_per_minute": 6})  # one at once
        await until(lambda: gateway.identification.directory.limits("acme") not in (None, Limits()))
        metadata, codes = tuple(bearer(key).items()), []
        for number in range(2):
            asked = pb.GenerateRequest(model=MODEL, text=f"{number} {PROMPT}")
            codes.append((await refused(stub_on(channel).Generate(asked, metadata=metadata, timeout=0.3))).code())
            await until(lambda: not gateway.admission.num_in_flight)
        assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED]
