"""HTTP, as a raw ASGI application.

Routes, body limits, the error shape, and cancelling what a client no longer waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from kvferry.config import GatewayConfig
from kvferry.errors import (
    BodyTimeout,
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    KvferryError,
    MethodNotAllowed,
    ModelNotFound,
    NotReady,
    Overloaded,
    RouteNotFound,
)
from kvferry.gateway.answers import DONE, error_body, error_chunk
from kvferry.gateway.openai import OpenAI
from kvferry.telemetry import Metrics

log = logging.getLogger(__name__)

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S = 30.0
LINGER_S = 2.0

_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")


class _ClientGone(Exception):
    """The client closed its connection: nothing to answer."""


class Readiness(msgspec.Struct, frozen=True):
    """`/readyz`.

    Ready means that a request sent now can be answered; `waiting_for` names what is configured and not there yet.
    """

    ready: bool
    waiting_for: Sequence[str]
    members: Sequence[str]


class HttpApp:
    """The ASGI application. `openai` is None until the gateway can render; until then requests get 503."""

    def __init__(
        self,
        config: GatewayConfig,
        served_name: str,
        metrics: Metrics,
        read_readiness: Callable[[], Readiness],
    ) -> None:
        self.openai: OpenAI | None = None
        self.max_model_len: int | None = None
        self.draining = False
        self.num_in_flight = 0
        self.idle = asyncio.Event()  # set while nothing is in flight
        self.idle.set()
        self._config = config
        self._served_name = served_name
        self._metrics = metrics
        self._read_readiness = read_readiness
        self._started_unix_s = int(time.time())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope {scope['type']}")
        path, method = scope["path"], scope["method"]
        try:
            match path:
                case "/v1/chat/completions":
                    await self._generate("chat_completions", scope, receive, send)
                case "/v1/completions":
                    await self._generate("completions", scope, receive, send)
                case "/v1/models":
                    _allow(method, "GET")
                    await _respond(send, 200, msgspec.json.encode({"object": "list", "data": [self._model()]}))
                case "/healthz":
                    _allow(method, "GET")
                    await _respond(send, 200, b'{"status":"ok"}')
                case "/readyz":
                    _allow(method, "GET")
                    readiness = self._read_readiness()
                    await _respond(send, 200 if readiness.ready else 503, msgspec.json.encode(readiness))
                case "/metrics":
                    _allow(method, "GET")
                    kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
                    await _respond(send, 200, self._metrics.render(), [kind])
                case _ if path.startswith("/v1/models/"):
                    _allow(method, "GET")
                    name = path.removeprefix("/v1/models/")
                    if name != self._served_name:
                        raise ModelNotFound(f"the model {name!r} does not exist; served here: {self._served_name}")
                    await _respond(send, 200, msgspec.json.encode(self._model()))
                case _:
                    raise RouteNotFound(f"{method} {path}: no such path")
        except KvferryError as error:
            await _respond_error(send, error)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served_name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "kvferry",
            "max_model_len": self.max_model_len,
        }

    async def _generate(self, endpoint: str, scope: Message, receive: Receive, send: Send) -> None:
        status = "500"
        self.num_in_flight += 1
        self.idle.clear()
        self._metrics.requests_in_flight.inc()
        try:
            _allow(scope["method"], "POST")
            if self.openai is None or self.draining:
                raise NotReady(
                    "this gateway is stopping" if self.draining else "this gateway is starting: " + self._missing()
                )
            if self.num_in_flight > self._config.max_requests:
                raise Overloaded(f"{self._config.max_requests} requests are in flight, the limit of this gateway")
            raw = await self._read_body(scope, receive)
            debug = any(name == b"x-kvferry-debug" and value == b"1" for name, value in scope["headers"])
            status = await _until_disconnect(receive, self._serve(endpoint, raw, send, debug=debug))
        except _ClientGone:
            status = "499"
            self._metrics.cancelled.inc()
        except (BodyTooLarge, BodyTimeout) as error:
            status = str(error.http_status)
            await _refuse_body(receive, send, error)
        except KvferryError as error:
            status = str(error.http_status)
            await _respond_error(send, error)
        except Exception:
            log.exception("a request to %s failed", scope["path"])
            await _respond_error(send, EngineError("the gateway failed on this request; its log says why"))
        finally:
            self.num_in_flight -= 1
            if not self.num_in_flight:
                self.idle.set()
            self._metrics.requests_in_flight.dec()
            self._metrics.requests.labels(endpoint=endpoint, status=status).inc()

    def _missing(self) -> str:
        return "waiting for " + (", ".join(self._read_readiness().waiting_for) or "the renderer")

    async def _serve(self, endpoint: str, raw: bytes, send: Send, *, debug: bool) -> str:
        """Answer; returns the status for the metric. Raises a KvferryError while no byte was sent."""
        assert self.openai is not None
        read = self.openai.chat if endpoint == "chat_completions" else self.openai.completion
        timeout_s = self._config.request_timeout_s
        begun = False
        try:
            async with asyncio.timeout(timeout_s):
                answer = await read(raw, debug=debug)
                headers = [(b"x-request-id", answer.answer_id.encode())]
                if not answer.streamed:
                    body = await answer.whole()
                    await _respond(send, 200, body, [_JSON, *headers])
                    return "200"
                async with contextlib.aclosing(answer.chunks()) as chunks:
                    first = await anext(chunks)
                    await send(
                        {
                            "type": "http.response.start",
                            "status": 200,
                            "headers": [
                                _EVENTS,
                                (b"cache-control", b"no-cache"),
                                (b"x-accel-buffering", b"no"),
                                *headers,
                            ],
                        }
                    )
                    begun = True
                    await send({"type": "http.response.body", "body": first, "more_body": True})
                    async for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            error = DeadlineExceeded(f"the request took longer than {timeout_s:g} s")
            if not begun:
                raise error from None
            # Perhaps the time ran out because the client does not read: it must not keep its place for that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await send({"type": "http.response.body", "body": error_chunk(error) + DONE, "more_body": False})
        return "200"

    async def _read_body(self, scope: Message, receive: Receive) -> bytes:
        limit = self._config.max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise BodyTooLarge(f"the body is {int(value)} bytes; the limit is {limit}")
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _ClientGone
                    piece = message.get("body", b"")
                    size += len(piece)
                    if size > limit:
                        raise BodyTooLarge(f"the body is over {limit} bytes, the limit")
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None


async def _until_disconnect(receive: Receive, serving: Any) -> str:
    """Run `serving` until it ends or the client leaves; leaving cancels it, and with it the request on every worker."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work = asyncio.ensure_future(serving)
    watch = asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return str(work.result())
        raise _ClientGone
    finally:
        for task in (work, watch):
            task.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


def _allow(method: str, allowed: str) -> None:
    if method != allowed:
        raise MethodNotAllowed(f"{method} is not allowed here; use {allowed}", param=allowed)


async def _respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (_JSON,)) -> None:
    length = (b"content-length", str(len(body)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def _respond_error(send: Send, error: KvferryError) -> None:
    headers = [_JSON]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, MethodNotAllowed) and error.param:
        headers.append((b"allow", error.param.encode()))
    await _respond(send, error.http_status, error_body(error), headers)


async def _refuse_body(receive: Receive, send: Send, error: KvferryError) -> None:
    """Answer while the rest of the body is still on its way, then read on for a moment.

    A connection closed with unread data is reset, and the reset can overtake the answer.
    """
    body = error_body(error)
    headers = [_JSON, (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": error.http_status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    try:
        async with asyncio.timeout(LINGER_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b"", "more_body": False})
