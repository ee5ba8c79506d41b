"""Limits of the first token, of the next and of the whole, and comments while a stream is silent."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI

from kvferry.gateway.http import asgi
from kvferry.gateway.http.stream_writer import KEEP_ALIVE
from kvferry.membership.base import MemberKind
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running
from .test_gateway_grpc import channel_to, details_of, refused, sampled, stub_on

BODY: dict[str, Any] = {"model": MODEL, "prompt": "one two", "max_tokens": 50, "ignore_eos": True}

# What is slow, and the setting that ends it.
LIMITS = {
    "first_token_timeout_s": {"prefill_tokens_per_s": 1.0, "step_ms": 1.0},
    "inter_token_timeout_s": {"prefill_tokens_per_s": 1e6, "step_ms": 600.0},
    "request_timeout_s": {"prefill_tokens_per_s": 1e6, "step_ms": 20.0},
}


def slow(limit: str, **gateway: Any) -> Any:
    return running(sim=LIMITS[limit], gateway={limit: 0.4, "placement": "priced", **gateway})


async def let_go(cluster: SimCluster) -> None:
    gateway = cluster.gateway
    assert gateway is not None
    await until(lambda: gateway.admission.num_in_flight == 0)
    await until(lambda: not any(engine.stats().num_running for _, engine in cluster.workers), what="engines let go")
    assert gateway.admission.in_flight == (0, 0, 0)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("limit", LIMITS)
async def test_each_limit_ends_an_answer_and_is_named(limit: str, n: int) -> None:
    async with slow(limit) as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        answer = await http.post("/v1/completions", json={**BODY, "n": n})
        assert answer.status_code == 504, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout")
        assert f"0.4 s (gateway.{limit})" in error["message"]
        await let_go(cluster)


@pytest.mark.parametrize("limit", LIMITS)
async def test_each_limit_ends_a_stream_with_an_event_and_a_call_with_a_status(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi, "MAX_SILENCE_S", 0.05)
    async with (
        slow(limit) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        channel_to(cluster) as channel,
    ):
        answer = await http.post("/v1/completions", json={**BODY, "stream": True})
        assert answer.status_code == 200
        *_, last, done = [line for line in answer.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        assert f"gateway.{limit}" in json.loads(last.removeprefix("data: "))["error"]["message"]
        metrics = (await http.get("/metrics")).text
        assert 'kvferry_requests_refused_total{code="deadline_exceeded"} 1.0' in metrics
        assert 'kvferry_requests_total{endpoint="completions",status="200"} 1.0' in metrics
        for method in ("Generate", "GenerateStream"):
            error = await refused(getattr(stub_on(channel), method)(sampled(max_tokens=50, ignore_eos=True)))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert f"gateway.{limit}" in (error.details() or "")
            assert details_of(error)["ErrorInfo"].reason == "DEADLINE_EXCEEDED"
        await let_go(cluster)


async def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill of half a second: comments come before the first event, and its status with them."""
    monkeypatch.setattr(asgi, "MAX_SILENCE_S", 0.1)
    sim = {"prefill_tokens_per_s": 100.0, "step_ms": 1.0}
    async with (
        running(sim=sim) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        body = {**BODY, "prompt": "word " * 50, "stream": True}
        (prefill,) = cluster.engines(MemberKind.PREFILL)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            was_early = prefill.stats().num_running == 1
            raw = await answer.aread()
        assert was_early
        comments, _, events = raw.partition(b"data: ")
        assert (comments.replace(KEEP_ALIVE, b""), bool(comments)) == (b"", True)
        assert KEEP_ALIVE not in events, "tokens came often enough"
        assert events.endswith(b"data: [DONE]\n\n")


async def test_comments_come_between_tokens_and_openais_client_skips_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_SILENCE_S", 0.05)
    async with (
        running(sim={"step_ms": 150.0}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        body = {**BODY, "max_tokens": 4, "temperature": 0}
        raw = (await http.post("/v1/completions", json={**body, "stream": True})).content
        assert KEEP_ALIVE in raw.partition(b"data: ")[2]
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        stream = await client.completions.create(
            model=MODEL, prompt="one two", max_tokens=4, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        assert "".join([chunk.choices[0].text async for chunk in stream if chunk.choices]) == whole


@pytest.mark.usefixtures("short_worker_wait")
async def test_an_error_after_a_comment_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The status is sent with the first comment."""
    monkeypatch.setattr(asgi, "MAX_SILENCE_S", 0.05)
    async with (
        running(sim={"prefill_tokens_per_s": 10.0}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "stream": True, "prompt": "word " * 500}) as answer,
    ):
        assert answer.status_code == 200
        for host, _ in cluster.workers:
            host.server.engine_died("killed by a test")
        async with asyncio.timeout(SOON_S):
            text = (await answer.aread()).decode()
    *_, last, done = [line for line in text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["type"] in ("service_unavailable", "internal_error")
