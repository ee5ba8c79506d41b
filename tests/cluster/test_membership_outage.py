"""The registry goes away, forgets members, comes back; workers leave, and come back elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec

from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import MemberKind
from kvferry.worker.lifecycle import WorkerHost
from kvferry.worker.server import WorkerServer
from support.beside import beside
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running

BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "one two three",
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def ask(cluster: SimCluster, **values: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        return await http.post("/v1/completions", json={**BODY, **values}, headers={"x-kvferry-debug": "1"})


async def journey_of(cluster: SimCluster) -> dict[str, Any]:
    answer = await ask(cluster)
    assert answer.status_code == 200, answer.text
    record: dict[str, Any] = answer.json()["kvferry"]
    return record


@asynccontextmanager
async def streaming(cluster: SimCluster, num_tokens: int) -> AsyncIterator[AsyncIterator[str]]:
    """A stream that has begun. Its remaining text, to be read to the end."""
    body = {**BODY, "max_tokens": num_tokens, "stream": True}
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        pieces = answer.aiter_text()
        await anext(pieces)
        yield pieces


async def finished_well(pieces: AsyncIterator[str]) -> bool:
    raw = "".join([piece async for piece in pieces])
    *events, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert done == "[DONE]"
    last = json.loads(events[-1])
    return "error" not in last and last["choices"][0]["finish_reason"] == "length"


def links(cluster: SimCluster, kind: MemberKind) -> list[WorkerLink]:
    assert cluster.gateway is not None
    return cluster.gateway.worker_pool.links(kind)


def forget(cluster: SimCluster, host: WorkerHost, clock: Clock) -> None:
    """The registry loses a member that lives."""
    assert host._registration is not None
    cluster.registry._abandon(host._registration)  # type: ignore[arg-type]
    clock.now_s += 60
    cluster.registry.expire_due()
    assert host.worker_id not in {member.member_id for member in cluster.registry.members()}


async def test_requests_go_on_through_an_outage_longer_than_the_lease() -> None:
    clock = Clock()
    async with running(clock=clock) as cluster, streaming(cluster, 400) as pieces:
        before = [link for kind in (MemberKind.PREFILL, MemberKind.DECODE) for link in links(cluster, kind)]
        with cluster.registry.outage():
            clock.now_s += 60
            assert (await journey_of(cluster))["reason"] == "disaggregated"
        assert (await journey_of(cluster))["reason"] == "disaggregated"
        assert await finished_well(pieces)
        after = [link for kind in (MemberKind.PREFILL, MemberKind.DECODE) for link in links(cluster, kind)]
        assert after == before  # the very streams, never dialled again


async def test_a_member_that_the_registry_forgot_is_kept_while_its_stream_lives() -> None:
    clock = Clock()
    async with running(clock=clock) as cluster:
        (host,) = cluster.hosts(MemberKind.DECODE)
        forget(cluster, host, clock)
        assert cluster.gateway is not None
        gone = cluster.gateway.worker_pool._gone
        await until(lambda: host.worker_id in gone, what="the gateway heard that the member left")
        assert (await journey_of(cluster))["decode_worker"] == host.worker_id
        await host.server.stop()
        await until(lambda: not links(cluster, MemberKind.DECODE), what="the link is dropped with its stream")
        assert (await ask(cluster)).status_code == 503


async def test_a_worker_that_dies_in_an_outage_is_passed_over_and_dropped_after_it() -> None:
    clock = Clock()
    async with running(decode=2, clock=clock) as cluster:
        lost, left = cluster.hosts(MemberKind.DECODE)
        with cluster.registry.outage():
            await lost.stop()
            for _ in range(3):
                assert (await journey_of(cluster))["decode_worker"] == left.worker_id
            clock.now_s += 60
        await until(lambda: len(links(cluster, MemberKind.DECODE)) == 1, what="the lost worker is dropped")
        assert links(cluster, MemberKind.DECODE)[0].member.member_id == left.worker_id


async def test_a_worker_that_leaves_is_dropped() -> None:
    async with running() as cluster:
        (host,) = cluster.hosts(MemberKind.PREFILL)
        assert await host.drain()
        await until(lambda: not any(link.usable for link in links(cluster, MemberKind.PREFILL)))
        assert (await journey_of(cluster))["reason"] == "no_prefill_worker"
        await host.stop()
        await until(lambda: not links(cluster, MemberKind.PREFILL), what="its link is dropped")


async def test_another_worker_takes_the_place_of_one_that_left() -> None:
    async with running() as cluster:
        (left,) = cluster.hosts(MemberKind.DECODE)
        await left.stop()
        host, _ = await cluster.add_worker(MemberKind.DECODE)
        await cluster.ready(num_workers=2)
        assert (await journey_of(cluster))["decode_worker"] == host.worker_id
        await until(lambda: len(links(cluster, MemberKind.DECODE)) == 1)


async def test_a_member_that_comes_back_on_another_address_is_used() -> None:
    async with running() as cluster:
        (host,) = cluster.hosts(MemberKind.DECODE)
        (old,) = links(cluster, MemberKind.DECODE)
        await host.server.stop()
        await until(lambda: not old.connected)
        host.server = WorkerServer(
            cluster.engines(MemberKind.DECODE)[0],
            worker_id=host.worker_id,
            role="decode",
            host="127.0.0.1",
            max_requests=8,
            heartbeat_s=0.2,
        )
        await host.server.start()
        assert host._registration is not None
        await host._registration.update(msgspec.structs.replace(host.member, started_unix_s=1.0))
        await cluster.ready()
        (new,) = links(cluster, MemberKind.DECODE)
        assert new.member.address != old.member.address
        assert (await journey_of(cluster))["decode_worker"] == host.worker_id


async def test_a_draining_worker_finishes_its_streams_while_others_take_the_new_requests() -> None:
    async with running(decode=2) as cluster, streaming(cluster, 300) as pieces:
        hosts = cluster.hosts(MemberKind.DECODE)
        await until(lambda: any(host.server.num_requests for host in hosts))
        draining = next(host for host in hosts if host.server.num_requests)
        other = next(host for host in hosts if host is not draining)
        drained = asyncio.create_task(draining.drain())
        for _ in range(3):
            assert (await journey_of(cluster))["decode_worker"] == other.worker_id
        assert await finished_well(pieces)
        assert await drained
        await draining.stop()
        await until(lambda: len(links(cluster, MemberKind.DECODE)) == 1)


async def test_stopping_right_after_the_drain_loses_no_output() -> None:
    async with running() as cluster:
        (host,) = cluster.hosts(MemberKind.DECODE)
        async with streaming(cluster, 200) as pieces:

            async def leave() -> None:
                assert await host.drain()
                await host.stop()

            leaving = asyncio.create_task(leave())
            assert await finished_well(pieces)
            await leaving


async def test_new_requests_are_503_while_the_only_decode_worker_drains() -> None:
    async with running() as cluster, streaming(cluster, 300) as pieces:
        (host,) = cluster.hosts(MemberKind.DECODE)
        async with beside(host.drain()) as (drained,):
            await until(lambda: host.server.draining)
            answer = await ask(cluster)
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "no_decode_worker"
            assert await finished_well(pieces)
            assert await drained


async def test_a_drain_that_takes_too_long_says_so() -> None:
    async with running(worker={"drain_timeout_s": 0.1}) as cluster:
        (host,) = cluster.hosts(MemberKind.DECODE)
        async with streaming(cluster, 5000):
            assert not await host.drain()
