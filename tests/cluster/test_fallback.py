"""What happens to requests when a worker, an engine or a transfer breaks, or the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from kvferry import config as configuration
from kvferry.errors import KvferryError
from kvferry.membership.base import MemberKind
from kvferry.router import dispatch
from kvferry.worker import lifecycle as worker_host
from kvferry.worker.lifecycle import WorkerHost
from kvferry_sim import Faults, SimEngine, kv_cache
from kvferry_sim.kv_transfer import PullFault
from support.beside import answered, beside
from support.tcp_relay import TcpRelay
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running

PROMPT = " ".join(f"w{i}" for i in range(40))
BODY: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
NUM_PROMPT_TOKENS = 41  # with bos


async def post(cluster: SimCluster, **values: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        return await http.post("/v1/completions", json={**BODY, **values}, headers={"x-kvferry-debug": "1"})


async def succeeds(cluster: SimCluster, **values: Any) -> tuple[str, dict[str, Any]]:
    """Text and journey of a request that must not fail."""
    answer = await post(cluster, **values)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"], answer.json()["kvferry"]


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """The greedy text of BODY where nothing goes wrong."""

    async def ask() -> str:
        async with running() as cluster:
            text, record = await succeeds(cluster)
            assert record["prefill_failure"] is None
            return text

    return asyncio.run(ask())


@pytest.fixture
def slow_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers learn of a dead engine from a request only, so that a test decides which one is first."""
    monkeypatch.setattr(worker_host, "HEALTH_PERIOD_S", 60.0)


def fallbacks(cluster: SimCluster, cause: str) -> float:
    return cluster.metric(f'kvferry_prefill_fallbacks_total{{cause="{cause}"}}')


def the(cluster: SimCluster, kind: MemberKind) -> SimEngine:
    (engine,) = cluster.engines(kind)
    return engine


@pytest.mark.usefixtures("slow_to_notice")
async def test_a_prefill_engine_killed_before_the_request(cluster: SimCluster, undisturbed: str) -> None:
    the(cluster, MemberKind.PREFILL).kill()
    text, record = await succeeds(cluster)
    assert text == undisturbed
    assert record["prefill_failure"]
    assert record["prefill_worker"] is None
    assert record["prompt_tokens_by_source"]["local_compute"] == NUM_PROMPT_TOKENS
    assert fallbacks(cluster, "engine_dead") == 1

    # The request showed the worker that its engine is dead: it leaves, and nobody is sent there again.
    await cluster.ready(num_workers=1)
    assert (await succeeds(cluster))[1]["reason"] == "no_prefill_worker"


@pytest.mark.usefixtures("slow_to_notice")
async def test_a_prefill_engine_killed_during_prefill(cluster: SimCluster, undisturbed: str) -> None:
    prefill = the(cluster, MemberKind.PREFILL)
    prefill.faults = Faults(stalled=True)
    async with beside(succeeds(cluster)) as (asked,):
        await until(lambda: prefill.stats().num_waiting == 1, what="the prompt waits on the prefill engine")
        prefill.kill()
        text, record = await asked
    assert text == undisturbed
    assert "killed" in record["prefill_failure"]
    assert fallbacks(cluster, "engine_dead") == 1
    await cluster.until_quiet()


async def test_a_prefill_worker_lost_during_prefill(cluster: SimCluster, undisturbed: str) -> None:
    prefill = the(cluster, MemberKind.PREFILL)
    prefill.faults = Faults(stalled=True)
    async with beside(succeeds(cluster)) as (asked,):
        await until(lambda: prefill.stats().num_waiting == 1, what="the prompt waits on the prefill engine")
        await cluster.hosts(MemberKind.PREFILL)[0].stop()
        text, record = await asked
    assert text == undisturbed
    assert record["prefill_failure"]
    assert fallbacks(cluster, "worker_lost") + fallbacks(cluster, "engine_dead") == 1


