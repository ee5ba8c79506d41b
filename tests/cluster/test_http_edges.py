"""Clients that do not read, that leave while nobody reads, and that send what nothing can carry."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import Any

import httpx
import pytest

from kvferry.engine.base import RequestId
from kvferry.gateway import admission
from kvferry.gateway.admission import CountedRequest
from kvferry.gateway.bodies.openai_bodies import MAX_CHOICES
from kvferry.gateway.http import asgi, openai_endpoint
from kvferry.gateway.http.openai_responses import encode
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.membership.base import MemberKind
from support.beside import beside
from support.hostile_inputs import HEAD
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running

BODY: dict[str, Any] = {"model": MODEL, "prompt": "one two", "max_tokens": 5000, "ignore_eos": True, "stream": True}


class Client:
    """An ASGI server's side of one request, whose client stops reading after some messages."""

    def __init__(self, body: dict[str, Any], reads: int) -> None:
        self._body: bytes | None = json.dumps(body).encode()
        self._reads = reads
        self.blocked = asyncio.Event()
        self.left = asyncio.Event()
        self.received: list[dict[str, Any]] = []

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "path": "/v1/completions",
            "method": "POST",
            "headers": [(b"content-type", b"application/json")],
        }

    async def receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if len(self.received) >= self._reads:
            self.blocked.set()
            await asyncio.Event().wait()
        self.received.append(message)


async def test_a_client_that_never_reads_does_not_keep_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LINGER_S", 0.2)
    async with running(gateway={"http_port": 0, "request_timeout_s": 0.5}) as cluster:
        assert cluster.gateway is not None
        app, client = cluster.gateway.app, Client(BODY, reads=3)
        async with asyncio.timeout(SOON_S):
            await app(client.scope(), client.receive, client.send)
        assert cluster.gateway.admission.num_in_flight == 0
        await cluster.until_quiet()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_while_it_does_not_read(cluster: SimCluster, n: int) -> None:
    assert cluster.gateway is not None
    client = Client({**BODY, "n": n}, reads=3)
    async with beside(cluster.gateway.app(client.scope(), client.receive, client.send)) as (serving,):
        await client.blocked.wait()
        gc.disable()  # what the client left is released by whoever held it, not found later
        try:
            client.left.set()
            async with asyncio.timeout(SOON_S):
                await serving
            await cluster.until_quiet()
        finally:
            gc.enable()


async def test_a_gateway_stops_though_a_client_does_not_read(cluster: SimCluster) -> None:
    gateway = cluster.gateway
    assert gateway is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps({**BODY, "logprobs": 5, "n": 8}).encode()
    head = HEAD % len(body)
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(head + body)
    await until(lambda: gateway.admission.num_in_flight == 1)
    async with asyncio.timeout(SOON_S):
        await gateway.stop()
    assert not gateway._server.state.tasks
    assert gateway.admission.num_in_flight == 0
    writer.transport.abort()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_the_engine_aborts_ends_in_an_error_event(cluster: SimCluster, n: int) -> None:
    (decode,) = cluster.engines(MemberKind.DECODE)
    async with (
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/completions", json={**BODY, "n": n}) as answer,
    ):
        pieces = answer.aiter_text()
        raw = await anext(pieces)
        name = answer.headers["x-request-id"]
        await decode.abort(RequestId(f"{name}-0"))
        async for piece in pieces:
            raw += piece
    *_, error, done = [line.removeprefix("data: ") for line in raw.split("\n\n") if line]
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "engine_error"
    await cluster.until_quiet()


