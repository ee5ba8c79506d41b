"""A request's span in a gateway, after OpenTelemetry's GenAI conventions.

Texts require `tracing.prompts`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.engine.base import EngineOutput
from kvferry.errors import KvferryError
from kvferry.gateway.bodies.openai_bodies import ChatBody, CompletionBody
from kvferry.link.remote_request import OnOutput, OnText
from kvferry.observability.tracing import TRACEPARENT, TRACESTATE, Attributes, Span, Tracing, error_type
from kvferry.router.request import Request

_ENDPOINT_TO_OPERATION = {"chat_completions": "chat", "completions": "text_completion"}


def begin_trace(
    tracing: Tracing, headers: Mapping[str, str], endpoint: str, model: str, attributes: Attributes
) -> RequestTrace:
    """Start a request's span below that of `headers` (lower-case names).

    `endpoint` is one of telemetry.ENDPOINTS; `attributes` are the protocol's.
    """
    operation = _ENDPOINT_TO_OPERATION.get(endpoint, "generate_content")
    span = tracing.receive(
        headers,
        f"{operation} {model}",
        {
            **attributes,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "kvferry",
            "gen_ai.request.model": model,
        },
    )
    return RequestTrace(span, prompts=tracing.prompts, is_http="http.request.method" in attributes)


def trace_headers(headers: Sequence[tuple[bytes, bytes]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in headers:
        if name == b"traceparent":
            found[TRACEPARENT] = value.decode("latin-1")
        elif name == b"tracestate":
            # It may come in several lines, which are one list.
            before = found.get(TRACESTATE)
            found[TRACESTATE] = f"{before},{value.decode('latin-1')}" if before else value.decode("latin-1")
    return found


class RequestTrace:
    """Span of a request, from its arrival until `end`."""

    def __init__(self, span: Span, *, prompts: bool, is_http: bool) -> None:
        self._span = span
        self._is_http = is_http
        self._prompts = prompts and span.is_sampled
        self._texts: list[list[str]] = []
        self.headers = span.context.headers()  # for the answer

    @property
    def span(self) -> Span | None:
        """Parent of this request's spans, or None if not sampled."""
        return self._span if self._span.is_sampled else None

    def rendered(
        self,
        answer_id: str,
        body: ChatBody | CompletionBody,
        requests: Sequence[Request],
        begun_ns: int,
        model: str,
    ) -> None:
        """Record `requests`, one per choice; rendering, for the configured `model`, began at `begun_ns` (Unix time)."""
        if not self._span.is_sampled:
            return
        sampling = requests[0].sampling
        self._span.record("render", begun_ns, time.time_ns())
        self._span.set(
            {
                "gen_ai.response.id": answer_id,
                "gen_ai.request.model": body.model,
                "kvferry.model": model,
                "gen_ai.request.choice.count": len(requests) if len(requests) > 1 else None,
                "gen_ai.request.stream": bool(body.stream) if self._is_http else None,  # else the method says it
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.seed": sampling.seed,
            }
        )
        if self._prompts:
            self._texts = [[] for _ in requests]
            self._span.set({"gen_ai.input.messages": json.dumps(_messages_of(body), ensure_ascii=False)})

    def listen(self, choice: int, on_output: OnOutput, on_text: OnText) -> tuple[OnOutput, OnText]:
        """Return a choice's sinks, recording its text if `tracing.prompts` is set."""
        if not self._prompts:
            return on_output, on_text
        texts = self._texts[choice]

        def output_and_keep(output: EngineOutput) -> None:
            texts.append(output.text)
            on_output(output)

        def text_and_keep(token_ids: Sequence[int], text: str) -> None:
            texts.append(text)
            on_text(token_ids, text)

        return output_and_keep, text_and_keep

    def answered(
        self,
        *,
        prompt_tokens: int,
        cached_tokens: int,
        generated_tokens: int,
        finish_reasons: Sequence[str | None],
        first_token_s: float | None,
    ) -> None:
        """Record the end of all choices; `first_token_s` counts from the request's arrival."""
        if not self._span.is_sampled:
            return
        self._span.set(
            {
                "gen_ai.response.finish_reasons": [reason or "" for reason in finish_reasons],
                "gen_ai.response.time_to_first_chunk": first_token_s,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": generated_tokens,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            }
        )
        if self._prompts:
            messages = [
                {
                    "role": "assistant",
                    "parts": [{"type": "text", "content": "".join(texts)}],
                    "finish_reason": reason or "",
                }
                for texts, reason in zip(self._texts, finish_reasons, strict=True)
            ]
            self._span.set({"gen_ai.output.messages": json.dumps(messages, ensure_ascii=False)})

    def failed(self, error: BaseException) -> None:
        if isinstance(error, KvferryError) and error.http_status < 500:
            # As HTTP's conventions have it: the client's fault is no error of a server.
            self._span.set({"error.type": error_type(error)})
        else:
            self._span.fail(error_type(error))

    def end(self, status: str) -> None:
        if self._is_http:
            self._span.set({"http.response.status_code": int(status)})
        self._span.end()


def _messages_of(body: ChatBody | CompletionBody) -> list[dict[str, Any]]:
    if isinstance(body, ChatBody):
        return [{"role": message.get("role"), "parts": _parts_of(message.get("content"))} for message in body.messages]
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    return [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts]


def _parts_of(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}]
    parts = content if isinstance(content, list) else []
    return [{"type": "text", "content": part["text"]} for part in parts if isinstance(part, dict) and "text" in part]
