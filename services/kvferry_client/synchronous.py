# Generated from asynchronous.py by tools/generate_client.py: change that file, and run `make client`.
"""The client for synchronous code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self, Unpack

import grpc

from kvferry.inference.v1 import inference_pb2 as pb
from kvferry_client.calls import (
    SERVICE,
    MessageLike,
    SamplingOptions,
    generate_request,
    only_model,
    tokenize_request,
)
from kvferry_client.connection import Tls, metadata_of, options_of, tls_of
from kvferry_client.errors import failure_of


class _Call(Protocol):
    def __iter__(self) -> Iterator[pb.GenerateChunk]: ...

    def cancel(self) -> bool: ...


class AnswerStream(Iterator[pb.GenerateChunk]):
    """Chunks of one answer. Leaving its `with`, or `cancel`, ends the request on the cluster."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._chunks = iter(call)

    def __next__(self) -> pb.GenerateChunk:
        """Raises CallFailed; earlier chunks stay valid."""
        try:
            return next(self._chunks)
        except grpc.RpcError as error:
            raise failure_of(error) from None

    def cancel(self) -> None:
        """Idempotent, also after the end."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


class Client:
    """A connection to one endpoint. Thread-safe; `close` it, or use it in a `with`.

    Every call may raise CallFailed, and ValueError or TypeError for arguments that cannot be sent. `timeout_s` of a
    call is its deadline, at which the cluster stops working on it.
    """

    def __init__(
        self,
        target: str,
        *,
        api_key: str | None = None,
        tls: Tls | bool = False,
        timeout_s: float | None = None,
        key_in_clear: bool = False,
    ) -> None:
        """`target` is host:port. `tls=True` trusts this machine's authorities. `timeout_s` is the default of all
        calls. A key goes without TLS to this machine only, or wherever `key_in_clear` says so (else ValueError).
        """
        found = tls_of(tls)
        self._metadata = metadata_of(api_key, target, found, key_in_clear=key_in_clear)
        if found is None:
            self._channel = grpc.insecure_channel(target, options=options_of(None))
        else:
            self._channel = grpc.secure_channel(target, found.credentials(), options=options_of(found))
        self._target = target
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
        return f"<Client of {self._target}>"

    def generate(
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
        cache_salt: str | None = None,
        cache_ttl_s: float | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> pb.GenerateResponse:
        """Return the whole answer to one prompt: `text`, `messages` or `token_ids`. `model` defaults to the only
        served one.
        """
        request = generate_request(
            model or self._the_only_model(timeout_s),
            text,
            messages,
            token_ids,
            tools=tools,
            tool_choice=tool_choice,
            structured_output=structured_output,
            num_choices=num_choices,
            return_token_ids=return_token_ids,
            cache_salt=cache_salt,
            cache_ttl_s=cache_ttl_s,
            sampling=sampling,
        )
        try:
            return self._generate(request, timeout=self._deadline(timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure_of(error) from None

    def stream(
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
        cache_salt: str | None = None,
        cache_ttl_s: float | None = None,
        timeout_s: float | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Take the arguments of `generate`; return the answer's chunks."""
        request = generate_request(
            model or self._the_only_model(timeout_s),
            text,
            messages,
            token_ids,
            tools=tools,
            tool_choice=tool_choice,
            structured_output=structured_output,
            num_choices=num_choices,
            return_token_ids=return_token_ids,
            cache_salt=cache_salt,
            cache_ttl_s=cache_ttl_s,
            sampling=sampling,
        )
        return AnswerStream(self._stream(request, timeout=self._deadline(timeout_s), metadata=self._metadata))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Sequence[MessageLike] | None = None,
        model: str = "",
        timeout_s: float | None = None,
    ) -> pb.TokenizeResponse:
        """Return the token ids of a prompt, given as `text` or `messages`."""
        request = tokenize_request(model or self._the_only_model(timeout_s), text, messages)
        try:
            return self._tokenize(request, timeout=self._deadline(timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure_of(error) from None

    def models(self, *, timeout_s: float | None = None) -> list[pb.Model]:
        listed = self._list_models(timeout_s)
        return list(listed.models)

    def close(self) -> None:
        """Cancel running calls. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _the_only_model(self, timeout_s: float | None) -> str:
        if not self._only_model:
            self._only_model = only_model(self._list_models(timeout_s))
        return self._only_model

    def _list_models(self, timeout_s: float | None) -> pb.ListModelsResponse:
        try:
            return self._models(pb.ListModelsRequest(), timeout=self._deadline(timeout_s), metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure_of(error) from None
