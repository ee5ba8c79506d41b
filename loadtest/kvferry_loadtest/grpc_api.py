"""A kvferry.inference.v1 endpoint over gRPC: `grpc://HOST:PORT`, or `grpcs://` with TLS.

grpc.aio costs a task and a few wake-ups for each request, where the HTTP client here needs none: at rates where that
makes the harness late, it says so as always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import grpc
import msgspec

from kvferry_loadtest import content
from kvferry_loadtest.apis import Sampling, Usage, messages_of, tokens_of
from kvferry_loadtest.errors import KeyRefused, TargetError
from kvferry_loadtest.http_client import Receiver
from kvferry_loadtest.plan import PlannedRequest, RequestId
from kvferry_loadtest.wire import inference_pb2 as pb

SERVICE = "kvferry.inference.v1.Inference"
SCHEMES = ("grpc", "grpcs")
LOOK_TIMEOUT_S = 10.0
# A broken connection is tried again at once: the first request after a restart must not wait for a back-off.
OPTIONS = (("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 1000))

# As gateways between gRPC and HTTP translate them (google.rpc.Code).
_CODE_TO_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_TOOL_CALLS: "tool_calls",
}


class GrpcApi:
    """GenerateStream over one channel. To be made where an event loop runs."""

    def __init__(self, url: str) -> None:
        """Raises TargetError for what is no grpc(s) URL."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme not in SCHEMES or not parts.hostname or not port or parts.path.strip("/"):
            raise TargetError(f"{url}: not a URL like grpc://HOST:PORT")
        self.url = f"{parts.scheme}://{parts.netloc}"
        if parts.scheme == "grpcs":
            credentials = grpc.ssl_channel_credentials()
            self._channel = grpc.aio.secure_channel(parts.netloc, credentials, options=OPTIONS)
        else:
            self._channel = grpc.aio.insecure_channel(parts.netloc, options=OPTIONS)
        # Messages as bytes: when they came is noted before they are read.
        self._stream: Any = self._channel.unary_stream(f"/{SERVICE}/GenerateStream")
        self._models: Any = self._channel.unary_unary(f"/{SERVICE}/ListModels")
        self._exchanges: set[_Exchange] = set()

    def __repr__(self) -> str:
        return f"<GrpcApi {self.url} busy={len(self._exchanges)}>"

    async def models(self, key: str) -> list[str]:
        try:
            answer = await self._models(
                pb.ListModelsRequest().SerializeToString(), metadata=_metadata(key), timeout=LOOK_TIMEOUT_S
            )
            return [model.name for model in pb.ListModelsResponse.FromString(answer).models]
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
                raise KeyRefused(self.url, _describe(error)) from None
            raise TargetError(f"{self.url}: {_describe(error)}") from None

    def body(self, request: PlannedRequest, sampling: Sampling, answer_of: Callable[[RequestId], str]) -> bytes:
        message = pb.GenerateRequest(model=sampling.model)
        message.sampling.max_tokens = request.max_tokens
        message.sampling.temperature = sampling.temperature
        message.sampling.ignore_eos = sampling.ignore_eos
        if request.tokens:
            message.token_ids.ids.extend(tokens_of(request))
        else:
            for role, text in messages_of(request, answer_of):
                message.conversation.messages.add(role=role, content=text)
            if request.tools:
                for tool in content.TOOLS:
                    function = tool["function"]
                    message.conversation.tools.add(
                        name=function["name"],
                        description=function["description"],
                        parameters=msgspec.json.encode(function["parameters"]).decode(),
                    )
                message.conversation.tool_choice = "none"
        return message.SerializeToString()

    def send(self, request: PlannedRequest, body: bytes, key: str, receiver: Receiver) -> _Exchange:
        exchange = _Exchange(self._stream(body, metadata=_metadata(key)), receiver)
        self._exchanges.add(exchange)
        exchange.task.add_done_callback(lambda task: self._exchanges.discard(exchange))
        return exchange

    def reader(self) -> ChunkReader:
        return ChunkReader()

    async def close(self) -> None:
        exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.abort()
        await asyncio.gather(*(exchange.task for exchange in exchanges), return_exceptions=True)
        await self._channel.close()


class _Exchange:
    def __init__(self, call: grpc.aio.UnaryStreamCall[bytes, bytes], receiver: Receiver) -> None:
        self.is_over = False
        self._call = call
        self._receiver = receiver
        self.task = asyncio.create_task(self._read())

    def abort(self) -> None:
        self.is_over = True
        self._call.cancel()

    async def _read(self) -> None:
        receiver, begun = self._receiver, False
        try:
            async for message in self._call:
                if self.is_over:
                    return
                if not begun:
                    receiver.status(200)
                    begun = True
                receiver.body(message)
        except grpc.aio.AioRpcError as error:
            if self.is_over:
                return
            self.is_over = True
            status = _CODE_TO_STATUS.get(error.code(), 503 if error.code() is grpc.StatusCode.UNAVAILABLE else 500)
            if begun:
                receiver.ended(_describe(error))
            else:
                receiver.status(status)
                receiver.body(_describe(error).encode())
                receiver.ended("")
            return
        except asyncio.CancelledError:
            # The call was: by `abort`, or by its channel, which was closed.
            if not self.is_over:
                self.is_over = True
                receiver.ended("the client was closed")
            return
        if not self.is_over:
            self.is_over = True
            if not begun:
                receiver.status(200)
            receiver.ended("")


class ChunkReader:
    """GenerateChunk messages; one with text is one entry of `token_s`."""

    def __init__(self) -> None:
        self.token_s: list[float] = []
        self.usage: Usage | None = None
        self.finish_reason = ""
        self.error = ""
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def feed(self, data: bytes, now_s: float) -> None:
        chunk = pb.GenerateChunk.FromString(data)
        if chunk.text or chunk.reasoning or chunk.tool_calls:
            self.token_s.append(now_s)
            self._pieces.append(chunk.text)
        if chunk.finish_reason:
            self.finish_reason = _FINISH_REASONS.get(chunk.finish_reason, str(chunk.finish_reason))
        if chunk.HasField("usage"):
            usage = chunk.usage
            self.usage = Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens)

    def finish(self) -> None:
        if not self.error and not self.finish_reason:
            self.error = "the stream ended without its end"


def _metadata(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {' '.join((error.details() or '').split())}"
