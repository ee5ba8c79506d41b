"""More requests than the workers take: how much of the capacity clients still get, and what refused ones cost."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from bench.chaos.fleet import Fleet, fleet
from bench.results import BenchFailed, Results
from kvferry.membership.base import MemberKind

SLOTS_PER_WORKER = 8
TIMES_CAPACITY = 3
MAX_TOKENS = 40
PROMPT_WORDS = 60
MIN_GOODPUT = 0.95

Progress = Callable[[str], None]


class _Phase:
    """One load: as many streams at a time as `num_streams`, for `seconds`; refused ones try again as they are told."""

    def __init__(self, urls: Sequence[str], num_streams: int, seconds: float, seed: int) -> None:
        self._urls = urls
        self._num_streams = num_streams
        self._seconds = seconds
        self._seeded = random.Random(seed)
        self.num_answered = 0
        self.num_refused = 0
        self.prompt_tokens = 0  # of answered requests

    async def run(self) -> float:
        """Return answers per second. Those in flight at the end are waited for, and count for their tokens only.

        Raises an ExceptionGroup with a BenchFailed for the first request that is neither answered nor refused.
        """
        ends_s = time.perf_counter() + self._seconds
        num_in_time = 0

        async def stream(http: httpx.AsyncClient, index: int) -> None:
            nonlocal num_in_time
            while time.perf_counter() < ends_s:
                # No two prompts have anything in common: each answered one is computed once, and whole.
                prompt = " ".join(f"w{self._seeded.randrange(4000)}" for _ in range(PROMPT_WORDS))
                body = {"model": "sim-model", "prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
                url = self._urls[index % len(self._urls)]
                answer = await http.post(
                    f"{url}/v1/completions", json=body, headers={"x-kvferry-debug": "disaggregate"}
                )
                if answer.status_code == 200:
                    self.num_answered += 1
                    self.prompt_tokens += answer.json()["usage"]["prompt_tokens"]
                    num_in_time += time.perf_counter() < ends_s
                elif answer.status_code == 429:
                    self.num_refused += 1
                    wait_s = min(float(answer.headers["retry-after"]), ends_s - time.perf_counter())
                    await asyncio.sleep(max(0.0, wait_s))
                else:
                    raise BenchFailed(f"overload, stream {index} at {url}: {answer.status_code}: {answer.text[:200]}")

        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as http, asyncio.TaskGroup() as tasks:
            for index in range(self._num_streams):
                tasks.create_task(stream(http, index))
        return num_in_time / self._seconds


async def _num_computed(running: Fleet) -> int:
    """Prompt tokens that the workers computed since they started."""
    total = 0.0
    async with httpx.AsyncClient(timeout=10) as http:
        # Loads come with heartbeats: the last ones are there after two.
        before = -1.0
        while total != before:
            before = total
            await asyncio.sleep(1.2)
            text = (await http.get(f"{running.urls()[0]}/metrics")).text
            total = sum(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith("kvferry_worker_prompt_tokens_total{") and 'source="local_compute"' in line
            )
    return int(total)


async def measure(folder: Path, seconds: float, seed: int, progress: Progress, results: Results) -> None:
    """Load at capacity, then at TIMES_CAPACITY, and add what both gave as `overload`.

    `goodput` is answers per second under overload as a share of those at capacity; `refused_tokens_computed` are
    prompt tokens that workers computed beyond those of answered requests. Raises BenchFailed where these are too low
    and too many.
    """
    async with fleet(
        folder,
        worker={"max_requests": SLOTS_PER_WORKER},
        gateway={"queue_timeout_s": 1.0, "max_queued_requests": 8},
        sim={"step_ms": 10.0, "prefill_tokens_per_s": 20_000.0, "num_pages": 4096},
    ) as running:
        num_slots = SLOTS_PER_WORKER * len(running.of(MemberKind.DECODE))
        progress("overload: at capacity")
        at_capacity = _Phase(running.urls(), num_slots, seconds, seed)
        capacity_per_s = await at_capacity.run()
        results.add({"overload": {"capacity_per_s": round(capacity_per_s, 1)}})
        before = await _num_computed(running)
        progress(f"overload: {TIMES_CAPACITY} times capacity")
        overload = _Phase(running.urls(), TIMES_CAPACITY * num_slots, seconds, seed + 1)
        overload_per_s = await overload.run()
        computed = await _num_computed(running) - before
    goodput = round(overload_per_s / capacity_per_s, 3)
    refused_tokens_computed = computed - overload.prompt_tokens
    results.add(
        {
            "overload": {
                "streams": TIMES_CAPACITY * num_slots,
                "overload_per_s": round(overload_per_s, 1),
                "goodput": goodput,
                "answered": overload.num_answered,
                "refused": overload.num_refused,
                "refused_tokens_computed": refused_tokens_computed,
            }
        }
    )
    if goodput < MIN_GOODPUT:
        raise BenchFailed(f"overload: goodput of {goodput}, below {MIN_GOODPUT} of the capacity")
    if refused_tokens_computed > 0:
        raise BenchFailed(f"overload: {refused_tokens_computed} prompt tokens of refused requests were computed")
