"""The OpenAI endpoints over real HTTP, with sim engines behind them."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from kvferry.engine.base import EngineOutput, EngineRequest
from kvferry.membership.base import MemberKind
from kvferry_client import AsyncClient
from kvferry_sim import SimEngine
from support.waiting import PATIENCE_S, until

from .conftest import MODEL, SimCluster, running

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "tell me of the river"}]}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "one two three four", "max_tokens": 8, "ignore_eos": True}


def events(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_a_request_is_prefilled_on_one_worker_and_decoded_on_another(
    cluster: SimCluster, http: httpx.AsyncClient
) -> None:
    prompt = " ".join(f"w{i}" for i in range(40))
    answer = await http.post("/v1/completions", json={**COMPLETION, "prompt": prompt}, headers={"x-kvferry-debug": "1"})
    assert answer.status_code == 200
    record = answer.json()["kvferry"]
    assert record["reason"] == "disaggregated"
    assert record["prefill_worker"] == cluster.hosts(MemberKind.PREFILL)[0].worker_id
    assert record["decode_worker"] == cluster.hosts(MemberKind.DECODE)[0].worker_id
    assert record["prompt_tokens_by_source"] == {"local_compute": 0, "local_cache_hit": 0, "external_kv_transfer": 41}
    assert record["cached_prompt_tokens_by_tier"] == {"device": 0, "cpu": 0, "volume": 0, "ferry": 41}
    assert record["ferried_pages"] == 3  # of 16 tokens each
    assert cluster.engines(MemberKind.DECODE)[0].stats().prompt_tokens.external_kv_transfer == 41


async def test_streamed_and_whole_answers_are_the_same(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "temperature": 0, "stream_options": {"include_usage": True}}
    whole = (await http.post("/v1/completions", json=body)).json()
    streamed = events((await http.post("/v1/completions", json={**body, "stream": True})).text)
    assert "".join(event["choices"][0]["text"] for event in streamed[:-1]) == whole["choices"][0]["text"]
    assert streamed[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    assert streamed[-1]["choices"] == []
    for usage in (whole["usage"], streamed[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 8, 13)  # with bos
    assert all(event["usage"] is None for event in streamed[:-1])
    assert len({event["id"] for event in streamed}) == 1


async def test_the_openai_client_unmodified(cluster: SimCluster) -> None:
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        models = [model.id async for model in client.models.list()]
        assert models == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL

        chat = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello there"}],
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=2,
            extra_body={"ignore_eos": True},
        )
        assert chat.choices[0].finish_reason == "length"
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 6
        logprobs = chat.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 6
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        assert "".join(entry.token for entry in logprobs.content) == chat.choices[0].message.content

        text, finish, usage = "", None, None
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello there"}],
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
            usage = chunk.usage or usage
        assert text == chat.choices[0].message.content
        assert finish == "length"
        assert usage == chat.usage

        several = await client.completions.create(model=MODEL, prompt=["a b", "c d e"], n=2, max_tokens=3, seed=5)
        assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
        assert several.usage is not None
        assert several.usage.prompt_tokens == 7  # two prompts, a bos each

        again = await client.completions.create(model=MODEL, prompt=["a b", "c d e"], n=2, max_tokens=3, seed=5)
        assert [choice.text for choice in again.choices] == [choice.text for choice in several.choices]

        with pytest.raises(NotFoundError):
            await client.completions.create(model="other", prompt="x")
        with pytest.raises(BadRequestError):
            await client.completions.create(model=MODEL, prompt="x", max_tokens=10**6)


async def test_stop_strings_end_the_answer_and_are_cut(http: httpx.AsyncClient) -> None:
    body = {**COMPLETION, "temperature": 0, "max_tokens": 20}
    text = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
    word = text.split()[3]
    stopped = (await http.post("/v1/completions", json={**body, "stop": [word]})).json()["choices"][0]
    assert stopped["finish_reason"] == "stop"
    assert stopped["stop_reason"] == word
    assert stopped["text"] == text[: text.index(word)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"{not json", 400, "not valid JSON"),
        (b'{"model": "other", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}', 400, "unrecognized"),
        (b"[]", 400, "JSON object"),
    ],
)
async def test_bad_bodies_get_openais_error_shape(
    http: httpx.AsyncClient, path: str, content: bytes, status: int, says: str
) -> None:
    answer = await http.post(path, content=content)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in answer.text


async def test_an_unknown_model_is_404_and_names_what_is_served(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, "model": "gpt-9"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert "gpt-9" in answer.json()["error"]["message"]
    assert MODEL in answer.json()["error"]["message"]


async def test_over_the_context_is_400_with_the_numbers(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**COMPLETION, "max_tokens": 8190})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in ("8192", "5", "8190"):
        assert number in error["message"]


async def test_routes_methods_and_limits(http: httpx.AsyncClient) -> None:
    assert (await http.get("/nowhere")).status_code == 404
    refused = await http.get("/v1/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["param"] is None
    big = b'{"model": "' + b"x" * (9 << 20) + b'"}'
    declared = await http.post("/v1/completions", content=big)
    assert declared.status_code == 413
    assert declared.json()["error"]["code"] == "body_too_large"
    assert declared.json()["error"]["message"] == f"the body is {len(big)} bytes; gateway.max_body_bytes is {8 << 20}"

    async def pieces() -> Any:
        for start in range(0, len(big), 1 << 20):
            yield big[start : start + (1 << 20)]

    chunked = await http.post("/v1/completions", content=pieces())
    assert chunked.status_code == 413
    assert (await http.get("/healthz")).status_code == 200


async def test_not_ready_is_503_with_retry_after() -> None:
    async with running(prefill=1, decode=0) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        ready = await http.get("/readyz")
        assert ready.status_code == 503
        assert ready.json()["ready"] is False
        answer = await http.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_decode_worker"
        assert (await http.get("/healthz")).status_code == 200


async def test_too_many_requests_are_429() -> None:
    async with running(gateway={"http_port": 0, "max_requests": 2}, sim={"step_ms": 50.0}) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            answers = await asyncio.gather(*(http.post("/v1/completions", json=COMPLETION) for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert int(refused.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_cancels_on_both_workers(cluster: SimCluster) -> None:
    assert cluster.gateway is not None
    decode, prefill = cluster.engines(MemberKind.DECODE)[0], cluster.engines(MemberKind.PREFILL)[0]
    body = {**COMPLETION, "max_tokens": 5000, "stream": True}
    async with (
        httpx.AsyncClient(base_url=cluster.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        await anext(answer.aiter_bytes())
        assert decode.stats().num_running == 1
    await until(lambda: decode.stats().num_running == 0, what="the decode engine dropped the request")
    await until(lambda: prefill.stats().num_running == 0, what="the prefill engine dropped the request")
    gateway = cluster.gateway
    await until(lambda: gateway.admission.num_in_flight == 0)
    assert b'kvferry_requests_total{endpoint="completions",status="499"} 1.0' in gateway.metrics.render()


async def test_streams_are_sent_without_nagles_delay(cluster: SimCluster) -> None:
    """The accepted socket has TCP_NODELAY: chunks of a few bytes must not wait for acknowledgements."""
    assert cluster.gateway is not None
    body = {**COMPLETION, "max_tokens": 2000, "stream": True}
    async with (
        httpx.AsyncClient(base_url=cluster.url) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        await anext(answer.aiter_bytes())
        connections = list(cluster.gateway._server.state.connections)
        assert connections
        for connection in connections:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_metrics_tell_what_happened(cluster: SimCluster, http: httpx.AsyncClient) -> None:
    await http.post("/v1/completions", json=COMPLETION)
    decode = cluster.hosts(MemberKind.DECODE)[0].worker_id

    async def text() -> str:
        return (await http.get("/metrics")).text

    wanted = f'kvferry_worker_prompt_tokens_total{{role="decode",source="external_kv_transfer",worker="{decode}"}} 5.0'
    for _ in range(100):
        if wanted in (seen := await text()):
            break
        await asyncio.sleep(0.02)
    assert wanted in seen
    assert 'kvferry_requests_total{endpoint="completions",status="200"} 1.0' in seen
    assert 'kvferry_placements_total{reason="disaggregated"} 1.0' in seen
    assert 'kvferry_prefill_fallbacks_total{cause="timeout"} 0.0' in seen
    assert "kvferry_time_to_first_token_seconds_count 1.0" in seen


async def test_how_long_pages_are_wanted_reaches_every_worker_and_is_counted(
    cluster: SimCluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[float | None] = []
    generate = SimEngine.generate

    def record(self: SimEngine, request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        said.append(None if request.tier is None else request.tier.wanted_s)
        return generate(self, request, **of_worker)

    monkeypatch.setattr(SimEngine, "generate", record)
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", {**CHAT, "max_tokens": 2})):
        for fields in ({"cache_ttl_s": 90}, {"cache_ttl_s": 0}, {"prompt_cache_retention": "24h"}, {}):
            prompt = {"prompt": f"{fields} one two"} if "prompt" in body else {}
            assert (await http.post(path, json={**body, **prompt, **fields})).status_code == 200
    assert cluster.gateway is not None
    async with AsyncClient(f"localhost:{cluster.gateway.grpc.port}") as client:
        await client.generate("one two three", max_tokens=2, cache_ttl_s=45.5)
    assert {45.5, 90.0, 0.0, 86400.0, None} == set(said)
    assert said.count(90.0) >= 3, "prefill and decode worker of a prompt"
    seen = (await http.get("/metrics")).text
    assert 'kvferry_hinted_requests_total{hint="wanted"} 5.0' in seen
    assert 'kvferry_hinted_requests_total{hint="end"} 2.0' in seen


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("value", ["-1", "86400.5", "1e999", "NaN", '"1h"', "[0]", "true"])
async def test_a_time_that_no_page_may_be_wanted_for_is_refused(http: httpx.AsyncClient, path: str, value: str) -> None:
    body = CHAT if path.endswith("chat/completions") else COMPLETION
    raw = json.dumps(body)[:-1] + f', "cache_ttl_s": {value}}}'
    answer = await http.post(path, content=raw)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "cache_ttl_s" or "not valid JSON" in error["message"]


async def test_choices_of_a_cold_prompt_report_no_cached_tokens(http: httpx.AsyncClient) -> None:
    body = {"model": MODEL, "prompt": " ".join(f"cold{i}" for i in range(200)), "max_tokens": 2, "n": 4}
    cold = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    warm = (await http.post("/v1/completions", json=body)).json()["usage"]
    assert warm["prompt_tokens_details"]["cached_tokens"] >= 150


async def test_a_large_answer_waits_for_its_client_without_a_place() -> None:
    """7 MB, more than the sockets hold: what the client has not read is counted for all connections together."""
    values = {**CHAT, "n": 8, "max_tokens": 512, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(values).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    async with running(sim={"step_ms": 0.1, "prefill_tokens_per_s": 200_000.0}) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        # The client's reader takes at most 128 KiB from its socket until the test asks for more.
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(head.encode() + body)
        status = await reader.readline()
        assert status == b"HTTP/1.1 200 OK\r\n"
        await until(lambda: gateway.admission.num_in_flight == 0, what="its place is free")
        assert gateway.app.unread_answers.num_bytes > 1 << 20
        await reader.readuntil(b"\r\n\r\n")
        choices = json.loads(await reader.read())["choices"]
        assert [len(choice["logprobs"]["content"]) for choice in choices] == [512] * 8
        await until(lambda: gateway.app.unread_answers.num_bytes == 0, what="its bytes are given back")
        writer.close()
