"""Shares of decode slots, whatever parameters a tenant's streams have."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx

from bench.live_cluster import MODEL, config_of, running
from bench.results import BenchFailed

NUM_SLOTS = 64  # of each of two decode workers
STEP_MS = 200.0
NUM_STREAMS = 160  # of each tenant, at a time
GOLD_TOKENS = 30
NOISE_TOKENS = 5000  # longer than the measurement
HELD_S = 3.0  # how long noise has all slots before gold comes
SETTLE_S = 12.0

CASES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"temperature": 0},
    "seed": {"temperature": 1, "seed": 1},
    "penalties": {"temperature": 0, "presence_penalty": 0.001},
}


async def slot_share(more: Mapping[str, Any], seconds: float) -> float:
    """Return gold's part of all tokens that engines gave, with a share of 4 to 1.

    The other tenant's long streams, with the fields of `more`, have all slots when gold comes. Raises an ExceptionGroup
    with a BenchFailed for the first request that fails.
    """
    config = config_of(step_ms=STEP_MS, max_num_seqs=NUM_SLOTS)
    async with running(config, 1) as cluster:
        keys = {}
        for name, share in (("gold", 4.0), ("noise", 1.0)):
            await cluster.admin.create(name)
            await cluster.admin.set_contract(name, share=share)
            keys[name] = await cluster.admin.add_key(name, "bench")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        url = f"http://127.0.0.1:{cluster.gateways[0].port}/v1/completions"
        num_given: Counter[str] = Counter()
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:

            async def stream(name: str, number: int, num_tokens: int) -> None:
                headers = {"authorization": f"Bearer {keys[name]}"}
                for turn in itertools.count():
                    body = {
                        "model": MODEL, "prompt": f"{name} {number} {turn}", "max_tokens": num_tokens,
                        "ignore_eos": True, "stream": True, **(more if name == "noise" else {"temperature": 0}),
                    }  # fmt: skip
                    async with http.stream("POST", url, json=body, headers=headers) as answer:
                        if answer.status_code != 200:
                            raise BenchFailed(
                                f"{name}, stream {number}: {answer.status_code}: {await answer.aread()!r}"
                            )
                        async for line in answer.aiter_lines():
                            if '"error"' in line:
                                raise BenchFailed(f"{name}, stream {number}: {line[:200]}")
                            num_given[name] += line.startswith("data: {")

            async with asyncio.TaskGroup() as tasks:
                for name, num_tokens in (("noise", NOISE_TOKENS), ("gold", GOLD_TOKENS)):
                    loading = [tasks.create_task(stream(name, i, num_tokens)) for i in range(NUM_STREAMS)]
                    if name == "noise":
                        others = loading
                        await asyncio.sleep(HELD_S)
                await asyncio.sleep(SETTLE_S)
                num_given.clear()
                await asyncio.sleep(seconds)
                share = num_given["gold"] / num_given.total()
                for task in (*others, *loading):
                    task.cancel()
    return share
