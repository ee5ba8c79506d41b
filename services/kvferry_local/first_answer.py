"""A first real request through a cluster that has just become ready."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from kvferry.config import ClusterConfig
from kvferry.errors import LocalError
from kvferry_local.gateway_access import context_of, headers_of, url_of

QUESTION = "What does a ferry do? Answer in one short sentence."
_MAX_TOKENS = 48

# So short a question is cheaper to compute where it is decoded; this one is to show the whole way.
_HEADERS = {"x-kvferry-debug": "disaggregate"}


class FirstAnswerFailed(LocalError):
    pass


class QuestionRefused(FirstAnswerFailed):
    """The cluster works, and the model takes no such question: it may have no chat template."""


@dataclass(frozen=True, slots=True)
class FirstAnswer:
    question: str
    answer: str
    ttft_s: float  # from sending the request to the first text
    total_s: float
    prompt_tokens: int
    completion_tokens: int
    prefill_worker: str | None
    decode_worker: str
    transferred_pages: int
    transferred_bytes: int
    reason: str = ""  # of its placement

    @property
    def was_transferred(self) -> bool:
        return self.prefill_worker is not None and self.transferred_pages > 0


def ask(
    config: ClusterConfig,
    *,
    question: str = QUESTION,
    timeout_s: float = 300.0,
    clock: Callable[[], float] = time.monotonic,
) -> FirstAnswer:
    """Ask over the OpenAI endpoint, streamed. Raises FirstAnswerFailed with the gateway's message."""
    body = {
        "model": config.names[0],
        "messages": [{"role": "user", "content": question}],
        "max_tokens": _MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started_s = clock()
    try:
        with (
            httpx.Client(
                base_url=url_of(config.gateway),
                timeout=timeout_s,
                trust_env=False,
                verify=context_of(config.gateway),
                headers=headers_of(),
            ) as client,
            client.stream("POST", "/v1/chat/completions", json=body, headers=_HEADERS) as response,
        ):
            if response.status_code != 200:
                text = response.read().decode("utf-8", errors="replace")
                kind = QuestionRefused if response.status_code == 400 else FirstAnswerFailed
                raise kind(
                    f"the gateway answered {response.status_code}: {text[:500]} (--no-ask starts without this question)"
                )
            return _collect(question, _chunks(response.iter_lines()), started_s, clock)
    except httpx.HTTPError as error:
        raise FirstAnswerFailed(f"the first request failed: {error or type(error).__name__}") from None


def _chunks(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            raise FirstAnswerFailed(f"the stream ended with an error: {json.dumps(chunk['error'])[:500]}")
        yield chunk


def _collect(
    question: str, chunks: Iterator[dict[str, Any]], started_s: float, clock: Callable[[], float]
) -> FirstAnswer:
    parts: list[str] = []
    first_s: float | None = None
    usage: dict[str, Any] = {}
    record: dict[str, Any] | None = None
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                first_s = first_s if first_s is not None else clock()
                parts.append(text)
        usage = chunk.get("usage") or usage
        record = chunk.get("kvferry") or record
    if first_s is None:
        raise FirstAnswerFailed("the answer was empty")
    if record is None:
        raise FirstAnswerFailed("the answer does not say which workers computed it")
    return FirstAnswer(
        question=question,
        answer="".join(parts).strip(),
        ttft_s=first_s - started_s,
        total_s=clock() - started_s,
        prompt_tokens=int(usage.get("prompt_tokens", 0)),
        completion_tokens=int(usage.get("completion_tokens", 0)),
        prefill_worker=record.get("prefill_worker"),
        decode_worker=record["decode_worker"],
        transferred_pages=int(record.get("ferried_pages", 0)),
        transferred_bytes=int(record.get("ferried_bytes", 0)),
        reason=str(record.get("reason", "")),
    )
