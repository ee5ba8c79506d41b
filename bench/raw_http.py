"""A small HTTP/1.1 client: cheap enough to run beside what it loads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEPT_BYTES = 1024  # of an answer's end
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer; times are those of `time.monotonic`."""

    status: int
    first_s: float  # when the body began
    ended_s: float
    tail: bytes  # with the framing of chunks


def post_request(port: int, path: str, key: str, values: Mapping[str, Any]) -> bytes:
    body = json.dumps(values).encode()
    return post_head(port, path, key, len(body)) + body


def post_head(port: int, path: str, key: str, num_bytes: int) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {num_bytes}\r\n\r\n"
    ).encode()


class Connection:
    """One connection to a port of this machine, opened when it is needed. One request at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    def is_stale(self) -> bool:
        """Return whether the server has closed it, as servers do with what is idle for long."""
        return self._streams is not None and self._streams[0].at_eof()

    async def exchange(self, request: bytes) -> Reply:
        """Send a request and read its answer. Raises OSError or EOFError, with the connection closed."""
        if self.is_stale():
            self.close()
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(request)
            head = (await reader.readuntil(_HEAD_END)).lower()
            first_s, tail = await _read_body(reader, head)
        except BaseException:  # also cancelled: the rest of the answer may still come
            self.close()
            raise
        if b"\r\nconnection: close" in head:
            self.close()
        return Reply(int(head.split(b" ", 2)[1]), first_s, time.monotonic(), tail)


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> tuple[float, bytes]:
    if b"\r\ntransfer-encoding: chunked" not in head:
        before, _, after = head.partition(b"\r\ncontent-length: ")
        num_bytes = int(after.split(b"\r\n", 1)[0]) if before != head else 0
        body = await reader.readexactly(num_bytes)
        return time.monotonic(), body[-KEPT_BYTES:]
    first_s, tail = 0.0, b""
    while not tail.endswith(_LAST_CHUNK):
        data = await reader.read(1 << 18)
        if not data:
            raise EOFError("the answer ended before its end")
        first_s = first_s or time.monotonic()
        tail = (tail + data)[-KEPT_BYTES:]
    return first_s, tail
