"""Measures prefill and decode of a running deployment over its OpenAI endpoint, for `kvferry plan --calibrate URL`."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from kvferry.errors import ConfigError, LocalError
from kvferry_plan.planner.calibration import DecodeMeasurement, PrefillMeasurement
from kvferry_plan.planner.workload import MAX_TOKENS

T = TypeVar("T")

BATCHES: Final = (1, 2, 4, 8)
ANSWER_TOKENS: Final = 48
_PROMPT_SHARES: Final = (0.1, 0.3, 0.6, 0.9)  # of the longest prompt that is measured
_MAX_PROMPT_TOKENS: Final = 16_384
_REPEATS: Final = 3
_BUDGET_S: Final = 120.0
_REQUEST_TIMEOUT_S: Final = 60.0
_LIMIT_S: Final = 240.0  # of everything, whatever the deployment sends and however slowly
_MAX_RESPONSE_BYTES: Final = 4 << 20
_MAX_SHOWN_CHARS: Final = 400
_MIN_TOKENS_PER_WORD: Final = 0.5  # a smaller figure would make prompts of megabytes
_WORDS: Final = ("river", "ferry", "stone", "cloud", "table", "green", "seven", "north", "music", "paper")


class MeasuringFailed(LocalError):
    """The deployment did not answer as expected; the message has its status."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a minute of load."""

    prefills: tuple[PrefillMeasurement, ...]
    decodes: tuple[DecodeMeasurement, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    last_s: float  # from the first token to the last

    @property
    def tpot_s(self) -> float:
        return self.last_s / max(1, self.output_tokens - 1)


def measure(url: str, *, longest_tokens: int, batches: tuple[int, ...] = BATCHES) -> Measured:
    """Send prompts one after the other, then streams side by side. The deployment must be idle otherwise.

    The API key comes from KVFERRY_API_KEY. Raises ConfigError for a URL that is none, MeasuringFailed for refusals.
    """
    _check_url(url)
    try:
        return asyncio.run(_measure_in_time(url.rstrip("/"), longest_tokens, batches))
    except httpx.InvalidURL as error:
        raise ConfigError(f"--calibrate {url[:80]!a}: {error}") from None
    except httpx.HTTPError as error:
        raise _failed(f"{url}: {str(error) or type(error).__name__}") from None
    except TimeoutError:
        raise _failed(f"{url}: not done after {_LIMIT_S:g} s, the limit") from None


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_url = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and url.isprintable()
            and " " not in url
        )
    except ValueError:  # of brackets, and of a port over 65535
        is_url = False
    if not is_url:
        raise ConfigError(f"--calibrate {url[:80]!a}: expected a URL such as http://127.0.0.1:8000")
    if parts.username is not None:
        raise ConfigError("--calibrate: the URL has a user; the key is read from KVFERRY_API_KEY")