async def test_a_failure_inside_the_gateway_mid_stream_ends_in_an_error_event(
    cluster: SimCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_texts = 0

    def failing(text: str) -> bytes:
        nonlocal num_texts
        num_texts += 1
        if num_texts == 3:
            raise RuntimeError("the cause")
        return encode(text)

    monkeypatch.setattr(openai_endpoint, "encode", failing)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        answer = await http.post("/v1/completions", json=BODY)
    *_, error, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "engine_error"
    assert "the cause" in caplog.text
    await cluster.until_quiet()


@pytest.mark.parametrize(
    "values",
    [
        {"top_k": 2**40},
        {"top_k": 2**70},
        {"min_tokens": 2**40},
        {"max_tokens": 2**40},
        {"stop_token_ids": [2**40]},
        {"allowed_token_ids": [2**40]},
        {"logit_bias": {str(2**40): 1}},
        {"logit_bias": {"²": 1}},
        {"prompt": [2**40]},
        {"prompt": [[1], [2**40]]},
        {"prompt": ["x"] * (MAX_CHOICES + 1)},
        {"prompt": ["x"] * (MAX_CHOICES // 2 + 1), "n": 2},
    ],
    ids=lambda values: str(values)[:40],
)
async def test_numbers_that_nothing_can_carry_are_the_clients_to_mend(http: httpx.AsyncClient, values: Any) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 2, **values})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_nested_too_deeply_is_400(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", content=b'{"prompt":' + b"[" * 40_000)
    assert answer.status_code == 400
    assert "nested" in answer.json()["error"]["message"]


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63), 0])
async def test_every_seed_does_for_several_choices(http: httpx.AsyncClient, seed: int) -> None:
    body = {**BODY, "stream": False, "max_tokens": 4, "seed": seed, "n": 3}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert len({choice["text"] for choice in answer.json()["choices"]}) > 1


async def test_an_upgrade_to_a_web_socket_is_not_taken(cluster: SimCluster, caplog: pytest.LogCaptureFixture) -> None:
    headers = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        answer = await http.get("/v1/models", headers=headers)
    assert answer.status_code == 200
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_after_a_large_body_is_noticed(cluster: SimCluster) -> None:
    gateway = cluster.gateway
    assert gateway is not None
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = json.dumps({**BODY, "user": "x" * (200 << 10)}).encode()
    writer.write(HEAD % len(body))
    await until(lambda: gateway.admission.num_in_flight == 1)
    # All in one read, so that much of it waits when the body ends.
    writer.write(body)
    (decode,) = cluster.engines(MemberKind.DECODE)
    await until(lambda: decode.stats().num_running == 1)
    writer.transport.abort()
    await until(lambda: gateway.admission.num_in_flight == 0)
    assert cluster.metric("kvferry_requests_cancelled_total") == 1
    await cluster.until_quiet()


