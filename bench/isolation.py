"""What one tenant's abuse takes from another's goodput.

A live cluster of simulated engines with two gateways, and an innocent tenant that sends at a steady rate, well below
its share. Its goodput is the part of its requests that are answered in whole within the deadline. It is measured beside
each attack (`bench.abuse`, a process of its own with a lower priority), and without one before and after it.

The last line on stdout is one JSON object; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.abuse import KINDS
from bench.fairness import MODEL, Cluster, running
from kvferry_loadtest.machine import machine_line

RATE_PER_S: Final = 20.0  # a tenth of what the engines compute
PROMPT_TOKENS: Final = 100
ANSWER_TOKENS: Final = 16
DEADLINE_S: Final = 2.0  # of an answer that takes 40 ms alone
SETTLE_S: Final = 1.0


class Innocent:
    def __init__(self, url: str, key: str, seed: int) -> None:
        self._rng = random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        headers = {"authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=DEADLINE_S, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def goodput(self, seconds: float) -> tuple[float, list[float]]:
        """Return the part of requests answered in time, and the seconds of these."""
        took: list[float | None] = []
        ends_s = time.perf_counter() + seconds
        due_s = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            while due_s < ends_s:
                tasks.create_task(self._ask(due_s, took))
                due_s += self._rng.expovariate(RATE_PER_S)
                await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        answered = [each for each in took if each is not None]
        return len(answered) / len(took), answered

    async def _ask(self, due_s: float, took: list[float | None]) -> None:
        words = " ".join(f"w{i}" for i in range(PROMPT_TOKENS - 1))
        body = {
            "model": MODEL,
            "prompt": f"{self._rng.getrandbits(48)} {words}",
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        is_whole = False
        try:
            async with asyncio.timeout(DEADLINE_S), self._http.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    is_whole |= line == "data: [DONE]"
                is_whole &= answer.status_code == 200
        except (TimeoutError, httpx.HTTPError):
            is_whole = False
        took.append(time.perf_counter() - due_s if is_whole else None)


@asynccontextmanager
async def attacking(kind: str, cluster: Cluster, key: str, counts: Counter[str]) -> AsyncIterator[None]:
    """Attack the gateway of the innocent tenant. Add what was answered to `counts`."""
    address = f"127.0.0.1:{cluster.gateways[0].port}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.abuse", kind, address, MODEL,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "KVFERRY_API_KEY": key},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        await process.stdout.readline()
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        process.terminate()
        told, _ = await process.communicate()
        counts.update(json.loads(told.splitlines()[-1]))


async def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    calm: dict[str, list[float]] = {kind: [] for kind in KINDS}
    beside: dict[str, list[float]] = {kind: [] for kind in KINDS}
    seconds_calm: list[float] = []
    seconds_beside: dict[str, list[float]] = {kind: [] for kind in KINDS}
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    async with running(2) as cluster:
        keys = {}
        for name in ("innocent", "abuser"):
            await cluster.admin.create(name)
            keys[name] = await cluster.admin.add_key(name, "bench")
        innocent = Innocent(f"http://127.0.0.1:{cluster.gateways[0].port}", keys["innocent"], 1)
        await innocent.goodput(2.0)
        with Progress(console=console) as progress:
            task = progress.add_task("", total=arguments.rounds * len(KINDS))
            for _ in range(arguments.rounds):
                for kind in KINDS:
                    progress.update(task, description=kind)
                    before, took = await innocent.goodput(arguments.seconds / 2)
                    seconds_calm += took
                    async with attacking(kind, cluster, keys["abuser"], counts[kind]):
                        got, took = await innocent.goodput(arguments.seconds)
                    await asyncio.sleep(SETTLE_S)
                    after, others = await innocent.goodput(arguments.seconds / 2)
                    calm[kind].append((before + after) / 2)
                    beside[kind].append(got)
                    seconds_beside[kind] += took
                    seconds_calm += others
                    progress.advance(task)
        await innocent.close()
    table = Table("attack", "goodput", "without it", "p50 ms", "p99 ms", "answered")
    for kind in KINDS:
        table.add_row(
            kind,
            f"{statistics.mean(beside[kind]):.3f}",
            f"{statistics.mean(calm[kind]):.3f}",
            *_milliseconds(seconds_beside[kind]),
            str(dict(counts[kind])),
        )
    console.print(table)
    p50, p99 = _milliseconds(seconds_calm)
    console.print(f"without an attack: p50 {p50} ms, p99 {p99} ms")
    falls = {kind: round(fall_of(beside[kind], calm[kind]), 4) for kind in KINDS}
    attacks = {kind: dict(counts[kind]) for kind in KINDS}
    return {"goodput_fall_max": max(falls.values()), "falls": falls, "attacks": attacks}


def fall_of(beside: list[float], calm: list[float]) -> float:
    """Return the part of the goodput that is gone."""
    return 1.0 - statistics.mean(beside) / statistics.mean(calm)


def _milliseconds(seconds: list[float]) -> tuple[str, str]:
    if not seconds:
        return "-", "-"
    ordered = sorted(seconds)
    return f"{ordered[len(ordered) // 2] * 1e3:.0f}", f"{ordered[int(len(ordered) * 0.99)] * 1e3:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.isolation", description="Measure what abuse of one costs.")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack, and as long without it")
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    console = Console(stderr=True, width=160)
    logging.disable(logging.WARNING)
    console.print(machine_line())
    result = asyncio.run(measure(arguments, console))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
