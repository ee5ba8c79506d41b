"""Prompt tokens that hit where tenants have shares, beside the same requests without tenants."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import httpx

from bench.live_cluster import MODEL, config_of, running
from bench.results import BenchFailed
from bench.routing import BLOCK, VOCABULARY, Request, make_conversations, paced, read_trace

NUM_TENANTS = 4
RATE_PER_S = 60.0
SEED = 5
NUM_FIRST = 8  # blocks that requests of one tenant have in common, or not


def requests_of(trace: Path | None, number: int) -> list[Request]:
    """The first token names the tenant: so tenants share no pages in either run, and lose no hits to their salts."""
    requests = make_conversations(number, SEED) if trace is None else read_trace(trace, number)
    return [
        dataclasses.replace(request, tokens=[VOCABULARY[0] + tenant_by(request.tokens), *request.tokens[1:]])
        for request in paced(requests, RATE_PER_S)
    ]


def tenant_by(tokens: Sequence[int]) -> int:
    return zlib.crc32(array("I", tokens[: NUM_FIRST * BLOCK]).tobytes()) % NUM_TENANTS


def tenant_of(request: Request) -> int:
    return request.tokens[0] - VOCABULARY[0]


async def hit_share(requests: Sequence[Request], *, with_tenants: bool) -> float:
    """Return the part of all prompt tokens that no engine computed, by the usage that clients are told.

    Raises an ExceptionGroup with a BenchFailed for the first request that fails.
    """
    async with running(config_of(has_tenants=with_tenants), 2) as cluster:
        keys = [""] * NUM_TENANTS
        for number in range(NUM_TENANTS if with_tenants else 0):
            await cluster.admin.create(f"tenant{number}")
            keys[number] = await cluster.admin.add_key(f"tenant{number}", "bench")
        urls = [f"http://127.0.0.1:{gateway.port}" for gateway in cluster.gateways]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with httpx.AsyncClient(timeout=120, limits=limits) as http:
            begun_s = time.perf_counter() + 2.0  # gateways hear of keys meanwhile

            async def ask(number: int, request: Request) -> tuple[int, int]:
                await asyncio.sleep(max(0.0, begun_s + request.at_s - time.perf_counter()))
                key = keys[tenant_of(request)]
                body = {
                    "model": MODEL, "prompt": list(request.tokens), "max_tokens": request.max_tokens,
                    "temperature": 0, "ignore_eos": True,
                }  # fmt: skip
                url = f"{urls[number % len(urls)]}/v1/completions"
                headers = {"authorization": f"Bearer {key}"} if key else {}
                try:
                    answer = await http.post(url, json=body, headers=headers)
                except httpx.TransportError as error:
                    raise BenchFailed(f"hits, request {number}: {type(error).__name__}: {error}") from error
                if answer.status_code != 200:
                    raise BenchFailed(f"hits, request {number}: {answer.status_code}: {answer.text[:200]}")
                usage = json.loads(answer.content)["usage"]
                return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

            async with asyncio.TaskGroup() as tasks:
                asking = [tasks.create_task(ask(number, request)) for number, request in enumerate(requests)]
            answered = [task.result() for task in asking]
    return sum(cached for _, cached in answered) / sum(num_tokens for num_tokens, _ in answered)


async def measure_hits(trace: Path | None, number: int) -> tuple[float, float]:
    """Return the share of hits with tenants, and without."""
    requests = requests_of(trace, number)
    with_tenants = await hit_share(requests, with_tenants=True)
    return with_tenants, await hit_share(requests, with_tenants=False)