async def test_a_gateway_that_stops_at_once_ends_its_requests_quietly(caplog: pytest.LogCaptureFixture) -> None:
    async with running(sim={"step_ms": 20.0}) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        clients = []
        for body in (BODY, {**BODY, "stream": False}):
            raw = json.dumps(body).encode()
            clients.append(await asyncio.open_connection("127.0.0.1", gateway.port))
            clients[-1][1].write(HEAD % len(raw) + raw)
        trickling = await trickled(gateway, 4096, 100)
        assert (await clients[0][0].readline()).startswith(b"HTTP/1.1 200")
        await until(lambda: gateway.admission.num_in_flight == 3, within_s=SOON_S)
        await gateway.stop()
        assert gateway.admission.num_in_flight == 0
        refused = await clients[1][0].read()
        assert refused.startswith(b"HTTP/1.1 503"), refused
        for _, writer in clients:
            writer.transport.abort()
        trickling.transport.abort()
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def trickled(gateway: GatewayHost, size: int, sent: int) -> asyncio.StreamWriter:
    """A request whose body has not come whole."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(HEAD % size + b" " * sent)
    return writer


async def test_bodies_on_their_way_take_no_places_but_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING_BODY_BYTES", 8192)
    limits = {"max_requests": 1, "max_body_bytes": 4096}
    async with running(gateway=limits) as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        gateway = cluster.gateway
        assert gateway is not None
        body = {"model": MODEL, "prompt": "one two", "max_tokens": 2}
        writers = [await trickled(gateway, 4096, 3000) for _ in range(2)]
        await until(lambda: gateway.admission.body_bytes.num_taken == 6000, what="bytes count as they arrive")
        assert (await http.post("/v1/completions", json=body)).status_code == 200, "neither has the only place"
        refused = await http.post("/v1/completions", json={**body, "user": "x" * 3000})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "those of all requests may have 8192" in refused.json()["error"]["message"]
        assert cluster.metric("kvferry_body_bytes_in_flight") == 6000
        for writer in writers:
            writer.transport.abort()
        await until(lambda: gateway.admission.in_flight == (0, 0, 0), what="their bytes are free again")
        assert (await http.post("/v1/completions", json={**body, "user": "x" * 3000})).status_code == 200


async def test_bodies_that_do_not_end_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING_BODY_BYTES", 8192)
    limits = {"max_body_bytes": 4096}
    async with running(gateway=limits) as cluster, httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        gateway = cluster.gateway
        assert gateway is not None
        body = {"model": MODEL, "prompt": "one two", "max_tokens": 2, "user": "x" * 1000}
        writers = [await trickled(gateway, 4096, sent) for sent in (4095, 4001)]
        await until(lambda: gateway.admission.body_bytes.num_taken == 8096, what="they hold nearly all")
        assert (await http.post("/v1/completions", json=body)).status_code == 429, "they may be on their way"
        monkeypatch.setattr(admission, "PATIENCE_S", 0.0)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        await until(lambda: gateway.admission.num_in_flight == 1, what="one is cut")
        assert gateway.admission.body_bytes.num_taken in (4001, 4095), "one was enough"
        assert cluster.metric('kvferry_requests_refused_total{code="overloaded"}') == 2
        for writer in writers:
            writer.transport.abort()
        await until(lambda: gateway.admission.in_flight == (0, 0, 0))
        assert not gateway.admission.arriving


async def test_bytes_of_a_body_are_free_once_its_prompt_is_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING_BODY_BYTES", 4096)
    limits = {"max_body_bytes": 4096}
    padded = {**BODY, "user": "y" * 3000}
    async with (
        running(gateway=limits, sim={"step_ms": 20.0}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        assert cluster.gateway is not None
        async with http.stream("POST", "/v1/completions", json=padded) as answer:
            await anext(answer.aiter_bytes())
            assert cluster.metric("kvferry_body_bytes_in_flight") == 0
            assert cluster.gateway.admission.num_in_flight == 1
            # Not isinstance, which asks proxies of other tests' modules for their classes.
            counted = [found for found in gc.get_objects() if type(found) is CountedRequest]
            assert counted
            assert not any(b"yyy" in found.body for found in counted)
            async with http.stream("POST", "/v1/completions", json=padded) as other:
                assert other.status_code == 200


async def test_places_are_choices() -> None:
    async with (
        running(gateway={"max_requests": 4}, sim={"step_ms": 20.0}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        async with http.stream("POST", "/v1/completions", json={**BODY, "n": 3}) as answer:
            await anext(answer.aiter_bytes())
            assert cluster.metric("kvferry_choices_in_flight") == 3
            two = await http.post("/v1/completions", json={**BODY, "n": 2})
            assert (two.status_code, two.json()["error"]["code"]) == (429, "overloaded")
            one = {**BODY, "stream": False, "max_tokens": 2}
            assert (await http.post("/v1/completions", json=one)).status_code == 200
        five = await http.post("/v1/completions", json={**BODY, "n": 5})
        assert five.status_code == 400
        assert "gateway.max_requests is 4" in five.json()["error"]["message"]


async def test_prompt_tokens_in_flight_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_PENDING_PROMPT_TOKENS", 8192)
    async with (
        running(sim={"step_ms": 20.0}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        long = {**BODY, "prompt": [7] * 5000, "max_tokens": 500}
        async with http.stream("POST", "/v1/completions", json=long) as answer:
            await anext(answer.aiter_bytes())
            refused = await http.post("/v1/completions", json=long)
            assert refused.status_code == 429
            assert "a gateway takes 8192" in refused.json()["error"]["message"]
        both = await http.post("/v1/completions", json={**long, "n": 2})
        assert both.status_code == 400


async def test_refusals_before_an_endpoint_are_counted() -> None:
    async with running() as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        assert (await http.get("/v1/nothing")).status_code == 404
        assert (await http.get("/" + "x" * 9000)).status_code == 414
        assert (await http.get("/healthz", headers={f"h{i}": "x" for i in range(200)})).status_code == 431
        for code in ("route_not_found", "url_too_long", "headers_too_large"):
            assert cluster.metric(f'kvferry_requests_refused_total{{code="{code}"}}') == 1
