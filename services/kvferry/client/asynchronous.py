"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Self, Unpack

import grpc

from kvferry.client.calls import (
    SERVICE,
    MessageLike,
    SamplingOptions,
    generate_request,
    only_model,
    tokenize_request,
)
from kvferry.client.connection import Tls, metadata_of, options_of, tls_of
from kvferry.client.errors import failure_of
from kvferry.inference.v1 import inference_pb2 as pb


class AsyncAnswerStream(AsyncIterator[pb.GenerateChunk]):
    """Chunks of one answer as they come. Leaving its `async with`, or `cancel`, ends the request on the cluster."""

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, pb.GenerateChunk]) -> None:
        self._call = call
        self._chunks = aiter(call)

    async def __anext__(self) -> pb.GenerateChunk:
        """Raises CallFailed; chunks that came before are good."""
        try:
            return await anext(self._chunks)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from None

    def cancel(self) -> None:
        """May be repeated, and after the end."""
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()


class AsyncClient:
    """One endpoint, for the event loop that runs when it is made; `close` it, or use it in an `async with`.

    Every call may raise CallFailed, and ValueError or TypeError for arguments that cannot be sent. `timeout_s` of a
    call is its deadline: the cluster stops working on it then.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """`target` is host:port. `tls=True`: with what this machine trusts. `timeout_s`: of calls that have none."""
        found = tls_of(tls)
        if found is None:
            self._channel = grpc.aio.insecure_channel(target, options=options_of(None))
        else:
            self._channel = grpc.aio.secure_channel(target, found.credentials(), options=options_of(found))
        self._target = target
        self._metadata = metadata_of(api_key)
        self._timeout_s = timeout_s
        self._only_model = ""
        self._generate = self._channel.unary_unary(
            f"{SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        self._stream = self._channel.unary_stream(
            f"{SERVICE}/GenerateStream", pb.GenerateRequest.SerializeToString, pb.GenerateChunk.FromString
        )
        self._tokenize = self._channel.unary_unary(
            f"{SERVICE}/Tokenize", pb.TokenizeRequest.SerializeToString, pb.TokenizeResponse.FromString
        )
        self._models = self._channel.unary_unary(
            f"{SERVICE}/ListModels", pb.ListModelsRequest.SerializeToString, pb.ListModelsResponse.FromString
        )

    def __repr__(self) -> str:
        return f"<AsyncClient of {self._target}>"

    async def generate(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        tools: Sequence[pb.Tool] = (),
        tool_choice: str = "",
        structured_output: pb.StructuredOutput | None = None,
        num_choices: int = 1,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> pb.GenerateResponse:
        """The whole answer, of one prompt: `text`, `messages` or `token_ids`.

        `model`: by default the only one that is served.
        """
        request = generate_request(
            model or await self._the_only_model(),
            text,
            messages,
            token_ids,
            tools=tools,
            tool_choice=tool_choice,
            structured_output=structured_output,
            num_choices=num_choices,
            return_token_ids=return_token_ids,
            sampling=sampling,
        )
        try:
            return await self._generate(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from None

    async def stream(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str = "",
        tools: Sequence[pb.Tool] = (),
        tool_choice: str = "",
        structured_output: pb.StructuredOutput | None = None,
        num_choices: int = 1,
        return_token_ids: bool = False,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncAnswerStream:
        """As `generate`, while it is generated."""
        request = generate_request(
            model or await self._the_only_model(),
            text,
            messages,
            token_ids,
            tools=tools,
            tool_choice=tool_choice,
            structured_output=structured_output,
            num_choices=num_choices,
            return_token_ids=return_token_ids,
            sampling=sampling,
        )
        return AsyncAnswerStream(self._stream(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> pb.TokenizeResponse:
        """What a prompt, `text` or `messages`, is to the model."""
        request = tokenize_request(model or await self._the_only_model(), text, messages)
        try:
            return await self._tokenize(request, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from None

    async def models(self, *, timeout_s: float | None = None) -> list[pb.Model]:
        """What is served."""
        return list((await self._list_models(timeout_s)).models)

    async def close(self) -> None:
        """End what is still going on; may be repeated."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _the_only_model(self) -> str:
        if not self._only_model:
            self._only_model = only_model(await self._list_models(None))
        return self._only_model

    async def _list_models(self, timeout_s: float | None) -> pb.ListModelsResponse:
        try:
            return await self._models(
                pb.ListModelsRequest(), timeout=timeout_s or self._timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise failure_of(error) from None
