"""The client of bench/gateway.py: the first request that fails ends its run."""

from __future__ import annotations

import asyncio
import json

import pytest

from bench.gateway import Case, run_client

EVENT = b'data: {"choices": []}\n\n'
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (8 * len(EVENT), 8 * EVENT)
CUT = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (2 * len(EVENT), 2 * EVENT)
ERROR = b'data: {"error": {"message": "the engine died"}}\n\n'
ENDED = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (8 * len(EVENT) + len(ERROR), 8 * EVENT + ERROR)
REFUSED = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 9\r\n\r\nno worker"


async def client_says(capsys: pytest.CaptureFixture[str], *answers: bytes) -> dict[str, object]:
    """Return what a client says to whom the answers come in turn, and then the end of the connection."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for each in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
            writer.write(each)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        spec = {
            "case": vars(Case("streams", 1, 3, 8, stream=True)),
            "url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
            "model": "bench",
            "quick_ack": True,
            "time_limit_s": 60.0,
        }
        await run_client(spec)
    said: dict[str, object] = json.loads(capsys.readouterr().out)
    return said


async def test_a_run_counts_its_requests(capsys: pytest.CaptureFixture[str]) -> None:
    said = await client_says(capsys, WHOLE, WHOLE, WHOLE)
    assert (said["requests"], said["events_per_answer"]) == (3, 8)


@pytest.mark.parametrize(
    ("answers", "failure"),
    [
        ([WHOLE, REFUSED], "request 2: 503: no worker"),
        ([WHOLE, CUT], "request 2: cut short after 2 events"),
        ([WHOLE, ENDED], 'request 2: data: {"error": {"message": "the engine died"}}\n\n\r\n0\r\n\r\n'),
        ([WHOLE], "request 2: the connection was lost"),
    ],
)
async def test_the_first_request_that_fails_ends_a_run(
    capsys: pytest.CaptureFixture[str], answers: list[bytes], failure: str
) -> None:
    assert await client_says(capsys, *answers) == {"failure": failure}
