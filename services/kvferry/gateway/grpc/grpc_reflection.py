"""grpc.reflection.v1alpha of a gateway, for authenticated clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection, reflection_pb2

from kvferry.errors import DeadlineExceeded, InvalidRequest, KvferryError
from kvferry.gateway.grpc.grpc_messages import MessageReads
from kvferry.gateway.unread_answers import STALL_S

SERVICE = reflection.SERVICE_NAME

# A call waits for its client before every message. Few at once: others would keep requests out.
_MAX_READS = 4
_MAX_WAITING = 28

Context = grpc.aio.ServicerContext[Any, Any]


class Reflection:
    """`handler` serves it. A call ends once its next message does not come, or its answer is not read."""

    def __init__(
        self,
        services: Iterable[str],
        identify: Callable[[Context], object],
        abort: Callable[[Context, KvferryError], Awaitable[NoReturn]],
    ) -> None:
        """`identify` raises Unauthenticated."""
        self._servicer = reflection.aio.ReflectionServicer(services)
        self._identify = identify
        self._abort = abort
        self._reads = MessageReads(_MAX_READS, _MAX_WAITING)

    def __repr__(self) -> str:
        return f"<Reflection {self._reads!r}>"

    def handler(self) -> grpc.GenericRpcHandler:
        method: Any = grpc.stream_stream_rpc_method_handler(
            self._serve, response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"ServerReflectionInfo": method})

    async def _serve(self, _: object, context: Context) -> None:
        try:
            self._identify(context)
            async for answer in self._servicer.ServerReflectionInfo(self._requests(context), context):
                await _write(answer, context)
        except KvferryError as error:
            await self._abort(context, error)

    async def _requests(self, context: Context) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
        while (raw := await self._reads.read_next(context)) is not None:
            try:
                request = reflection_pb2.ServerReflectionRequest.FromString(raw)
            except DecodeError:
                raise InvalidRequest("the message is no ServerReflectionRequest", param="message") from None
            yield request


async def _write(answer: reflection_pb2.ServerReflectionResponse, context: Context) -> None:
    try:
        async with asyncio.timeout(STALL_S):
            await context.write(answer)
    except TimeoutError:
        raise DeadlineExceeded(f"the answer was not read within {STALL_S:g} s") from None
    except grpc.aio.BaseError:
        raise asyncio.CancelledError from None  # the client left
