"""kvferry.inference.v1 over gRPC, with health and reflection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NoReturn, Self, TypeVar

import grpc

from kvferry.config import GatewayConfig
from kvferry.errors import (
    BodyTooLarge,
    ConfigError,
    DeadlineExceeded,
    EngineError,
    KvferryError,
    Unauthenticated,
)
from kvferry.gateway.admission import Admission, CountedRequest, Readiness
from kvferry.gateway.grpc.grpc_connections import ConnectionEnder
from kvferry.gateway.grpc.grpc_health import SERVICE as HEALTH
from kvferry.gateway.grpc.grpc_health import Health
from kvferry.gateway.grpc.grpc_messages import MessageReads, status_of
from kvferry.gateway.grpc.grpc_reflection import SERVICE as REFLECTION
from kvferry.gateway.grpc.grpc_reflection import Reflection
from kvferry.gateway.grpc.grpc_requests import Chunks, Inference, InferenceAnswer
from kvferry.gateway.http.connection_limits import MAX_CONNECTIONS
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.metrics import GatewayMetrics
from kvferry.gateway.models import Models
from kvferry.gateway.request_trace import RequestTrace, begin_trace
from kvferry.gateway.tls import common_name
from kvferry.gateway.unread_answers import STALL_S, UnreadAnswers
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.util.addresses import join_host_port

log = logging.getLogger(__name__)

SERVICE = "kvferry.inference.v1.Inference"

MAX_CALLS = 8192  # at once, also of health checks and reflection
MAX_STREAMS_PER_CONNECTION = 1024

# For TLS, and for HTTP/2's settings.
HANDSHAKE_TIMEOUT_S = 15.0

# How long a message may wait for its client; large ones may wait longer: gRPC does not say whether it is read.
MIN_READ_BYTES_PER_S = 100_000

# For a client to read the status of a call that failed, and of one that was cut because it does not read.
ABORT_TIMEOUT_S = 5.0
SLOW_ABORT_TIMEOUT_S = 0.5

REQUEST_ID = "x-request-id"
# Only calls that reach workers are traced.
_TRACED = frozenset({"grpc_generate", "grpc_generate_stream"})
DEBUG = "x-kvferry-debug"

Context = grpc.aio.ServicerContext[Any, Any]
R = TypeVar("R")


class _ClientSlow(Exception):
    # Says which limit an unread answer exceeded.

    def __init__(self, message: str, *, is_counted: bool = False) -> None:
        super().__init__(message)
        self.is_counted = is_counted


class GrpcEndpoint:
    """The gRPC server. Refuses calls before the gateway can render."""

    def __init__(
        self,
        config: GatewayConfig,
        models: Models,
        metrics: GatewayMetrics,
        admission: Admission,
        read_readiness: Callable[[], Readiness],
        access: Access,
        unread_answers: UnreadAnswers,
        inference: Inference,
    ) -> None:
        self.port = 0
        self._inference = inference
        self._unread_answers = unread_answers
        self._config = config
        self._metrics = metrics
        self._admission = admission
        self._models = models
        self._access = access
        self._read_readiness = read_readiness
        self._health = Health(("", SERVICE), self._is_ready)
        self._reflection = Reflection((SERVICE, HEALTH, REFLECTION), self._identify, self._refuse)
        self._reads = MessageReads(max(1, admission.body_bytes.most // _max_message_bytes(config)))
        self._server: grpc.aio.Server | None = None
        self._ender: ConnectionEnder | None = None
        self._draining: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<GrpcEndpoint port={self.port} {self._admission!r}>"

    async def start(self, credentials: grpc.ServerCredentials | None) -> None:
        config = self._config
        assert config.grpc_port is not None
        server = grpc.aio.server(options=_options(config), maximum_concurrent_rpcs=MAX_CALLS)
        methods: dict[str, Any] = {
            # As if requests were streamed: gRPC reads another call's message, of any size and at any pace, before it
            # asks who calls. These read it themselves, after authentication and admission.
            # Without a serializer: bytes.
            "Generate": grpc.stream_stream_rpc_method_handler(self._serve_generate),
            "GenerateStream": grpc.stream_stream_rpc_method_handler(
                self._serve_stream, response_serializer=pb.GenerateChunk.SerializeToString
            ),
            "Tokenize": grpc.stream_stream_rpc_method_handler(self._serve_tokenize),
            "ListModels": grpc.stream_unary_rpc_method_handler(
                self._serve_models, response_serializer=pb.ListModelsResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_generic_rpc_handlers((self._health.handler(),))
        server.add_generic_rpc_handlers((self._reflection.handler(),))
        address = join_host_port(config.host, config.grpc_port)
        try:
            if credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, credentials)
        except RuntimeError:
            raise ConfigError(
                f"gateway.grpc_port: {address} cannot be used: something else listens there, or it is no address here",
                param="gateway.grpc_port",
            ) from None
        self._ender = ConnectionEnder(self.port)
        await server.start()
        self._server = server

    def notify_readiness(self) -> None:
        """Notify watchers of the health service; `Check` always reads the current state."""
        self._health.notify()

    def drain(self, timeout_s: float) -> None:
        """Stop listening and take no more calls. Those that run are cut off after `timeout_s`."""
        if self._server is not None and self._draining is None:
            # Never cancelled: a server whose stopping was cancelled never stops.
            self._draining = asyncio.create_task(self._server.stop(timeout_s))

    async def stop(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)
        if self._draining is not None:
            await self._draining
        if self._ender is not None:
            await self._ender.close()

    def _is_ready(self) -> bool:
        return self._read_readiness().ready

    # What clients call.

    async def _serve_generate(self, _: object, context: Context) -> None:
        async def answer(inference: Inference, raw: bytes, tenant: Tenant, counted: CountedRequest) -> None:
            # Nothing of the request is kept while the client reads.
            begun = self._begin(inference, raw, tenant, counted, context)
            del raw
            message = await (await begun).whole()
            del begun
            await self._send_whole("Generate", message, counted, context)

        await self._admitted("grpc_generate", context, answer)

    # Not a generator: gRPC leaves one that it cancels within a blocked write to the garbage collector, and the request
    # with it.
    async def _serve_stream(self, _: object, context: Context) -> None:
        async def answer(inference: Inference, raw: bytes, tenant: Tenant, counted: CountedRequest) -> None:
            begun = self._begin(inference, raw, tenant, counted, context)
            del raw
            answer = await begun
            unread_answers = self._unread_answers
            max_bytes = unread_answers.max_stream_bytes
            with _UntilSlow() as until_slow:
                chunks = Chunks(
                    max_bytes,
                    lambda: until_slow.end(_ClientSlow(f"more than {max_bytes} bytes of the answer were left unread")),
                    lambda: unread_answers.add(stream),
                )
                stream = _UnreadStream(f"/{SERVICE}/GenerateStream", context.peer(), chunks, until_slow)
                try:
                    await _send(answer, stream, context, unread_answers)
                finally:
                    unread_answers.remove(stream)

        await self._admitted("grpc_generate_stream", context, answer)

    async def _serve_tokenize(self, _: object, context: Context) -> None:
        async def answer(inference: Inference, raw: bytes, tenant: Tenant, counted: CountedRequest) -> None:
            tokenized = inference.tokenize(raw, tenant, counted.claim)
            del raw
            message = await tokenized
            # A write that is cancelled would have begun to send it, and no status could be sent.
            await context.send_initial_metadata(())
            await self._send_whole("Tokenize", message, counted, context)

        await self._admitted("grpc_tokenize", context, answer)

    async def _serve_models(self, _: object, context: Context) -> pb.ListModelsResponse:
        async def answer(inference: Inference, _: bytes, tenant: Tenant, __: CountedRequest) -> pb.ListModelsResponse:
            return inference.models(tenant)

        return await self._admitted("grpc_list_models", context, answer)

    async def _begin(
        self, inference: Inference, raw: bytes, tenant: Tenant, counted: CountedRequest, context: Context
    ) -> InferenceAnswer:
        disaggregate, trace = _wants_disaggregation(context), counted.trace
        left_s = context.time_remaining()
        deadline_s = None if left_s is None else time.monotonic() + min(left_s, self._config.request_timeout_s)
        answer = await inference.generate(
            raw,
            claim=counted.claim,
            tenant=tenant,
            disaggregate=disaggregate,
            trace=trace,
            deadline_s=deadline_s,
        )
        traced = trace.headers.items() if trace is not None else ()
        await context.send_initial_metadata(((REQUEST_ID, answer.answer_id), *traced))
        return answer

    async def _send_whole(self, method: str, message: bytes, counted: CountedRequest, context: Context) -> None:
        # Returns once the client has read all but what sockets hold. gRPC itself would keep the messages of calls that
        # are over, however many, until their clients read them.
        counted.claim.release()  # as over HTTP: from here on unread bytes are limited
        slow = _ClientSlow(
            f"clients left more than {self._unread_answers.max_bytes} bytes of answers unread, this one the longest",
            is_counted=True,
        )
        timeout_s = _patience_s(len(message))
        with _UntilSlow() as until_slow:
            unread = _UnreadMessage(f"/{SERVICE}/{method}", context.peer(), len(message), lambda: until_slow.end(slow))
            self._unread_answers.add(unread)
            try:
                async with asyncio.timeout(timeout_s):
                    await context.write(message)
            except TimeoutError:
                raise _ClientSlow(f"the answer of {len(message)} bytes was not read within {timeout_s:.0f} s") from None
            finally:
                self._unread_answers.remove(unread)

    async def _admitted(
        self,
        endpoint: str,
        context: Context,
        answer: Callable[[Inference, bytes, Tenant, CountedRequest], Awaitable[R]],
    ) -> R:
        """Authenticate, admit, read the message, run `answer` within its time, and turn errors into statuses."""
        with self._admission.count_request(endpoint) as counted:
            try:
                try:
                    tenant = self._identify(context)
                    self._admission.note_tenant(counted, tenant.name)
                except KvferryError:
                    # A client without a key does not decide what is sampled.
                    counted.trace = self._begin_trace(endpoint, {})
                    raise
                metadata = context.invocation_metadata() or ()
                counted.trace = self._begin_trace(
                    endpoint, {name: value for name, value in metadata if isinstance(value, str)}
                )
                self._admission.require_admission(can_render=self._models.is_started)
                raw = await self._reads.read(context)
                if len(raw) > self._config.max_body_bytes:
                    raise BodyTooLarge(
                        f"the message is {len(raw)} bytes; gateway.max_body_bytes is {self._config.max_body_bytes}",
                        param="message",
                    )
                counted.claim.add_body_bytes(len(raw))
                answering = answer(self._inference, raw, tenant, counted)
                del raw
                answered = await self._in_time(answering, context.time_remaining(), counted)
                counted.status = "200"
                return answered
            except (asyncio.CancelledError, grpc.aio.BaseError) as error:
                # The client cancelled, left, or its deadline passed: gRPC cancels, or what is sent to it fails.
                counted.left(error)
                self._metrics.cancelled.inc()
                raise asyncio.CancelledError from None
            except _ClientSlow as error:
                counted.left(error)
                if not error.is_counted:
                    self._metrics.slow_clients.inc()
                    log.warning("the client %s of %s was cut: %s", context.peer(), endpoint, error)
                aborted = context.abort(grpc.StatusCode.ABORTED, str(error))
                await self._abort_soon(aborted, SLOW_ABORT_TIMEOUT_S, context)
            except KvferryError as error:
                counted.failed(error)
                await self._refuse(context, error)
            except Exception:
                log.exception("a call of %s failed", endpoint)
                fault = EngineError("the gateway failed on this request; its log says why")
                counted.failed(fault)
                await self._refuse(context, fault)

    async def _refuse(self, context: Context, error: KvferryError) -> NoReturn:
        await self._abort_soon(_abort(context, error), ABORT_TIMEOUT_S, context)

    async def _abort_soon(self, abort: Awaitable[NoReturn], timeout_s: float, context: Context) -> NoReturn:
        try:
            async with asyncio.timeout(timeout_s):
                await abort
        except grpc.aio.InternalError:
            pass  # the client has left this call; others of its connection go on
        except TimeoutError:
            # The status waits behind what the client has not read.
            if peer := context.peer():  # empty once the connection has ended
                log.warning("the connection of %s is ended: it does not read the end of its call", peer)
                assert self._ender is not None
                self._ender.end(peer)
        raise asyncio.CancelledError

    def _begin_trace(self, endpoint: str, headers: Mapping[str, str]) -> RequestTrace | None:
        """Begin a span below that of `headers`, if calls of `endpoint` are traced."""
        tracing = self._admission.tracing
        if tracing is None or endpoint not in _TRACED:
            return None
        is_stream = endpoint == "grpc_generate_stream"
        attributes = {
            "rpc.system": "grpc",
            "rpc.service": SERVICE,
            "rpc.method": "GenerateStream" if is_stream else "Generate",
            "gen_ai.request.stream": is_stream,
        }
        return begin_trace(tracing, headers, endpoint, self._models.default, attributes)

    async def _in_time(self, answer: Awaitable[R], remaining_s: float | None, counted: CountedRequest) -> R:
        timeout_s = self._config.request_timeout_s
        is_ours = remaining_s is None or remaining_s > timeout_s
        try:
            async with asyncio.timeout(timeout_s if is_ours else remaining_s) as limit:
                counted.expire = lambda: limit.reschedule(asyncio.get_running_loop().time())
                if counted.ended_by is not None:
                    counted.end(counted.ended_by)
                return await answer
        except TimeoutError:
            counted.has_own_end = not is_ours
            raise counted.ended_by or DeadlineExceeded(
                f"the request took longer than {timeout_s:g} s (gateway.request_timeout_s)"
                if is_ours
                else "the deadline of the call passed"
            ) from None

    def _identify(self, context: Context) -> Tenant:
        found = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        if len(found) > 1:
            raise Unauthenticated("more than one authorization in the metadata")
        authorization = found[0] if found else None
        if isinstance(authorization, bytes):
            authorization = authorization.decode("latin-1")
        return self._access.identify(authorization, _client_name(context))


class _UnreadMessage:
    # gRPC does not say how much of a message was read.

    stalls = False

    def __init__(self, path: str, peer: str, num_bytes: int, cut: Callable[[], None]) -> None:
        self.path = path
        self.peer = peer
        self.num_bytes = num_bytes
        self.cut = cut

    def num_unread_bytes(self) -> int:
        return self.num_bytes


class _UntilSlow:
    # Turns the cancellation that `end` causes into its error.

    def __init__(self) -> None:
        self._error: _ClientSlow | None = None
        self._task = asyncio.current_task()

    def end(self, error: _ClientSlow) -> None:
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        task, self._task = self._task, None
        slow = self._error
        if slow is not None and task is not None and not task.uncancel() and isinstance(error, asyncio.CancelledError):
            raise slow from None


class _UnreadStream:
    # A stream's chunks until gRPC accepts them: it accepts no further chunk while its client does not read.

    def __init__(self, path: str, peer: str, chunks: Chunks, until_slow: _UntilSlow) -> None:
        self.path = path
        self.peer = peer
        self.chunks = chunks
        self.write_begun_s = 0.0
        self._until_slow = until_slow

    @property
    def stalls(self) -> bool:
        # Within a chunk, however large, nothing says that it is read.
        return time.monotonic() - self.write_begun_s >= _patience_s(self.chunks.num_popped_bytes)

    def num_unread_bytes(self) -> int:
        return self.chunks.num_unread_bytes()

    def cut(self) -> None:
        self._until_slow.end(_ClientSlow("the answer was left unread, longest of all or too long", is_counted=True))


def _patience_s(num_bytes: int) -> float:
    return STALL_S + num_bytes / MIN_READ_BYTES_PER_S


async def _send(
    answer: InferenceAnswer, stream: _UnreadStream, context: Context, unread_answers: UnreadAnswers
) -> None:
    """Generate, and write chunks at the client's pace. Raises generation errors at the end."""
    chunks = stream.chunks

    def generated(_: object) -> None:
        chunks.wake()
        unread_answers.add(stream)  # no further chunk tells what waits

    generating = asyncio.create_task(answer.stream(chunks))
    generating.add_done_callback(generated)
    try:
        while True:
            await chunks.wait()
            # Read before the chunks are popped: the last one is added before the task ends.
            is_over = generating.done()
            for chunk in chunks.pop_all():
                stream.write_begun_s = time.monotonic()
                await context.write(chunk)
            chunks.num_popped_bytes = 0
            if is_over:
                break
        generating.result()
    except grpc.aio.BaseError:
        # The write failed because the client left, and gRPC has not cancelled this call yet.
        raise asyncio.CancelledError from None
    finally:
        generating.remove_done_callback(generated)
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)


async def _abort(context: Context, error: KvferryError) -> NoReturn:
    status = status_of(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("an aborted call goes on")


def _client_name(context: Context) -> str | None:
    certificates = context.auth_context().get("x509_pem_cert")
    return next(map(common_name, certificates), None) if certificates is not None else None


def _wants_disaggregation(context: Context) -> bool:
    return any(pair == (DEBUG, "disaggregate") for pair in context.invocation_metadata() or ())


def _max_message_bytes(config: GatewayConfig) -> int:
    """Up to this, a message over `max_body_bytes` is refused by name; beyond it, by gRPC."""
    return config.max_body_bytes + min(config.max_body_bytes, 1 << 20)


def _options(config: GatewayConfig) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", _max_message_bytes(config)),
        ("grpc.max_concurrent_streams", MAX_STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_TIMEOUT_S * 1000)),
        ("grpc.max_connection_idle_ms", 900_000),
        # As on the HTTP port: gateways of one node share it, also an old one and its successor.
        ("grpc.so_reuseport", int(config.grpc_port != 0)),
        # A client that vanished is found within a minute, and its requests end.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.ping_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # How often clients may ask whether this gateway lives.
        ("grpc.http2.min_ping_interval_without_data_ms", 9_000),
    )
