"""Streams of completions, each compared with the answer it must give, through a client that retries connections."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.results import BenchFailed

MAX_ATTEMPTS = 8


@dataclass
class Outcome:
    """One request, from a client's side."""

    prompt: int
    text: str = ""
    error: str = ""
    elapsed_s: float = 0.0
    num_attempts: int = 0
    url: str = ""  # of the gateway that answered
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def continued(self) -> bool:
        return bool(self.record.get("continued_after"))

    @property
    def workers(self) -> list[str]:
        return [self.record[key] for key in ("prefill_worker", "decode_worker") if self.record.get(key)]

    @property
    def recomputed(self) -> bool:
        """Its prompt was computed by the decode worker because the prefill worker failed."""
        return bool(self.record.get("prefill_failure"))

    @property
    def affected(self) -> bool:
        return self.continued or self.recomputed or self.num_attempts > 1


def make_prompts(count: int, seed: int) -> list[str]:
    """Distinct prompts of 20 to 200 words, some with a beginning in common."""
    seeded = random.Random(seed)
    beginnings = [" ".join(f"w{seeded.randrange(4000)}" for _ in range(48)) for _ in range(4)]
    return [
        f"{seeded.choice(beginnings)} " + " ".join(f"w{seeded.randrange(4000)}" for _ in range(seeded.randint(20, 150)))
        for _ in range(count)
    ]


class Client:
    """Asks one of the gateways that `urls` names; on a broken connection asks another one, from the start."""

    def __init__(self, urls: Callable[[], Sequence[str]], prompts: Sequence[str], max_tokens: int) -> None:
        self._urls = urls
        self.prompts = list(prompts)
        self.max_tokens = max_tokens
        self._http = httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))
        self._turn = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, prompt: int) -> Outcome:
        outcome = Outcome(prompt)
        started_s = time.perf_counter()
        while outcome.num_attempts < MAX_ATTEMPTS:
            outcome.num_attempts += 1
            urls = self._urls()
            if not urls:
                outcome.error = "no gateway takes requests"
                break
            self._turn += 1
            outcome.text = ""
            outcome.url = urls[self._turn % len(urls)]
            try:
                outcome.error = await self._stream(outcome.url, outcome)
                break
            except httpx.TransportError as error:
                outcome.error = f"{type(error).__name__} after {outcome.num_attempts} attempts"
        outcome.elapsed_s = time.perf_counter() - started_s
        return outcome

    async def _stream(self, url: str, outcome: Outcome) -> str:
        """Fill in the outcome; what the server said went wrong, if anything. Raises for a broken connection."""
        body = {
            "model": "sim-model",
            "prompt": self.prompts[outcome.prompt],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        # Through both kinds of workers, whatever it costs: a fault of either must be able to hit it.
        headers = {"x-kvferry-debug": "disaggregate"}
        request = self._http.stream("POST", f"{url}/v1/completions", json=body, headers=headers)
        async with request as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue  # empty, or a comment
                if line == "data: [DONE]":
                    return ""
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"event: {event['error']['message']}"
                outcome.text += "".join(choice["text"] for choice in event["choices"])
                outcome.record = event.get("kvferry") or outcome.record
        return "the stream ended without [DONE]"


@dataclass
class Load:
    """Closed loop: as many requests at a time as there are streams, until told to stop."""

    client: Client
    num_prompts: int
    num_streams: int
    outcomes: list[Outcome] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load while the block runs; its requests in flight finish before this returns.

        Raises an ExceptionGroup with a BenchFailed, and cancels the block, at the first request that fails.
        """
        stopping = asyncio.Event()

        async def stream(first: int) -> None:
            prompt = first
            while not stopping.is_set():
                outcome = await self.client.ask(prompt % self.num_prompts)
                raise_failure(outcome)
                self.outcomes.append(outcome)
                prompt += self.num_streams

        async with asyncio.TaskGroup() as streams:
            for i in range(self.num_streams):
                streams.create_task(stream(i))
            yield
            stopping.set()


def raise_failure(outcome: Outcome) -> None:
    """Raise BenchFailed where a request has failed."""
    if outcome.error:
        raise BenchFailed(f"prompt {outcome.prompt} at {outcome.url}: {outcome.error}")


def summarize(outcomes: Sequence[Outcome], kills: int) -> dict[str, Any]:
    """The row of one fault. `extra_ms_p50` compares requests that it touched with those that it did not."""
    calm_s = [outcome.elapsed_s for outcome in outcomes if not outcome.affected]
    touched_s = [outcome.elapsed_s for outcome in outcomes if outcome.affected]
    extra_ms = None
    if calm_s and touched_s:
        extra_ms = round((statistics.median(touched_s) - statistics.median(calm_s)) * 1e3, 1)
    return {
        "kills": kills,
        "requests": len(outcomes),
        "continued": sum(outcome.continued for outcome in outcomes),
        "recomputed": sum(outcome.recomputed for outcome in outcomes),
        "retried": sum(outcome.num_attempts > 1 for outcome in outcomes),
        "extra_ms_p50": extra_ms,
    }


def compare(
    outcomes: Sequence[Outcome],
    expected_at: Callable[[str], Sequence[str]],
    is_foreign: Callable[[str, str], bool],
) -> None:
    """Raise BenchFailed for the first answer that differs, or that came from a worker of another model.

    `expected_at` returns the texts of a gateway's model by its URL, for each prompt. `is_foreign` tells of a gateway's
    URL and a worker's id whether their models differ.
    """
    for each in outcomes:
        if each.text != (expected := expected_at(each.url)[each.prompt]):
            raise BenchFailed(f"prompt {each.prompt} at {each.url}: {each.text!r}, undisturbed {expected!r}")
        if foreign := [worker for worker in each.workers if is_foreign(each.url, worker)]:
            raise BenchFailed(f"prompt {each.prompt} at {each.url}: answered by {foreign[0]}, which has another model")