async def test_a_slow_prefill_is_cancelled_and_computed_by_decode(
    undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "PREFILL_SHARE", 0.001)
    async with running(gateway={"http_port": 0, "request_timeout_s": 200.0}) as cluster:
        prefill = the(cluster, MemberKind.PREFILL)
        prefill.faults = Faults(prefill_slowdown=1e6)
        text, record = await succeeds(cluster)
        assert text == undisturbed
        assert "0.2 s" in record["prefill_failure"]
        assert fallbacks(cluster, "timeout") == 1
        await cluster.until_quiet()


async def test_without_a_prefill_worker(undisturbed: str) -> None:
    async with running(prefill=0) as cluster:
        text, record = await succeeds(cluster)
        assert (text, record["reason"]) == (undisturbed, "no_prefill_worker")
        assert record["prefill_failure"] is None


async def test_unequal_pages_are_not_ferried(undisturbed: str) -> None:
    async with running(prefill=0) as cluster:
        await cluster.add_worker(MemberKind.PREFILL, with_block_size(cluster, 32))
        await cluster.ready()
        text, record = await succeeds(cluster)
        assert (text, record["reason"]) == (undisturbed, "unequal_pages")
        assert record["ferried_pages"] == 0


@pytest.mark.parametrize("fault", [fault for fault in PullFault if fault is not PullFault.NONE])
async def test_a_transfer_that_fails_is_recomputed(
    cluster: SimCluster, undisturbed: str, fault: PullFault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "PULL_TIMEOUT_S", 0.3)
    the(cluster, MemberKind.PREFILL).faults = Faults(pulls=fault)
    text, record = await succeeds(cluster)
    assert text == undisturbed
    assert record["prompt_tokens_by_source"]["local_compute"] > 0
    the(cluster, MemberKind.PREFILL).faults = Faults()
    await cluster.until_quiet()


# Longer than a test: what a worker says of itself then comes with its answers only.
SELDOM_S = 14.0


async def test_a_prefill_worker_that_refuses_because_it_leaves(undisturbed: str) -> None:
    """The refusal crosses the request: the gateway has not heard of the draining yet."""
    async with running(heartbeat_s=SELDOM_S) as cluster:
        server = cluster.hosts(MemberKind.PREFILL)[0].server
        refusal = server.refusal

        def begin_draining_and_refuse(*values: str, **named: bool) -> KvferryError | None:
            server.draining = True
            return refusal(*values, **named)

        server.refusal = begin_draining_and_refuse  # type: ignore[method-assign]
        text, record = await succeeds(cluster)
        assert text == undisturbed
        assert "draining" in record["prefill_failure"]
        assert fallbacks(cluster, "worker_draining") == 1
        assert (await succeeds(cluster))[1]["reason"] == "no_prefill_worker"


@asynccontextmanager
async def waiting_on_decode(cluster: SimCluster, **values: Any) -> AsyncIterator[tuple[asyncio.Task[Any], int]]:
    """A request that waits on one of the stalled decode engines; which one."""
    engines = cluster.engines(MemberKind.DECODE)
    for engine in engines:
        engine.faults = Faults(stalled=True)
    async with beside(succeeds(cluster, **values)) as (asked,):
        await until(lambda: any(e.stats().num_waiting for e in engines), what="a decode engine has the request")
        yield asked, next(i for i, engine in enumerate(engines) if engine.stats().num_waiting)


