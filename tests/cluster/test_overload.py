"""More requests than workers take: they wait in line or are refused, and nothing is computed for those."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest

from kvferry.membership.base import MemberKind
from kvferry_client import AsyncClient, CallFailed
from kvferry_sim import Faults
from support.beside import answered, beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import bearer
from .test_tenants import admin_of, tenant_with_key

BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
PROMPT_WORDS = 200


def prompt(number: int) -> str:
    return " ".join(f"w{number}x{j}" for j in range(PROMPT_WORDS))


async def post(cluster: SimCluster, number: int, **values: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        return await http.post(
            "/v1/completions", json={**BODY, "prompt": prompt(number), **values}, headers={"x-kvferry-debug": "1"}
        )


def num_computed(cluster: SimCluster) -> int:
    return sum(engine.stats().prompt_tokens.local_compute for _, engine in cluster.workers)


def limit(cluster: SimCluster, kind: MemberKind, max_requests: int) -> None:
    for host in cluster.hosts(kind):
        host.server._max_requests = max_requests


async def test_nothing_is_computed_for_requests_that_full_decode_workers_refuse() -> None:
    async with running(2, 4, gateway={"queue_timeout_s": 0.3}) as cluster:
        limit(cluster, MemberKind.DECODE, 0)
        answers = await asyncio.gather(*(post(cluster, i) for i in range(20)))
        assert [answer.status_code for answer in answers] == [429] * 20
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers)
        assert num_computed(cluster) == 0
        await cluster.until_quiet()


@pytest.mark.parametrize("kind", [MemberKind.PREFILL, MemberKind.DECODE])
async def test_requests_wait_in_line_while_workers_are_full(kind: MemberKind) -> None:
    async with running(1, 2) as cluster:
        limit(cluster, kind, 1)
        answers = await asyncio.gather(*(post(cluster, i) for i in range(12)))
        assert [answer.status_code for answer in answers] == [200] * 12
        # A full prefill worker has not failed: no decode worker computes a prompt instead.
        assert {answer.json()["kvferry"]["reason"] for answer in answers} == {"disaggregated"}
        assert all(answer.json()["kvferry"]["prefill_failure"] is None for answer in answers)
        await cluster.until_quiet()
        assert all(host.server.num_requests == 0 for host, _ in cluster.workers)


async def test_the_line_is_first_come_first_served_and_has_a_limit() -> None:
    async with running(0, 1, gateway={"max_queued_requests": 3}) as cluster:
        (engine,) = cluster.engines(MemberKind.DECODE)
        limit(cluster, MemberKind.DECODE, 1)
        engine.faults = Faults(stalled=True)
        async with asyncio.TaskGroup() as clients:
            clients.create_task(answered(post(cluster, 0)))
            await until(lambda: engine.stats().num_waiting == 1)
            ended: list[int] = []
            dispatcher = cluster.dispatcher
            for number in range(1, 4):
                task = clients.create_task(answered(post(cluster, number)))
                task.add_done_callback(lambda _, number=number: ended.append(number))
                await until(lambda number=number: len(dispatcher._router.workers.queues.of("")) == number)
            refused = await post(cluster, 4)
            assert refused.status_code == 429
            assert "gateway.max_queued_requests is 3 choices" in refused.json()["error"]["message"]
            engine.faults = Faults()
        assert ended == [1, 2, 3]
        assert len(dispatcher._router.workers.queues.of("")) == 0


async def test_a_request_that_left_the_line_is_no_longer_in_it() -> None:
    async with running(1, 1) as cluster:
        limit(cluster, MemberKind.DECODE, 0)
        line = cluster.dispatcher._router.workers.queues.of("")
        async with beside(answered(post(cluster, 0))):
            await until(lambda: len(line) == 1)
        await until(lambda: len(line) == 0, what="the client is gone from the line")
        assert num_computed(cluster) == 0


async def test_a_client_that_leaves_during_prefill_gives_its_place_back() -> None:
    async with running(1, 1, sim={"step_ms": 1.0, "prefill_tokens_per_s": 500.0}) as cluster:
        (decode,) = cluster.hosts(MemberKind.DECODE)
        async with beside(answered(post(cluster, 0))):
            await until(lambda: decode.server.num_requests == 1, what="its place is reserved")
            assert not decode.server.is_busy
        await until(lambda: decode.server.num_requests == 0, what="its place is free")
        await cluster.until_quiet()


async def test_the_deadline_travels_to_the_worker() -> None:
    """It ends the request there though the gateway does not."""
    async with running(0, 1, gateway={"request_timeout_s": 0.4}) as cluster:
        (engine,) = cluster.engines(MemberKind.DECODE)
        engine.faults = Faults(stalled=True)
        seen = []
        generate = engine.generate

        def watch(request: Any, **of_worker: Any) -> Any:
            seen.append(request.deadline_s)
            return generate(request, **of_worker)

        engine.generate = watch  # type: ignore[method-assign]
        assert (await post(cluster, 0)).status_code == 504
        assert seen[0] is not None
        await cluster.until_quiet()


async def test_a_call_whose_deadline_comes_before_its_turn_is_refused_before_it_waits() -> None:
    async with running(0, 1) as cluster:
        limit(cluster, MemberKind.DECODE, 1)
        (engine,) = cluster.engines(MemberKind.DECODE)
        engine.faults = Faults(stalled=True)
        async with beside(answered(post(cluster, 0))) as (asked,):
            await until(lambda: engine.stats().num_waiting == 1)
            queue = cluster.dispatcher._router.workers.queues.of("")
            now_s = queue.now_s()
            for i in range(8):  # one completion every two seconds
                queue.completions.add(now_s - 16.0 + 2.0 * i)
            assert cluster.gateway is not None
            async with AsyncClient(f"127.0.0.1:{cluster.gateway.grpc.port}") as client:
                with pytest.raises(CallFailed) as refused:
                    await client.generate(prompt(1), timeout_s=1.0)
            assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "no room is expected within the" in refused.value.message
            engine.faults = Faults()
            await asked


@pytest.mark.parametrize("waits_for_its_prompt", [False, True])
async def test_a_preempted_request_is_not_refused_as_a_new_one_is(waits_for_its_prompt: bool) -> None:
    """Its tenant's line has no place left. Its client has part of the answer, or it waited for its prompt's turn."""
    slots = {"kind": "sim", "block_size": 16, "max_num_seqs": 4}
    async with running(
        prefill=0,
        decode=1,
        gateway={"tenants_in_etcd": True, "max_queued_requests": 2},
        engine=slots,
        sim={"step_ms": 10.0, "prefill_tokens_per_s": 1_000.0 if waits_for_its_prompt else 100_000.0},
        worker={"max_requests": 8},
    ) as cluster:
        words = " ".join(f"w{i}" for i in range(400 if waits_for_its_prompt else 1))
        keys = {name: await tenant_with_key(cluster, name) for name in ("hog", "gold")}
        await admin_of(cluster).set_contract("gold", class_name="premium")
        (engine,) = cluster.engines(MemberKind.DECODE)

        async def ask(name: str, number: int, max_tokens: int) -> httpx.Response:
            async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
                body = {**BODY, "prompt": f"{prompt(number)} {words}", "max_tokens": max_tokens}
                return await http.post("/v1/completions", json=body, headers=bearer(keys[name]))

        (host,) = cluster.hosts(MemberKind.DECODE)
        async with asyncio.TaskGroup() as clients:
            for number in range(4):
                clients.create_task(answered(ask("hog", number, 100)))
            if waits_for_its_prompt:
                await until(lambda: host.server.num_requests == 4)
            else:
                await until(lambda: engine.stats().num_running == 4)
                await asyncio.sleep(0.3)  # a stream has its slot for so long at least
            clients.create_task(ask("hog", 4, 4))
            await until(lambda: cluster.dispatcher.num_queued == 1)
            await asyncio.gather(*(answered(ask("gold", number, 20)) for number in range(5, 7)))
        assert cluster.metric("kvferry_preempted_requests_total") >= 1
