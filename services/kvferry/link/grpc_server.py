"""A worker's gRPC server: Attach for links, Describe for tools."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

import grpc
from google.protobuf.message import DecodeError

from kvferry.addresses import join_host_port
from kvferry.errors import UnavailableError
from kvferry.grpc_options import CHANNEL_OPTIONS
from kvferry.link.gateway_session import GatewaySession, SessionTransport
from kvferry.task_set import TaskSet
from kvferry.wire.v1 import worker_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = "kvferry.wire.v1.Worker"

Context = grpc.aio.ServicerContext[bytes, bytes]


class GrpcServer:
    """`detach` returns the task that ends the session's requests."""

    def __init__(
        self,
        attach: Callable[[SessionTransport, pb.Hello], GatewaySession],
        detach: Callable[[GatewaySession], asyncio.Task[None]],
        welcome: Callable[[], pb.Welcome],
    ) -> None:
        self._attach = attach
        self._detach = detach
        self._welcome = welcome
        self._server: grpc.aio.Server | None = None
        self._transports: set[_GrpcTransport] = set()
        self._handlers = TaskSet()  # of attached sessions
        self.port = 0

    async def start(self, host: str, credentials: grpc.ServerCredentials | None) -> None:
        server = self._server = grpc.aio.server(options=CHANNEL_OPTIONS)
        handlers = {
            "Attach": grpc.stream_stream_rpc_method_handler(self._serve_attach),
            "Describe": grpc.unary_unary_rpc_method_handler(
                self._serve_describe, pb.DescribeRequest.FromString, pb.Welcome.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        address = join_host_port(host, 0)
        if credentials is None:
            self.port = server.add_insecure_port(address)
        else:
            self.port = server.add_secure_port(address, credentials)
        await server.start()

    async def stop(self, grace_s: float) -> None:
        """Wait up to `grace_s` for pending messages to leave, then until every session is detached."""
        if self._server is not None:
            server, self._server = self._server, None
            for transport in self._transports:
                transport.close()
            await server.stop(grace_s)
            # gRPC returns when its calls have ended, which may be before their handlers see that they are cancelled.
            await self._handlers.wait_until_empty()

    async def _serve_describe(self, request: pb.DescribeRequest, context: Context) -> pb.Welcome:
        try:
            return self._welcome()
        except UnavailableError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, error.message)
            raise

    # Not a generator: when gRPC cancels a generator within a blocked write, it leaves it to the garbage collector, and
    # the requests with it.
    async def _serve_attach(self, messages: AsyncIterator[bytes], context: Context) -> None:
        hello = _hello(await anext(aiter(messages), None))
        if hello is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
            return
        handler = asyncio.current_task()
        if self._server is None or handler is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this worker stops")
            return
        self._handlers.add(handler)
        transport = _GrpcTransport()
        session = transport.session = self._attach(transport, hello)
        self._transports.add(transport)
        reader = asyncio.create_task(_read(messages, session, transport))
        try:
            while not transport.gone:
                transport.event.clear()
                payloads = session.pop_messages()
                for payload in payloads:
                    await context.write(payload)
                # Messages may have been queued while these were written.
                if not payloads:
                    if transport.closing:
                        break
                    await transport.event.wait()
        finally:
            self._transports.discard(transport)
            reader.cancel()
            # Shielded: a second cancel must not leave requests in the engine.
            await asyncio.shield(self._detach(session))
        if transport.fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, transport.fault)


class _GrpcTransport:
    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.closing = False  # pending messages are sent, then no more
        self.gone = False  # the stream ended
        self.fault = ""  # why the gateway's messages are invalid
        self.session: GatewaySession | None = None

    def messages_pending(self) -> None:
        self.event.set()

    def abort(self) -> None:
        self.gone = True
        self.event.set()

    def close(self) -> None:
        self.closing = True
        if self.session is not None:
            self.session.close()


async def _read(messages: AsyncIterator[bytes], session: GatewaySession, transport: _GrpcTransport) -> None:
    try:
        with contextlib.suppress(asyncio.CancelledError):
            async for payload in messages:
                session.receive(payload)
    except ValueError as error:
        log.warning("the stream of gateway %s ends: %s", session.gateway_id, error)
        transport.fault = str(error)
    except Exception:
        log.exception("reading from gateway %s failed", session.gateway_id)
    finally:
        transport.abort()


def _hello(payload: bytes | None) -> pb.Hello | None:
    if payload is None:
        return None
    try:
        message = pb.Downward.FromString(payload)
    except DecodeError:
        return None
    return message.hello if message.WhichOneof("kind") == "hello" else None
