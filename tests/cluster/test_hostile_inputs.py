"""Hundreds of hostile inputs at once to one gateway process: each gets the right answer, and nobody else notices.

A stream beside them is whole and exact, the gateway's memory is bounded, and all it counts returns to zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from bench.chaos.fleet import fleet
from kvferry.errors import MAX_ERROR_BYTES
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.membership.base import MemberKind
from kvferry.util.addresses import free_port
from support.hostile_inputs import (
    BODIES,
    CALLS,
    CLOSED,
    HEAD,
    MAX_BODY_BYTES,
    MAX_MODEL_LEN,
    MODEL,
    REQUESTS,
    Body,
    Call,
    Request,
)
from support.waiting import PATIENCE_S, SOON_S

# Of the gateway process. Measured: 77 MiB at rest, 107 MiB at most, with all cases side by side.
MAX_RSS_BYTES = 256 << 20
NUM_IDLE = 1000
AT_ONCE = 16
ANSWER_TIMEOUT_S = 40.0
MAX_ANSWER_BYTES = MAX_ERROR_BYTES + 1024  # of an error: its message, escaped, and what surrounds it

NEIGHBOUR: dict[str, Any] = {
    "model": MODEL, "prompt": "the neighbour", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True,
}  # fmt: skip


@dataclass
class Gateway:
    """A gateway process: its addresses, and what is seen of it from outside."""

    port: int
    grpc_port: int
    pid: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory_bytes(self, field: str) -> int:
        """`VmRSS` now, or `VmHWM`, the most there was."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))

    async def in_flight(self, http: httpx.AsyncClient) -> dict[str, float]:
        rows = (await http.get(f"{self.url}/metrics")).text.splitlines()
        return {row.split()[0]: float(row.split()[1]) for row in rows if "_in_flight" in row and row[0] != "#"}


@asynccontextmanager
async def gateway_process(folder: Path) -> AsyncIterator[Gateway]:
    grpc_port = free_port()
    config = {
        "grpc_port": grpc_port,
        "max_body_bytes": MAX_BODY_BYTES,
        "placement": "round_robin",
        "max_requests": 4096,
        "queue_timeout_s": 120.0,  # a slow machine refuses nothing here
    }
    sim = {"step_ms": 5.0, "prefill_tokens_per_s": 500_000.0, "max_model_len": MAX_MODEL_LEN, "num_pages": 16_384}
    worker = {"max_requests": 4096}
    async with fleet(folder, prefill=1, decode=1, gateways=1, gateway=config, sim=sim, worker=worker) as running:
        await running.complete()
        (process,) = running.of(MemberKind.GATEWAY)
        assert process.process is not None
        yield Gateway(process.port, grpc_port, process.process.pid, process.log)


async def neighbours_text(gateway: Gateway, http: httpx.AsyncClient) -> str:
    text, is_whole = "", False
    async with http.stream("POST", f"{gateway.url}/v1/completions", json=NEIGHBOUR, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
            is_whole = line == "data: [DONE]" or (is_whole and not line)
    assert is_whole
    return text


def fault_of_error(status: int, raw: bytes) -> str:
    """Return what is wrong with an error's body, or ""."""
    if status < 400:
        return ""
    if len(raw) > MAX_ANSWER_BYTES:
        return f"an error of {len(raw)} bytes"
    try:
        error = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        return f"no error of OpenAI's shape: {raw[:100]!r}"
    if not (error.get("message") and error.get("type") and "Traceback" not in error["message"]):
        return f"an error without its parts, or with a traceback: {raw[:200]!r}"
    return ""


async def fault_of_body(gateway: Gateway, http: httpx.AsyncClient, case: Body) -> str:
    headers = {"content-type": "application/json"}
    answer = await http.post(gateway.url + case.path, content=case.raw, headers=headers, timeout=ANSWER_TIMEOUT_S)
    if answer.status_code != case.status or case.said not in answer.text:
        return f"{answer.status_code} instead of {case.status}: {answer.text[:200]}"
    return fault_of_error(answer.status_code, answer.content)


async def read_answer(reader: asyncio.StreamReader, *, is_head: bool = False) -> tuple[int, bytes]:
    """Return status and body, or CLOSED."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return int(head.split()[1]), b"" if is_head else await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return CLOSED, b""


async def fault_of_request(gateway: Gateway, case: Request) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)

    async def send() -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(case.raw)
            await writer.drain()
            if case.ends:
                writer.write_eof()

    sending = asyncio.create_task(send())
    try:
        for expected in case.statuses:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                status, raw = await read_answer(reader, is_head=case.raw.startswith(b"HEAD "))
            if status not in expected:
                return f"{status} instead of {expected}: {raw[:200]!r}"
            if raw and (fault := fault_of_error(status, raw)):
                return fault
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.transport.abort()
    return ""


async def fault_of_call(channel: grpc.aio.Channel, case: Call) -> str:
    call = channel.unary_stream(case.method)(case.raw, metadata=case.metadata, timeout=ANSWER_TIMEOUT_S)
    code, details = "OK", ""
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        code, details = error.code().name, error.details() or ""
    if code not in case.code.split("|"):
        return f"{code} instead of {case.code}: {details[:200]}"
    if len(details) > 2 * MAX_ERROR_BYTES or "Traceback" in details:
        return f"details of {len(details)} characters: {details[:100]}"
    return ""


# Clients that are slow, or leave; each returns what is wrong, or "".


async def slow_headers(gateway: Gateway) -> str:
    """A byte of a header now and then: the timer runs from the first byte, whatever comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n")
    answer = asyncio.create_task(read_answer(reader))
    begun_s = time.monotonic()
    while not (await asyncio.wait((answer,), timeout=1.0))[0]:
        with contextlib.suppress(ConnectionError):
            writer.write(b"x: y\r\n")
    writer.transport.abort()
    took_s = time.monotonic() - begun_s
    return "" if answer.result()[0] == 408 and took_s < 40 else f"{answer.result()} after {took_s:.0f} s"


async def slow_body(gateway: Gateway) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(HEAD % 1000 + b"{")
    status, raw = await read_answer(reader)
    writer.transport.abort()
    return fault_of_error(status, raw) if status == 408 else f"{status} instead of 408"


async def leaves_at_once(gateway: Gateway) -> str:
    """Within headers, within a body, within an answer, and with half a connection."""
    body = json.dumps({**NEIGHBOUR, "n": 4}).encode()
    head = HEAD % len(body)
    for raw in (b"POST", head, head + body[:20], head + body):
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw)
        await writer.drain()
        if raw == head + body:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
    return ""


