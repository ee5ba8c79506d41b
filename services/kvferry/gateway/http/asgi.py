"""The HTTP endpoint as a raw ASGI application: routes, body limits, errors, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

import msgspec

from kvferry.config import GatewayConfig
from kvferry.errors import (
    BodyTimeout,
    BodyTooLarge,
    DeadlineExceeded,
    EngineError,
    KvferryError,
    MethodNotAllowed,
    NotReady,
    RouteNotFound,
    Unauthenticated,
)
from kvferry.gateway.admission import Admission, Claim, CountedRequest, Readiness
from kvferry.gateway.bodies.large_bodies import join
from kvferry.gateway.http.browser_requests import require_json, require_local_page
from kvferry.gateway.http.connection_limits import MAX_CONNECTIONS, ConnectionLimits, raise_descriptor_limit
from kvferry.gateway.http.openai_endpoint import NO_DEBUG, Debug, OpenAI
from kvferry.gateway.http.openai_responses import DONE, error_body, error_chunk
from kvferry.gateway.http.stream_writer import MAX_SILENCE_S, StreamWriter, keep_alive, open_stream_writer
from kvferry.gateway.http.uvicorn_connection import Exchange, drop_exchange, exchange_of
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.tenants import DEFAULT_TENANT, Tenant
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.models import AdapterNames, Models
from kvferry.gateway.record_views import for_tenant
from kvferry.gateway.request_trace import RequestTrace, begin_trace, trace_headers
from kvferry.gateway.timeouts import RequestTimeouts
from kvferry.gateway.unread_answers import Connection, UnreadAnswers
from kvferry.observability.exposition import CONTENT_TYPE
from kvferry.util.addresses import describe_client

log = logging.getLogger(__name__)

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S = 30.0
LINGER_S = 2.0

# Followed by the id of an answer: why its requests went where they went.
EXPLAIN_PATH = "/kvferry/v1/requests/"

_JSON = (b"content-type", b"application/json")
_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class _ClientGone(Exception):
    pass


class _ClientSlow(Exception):
    pass


class _ClientCut(Exception):  # already counted and logged
    pass


class HttpApp:
    """The ASGI application. Answers 503 before the gateway can render."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        adapters: AdapterNames,
        metrics: GatewayMetrics,
        admission: Admission,
        read_readiness: Callable[[], Readiness],
        access: Access,
        read_targets: Callable[[], Awaitable[bytes]],
        openai: OpenAI,
        tls_context: ssl.SSLContext | None,
    ) -> None:
        """`tls_context` is the listener's, if clients speak TLS."""
        self.openai = openai
        self.is_leaving = False  # connections are not kept for further requests
        self.tls_context = tls_context
        self.connection_limits = ConnectionLimits(
            raise_descriptor_limit(MAX_CONNECTIONS), config.max_connections_per_peer
        )
        self.unread_answers = UnreadAnswers(admission.body_bytes.most, self._note_cut)
        self._admission = admission
        self._access = access
        self._config = config
        self._models = models
        self._adapters = adapters
        self._metrics = metrics
        self._read_readiness = read_readiness
        self._read_targets = read_targets
        self._started_unix_s = int(time.time())
        self._timeouts = RequestTimeouts(config.request_timeout_s)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope {scope['type']}")
        path, method = scope["path"], scope["method"]
        try:
            if self._access.checks_pages:
                require_local_page(scope["headers"], self._config.allowed_hosts)
            match path:
                case "/v1/chat/completions":
                    await self._generate("chat_completions", scope, receive, send)
                case "/v1/completions":
                    await self._generate("completions", scope, receive, send)
                case "/v1/models":
                    _allow(method, "GET")
                    listed = self._listed(self._identify(scope))
                    await _respond(send, 200, msgspec.json.encode({"object": "list", "data": listed}))
                case "/healthz":
                    _allow(method, "GET")
                    await _respond(send, 200, b'{"status":"ok"}')
                case "/readyz":
                    _allow(method, "GET")
                    readiness = self._readiness(scope)
                    await _respond(send, 200 if readiness.ready else 503, msgspec.json.encode(readiness))
                case "/metrics":
                    _allow(method, "GET")
                    self._access.require_metrics(*self._shown(scope))
                    kind = (b"content-type", CONTENT_TYPE.encode())
                    await _respond(send, 200, self._metrics.render(), [kind])
                case "/kvferry/v1/targets":
                    _allow(method, "GET")
                    self._access.require_metrics(*self._shown(scope))
                    await _respond(send, 200, await self._read_targets())
                case _ if path.startswith(EXPLAIN_PATH):
                    _allow(method, "GET")
                    found = self._explain(path.removeprefix(EXPLAIN_PATH), scope)
                    await _respond(send, 200, found)
                case _ if path.startswith("/v1/models/"):
                    _allow(method, "GET")
                    shown = self._found(path.removeprefix("/v1/models/"), self._identify(scope))
                    await _respond(send, 200, msgspec.json.encode(shown))
                case _:
                    raise RouteNotFound(f"{method} {path}: no such path")
        except KvferryError as error:
            self.note_refusal(error)
            await _respond_error(send, error)
        except asyncio.CancelledError:
            # The gateway stops: uvicorn would log a traceback for each request.
            exchange = exchange_of(scope)
            if exchange is None:
                raise
            if exchange.may_answer:
                await _respond_error(send, NotReady("this gateway is stopping"))
            else:
                exchange.abort()
        finally:
            drop_exchange(scope)

    def _listed(self, tenant: Tenant) -> list[dict[str, Any]]:
        contexts, adapters = self._models.of(tenant), self._adapters.of(tenant)
        listed = [self._model(*each) for each in contexts.items()]
        return listed + [self._model(name, contexts.get(parent), parent) for name, parent in adapters.items()]

    def _found(self, name: str, tenant: Tenant) -> dict[str, Any]:
        model, adapter = self._adapters.resolve(name, tenant, param=None)
        self._models.route(model, tenant, param=None)
        return self._model(name, self._models.of(tenant).get(model), model if adapter else "")

    def _model(self, name: str, max_model_len: int | None, parent: str = "") -> dict[str, Any]:
        # As vLLM has them. It also says where an adapter lies (`root`), which is nothing to a client here.
        of_adapter = {"root": name.rpartition(":")[2], "parent": parent} if parent else {}
        return {
            "id": name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "kvferry",
            "max_model_len": max_model_len,
            **of_adapter,
        }

    def _readiness(self, scope: Message) -> Readiness:
        """Return readiness, with less for a tenant, and least for a client without a key."""
        readiness = self._read_readiness()
        try:
            tenant = self._identify(scope)
            reads_all = self._access.is_operator(*self._shown(scope))
        except KvferryError:
            return readiness.for_strangers()
        return readiness if reads_all else readiness.for_tenant(tenant.pool)

    def _identify(self, scope: Message) -> Tenant:
        return DEFAULT_TENANT if self._access.is_open else self._access.identify(*self._shown(scope))

    def _shown(self, scope: Message) -> tuple[str | None, str | None]:
        """Return the `authorization` header and the name in the client's certificate, where there are some."""
        found = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        if len(found) > 1:
            raise Unauthenticated("more than one authorization header")
        authorization = found[0] if found else None
        exchange = exchange_of(scope)
        return authorization, exchange.client_name if exchange is not None else None

    def _explain(self, answer_id: str, scope: Message) -> bytes:
        """Return the recorded placements of an answer. Raises RouteNotFound for an unknown id."""
        tenant = self._identify(scope)
        requests = self.openai.explain(answer_id, tenant)
        if not requests:
            raise RouteNotFound(f"this gateway remembers no request {answer_id!r}")
        if not self._access.is_operator(*self._shown(scope)):
            requests = [for_tenant(request) for request in requests]
        return msgspec.json.encode({"requests": requests})

    async def _generate(self, endpoint: str, scope: Message, receive: Receive, send: Send) -> None:
        with self._admission.count_request(endpoint) as counted:
            try:
                try:
                    _allow(scope["method"], "POST")
                    tenant = self._identify(scope)
                    self._admission.note_tenant(counted, tenant.name)
                except KvferryError:
                    # A client without a key does not decide what is sampled.
                    counted.trace = self._begin_trace(endpoint, scope, ())
                    raise
                counted.trace = self._begin_trace(endpoint, scope, scope["headers"])
                require_json(scope["headers"])
                self._admission.require_admission(can_render=self._models.is_started)
                exchange = exchange_of(scope)
                counted.body = await self._read_body(scope, exchange, receive, counted.claim)
                debug = _read_debug(scope["headers"])
                if debug.show and self._access.is_operator(*self._shown(scope)):
                    debug = dataclasses.replace(debug, shows_all=True)
                async with _ClientWatch(exchange, receive) as client_watch:
                    await self._serve(endpoint, exchange, send, client_watch, counted, tenant=tenant, debug=debug)
                counted.status = "200"
            except _ClientGone as error:
                counted.left(error)
                self._metrics.cancelled.inc()
            except _ClientSlow as error:
                counted.left(error)
                self._count_slow_client(
                    scope["path"],
                    describe_client(scope.get("client")),
                    f"more than {self.unread_answers.max_stream_bytes}",
                )
            except _ClientCut as error:
                counted.left(error)
            except (BodyTooLarge, BodyTimeout) as error:
                counted.failed(error)
                await _refuse_body(receive, send, error)
            except KvferryError as error:
                counted.failed(error)
                await _respond_error(send, error, counted.trace, counted.answer_id)
            except Exception:
                log.exception("a request to %s failed", scope["path"])
                fault = EngineError("the gateway failed on this request; its log says why")
                counted.failed(fault)
                await _respond_error(send, fault, counted.trace, counted.answer_id)

    def note_refusal(self, error: KvferryError) -> None:
        """Count an error of a request that reached no endpoint."""
        self._metrics.note_refusal(error.code)

    def _note_cut(self, connection: Connection, num_bytes: int) -> None:
        self._count_slow_client(connection.path, connection.peer, str(num_bytes))

    def _count_slow_client(self, path: str, peer: str, num_unread: str) -> None:
        self._metrics.slow_clients.inc()
        # The path as a literal: the client chose it.
        log.warning("the client %s of %.64r left %s bytes of its answer unread and was cut", peer, path, num_unread)

    def _begin_trace(
        self, endpoint: str, scope: Message, headers: Sequence[tuple[bytes, bytes]]
    ) -> RequestTrace | None:
        tracing = self._admission.tracing
        if tracing is None:
            return None
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"], "url.scheme": scope["scheme"]}
        return begin_trace(tracing, trace_headers(headers), endpoint, self._models.default, attributes)

    async def _serve(
        self,
        endpoint: str,
        exchange: Exchange | None,
        send: Send,
        client_watch: _ClientWatch,
        counted: CountedRequest,
        *,
        tenant: Tenant,
        debug: Debug,
    ) -> None:
        """Send the answer. Raises a KvferryError only while no byte was sent."""
        trace = counted.trace
        read = self.openai.chat if endpoint == "chat_completions" else self.openai.completion
        timeout_s = self._config.request_timeout_s
        writer: StreamWriter | None = None
        try:
            counted.require_not_ended()
            with self._timeouts.limit() as limit:
                counted.expire = limit.expire
                answer = await read(counted.body, claim=counted.claim, tenant=tenant, debug=debug, trace=trace)
                counted.body = b""
                named = [(b"x-request-id", answer.answer_id.encode()), *_trace_headers(trace)]
                if not answer.streamed:
                    body = await answer.whole()
                    if exchange is not None:
                        await exchange.respond([_JSON, *named], body)
                    else:
                        await _respond(send, 200, body, [_JSON, *named])
                    return
                writer = open_stream_writer(
                    exchange,
                    send,
                    [*_STREAM_HEADERS, *named],
                    self.unread_answers.max_stream_bytes,
                    lambda: client_watch.end(_ClientSlow()),
                )
                with keep_alive(writer, MAX_SILENCE_S):
                    await answer.stream(writer, counted.failed_in_stream)
        except TimeoutError:
            error = counted.ended_by or DeadlineExceeded(
                f"the request took longer than {timeout_s:g} s (gateway.request_timeout_s)"
            )
            if writer is None or not writer.started:
                raise error from None
            counted.failed_in_stream(error)
            # Perhaps the time ran out because the client does not read: it must not keep its place for that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    await writer.close(error_chunk(error) + DONE)
        finally:
            if writer is not None:
                writer.abandon()

    async def _read_body(self, scope: Message, exchange: Exchange | None, receive: Receive, claim: Claim) -> bytes:
        limit = self._config.max_body_bytes
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                raise BodyTooLarge(f"the body is {int(value)} bytes; gateway.max_body_bytes is {limit}")
        if exchange is not None and (body := exchange.whole_body()) is not None:
            if len(body) > limit:
                raise BodyTooLarge(f"the body is over {limit} bytes (gateway.max_body_bytes)")
            claim.add_body_bytes(len(body))
            return body
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S) as time_limit:
                with claim.arriving(time_limit):
                    while True:
                        message = await receive()
                        if message["type"] == "http.disconnect":
                            raise _ClientGone
                        piece = message.get("body", b"")
                        size += len(piece)
                        if size > limit:
                            raise BodyTooLarge(f"the body is over {limit} bytes (gateway.max_body_bytes)")
                        claim.add_body_bytes(len(piece))
                        pieces.append(piece)
                        if not message.get("more_body", False):
                            break
        except TimeoutError:
            claim.add_body_bytes(0)  # raises if that is why
            raise BodyTimeout(f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
        if exchange is not None:
            exchange.resume_reading()
        return await join(pieces, size)


class _ClientWatch:
    """Cancels a task once its client leaves or is cut off; raises the reason on exit."""

    def __init__(self, exchange: Exchange | None, receive: Receive) -> None:
        self._exchange = exchange
        self._receive = receive
        self._task = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None
        self._reason: Exception | None = None
        self._over = False

    def end(self, reason: Exception) -> None:
        """Cancel the task and its request on every worker. The first reason counts."""
        if self._task is not None and self._reason is None and not self._over:
            self._reason = reason
            self._task.cancel()

    async def __aenter__(self) -> Self:
        if self._exchange is not None:
            self._exchange.watch(self._gone)
        else:
            self._watch = asyncio.create_task(self._wait_for_disconnect(self._receive))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._over = True
        if self._exchange is not None:
            self._exchange.unwatch(self._gone)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        if isinstance(error, asyncio.CancelledError) and self._reason is not None:
            assert self._task is not None
            if not self._task.uncancel():
                raise self._reason from None

    def _gone(self) -> None:
        was_cut = self._exchange is not None and self._exchange.was_cut
        self.end(_ClientCut() if was_cut else _ClientGone())

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone()


def _read_debug(headers: Sequence[tuple[bytes, bytes]]) -> Debug:
    """Read `x-kvferry-debug`: `1` adds the request's record, `disaggregate` also forces a prefill worker."""
    for name, value in headers:
        if name == b"x-kvferry-debug" and value in (b"1", b"disaggregate"):
            return Debug(show=True, disaggregate=value == b"disaggregate")
    return NO_DEBUG


def _allow(method: str, allowed: str) -> None:
    if method != allowed:
        raise MethodNotAllowed(f"{method} is not allowed here; use {allowed}", allowed=allowed)


async def _respond(send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (_JSON,)) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _with_length(body, headers)})
    await send({"type": "http.response.body", "body": body})


def _with_length(body: bytes, headers: Sequence[tuple[bytes, bytes]]) -> Sequence[tuple[bytes, bytes]]:
    return [*headers, (b"content-length", str(len(body)).encode())]


def _trace_headers(trace: RequestTrace | None) -> list[tuple[bytes, bytes]]:
    return [] if trace is None else [(name.encode(), value.encode()) for name, value in trace.headers.items()]


async def _respond_error(
    send: Send, error: KvferryError, trace: RequestTrace | None = None, answer_id: str = ""
) -> None:
    headers = [_JSON, *_trace_headers(trace)]
    if answer_id:
        headers.append((b"x-request-id", answer_id.encode()))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed) and error.allowed:
        headers.append((b"allow", error.allowed.encode()))
    await _respond(send, error.http_status, error_body(error), headers)


async def _refuse_body(receive: Receive, send: Send, error: KvferryError) -> None:
    """Answer before the body's end, then read on: closing with unread data could overtake the answer."""
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
