from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from rich.console import Console

from bench.neighbours import Sent, Stream, Watches, post, results_of, run_streams, send_all, summary
from bench.results import BenchFailed
from bench.worst_bodies import MAX_BODY_BYTES, MODEL, WORST_BODIES, WorstBody
from kvferry import config as configuration
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.membership.base import MemberKind
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S, until


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port() -> AsyncIterator[int]:
    config = configuration.parse(
        {
            "model": {"served_name": MODEL},
            "engine": {"kind": "sim", "block_size": 16, "max_num_seqs": 512},
            "prefill": {"replicas": 0},
            "decode": {"replicas": 1},
            "gateway": {"http_port": 0, "grpc_port": None},
            "sim": {"step_ms": 0, "prefill_tokens_per_s": 1_000_000, "num_pages": 32_768},
        }
    )
    registry = MemoryRegistry()
    engine = build_engine(config, MemberKind.DECODE, MODEL)
    worker = WorkerHost(config, MemberKind.DECODE, engine, MemoryMembership(registry))
    gateway = GatewayHost(config, MODEL, MemoryMembership(registry))
    await worker.start()
    await gateway.start()
    await until(lambda: gateway.readiness().ready)
    yield gateway.port
    await gateway.stop()
    await worker.stop()


def test_there_are_enough_bodies_with_names_of_their_own() -> None:
    assert len(WORST_BODIES) >= 25
    assert not [name for name, times in Counter(body.name for body in WORST_BODIES).items() if times > 1]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("body", WORST_BODIES, ids=lambda body: body.name)
async def test_each_gets_its_status(port: int, body: WorstBody) -> None:
    raw = body.build()
    assert len(raw) <= MAX_BODY_BYTES
    assert await asyncio.to_thread(post, port, body.path, raw) == body.expected(simulated=True)


def test_gaps_count_for_the_body_whose_window_they_end_in() -> None:
    body, other = WORST_BODIES[:2]
    sent = [
        Sent(body, 10, windows=[(1.0, 2.0), (3.0, 4.0)], quiet=[(2.0, 3.0), (4.0, 5.0)]),
        Sent(other, 20, windows=[(5.0, 6.0)], quiet=[(6.0, 7.0)]),
    ]
    gaps = [(1.5, 0.010), (1.6, 0.004), (3.5, 0.030), (2.5, 0.007), (5.5, 0.002)]
    heartbeats = [(1.5, 0.009, 0.008), (3.2, 0.001, 0.020)]
    first, second = results_of(sent, gaps, heartbeats, simulated=False)
    assert (first["gap_ms"], first["median_gap_ms"], first["quiet_gap_ms"]) == (30.0, 20.0, 7.0)
    assert (first["loop_late_ms"], first["loop_cpu_ms"]) == (9.0, 20.0)
    assert second["gap_ms"] == 2.0
    said = summary([first, second])
    assert (said["worst_gap_ms"], said["worst_body"], said["bodies"]) == (30.0, body.name, 2)
    assert said["baseline_gap_ms"] == 7.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_gets_another_status_ends_it_and_those_before_are_kept(port: int) -> None:
    good = next(body for body in WORST_BODIES if body.name == "numbers with exponents, 60 KiB")
    bad = dataclasses.replace(good, name="bad", status=418)
    sent: list[Sent] = []

    def send() -> None:
        for one in send_all(port, [good, bad, good], 1, Watches(set()), Console(quiet=True), simulated=True):
            sent.append(one)

    with pytest.raises(BenchFailed, match="bad: 200 instead of 418"):
        await asyncio.to_thread(send)
    assert [one.body for one in sent] == [good]


async def test_the_first_stream_that_fails_ends_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    gaps = tmp_path / "gaps.json"
    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        await run_streams({"port": port, "streams": 2, "step_s": 0.005, "gaps": str(gaps)})
    assert json.loads(capsys.readouterr().out) == {"streams": 2}
    assert json.loads(gaps.read_text())["failure"].startswith("HTTP/1.1 503")


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("cut", [0, 4])
async def test_a_stream_that_ends_with_an_error_is_a_failure(cut: int) -> None:
    event = b'data: {"error": {"message": "the engine died"}}\n\n'
    answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b" % (len(event), event)

    async def fail(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        at = answer.index(b"data: ") + cut
        writer.write(answer[:at])
        await asyncio.sleep(0)
        writer.write(answer[at:])
        await writer.drain()
        writer.close()

    failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with await asyncio.start_server(fail, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: Stream(port, 8, 0.01, [], failure), "127.0.0.1", port
        )
        async with asyncio.timeout(SOON_S):
            assert (await failure).startswith('data: {"error"')
        transport.close()