def _key() -> str:
    key = os.environ.get("KVFERRY_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("KVFERRY_API_KEY: expected printable ASCII")
    return key


def _failed(text: str) -> MeasuringFailed:
    # Servers and proxies repeat headers. The key is removed before the text is cut, so that no part of it is left.
    key = _key()
    shown = (text.replace(key, "***") if key else text)[:_MAX_SHOWN_CHARS]
    return MeasuringFailed("--calibrate " + "".join(each if each.isprintable() else "?" for each in shown))


async def _measure_in_time(url: str, longest_tokens: int, batches: tuple[int, ...]) -> Measured:
    async with asyncio.timeout(_LIMIT_S):
        return await _measure(url, longest_tokens, batches)


async def _measure(url: str, longest_tokens: int, batches: tuple[int, ...]) -> Measured:
    # Without compression, so that bytes of the network are bytes of the text.
    key, headers = _key(), {"accept-encoding": "identity"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    deadline = time.monotonic() + _BUDGET_S
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
        probe = _Probe(client, await _model(client), random.Random())
        # The first request of a length may compile or allocate, so it does not count.
        first = await probe.ask(64, 4)
        probe.tokens_per_word = max(_MIN_TOKENS_PER_WORD, first.prompt_tokens / 64)
        longest = min(longest_tokens - ANSWER_TOKENS, _MAX_PROMPT_TOKENS)
        prefills = await _prefills(probe, [probe.words(share * longest) for share in _PROMPT_SHARES], deadline)
        decodes = await _decodes(probe, batches, deadline)
    return Measured(tuple(prefills), tuple(decodes))


async def _prefills(probe: _Probe, lengths: Sequence[int], deadline: float) -> list[PrefillMeasurement]:
    # Each round has all lengths, so that a machine that becomes slower makes none of them look worse than others.
    found: list[list[_Answer]] = [[] for _ in lengths]
    for number in range(_REPEATS):
        for length, answers in zip(lengths, found, strict=True):
            if not number:
                await probe.ask(length, 2)
            answers.append(await probe.ask(length, 2))
            if time.monotonic() > deadline:
                break
        if time.monotonic() > deadline:
            break
    return [
        PrefillMeasurement(
            round(statistics.mean(each.prompt_tokens for each in answers)),
            statistics.median(each.ttft_s for each in answers),
        )
        for answers in found
        if answers
    ]


async def _decodes(probe: _Probe, batches: Sequence[int], deadline: float) -> list[DecodeMeasurement]:
    # In rounds for the same reason. One round is whole, whatever it takes.
    found: list[list[Sequence[_Answer]]] = [[] for _ in batches]
    for _ in range(_REPEATS):
        for batch, rounds in zip(batches, found, strict=True):
            rounds.append(await asyncio.gather(*(probe.ask(16, ANSWER_TOKENS) for _ in range(batch))))
        if time.monotonic() > deadline:
            break
    decodes = []
    for batch, rounds in zip(batches, found, strict=True):
        answers = [answer for each in rounds for answer in each]
        context = statistics.mean(each.prompt_tokens + each.output_tokens / 2 for each in answers)
        step_s = statistics.median(statistics.median(each.tpot_s for each in one) for one in rounds)
        decodes.append(DecodeMeasurement(batch, context, step_s))
    return decodes


class _Model(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class _Models(msgspec.Struct):
    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count


class _Event(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


def _decoded(content: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _failed(f"{what}: {error}: {_text(content)}") from None


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


async def _chunks(response: httpx.Response, what: str) -> AsyncIterator[bytes]:
    num_bytes = 0
    async for chunk in response.aiter_raw():
        num_bytes += len(chunk)
        if num_bytes > _MAX_RESPONSE_BYTES:
            raise _failed(f"{what}: a response of over {_MAX_RESPONSE_BYTES} bytes, the limit")
        yield chunk


async def _lines(response: httpx.Response, what: str) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for chunk in _chunks(response, what):
        rest += chunk
        if b"\n" in chunk:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line)
    yield bytes(rest)


async def _check_status(response: httpx.Response, what: str) -> None:
    if response.status_code != 200:
        content = b"".join([chunk async for chunk in _chunks(response, what)])
        raise _failed(f"{what}: {response.status_code}: {_text(content)}")


async def _model(client: httpx.AsyncClient) -> str:
    what = "GET /v1/models"
    async with client.stream("GET", "/v1/models") as response:
        await _check_status(response, what)
        content = b"".join([chunk async for chunk in _chunks(response, what)])
    return _decoded(content, _Models, what).data[0].id


@dataclass
class _Probe:
    client: httpx.AsyncClient
    model: str
    rng: random.Random
    tokens_per_word: float = 1.0

    def words(self, num_tokens: float) -> int:
        return max(1, int(num_tokens / self.tokens_per_word))

    async def ask(self, num_words: int, num_tokens: int) -> _Answer:
        """Stream one answer of exactly `num_tokens` to a prompt that nothing has cached."""
        prompt = f"{self.rng.getrandbits(64):x} " + " ".join(self.rng.choice(_WORDS) for _ in range(num_words))
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        start = time.perf_counter()
        first = last = 0.0
        usage: _Usage | None = None
        what = "POST /v1/completions"
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            await _check_status(response, what)
            async for line in _lines(response, what):
                if not line.startswith(b"data: {"):
                    continue
                event = _decoded(line[6:], _Event, what)
                if event.error is not None:
                    raise _failed(f"{what}: {event.error}")
                if event.choices:
                    last = time.perf_counter()
                    first = first or last
                usage = event.usage or usage
        if not first or usage is None:
            raise _failed(f"{what}: a stream without tokens, or without usage")
        return _Answer(usage.prompt_tokens, usage.completion_tokens, first - start, last - first)