async def cancelled_calls(gateway: Gateway) -> str:
    """Cancelled at once, within an answer, and more streams than a connection carries, which wait for one another."""
    request = pb.GenerateRequest(
        model=MODEL, text="x", num_choices=2, sampling=pb.Sampling(max_tokens=2000, ignore_eos=True)
    ).SerializeToString()
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}", options=options) as channel:
        stream = channel.unary_stream("/kvferry.inference.v1.Inference/GenerateStream")
        half_open = channel.stream_stream("/kvferry.inference.v1.Inference/Generate")
        for _ in range(50):
            stream(request).cancel()
        reading = stream(request)
        await reading.read()
        reading.cancel()
        silent = [half_open() for _ in range(1500)]
        for call in silent:
            call.cancel()
    return ""


async def idle_connections(gateway: Gateway) -> str:
    """They are open together, and end by themselves."""
    opened = await asyncio.gather(
        *(asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(NUM_IDLE)), return_exceptions=True
    )
    failed = [each for each in opened if isinstance(each, BaseException)]
    if failed:
        return f"{len(failed)} of {NUM_IDLE} were not accepted: {failed[0]}"
    connections = [each for each in opened if not isinstance(each, BaseException)]
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        left = await asyncio.gather(*(reader.read() for reader, _ in connections), return_exceptions=True)
    for _, writer in connections:
        writer.transport.abort()
    answered = sum(each != b"" for each in left)
    return f"{answered} of {NUM_IDLE} did not just end" if answered else ""


CLIENTS: tuple[Callable[[Gateway], Awaitable[str]], ...] = (
    slow_headers, slow_body, leaves_at_once, cancelled_calls, idle_connections,
)  # fmt: skip


async def faults_of(cases: Iterable[tuple[str, Callable[[], Awaitable[str]]]], at_once: int) -> list[str]:
    """Run the cases, some at once; return the faults with the names of their cases."""
    slots, faults = asyncio.Semaphore(at_once), []

    async def run(name: str, check: Callable[[], Awaitable[str]]) -> None:
        async with slots:
            try:
                fault = await check()
            except (OSError, httpx.HTTPError, TimeoutError, EOFError) as error:
                fault = repr(error)
        if fault:
            faults.append(f"{name}: {fault}")

    await asyncio.gather(*(run(name, check) for name, check in cases))
    return faults


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    names = [case.name for case in (*BODIES, *REQUESTS, *CALLS)]
    assert len(names) + len(CLIENTS) >= 600
    assert len(set(names)) == len(names)


async def test_a_gateway_answers_each_hostile_input_and_others_do_not_notice(tmp_path: Path) -> None:
    async with gateway_process(tmp_path) as gateway, httpx.AsyncClient() as http:
        alone = await neighbours_text(gateway, http)
        at_rest = gateway.memory_bytes("VmRSS")
        begun_s = time.monotonic()
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with (
            httpx.AsyncClient(limits=limits) as clients,
            grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
        ):
            # A default argument binds the case of this turn.
            groups = (
                [(client.__name__, lambda c=client: c(gateway)) for client in CLIENTS],
                [(case.name, lambda c=case: fault_of_body(gateway, clients, c)) for case in BODIES],
                [(case.name, lambda c=case: fault_of_request(gateway, c)) for case in REQUESTS],
                [(case.name, lambda c=case: fault_of_call(channel, c)) for case in CALLS],
            )
            beside = asyncio.create_task(neighbours_text(gateway, http))
            found = await asyncio.gather(*(faults_of(group, AT_ONCE) for group in groups))
            texts = [await beside, await neighbours_text(gateway, http)]
        took_s = time.monotonic() - begun_s
        faults = [fault for group in found for fault in group]
        assert not faults, f"{len(faults)} wrong answers:\n" + "\n".join(faults)
        assert texts == [alone, alone]

        async def all_ended() -> bool:
            return not any((await gateway.in_flight(http)).values())

        async with asyncio.timeout(SOON_S):
            while not await all_ended():  # noqa: ASYNC110  another process's
                await asyncio.sleep(0.05)
        assert len(await gateway.in_flight(http)) == 5
        peak = gateway.memory_bytes("VmHWM")
        print(f"{took_s:.0f} s; RSS {at_rest >> 20} MiB at rest, {peak >> 20} MiB at most")
        assert peak < MAX_RSS_BYTES
        log = gateway.log.read_text()
        assert "Traceback" not in log, log[-4000:]
        assert len(log) < 64 << 10
