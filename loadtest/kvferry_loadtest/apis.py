"""Interface of the load engine to an endpoint, over HTTP or gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from kvferry_loadtest import content
from kvferry_loadtest.http_client import Receiver
from kvferry_loadtest.plan import AnswerOf, PlannedRequest, RequestId


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters that all requests of a run share."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    timeout_s: float = 120.0


class Usage(msgspec.Struct):
    """Counts of tokens by the server; None where it reports none."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Reader(Protocol):
    """An answer as it arrives. After `finish`, `error` says what was wrong with the stream."""

    token_s: list[float]  # when each piece of text came
    usage: Usage | None
    finish_reason: str
    error: str

    @property
    def text(self) -> str: ...

    def feed(self, data: bytes, now_s: float) -> None: ...

    def finish(self) -> None: ...


class Exchange(Protocol):
    """One request and its answer."""

    @property
    def is_over(self) -> bool: ...

    def abort(self) -> None:
        """Give up: the server is told, and the receiver hears nothing more."""


class Api(Protocol):
    """One endpoint. `close` ends what is open.

    What a receiver hears are an HTTP status (of gRPC the one that means the same), the answer's bytes as a Reader of
    this Api takes them (or an error's), and the end.
    """

    url: str

    async def models(self, key: str) -> list[str]:
        """Names of the models served. Raises KeyRefused, or TargetError: unreachable, no such endpoint."""
        ...

    def body(self, request: PlannedRequest, sampling: Sampling, answer_of: Callable[[RequestId], str]) -> bytes:
        """The request as it is sent, but for the key."""
        ...

    def send(self, request: PlannedRequest, body: bytes, key: str, receiver: Receiver) -> Exchange: ...

    def reader(self) -> Reader: ...

    async def close(self) -> None: ...


def messages_of(request: PlannedRequest, answer_of: Callable[[RequestId], str]) -> list[tuple[str, str]]:
    """Role and text of each message."""
    return [
        (
            message.role,
            "".join(
                answer_of(part.request_id) if isinstance(part, AnswerOf) else content.text_of(part)
                for part in message.parts
            ),
        )
        for message in request.messages
    ]


def tokens_of(request: PlannedRequest) -> Sequence[int]:
    return [token for segment in request.tokens for token in content.token_ids_of(segment)]