@pytest.mark.parametrize("how", ["engine", "worker", "stream"])
async def test_a_decode_worker_lost_before_the_first_token(how: str, undisturbed: str) -> None:
    async with running(decode=2, sim={"step_ms": 1.0, "transfer_lease_s": 1.0}) as cluster:
        assert cluster.gateway is not None
        relays = [await relayed(cluster, host) for host in cluster.hosts(MemberKind.DECODE)]
        try:
            async with waiting_on_decode(cluster) as (asked, lost):
                survivor = 1 - lost
                if how == "engine":
                    cluster.engines(MemberKind.DECODE)[lost].kill()
                elif how == "worker":
                    await cluster.hosts(MemberKind.DECODE)[lost].stop()
                else:
                    relays[lost].cut()
                for i, engine in enumerate(cluster.engines(MemberKind.DECODE)):
                    if i == survivor:
                        engine.faults = Faults()
                text, record = await asked
            assert text == undisturbed
            assert record["decode_worker"] == cluster.hosts(MemberKind.DECODE)[survivor].worker_id
            assert cluster.metric("kvferry_decode_retries_total") == 1
            # Parameters of a transfer are good for one engine, once: the prompt was kept anew, out of the cache.
            assert record["prompt_tokens_by_source"]["external_kv_transfer"] == NUM_PROMPT_TOKENS
            assert the(cluster, MemberKind.PREFILL).stats().prompt_tokens.local_cache_hit > 0
            if how == "stream":
                cluster.engines(MemberKind.DECODE)[lost].faults = Faults()
                await cluster.until_quiet()
            await until(lambda: the(cluster, MemberKind.PREFILL).num_offers == 0, what="nothing stays pinned")
        finally:
            await asyncio.gather(*(relay.stop() for relay in relays))


async def test_the_next_decode_worker_may_have_other_pages(undisturbed: str) -> None:
    async with running(prefill=1, decode=1) as cluster:
        (lost,) = cluster.hosts(MemberKind.DECODE)
        async with waiting_on_decode(cluster) as (asked, _):
            await cluster.add_worker(MemberKind.DECODE, with_block_size(cluster, 32))
            await cluster.ready()
            await lost.stop()
            text, record = await asked
        assert text == undisturbed
        assert record["reason"] == "unequal_pages"
        assert record["prompt_tokens_by_source"]["external_kv_transfer"] == 0


@pytest.mark.parametrize("limit", ["max_requests", "draining"])
async def test_a_decode_worker_that_refuses_is_passed_over(limit: str, undisturbed: str) -> None:
    async with running(decode=2, heartbeat_s=SELDOM_S) as cluster:
        hosts = cluster.hosts(MemberKind.DECODE)
        refusing = hosts[0].server
        if limit == "draining":
            refusing.draining = True
        else:
            refusing._max_requests = 0
        answers = [await succeeds(cluster) for _ in range(4)]
        assert [text for text, _ in answers] == [undisturbed] * 4
        assert {record["decode_worker"] for _, record in answers} == {hosts[1].worker_id}
        await cluster.until_quiet()


async def test_when_every_decode_worker_is_full_it_is_429() -> None:
    async with running(gateway={"queue_timeout_s": 0.2}) as cluster:
        cluster.hosts(MemberKind.DECODE)[0].server._max_requests = 0
        answer = await post(cluster)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "overloaded"
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_stream_that_lost_its_worker_waits_for_room(undisturbed: str) -> None:
    async with running(decode=2, gateway={"max_queued_requests": 0}) as cluster:
        hosts, engines = cluster.hosts(MemberKind.DECODE), cluster.engines(MemberKind.DECODE)
        for host in hosts:
            host.server._max_requests = 1
        for engine in engines:
            engine.faults = Faults(step_delay_s=0.05)
        async with beside(succeeds(cluster), succeeds(cluster)) as (first, second):
            await until(lambda: all(engine.stats().num_running for engine in engines), what="both workers are full")
            engines[0].kill()
            # The other one has no room yet, and for a new request it never has.
            await until(lambda: hosts[0].server.died.is_set())
            assert (await post(cluster, max_tokens=1)).status_code == 429
            engines[1].faults = Faults()
            assert [text for text, _ in (await first, await second)] == [undisturbed] * 2
        assert cluster.metric('kvferry_requests_total{endpoint="completions",status="429"}') == 1


@pytest.mark.usefixtures("short_worker_wait")
async def test_a_stream_that_finds_no_room_is_refused_in_the_end() -> None:
    async with running(decode=2, worker={"max_requests": 1}) as cluster:
        engines = cluster.engines(MemberKind.DECODE)
        for engine in engines:
            engine.faults = Faults(stalled=True)
        asked = [asyncio.create_task(post(cluster)) for _ in range(2)]
        await until(lambda: all(engine.stats().num_waiting for engine in engines), what="both workers are full")
        engines[0].kill()
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        assert refused.result().status_code == 429
        engines[1].faults = Faults()
        assert sorted([(await each).status_code for each in asked]) == [200, 429]


