"""Measures prefill and decode of a running deployment over its OpenAI endpoint, for `kvferry plan --calibrate URL`."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from kvferry.errors import ConfigError, KvferryError
from kvferry.planner.calibration import DecodeMeasurement, PrefillMeasurement

BATCHES: Final = (1, 2, 4, 8)
ANSWER_TOKENS: Final = 48
_PROMPT_SHARES: Final = (0.1, 0.3, 0.6, 0.9)  # of the longest prompt that is measured
_MAX_PROMPT_TOKENS: Final = 16_384
_REPEATS: Final = 3
_BUDGET_S: Final = 120.0
_REQUEST_TIMEOUT_S: Final = 60.0
_MAX_LINE_BYTES: Final = 1 << 20
_WORDS: Final = ("river", "ferry", "stone", "cloud", "table", "green", "seven", "north", "music", "paper")


class MeasuringFailed(KvferryError):
    """The deployment did not answer as expected; the message has its status."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a minute of load showed."""

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
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--calibrate {url[:80]!r}: expected a URL such as http://127.0.0.1:8000")
    try:
        return asyncio.run(_measure(url.rstrip("/"), longest_tokens, batches))
    except httpx.HTTPError as error:
        raise MeasuringFailed(f"--calibrate {url}: {error or type(error).__name__}") from None


async def _measure(url: str, longest_tokens: int, batches: tuple[int, ...]) -> Measured:
    key = os.environ.get("KVFERRY_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    deadline = time.monotonic() + _BUDGET_S
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=_REQUEST_TIMEOUT_S, trust_env=False) as client:
        probe = _Probe(client, await _model(client), random.Random())
        # The first request of a length may compile or allocate, so it does not count.
        first = await probe.ask(64, 4)
        probe.tokens_per_word = first.prompt_tokens / 64
        longest = min(longest_tokens - ANSWER_TOKENS, _MAX_PROMPT_TOKENS)
        prefills: list[PrefillMeasurement] = []
        for share in _PROMPT_SHARES:
            await probe.ask(probe.words(share * longest), 2)
            found = [await probe.ask(probe.words(share * longest), 2) for _ in range(_REPEATS)]
            seconds = statistics.median(each.ttft_s for each in found)
            prefills.append(PrefillMeasurement(round(statistics.mean(each.prompt_tokens for each in found)), seconds))
            if time.monotonic() > deadline:
                break
        decodes: list[DecodeMeasurement] = []
        for batch in batches:
            rounds = []
            for _ in range(_REPEATS):
                together = [probe.ask(16, ANSWER_TOKENS) for _ in range(batch)]
                rounds.append(await asyncio.gather(*together))
                if time.monotonic() > deadline:
                    break
            answers = [answer for each in rounds for answer in each]
            context = statistics.mean(each.prompt_tokens + each.output_tokens / 2 for each in answers)
            step_s = statistics.median(statistics.median(each.tpot_s for each in one) for one in rounds)
            decodes.append(DecodeMeasurement(batch, context, step_s))
    return Measured(tuple(prefills), tuple(decodes))


async def _model(client: httpx.AsyncClient) -> str:
    response = await client.get("/v1/models")
    try:
        name = response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        raise MeasuringFailed(f"--calibrate: GET /v1/models: {response.status_code}: {response.text[:200]}") from None
    return str(name)


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
        usage: dict[str, Any] = {}
        async with self.client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread())[:300].decode(errors="replace")
                raise MeasuringFailed(f"--calibrate: POST /v1/completions: {response.status_code}: {text}")
            async for line in response.aiter_lines():
                if len(line) > _MAX_LINE_BYTES:
                    raise MeasuringFailed(f"--calibrate: a line of over {_MAX_LINE_BYTES} bytes")
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise MeasuringFailed(f"--calibrate: {str(event['error'])[:300]}")
                if event.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                usage = event.get("usage") or usage
        if not first or "prompt_tokens" not in usage:
            raise MeasuringFailed("--calibrate: a stream without tokens, or without usage")
        return _Answer(int(usage["prompt_tokens"]), int(usage["completion_tokens"]), first - start, last - first)
