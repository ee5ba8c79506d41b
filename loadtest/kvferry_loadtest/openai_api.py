"""An OpenAI endpoint over HTTP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvferry_loadtest import content
from kvferry_loadtest.apis import Sampling, messages_of, tokens_of
from kvferry_loadtest.errors import KeyRefused, TargetError
from kvferry_loadtest.http_client import Endpoint, Exchange, HttpClient, Receiver
from kvferry_loadtest.plan import PlannedRequest, RequestId
from kvferry_loadtest.stream import StreamReader, error_text


class OpenAiApi:
    """Streams of /v1/chat/completions, or of /v1/completions for prompts of token ids."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.client = HttpClient(endpoint)
        self.url = endpoint.url
        self._heads: dict[tuple[str, str], bytes] = {}

    def __repr__(self) -> str:
        return f"<OpenAiApi {self.client!r}>"

    async def models(self, key: str) -> list[str]:
        try:
            status, body = await self.client.fetch("/v1/models", _authorization(key))
        except OSError as error:
            raise TargetError(f"{self.url}: {error}") from None
        if status in (401, 403):
            raise KeyRefused(self.url, f"{status}: {error_text(body)}")
        if status != 200:
            raise TargetError(f"{self.url}: GET /v1/models answers {status}: {error_text(body)}")
        try:
            return [model.id for model in msgspec.json.decode(body, type=_Models).data]
        except msgspec.MsgspecError as error:
            raise TargetError(f"{self.url}: GET /v1/models is no list of models: {error}") from None

    def body(self, request: PlannedRequest, sampling: Sampling, answer_of: Callable[[RequestId], str]) -> bytes:
        fields: dict[str, Any] = {
            "model": sampling.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
        }
        if sampling.ignore_eos:
            fields["ignore_eos"] = True
        if request.tokens:
            fields["prompt"] = tokens_of(request)
        else:
            fields["messages"] = [{"role": role, "content": text} for role, text in messages_of(request, answer_of)]
        if request.tools:
            fields["tools"] = content.TOOLS
            fields["tool_choice"] = (
                "none"  # answers are of fixed length; the definitions are in the prompt all the same
            )
        return msgspec.json.encode(fields)

    def send(self, request: PlannedRequest, body: bytes, key: str, receiver: Receiver) -> Exchange:
        path = "/v1/completions" if request.tokens else "/v1/chat/completions"
        head = self._heads.get((path, key))
        if head is None:
            headers = {"content-type": "application/json", "accept": "text/event-stream", **_authorization(key)}
            head = self._heads[path, key] = self.client.request_head("POST", path, headers)
        return self.client.send(head, body, receiver)

    def reader(self) -> StreamReader:
        return StreamReader()

    async def close(self) -> None:
        await self.client.close()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
