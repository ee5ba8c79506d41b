"""Streams of completions, each compared with the answer it must give, through a client that asks again when it has to.

With tenants there are two: one that has as many streams as it may at all times, and one that comes in bursts, for which
streams of the first one are preempted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.receipts import Ending, Receipt
from bench.results import BenchFailed
from kvferry.membership.base import MemberKind

MAX_ATTEMPTS = 8
MAX_REFUSALS = 60
MAX_PAUSE_S = 1.0  # after a refusal, whatever `Retry-After` says: limits of a fault end with it

STEADY = "steady"
BURSTY = "bursty"
TENANTS = (STEADY, BURSTY)
BURSTY_SHARE = 1 / 4  # of the streams
LULL_S = 0.4  # between two bursts
UNDISTURBED_AT_ONCE = 32  # requests, of the steady tenant


@dataclass
class Outcome:
    """One request, from a client's side."""

    prompt: int
    text: str = ""
    error: str = ""
    elapsed_s: float = 0.0
    num_attempts: int = 0
    num_refusals: int = 0
    url: str = ""  # of the gateway that answered
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def continued(self) -> bool:
        """Whether another worker continued the request because its decode worker was lost."""
        lost = self.record.get("lost_workers") or ()
        return self._has_gone_on and any(worker.startswith(MemberKind.DECODE.value) for worker in lost)

    @property
    def preempted(self) -> bool:
        return self._has_gone_on and not self.continued

    @property
    def _has_gone_on(self) -> bool:
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
    """Asks one of the gateways that `urls` names; on a broken connection asks another one, from the start.

    `tenant_to_headers` is empty for a cluster without tenants. What each request got is added to `receipts`.
    """

    def __init__(
        self,
        urls: Callable[[], Sequence[str]],
        prompts: Sequence[str],
        max_tokens: int,
        tenant_to_headers: Mapping[str, Mapping[str, str]],
        receipts: list[Receipt],
    ) -> None:
        self._urls = urls
        self.prompts = list(prompts)
        self.max_tokens = max_tokens
        self._tenant_to_headers = tenant_to_headers
        self._receipts = receipts
        self._http = httpx.AsyncClient(
            timeout=120, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._turn = 0

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, prompt: int, tenant: str = STEADY) -> Outcome:
        """Ask until an answer is whole or has failed. A refused request comes back, MAX_REFUSALS times at most."""
        outcome = Outcome(prompt)
        started_s = time.perf_counter()
        while outcome.num_attempts < MAX_ATTEMPTS and outcome.num_refusals < MAX_REFUSALS:
            urls = self._urls()
            if not urls:
                outcome.error = "no gateway takes requests"
                break
            self._turn += 1
            outcome.text = ""
            outcome.url = urls[self._turn % len(urls)]
            receipt = Receipt(tenant, outcome.url)
            self._receipts.append(receipt)
            try:
                outcome.num_attempts += 1
                outcome.error = await self._stream(outcome, receipt)
                receipt.end(Ending.FAILED if outcome.error else Ending.WHOLE)
                break
            except httpx.TransportError as error:
                receipt.end(Ending.CUT)
                outcome.error = f"{type(error).__name__} after {outcome.num_attempts} attempts"
            except _Refused as refused:
                receipt.end(Ending.REFUSED)
                outcome.num_attempts -= 1
                outcome.num_refusals += 1
                outcome.error = f"{refused} after {outcome.num_refusals} refusals"
                await asyncio.sleep(min(refused.retry_after_s, MAX_PAUSE_S))
            except asyncio.CancelledError:
                receipt.end(Ending.LEFT)
                raise
        outcome.elapsed_s = time.perf_counter() - started_s
        return outcome

    async def _stream(self, outcome: Outcome, receipt: Receipt) -> str:
        """Fill in both; return what the server said went wrong, if anything.

        Raises httpx.TransportError for a broken connection, and _Refused for a 429.
        """
        body = {
            "model": "sim-model",
            "prompt": self.prompts[outcome.prompt],
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        # Through both kinds of workers, whatever it costs: a fault of either must be able to hit it.
        headers = {"x-kvferry-debug": "disaggregate", **self._tenant_to_headers.get(receipt.tenant, {})}
        request = self._http.stream("POST", f"{receipt.url}/v1/completions", json=body, headers=headers)
        async with request as answer:
            receipt.answer_id = answer.headers.get("x-request-id", "")
            if answer.status_code != 200:
                text = f"{answer.status_code}: {(await answer.aread()).decode()[:200]}"
                if answer.status_code == 429:
                    raise _Refused(text, float(answer.headers["retry-after"]))
                return text
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue  # empty, or a comment
                if line == "data: [DONE]":
                    return ""
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"event: {event['error']['message']}"
                text = "".join(choice["text"] for choice in event["choices"])
                outcome.text += text
                # A word is a token: of an answer that is cut this is all that its client knows.
                receipt.token_times_s.extend([time.time()] * len(text.split()))
                outcome.record = event.get("kvferry") or outcome.record
                if usage := event.get("usage"):
                    receipt.num_prompt_tokens = usage["prompt_tokens"]
                    receipt.num_generated = usage["completion_tokens"]
        return "the stream ended without [DONE]"


class _Refused(Exception):
    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass
class Load:
    """Closed loop: as many requests at a time as there are streams, until told to stop.

    With tenants, BURSTY_SHARE of the streams are of the bursty one: they ask all at once, and again LULL_S after the
    last one has its answer.
    """

    client: Client
    num_prompts: int
    num_streams: int
    has_tenants: bool = True
    outcomes: list[Outcome] = field(default_factory=list)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load while the block runs; its requests in flight finish before this returns.

        Raises an ExceptionGroup with a BenchFailed, and cancels the block, at the first request that fails.
        """
        stopping = asyncio.Event()
        num_bursty = int(self.num_streams * BURSTY_SHARE) if self.has_tenants else 0

        async def stream(first: int) -> None:
            prompt = first
            while not stopping.is_set():
                await self._ask(prompt, STEADY)
                prompt += self.num_streams

        async def bursts() -> None:
            first = self.num_streams - num_bursty
            while not stopping.is_set():
                await asyncio.gather(*(self._ask(first + i, BURSTY) for i in range(num_bursty)))
                first += self.num_streams
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LULL_S):
                        await stopping.wait()

        async with asyncio.TaskGroup() as streams:
            for i in range(self.num_streams - num_bursty):
                streams.create_task(stream(i))
            if num_bursty:
                streams.create_task(bursts())
            yield
            stopping.set()

    async def _ask(self, prompt: int, tenant: str) -> None:
        outcome = await self.client.ask(prompt % self.num_prompts, tenant)
        raise_failure(outcome)
        self.outcomes.append(outcome)


class LongStreams:
    """Streams of the steady tenant that go on for longer than a gateway may lose of them when it is killed.

    On a broken connection they begin anew. `leave` closes their connections, as clients do that have enough.
    """

    def __init__(self, client: Client, num_streams: int) -> None:
        self._tasks = [asyncio.create_task(self._go_on(client, prompt)) for prompt in range(num_streams)]

    async def _go_on(self, client: Client, prompt: int) -> None:
        while True:
            outcome = await client.ask(prompt)
            if outcome.error and outcome.num_attempts != MAX_ATTEMPTS:
                raise_failure(outcome)

    async def leave(self) -> None:
        """Idempotent. Raises BenchFailed where a stream has failed."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


def raise_failure(outcome: Outcome) -> None:
    """Raise BenchFailed where a request has failed."""
    if outcome.error:
        raise BenchFailed(f"prompt {outcome.prompt} at {outcome.url}: {outcome.error}")


def summarize(outcomes: Sequence[Outcome], kills: int) -> dict[str, Any]:
    """The row of one fault. `extra_ms_p50` compares requests that it touched with those that it did not."""
    calm_s = [outcome.elapsed_s for outcome in outcomes if not (outcome.affected or outcome.preempted)]
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
        "preempted": sum(outcome.preempted for outcome in outcomes),
        "refused": sum(outcome.num_refusals > 0 for outcome in outcomes),
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
