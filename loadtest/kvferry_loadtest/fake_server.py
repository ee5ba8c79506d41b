"""An OpenAI endpoint, and one over gRPC, that answer after known delays: what the harness is measured against.

    python -m kvferry_loadtest.fake_server --ttft-ms 50 --itl-ms 5

Prints its address, serves until it is ended. `GET /fake/delays` says how long each answer really took from the last
byte of the request to each of its events, by this server's own clock: timers are late now and then, and the harness is
not to be blamed for that. Binds to loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import httptools
import msgspec
import uvloop

from kvferry_loadtest.grpc_api import SERVICE
from kvferry_loadtest.wire import inference_pb2 as pb

MODEL = "fake"
_HEAD = b"HTTP/1.1 %d %s\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Answering(msgspec.Struct, frozen=True, kw_only=True):
    """How answers come."""

    model: str = MODEL
    ttft_ms: float = 20.0
    ttft_spread: float = 0.0  # sigma of a lognormal factor with median 1
    itl_ms: float = 2.0
    seed: int = 0
    stall_at_s: float | None = None  # from the first request on
    stall_for_s: float = 2.0  # nothing is read and nothing written meanwhile
    refuse_every: int = 0  # each n-th request gets 429; 0: none
    api_key: str = ""
    keep_bodies: bool = False


class _Body(msgspec.Struct):
    max_tokens: int = 16


_body = msgspec.json.Decoder(_Body)


class FakeServer:
    """Listens on 127.0.0.1 from `start` to `stop`."""

    def __init__(self, answering: Answering) -> None:
        self.answering = answering
        self.num_requests = 0
        self.ttft_us: list[int] = []
        self.itl_us: list[int] = []
        self.bodies: list[bytes] = []
        self.random = random.Random(answering.seed)
        self.port = 0
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def start(self, port: int = 0) -> FakeServer:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), "127.0.0.1", port, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        connections = list(self.connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            await connection.lost.wait()

    def came(self) -> None:
        self.num_requests += 1
        if self.num_requests == 1 and self.answering.stall_at_s is not None:
            asyncio.get_running_loop().call_later(self.answering.stall_at_s, time.sleep, self.answering.stall_for_s)


class _Connection(asyncio.Protocol):
    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._url = b""
        self._authorization = b""
        self._pieces: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0
        self._count = 0
        self._wrote_s = 0.0
        self._event = b""
        self.lost = asyncio.Event()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._server.connections.discard(self)
        self.lost.set()

    # What the parser calls.

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"authorization":
            self._authorization = value

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        url, self._url = self._url, b""
        authorization, self._authorization = self._authorization, b""
        body, self._pieces = b"".join(self._pieces), []
        server = self._server
        key = server.answering.api_key
        if key and authorization != b"Bearer " + key.encode():
            self._answer(401, b"Unauthorized", {"error": {"message": "this key is not known"}})
        elif url == b"/v1/models":
            models = [{"id": server.answering.model, "object": "model"}]
            self._answer(200, b"OK", {"object": "list", "data": models})
        elif url == b"/fake/delays":
            self._answer(200, b"OK", {"ttft_us": server.ttft_us, "itl_us": server.itl_us})
        elif url in (b"/v1/chat/completions", b"/v1/completions"):
            server.came()
            if server.answering.keep_bodies:
                server.bodies.append(body)
            if (every := server.answering.refuse_every) and server.num_requests % every == 0:
                self._answer(429, b"Too Many Requests", {"error": {"message": "too much at once"}})
                return
            try:
                self._begin(_body.decode(body), is_chat=url.endswith(b"chat/completions"))
            except msgspec.MsgspecError as error:
                self._answer(400, b"Bad Request", {"error": {"message": str(error)}})
        else:
            self._answer(404, b"Not Found", {"error": {"message": "there is nothing here"}})

    def _answer(self, status: int, reason: bytes, content: object) -> None:
        body = msgspec.json.encode(content)
        if self._transport is not None:
            self._transport.write(_HEAD % (status, reason, b"application/json", len(body)) + body)

    def _begin(self, body: _Body, *, is_chat: bool) -> None:
        answering = self._server.answering
        self._left = self._count = body.max_tokens
        text = b'{"index":0,"delta":{"content":" x"}}' if is_chat else b'{"index":0,"text":" x"}'
        self._event = _chunked(b'data: {"choices":[' + text + b"]}\n\n")
        self._wrote_s = time.perf_counter()
        factor = self._server.random.lognormvariate(0.0, answering.ttft_spread) if answering.ttft_spread else 1.0
        self._later(answering.ttft_ms * factor)

    def _later(self, delay_ms: float) -> None:
        wait_s = self._wrote_s + delay_ms / 1e3 - time.perf_counter()
        self._timer = asyncio.get_running_loop().call_later(max(wait_s, 0.0), self._write)

    def _write(self) -> None:
        if self._transport is None:
            return
        now_s = time.perf_counter()
        took_us = round((now_s - self._wrote_s) * 1e6)
        if self._left == self._count:
            self._server.ttft_us.append(took_us)
            self._transport.write(_STREAM_HEAD + self._event)
        else:
            self._server.itl_us.append(took_us)
            self._transport.write(self._event)
        self._wrote_s = now_s
        self._left -= 1
        if self._left:
            self._later(self._server.answering.itl_ms)
            return
        usage = b'{"prompt_tokens":1,"completion_tokens":%d}' % self._count
        self._transport.write(
            _chunked(b'data: {"choices":[{"index":0,"finish_reason":"length"}]}\n\n')
            + _chunked(b'data: {"choices":[],"usage":' + usage + b"}\n\ndata: [DONE]\n\n")
            + b"0\r\n\r\n"
        )


class FakeGrpc:
    """The same answers over gRPC, with the delays and counts of `server`."""

    def __init__(self, server: FakeServer) -> None:
        self._fake = server
        self._server = grpc.aio.server()
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "GenerateStream": grpc.unary_stream_rpc_method_handler(
                self._generate, pb.GenerateRequest.FromString, pb.GenerateChunk.SerializeToString
            ),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self._models, pb.ListModelsRequest.FromString, pb.ListModelsResponse.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def start(self) -> int:
        """The port."""
        port: int = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return port

    async def stop(self) -> None:
        await self._server.stop(None)

    async def _models(self, request: Any, context: Any) -> pb.ListModelsResponse:
        await self._check_key(context)
        return pb.ListModelsResponse(models=[pb.Model(name=self._fake.answering.model)])

    async def _generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateChunk]:
        came_s = time.perf_counter()
        fake, answering = self._fake, self._fake.answering
        await self._check_key(context)
        fake.came()
        if answering.keep_bodies:
            fake.bodies.append(request.SerializeToString())
        if answering.refuse_every and fake.num_requests % answering.refuse_every == 0:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much at once")
        factor = fake.random.lognormvariate(0.0, answering.ttft_spread) if answering.ttft_spread else 1.0
        wrote_s, delay_s, count = came_s, answering.ttft_ms * factor / 1e3, request.sampling.max_tokens
        for i in range(count):
            await asyncio.sleep(max(0.0, wrote_s + delay_s - time.perf_counter()))
            now_s = time.perf_counter()
            (fake.itl_us if i else fake.ttft_us).append(round((now_s - wrote_s) * 1e6))
            wrote_s, delay_s = now_s, answering.itl_ms / 1e3
            chunk = pb.GenerateChunk(text=" x")
            if i == count - 1:
                chunk.finish_reason = pb.FINISH_REASON_LENGTH
                chunk.usage.prompt_tokens, chunk.usage.completion_tokens = 1, count
            yield chunk

    async def _check_key(self, context: Any) -> None:
        key = self._fake.answering.api_key
        if key and ("authorization", f"Bearer {key}") not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this key is not known")


def _chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def main() -> None:
    parser = argparse.ArgumentParser(description="An OpenAI endpoint that answers after known delays.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    parser.add_argument("--ttft-spread", type=float, default=0.0, help="sigma of a lognormal factor")
    parser.add_argument("--itl-ms", type=float, default=2.0)
    parser.add_argument(
        "--stall-at-s", type=float, default=None, help="stop for a while, this long after the first request"
    )
    parser.add_argument("--stall-for-s", type=float, default=2.0)
    parser.add_argument("--api-key", default="", help="refuse requests without it")
    parser.add_argument("--refuse-every", type=int, default=0, help="answer each n-th request with 429")
    parser.add_argument("--grpc", action="store_true", help="answer over gRPC too, at the second address printed")
    arguments = vars(parser.parse_args())
    port, with_grpc = arguments.pop("port"), arguments.pop("grpc")

    async def serve() -> None:
        server = await FakeServer(Answering(**arguments)).start(port)
        addresses = [f"http://127.0.0.1:{server.port}"]
        over_grpc = FakeGrpc(server) if with_grpc else None
        if over_grpc is not None:
            addresses.append(f"grpc://127.0.0.1:{await over_grpc.start()}")
        print(*addresses, flush=True)
        gc.freeze()  # a collection is a delay that nobody asked for
        # Whoever started it has gone when its input ends.
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        if over_grpc is not None:
            await over_grpc.stop()
        await server.stop()

    uvloop.run(serve())


if __name__ == "__main__":
    main()