def parse_events(raw: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert lines[-1] == "[DONE]", raw[-400:]
    return [json.loads(line) for line in lines[:-1]]


async def stream(cluster: SimCluster, **values: Any) -> AsyncIterator[str]:
    """Raw pieces of a streamed completion."""
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True, **values}) as answer,
    ):
        assert answer.status_code == 200
        async for piece in answer.aiter_text():
            yield piece


async def streamed_events(cluster: SimCluster, after: Callable[[], Awaitable[None]], **values: Any) -> list[Any]:
    """Events of a streamed completion; `after` runs once the first ones arrived."""
    raw = ""
    async with contextlib.aclosing(stream(cluster, **values)) as pieces:
        async for piece in pieces:
            if not raw:
                await after()
            raw += piece
    return parse_events(raw)


def comparable(events: list[Any]) -> list[Any]:
    """What a client sees of every choice, whatever its chunks: text, log-probabilities, end."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            seen = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None})
            assert seen["end"] is None, "something follows the end"
            seen["text"] += choice["text"]
            if choice.get("logprobs"):
                seen["logprobs"] += list(
                    zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
                )
            seen["end"] = choice["finish_reason"]
    usage = [event["usage"] for event in events if event.get("usage")]
    return [[choices[index] for index in sorted(choices)], [{**u, "prompt_tokens_details": None} for u in usage]]


LONG = 300  # tokens
WITH_USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"logprobs": 2},
        {"n": 3, "temperature": 1.0, "seed": 5},
        {"presence_penalty": 1.0, "min_tokens": 250, "ignore_eos": False},
    ],
    ids=["greedy", "logprobs", "three-seeded", "min-tokens"],
)
@pytest.mark.parametrize("how", ["engine", "worker"])
async def test_a_decode_worker_lost_mid_stream_is_continued_by_another(how: str, values: dict[str, Any]) -> None:
    async def nothing() -> None:
        pass

    asked = {"max_tokens": LONG, "stream_options": WITH_USAGE, **values}
    async with running(decode=2, sim={"step_ms": 1.0, "prefill_tokens_per_s": 2e5, "answer_tokens": LONG}) as cluster:
        expected = await streamed_events(cluster, nothing, **asked)

        async def lose_the_busy_one() -> None:
            for host, engine in cluster.workers:
                if host.member.kind is MemberKind.DECODE and engine.stats().num_running:
                    if how == "engine":
                        engine.kill()
                    else:
                        await host.stop()
                    return
            raise AssertionError("no decode worker is busy")

        events = await streamed_events(cluster, lose_the_busy_one, **asked)
        assert comparable(events) == comparable(expected)
        assert len({event["id"] for event in events}) == 1
        assert cluster.metric("kvferry_continued_requests_total") >= 1
        assert any(choice.get("resumed_after") for event in events for choice in event["choices"])
        await cluster.until_quiet()


async def test_stop_strings_match_across_the_loss_of_a_worker() -> None:
    """A stop string whose beginning came from one worker and whose end comes from another."""
    async with running(decode=2) as cluster:
        text, _ = await succeeds(cluster, max_tokens=400)
        words = text.split(" ")
        stop = " ".join(words[120:320])
        expected = text[: text.index(stop)]

        engines = cluster.engines(MemberKind.DECODE)
        before = [engine.stats().num_generated_tokens for engine in engines]

        async def lose_the_busy_one() -> None:
            def num_given() -> int:
                return max(e.stats().num_generated_tokens - b for e, b in zip(engines, before, strict=True))

            # Past the beginning of the stop string: the text is held back from there on.
            await until(lambda: num_given() > 150)
            next(engine for engine in engines if engine.stats().num_running).kill()

        events = await streamed_events(cluster, lose_the_busy_one, max_tokens=2000, stop=stop)
        ((choice,), _) = comparable(events)
        assert choice["text"] == expected
        assert choice["end"] == "stop"


async def test_a_sole_decode_worker_is_waited_for_when_it_is_lost(cluster: SimCluster) -> None:
    text, _ = await succeeds(cluster, max_tokens=LONG)
    before = the(cluster, MemberKind.DECODE).stats().num_generated_tokens
    async with beside(answered(post(cluster, max_tokens=LONG))) as (asked,):
        await until(lambda: the(cluster, MemberKind.DECODE).stats().num_generated_tokens > before + 20)
        the(cluster, MemberKind.DECODE).kill()
        await cluster.ready(num_workers=1)
        await cluster.add_worker(MemberKind.DECODE)
        answer = await asked
    assert answer.json()["choices"][0]["text"] == text
    (after,) = answer.json()["kvferry"]["continued_after"]
    assert 0 < after < LONG


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.usefixtures("short_worker_wait")
async def test_without_another_decode_worker_a_stream_ends_in_an_error_event(n: int) -> None:
    async with running() as cluster:

        async def lose_it() -> None:
            the(cluster, MemberKind.DECODE).kill()

        events = await streamed_events(cluster, lose_it, max_tokens=5000, n=n)
        assert events[-1]["error"]["code"] == "no_decode_worker"
        assert all("error" not in event for event in events[:-1])
        await until(lambda: cluster.gateway is not None and cluster.gateway.admission.num_in_flight == 0)
        await until(lambda: the(cluster, MemberKind.PREFILL).num_offers == 0)


@pytest.mark.usefixtures("short_worker_wait")
async def test_without_another_decode_worker_it_is_503_where_nothing_was_sent() -> None:
    async with running() as cluster:
        async with beside(answered(post(cluster, max_tokens=5000), 503)) as (asked,):
            await until(lambda: the(cluster, MemberKind.DECODE).stats().num_running == 1)
            the(cluster, MemberKind.DECODE).kill()
            answer = await asked
        assert int(answer.headers["retry-after"]) >= 1


async def test_pages_that_no_decode_worker_takes_are_given_back(cluster: SimCluster) -> None:
    """The sole decode worker leaves while the prompt is computed; the lease would keep its pages for 30 s."""
    prefill, decode = the(cluster, MemberKind.PREFILL), cluster.hosts(MemberKind.DECODE)[0]
    prefill.faults = Faults(stalled=True)
    async with beside(answered(post(cluster))):
        await until(lambda: prefill.stats().num_waiting == 1)
        decode.server.refuse_new()
        await cluster.ready(num_workers=1)
        prefill.faults = Faults()
        await until(lambda: prefill.stats().num_generated_tokens == 1, what="the prompt is computed")
    await until(lambda: prefill.num_offers == 0, within_s=SOON_S, what="its pages are given back")


async def test_without_a_decode_worker_it_is_503(cluster: SimCluster) -> None:
    await cluster.hosts(MemberKind.DECODE)[0].stop()
    await cluster.ready(num_workers=1)
    answer = await post(cluster)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "no_decode_worker"
    assert int(answer.headers["retry-after"]) >= 1
    assert the(cluster, MemberKind.PREFILL).stats().num_generated_tokens == 0  # nobody prefilled in vain


async def test_eight_streams_while_the_prefill_engine_is_killed(cluster: SimCluster) -> None:
    prefill = the(cluster, MemberKind.PREFILL)
    prefill.faults = Faults(prefill_slowdown=200.0)  # some prompts are done, some under way, some wait

    async def stream(http: httpx.AsyncClient, i: int) -> list[dict[str, Any]]:
        answer = await http.post("/v1/completions", json={**BODY, "prompt": f"{i} {PROMPT}", "stream": True})
        assert answer.status_code == 200
        return parse_events(answer.text)

    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        beside(*(stream(http, i) for i in range(8))) as asked,
    ):
        await until(lambda: the(cluster, MemberKind.DECODE).stats().num_generated_tokens > 0, what="one was ferried")
        prefill.kill()
        for events in await asyncio.gather(*asked):
            assert not [event for event in events if "error" in event]
            assert events[-1]["choices"][0]["finish_reason"] == "length"

    await cluster.add_worker(MemberKind.PREFILL)
    await cluster.ready(num_workers=2)
    _, record = await succeeds(cluster, prompt=f"fresh {PROMPT}")
    assert record["reason"] == "disaggregated"
    assert record["prompt_tokens_by_source"]["external_kv_transfer"] == NUM_PROMPT_TOKENS + 1


async def relayed(cluster: SimCluster, host: WorkerHost) -> TcpRelay:
    """Put a relay between gateway and worker."""
    gateway = cluster.gateway
    assert gateway is not None
    relay = await TcpRelay(host.member.link_address).start()
    assert host._registration is not None
    await host._registration.update(msgspec.structs.replace(host.member, link_address=relay.address))
    await until(
        lambda: any(
            link.usable and link.member.link_address == relay.address
            for kind in (MemberKind.PREFILL, MemberKind.DECODE)
            for link in gateway.worker_pool.links(kind)
        ),
        what="the gateway dials the relay",
    )
    return relay


LEAVING = ["prefilling", "prefilled", "submitted", "transferring", "decoding"]


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", LEAVING)
async def test_a_client_that_leaves_leaves_nothing_behind(
    cluster: SimCluster, when: str, n: int, streamed: bool
) -> None:
    gateway = cluster.gateway
    assert gateway is not None
    prefill, decode = the(cluster, MemberKind.PREFILL), the(cluster, MemberKind.DECODE)
    relay = await relayed(cluster, cluster.hosts(MemberKind.PREFILL)[0])
    try:
        match when:
            case "prefilling":
                prefill.faults = Faults(stalled=True)
            case "prefilled":
                relay.backward.clear()  # the prompts are computed and kept, and the gateway does not hear of it
            case "submitted":
                decode.faults = Faults(stalled=True)
            case "transferring":
                prefill.faults = Faults(pulls=PullFault.HANG)
        reached = {
            "prefilling": lambda: prefill.stats().num_waiting == n,
            "prefilled": lambda: prefill.num_offers == n,
            "submitted": lambda: decode.stats().num_waiting == n,
            "transferring": lambda: decode.stats().num_waiting == n and decode.stats().num_pages_used > 0,
            "decoding": lambda: decode.stats().num_running == n and decode.stats().num_generated_tokens > n,
        }[when]
        async with beside(answered(post(cluster, n=n, max_tokens=5000, stream=streamed))):
            await until(reached, what=when)
        await until(lambda: gateway.admission.num_in_flight == 0, what="the gateway let go")
        relay.backward.set()
        if when in ("prefilled", "prefilling"):
            prefill.faults = Faults()
        await cluster.until_quiet()
        for kind in (MemberKind.PREFILL, MemberKind.DECODE):
            for link in gateway.worker_pool.links(kind):
                assert link.num_requests == 0
        assert cluster.metric("kvferry_requests_cancelled_total") == 1
    finally:
        await relay.stop()


async def test_a_prompt_that_is_computed_just_after_its_time_ran_out_is_given_back(
    undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "PREFILL_SHARE", 0.001)
    async with running(gateway={"http_port": 0, "request_timeout_s": 300.0}) as cluster:
        relay = await relayed(cluster, cluster.hosts(MemberKind.PREFILL)[0])
        try:
            relay.backward.clear()
            text, record = await succeeds(cluster)
            assert text == undisturbed
            assert record["prefill_failure"]
            assert the(cluster, MemberKind.PREFILL).num_offers == 1
            relay.backward.set()
            await cluster.until_quiet()
        finally:
            await relay.stop()


def with_block_size(cluster: SimCluster, block_size: int) -> configuration.ClusterConfig:
    engine = cluster.config.engine.model_copy(update={"block_size": block_size})
    return cluster.config.model_copy(update={"engine": engine})
