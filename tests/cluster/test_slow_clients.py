"""A client that does not read holds up nobody, and is cut when it has left too much."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import httpx
import pytest

from support.hostile_inputs import HEAD
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, connect, running
from .test_http_edges import Client

BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "one two",
    "max_tokens": 8000,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 20,
}
pytestmark = pytest.mark.usefixtures("small_send_buffers")


async def connect_without_reading(cluster: SimCluster, body: dict[str, Any]) -> socket.socket:
    """A client with a small receive buffer that sends a request and reads nothing of the answer."""
    client = await connect(cluster)
    raw = json.dumps(body).encode()
    await asyncio.get_running_loop().sock_sendall(client, HEAD % len(raw) + raw)
    return client


@pytest.mark.parametrize("n", [1, 4])
async def test_it_is_cut_and_counted_and_its_request_ends_on_the_workers(
    n: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(sim={"step_ms": 0.0}) as cluster:
        assert cluster.gateway is not None
        cluster.gateway.app.unread_answers.max_stream_bytes = 64 << 10
        admission = cluster.gateway.admission
        client = await connect_without_reading(cluster, {**BODY, "n": n})
        try:
            await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1, what="the client was cut")
            await until(lambda: admission.num_in_flight == 0)
            await cluster.until_quiet()
            assert cluster.metric('kvferry_requests_total{endpoint="completions",status="499"}') == 1
            assert "unread" in caplog.text
            assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        finally:
            client.close()


async def test_others_are_served_meanwhile(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        running(sim={"step_ms": 1.0}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        assert cluster.gateway is not None
        clients = [await connect_without_reading(cluster, BODY) for _ in range(3)]
        try:
            await until(lambda: cluster.gateway is not None and cluster.gateway.admission.num_in_flight == 3)
            answer = await http.post("/v1/completions", json={**BODY, "max_tokens": 50, "logprobs": None})
            assert answer.text.endswith("data: [DONE]\n\n")
            assert cluster.metric("kvferry_slow_clients_total") == 0
        finally:
            for client in clients:
                client.close()
        await until(lambda: cluster.gateway is not None and cluster.gateway.admission.num_in_flight == 0)
        await cluster.until_quiet()


async def test_it_is_cut_under_another_server_too() -> None:
    async with running(sim={"step_ms": 0.0}) as cluster:
        assert cluster.gateway is not None
        cluster.gateway.app.unread_answers.max_stream_bytes = 64 << 10
        client = Client(BODY, reads=2)
        async with asyncio.timeout(SOON_S):
            await cluster.gateway.app(client.scope(), client.receive, client.send)
        assert cluster.metric("kvferry_slow_clients_total") == 1
        await cluster.until_quiet()


async def test_another_server_gets_the_same_answer(cluster: SimCluster, http: httpx.AsyncClient) -> None:
    assert cluster.gateway is not None
    body = {**BODY, "max_tokens": 40, "n": 2, "seed": 3}
    client = Client(body, reads=10_000)
    await cluster.gateway.app(client.scope(), client.receive, client.send)
    assert client.received[0]["status"] == 200
    assert [message.get("more_body") for message in client.received[1:]][-1] is False
    through_asgi = b"".join(message["body"] for message in client.received[1:]).decode()
    direct = (await http.post("/v1/completions", json=body)).text

    def texts(answer: str) -> list[str]:
        events = [json.loads(event[6:]) for event in answer.split("\n\n") if event.startswith("data: {")]
        assert answer.endswith("data: [DONE]\n\n")
        return ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in range(2)]

    assert texts(through_asgi) == texts(direct)


async def test_an_answer_behind_one_that_was_not_read_waits_for_it(cluster: SimCluster) -> None:
    """Pipelined: the second answer begins while the connection is still full of the first."""
    assert cluster.gateway is not None
    body = json.dumps({**BODY, "max_tokens": 300}).encode()
    head = HEAD % len(body)
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.gateway.port, limit=1 << 24)
    writer.write((head + body) * 2)
    async with asyncio.timeout(SOON_S):
        for _ in range(2):
            answer = await reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.count(b'"finish_reason":null') == 300
    writer.close()
