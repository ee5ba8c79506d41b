"""Whole answers that their clients do not read: a megabyte, many times what the sockets of these tests hold."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from kvferry.gateway import unread_answers
from kvferry.gateway.unread_answers import STALL_S, UnreadAnswers
from support.beside import beside
from support.waiting import until

from .conftest import MODEL, SimCluster, connect, running
from .test_access import Certificates, certificates

__all__ = ["certificates"]  # a fixture

BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "n": 8,
    "max_tokens": 100,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 20,
}
pytestmark = pytest.mark.usefixtures("small_send_buffers")

MOST = 512 << 10  # bytes of an answer that are left after its head
FAST = {"step_ms": 0.1, "prefill_tokens_per_s": 200_000.0}

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_answers, "LOOK_S", 0.01)


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s

    async def until_stalled(self, condition: Callable[[], bool], what: str) -> None:
        """Let time pass, again and again: the kernel takes some bytes of an answer a moment later."""

        def stalled() -> bool:
            self.time_s += STALL_S
            return condition()

        await until(stalled, what=what)


def unread_of(cluster: SimCluster, clock: Clock | None = None) -> UnreadAnswers:
    assert cluster.gateway is not None
    unread = cluster.gateway.app.unread_answers
    unread._now_s = clock or Clock()
    return unread


async def ask(
    cluster: SimCluster, body: dict[str, Any] = BODY, tls: ssl.SSLContext | None = None, ends: str = "close"
) -> Connection:
    """Send a request; the reader takes at most 128 KiB from its socket until the test asks for more."""
    assert cluster.gateway is not None
    limits = cluster.gateway.app.connection_limits
    num_open = limits.num_open
    reader, writer = await asyncio.open_connection(sock=await connect(cluster))
    if tls is not None:
        await until(lambda: limits.num_open > num_open, what="the gateway has taken the connection")
        await writer.start_tls(tls, server_hostname="localhost")
    raw = json.dumps(body).encode()
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\nconnection: {ends}\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    return reader, writer


async def left_unread(cluster: SimCluster, more_than: int = 0) -> int:
    """Bytes of answers that are not read, once no request is in flight."""
    assert cluster.gateway is not None
    admission, unread = cluster.gateway.admission, cluster.gateway.app.unread_answers
    await until(lambda: unread.num_bytes > more_than and not admission.num_in_flight, what="an answer waits")
    assert admission.in_flight == (0, 0, 0)
    return unread.num_bytes


@pytest.mark.parametrize("ends", ["close", "keep-alive"])
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_a_client_that_never_reads_is_cut(
    certificates: Certificates, caplog: pytest.LogCaptureFixture, has_tls: bool, run: Callable[..., None], ends: str
) -> None:
    async def attempt() -> None:
        gateway = {"tls": certificates.config()} if has_tls else {}
        async with running(sim=FAST, gateway=gateway) as cluster:
            assert cluster.gateway is not None
            clock = Clock()
            unread = unread_of(cluster, clock)
            _, writer = await ask(cluster, tls=certificates.context() if has_tls else None, ends=ends)
            assert await left_unread(cluster) > MOST
            assert cluster.metric("kvferry_unread_answer_bytes") == unread.num_bytes
            limits = cluster.gateway.app.connection_limits
            await clock.until_stalled(lambda: limits.num_open == 0, what="its connection is closed")
            assert unread.num_bytes == 0
            unread.check()
            assert cluster.metric("kvferry_slow_clients_total") == 1
            assert cluster.metric('kvferry_requests_total{endpoint="chat_completions",status="200"}') == 1
            assert "bytes of its answer unread and was cut" in caplog.text
            assert "the client 127.0.0.1:" in caplog.text
            assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
            writer.transport.abort()

    run(attempt())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
def test_a_client_that_never_reads_is_cut_when_the_gateway_stops(
    certificates: Certificates, has_tls: bool, run: Callable[..., None]
) -> None:
    """Its connection was closed, and stayed open to be written to."""

    async def attempt() -> None:
        gateway = {"tls": certificates.config()} if has_tls else {}
        async with running(sim=FAST, gateway=gateway) as cluster:
            assert cluster.gateway is not None
            limits = cluster.gateway.app.connection_limits
            _, writer = await ask(cluster, tls=certificates.context() if has_tls else None)
            assert await left_unread(cluster) > MOST
        assert limits.num_open == 0
        writer.transport.abort()

    run(attempt())


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
async def test_a_draining_gateway_waits_until_answers_are_read(certificates: Certificates, has_tls: bool) -> None:
    gateway = {"tls": certificates.config()} if has_tls else {}
    async with running(sim=FAST, gateway=gateway) as cluster:
        assert cluster.gateway is not None
        reader, writer = await ask(cluster, tls=certificates.context() if has_tls else None)
        await left_unread(cluster)
        async with beside(cluster.gateway.drain()) as (draining,):
            await until(lambda: not cluster.gateway.readiness().ready and cluster.gateway.admission.draining)
            assert not cluster.gateway.admission.num_in_flight
            for _ in range(10):
                await asyncio.sleep(0)
            assert not draining.done()
            reading = asyncio.create_task(reader.read())
            await draining
        await cluster.gateway.stop()
        head, _, body = (await reading).partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}\r\n".encode() in head
        assert len(body) > 1 << 20
        writer.transport.abort()


async def test_a_client_that_does_not_read_keeps_a_gateway_until_its_draining_ends() -> None:
    async with running(sim=FAST, gateway={"drain_timeout_s": 0.01}) as cluster:
        assert cluster.gateway is not None
        _, writer = await ask(cluster)
        await left_unread(cluster)
        await cluster.gateway.drain()
        assert cluster.gateway.app.unread_answers.num_bytes > MOST
        writer.transport.abort()


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
async def test_a_client_that_reads_slowly_gets_its_whole_answer(certificates: Certificates, has_tls: bool) -> None:
    gateway = {"tls": certificates.config()} if has_tls else {}
    async with running(sim=FAST, gateway=gateway) as cluster:
        clock = Clock()
        unread = unread_of(cluster, clock)
        reader, writer = await ask(cluster, tls=certificates.context() if has_tls else None)
        await left_unread(cluster)
        await reader.readuntil(b"\r\n\r\n")
        (entry,) = unread._connections.values()
        answer = b""
        while unread._connections:
            num_before = entry.num_bytes
            while unread._connections and entry.num_bytes >= num_before:
                answer += await reader.read(1 << 16)
                await asyncio.sleep(0)
                unread.look()
            clock.time_s += STALL_S - 1
        assert clock.time_s > 2 * STALL_S
        answer += await reader.read()
        choices = json.loads(answer)["choices"]
        assert [len(choice["logprobs"]["content"]) for choice in choices] == [100] * 8
        assert cluster.metric("kvferry_slow_clients_total") == 0
        assert unread.num_bytes == 0
        writer.close()


async def test_beyond_the_limit_of_all_the_one_that_reads_nothing_is_cut() -> None:
    async with running(sim=FAST) as cluster:
        unread = unread_of(cluster)
        stalls, newer = await ask(cluster), None
        unread.max_bytes = await left_unread(cluster)
        newer = await ask(cluster)
        await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1, what="the first one was cut")
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await stalls[0].readexactly(20 << 20)
        await newer[0].readuntil(b"\r\n\r\n")
        assert len(json.loads(await newer[0].read())["choices"]) == 8
        assert cluster.metric("kvferry_slow_clients_total") == 1
        await until(lambda: unread.num_bytes == 0)
        for _, writer in (stalls, newer):
            writer.transport.abort()


async def test_a_stream_that_is_cut_ends_its_request_on_the_workers() -> None:
    """Its client has left less unread than a stream may."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True, "logprobs": 20}
    async with running(sim={"step_ms": 0.0}) as cluster:
        unread = unread_of(cluster)
        unread.max_stream_bytes = 1 << 30
        stalls = await ask(cluster, body={**body, "n": 4})
        await until(lambda: unread.num_bytes > 0, what="the stream waits")
        unread.max_bytes = 0
        newer = await ask(cluster)
        await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1, what="the stream was cut")
        await until(lambda: cluster.metric('kvferry_requests_total{endpoint="completions",status="499"}') == 1)
        assert cluster.metric("kvferry_requests_cancelled_total") == 0
        await newer[0].readuntil(b"\r\n\r\n")
        assert len(json.loads(await newer[0].read())["choices"]) == 8
        await cluster.until_quiet()
        for _, writer in (stalls, newer):
            writer.transport.abort()


async def test_a_stalled_client_does_not_keep_its_place_for_an_answer_behind() -> None:
    """Pipelined: the second answer waits for the first one to be read."""
    async with running(sim=FAST) as cluster:
        assert cluster.gateway is not None
        admission, clock = cluster.gateway.admission, Clock()
        unread = unread_of(cluster, clock)
        _, writer = await ask(cluster, ends="keep-alive")
        await left_unread(cluster)
        body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 1}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until(lambda: admission.num_in_flight == 1, what="the second request came")
        await clock.until_stalled(lambda: admission.num_in_flight == 0, what="its place is free")
        assert unread.num_bytes == 0
        writer.transport.abort()
