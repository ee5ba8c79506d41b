"""Prefix routing beside round robin, on 4 prefill and 4 decode workers with sim engines, each a process of its own.

Replays a trace in Mooncake's format (--trace: timestamp in ms, input_length, output_length, hash_ids of 512-token
blocks), scaled down to what the engines here compute; without one, conversations made from a seed. Then two small
questions: what a burst of siblings costs, and what share a worker at half speed gets. The figures of each replay are a
line of JSON on stdout when it ends, and the last line has all. The first request that fails, or the first worker or
gateway that ends, ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.chaos.fleet import Fleet, fleet
from bench.results import BenchFailed, Results, run_benchmark
from kvferry.config import parse
from kvferry.membership.base import WORKER_KINDS, MemberKind
from kvferry.membership.etcd import EtcdMembership
from kvferry.wire.v1 import worker_pb2, worker_pb2_grpc
from kvferry_loadtest.machine import machine_line

BLOCK = 16  # tokens per page, and per block of the trace once scaled
TRACE_BLOCK = 512
VOCABULARY = (16, 50_000)
MAX_PROMPT = 4096
PLACEMENTS = ("round_robin", "priced")


@dataclass(frozen=True)
class Request:
    at_s: float
    tokens: Sequence[int]
    max_tokens: int


def block_tokens(hash_id: int) -> list[int]:
    seeded = random.Random(hash_id * 2_654_435_761 + 1)
    return [seeded.randrange(*VOCABULARY) for _ in range(BLOCK)]


def read_trace(file: Path, count: int) -> list[Request]:
    """The first `count` requests, 512 tokens shrunk to 16."""
    requests = []
    with file.open() as lines:
        for line, _ in zip(lines, range(count), strict=False):
            row = json.loads(line)
            tokens = [token for hash_id in row["hash_ids"] for token in block_tokens(hash_id)]
            length = max(1, min(MAX_PROMPT, math.ceil(row["input_length"] * BLOCK / TRACE_BLOCK)))
            num_out = max(1, round(row["output_length"] * BLOCK / TRACE_BLOCK))
            requests.append(Request(row["timestamp"] / 1e3, tokens[:length], num_out))
    return requests


def make_conversations(count: int, seed: int) -> list[Request]:
    """Conversations that come back with all they said before, over system prompts in common."""
    seeded = random.Random(seed)
    next_block = iter(range(10**6, 10**9))
    systems = [[next(next_block) for _ in range(6)] for _ in range(6)]
    open_ones: list[list[int]] = []
    requests = []
    at_s = 0.0
    while len(requests) < count:
        at_s += seeded.expovariate(1.0)
        if open_ones and seeded.random() < 0.6:
            blocks = open_ones.pop(seeded.randrange(len(open_ones)))
        else:
            blocks = list(seeded.choice(systems))
        blocks = blocks + [next(next_block) for _ in range(seeded.randint(4, 24))]
        requests.append(
            Request(at_s, [t for block in blocks for t in block_tokens(block)][:MAX_PROMPT], seeded.randint(4, 20))
        )
        if len(blocks) < 120:
            open_ones.append(blocks)
            del open_ones[:-200]
    return requests


def paced(requests: Sequence[Request], rate: float) -> list[Request]:
    """The same order and bunching, at a mean rate."""
    span_s = (requests[-1].at_s - requests[0].at_s) or 1.0
    scale = len(requests) / rate / span_s
    return [Request((r.at_s - requests[0].at_s) * scale, r.tokens, r.max_tokens) for r in requests]


async def ask(http: httpx.AsyncClient, url: str, request: Request, debug: str) -> float:
    """Return the seconds to the first token. Raises BenchFailed with the reason where there is no whole answer."""
    body = {
        "model": "sim-model",
        "prompt": list(request.tokens),
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started_s = time.perf_counter()
    ttft_s = math.nan
    headers = {"x-kvferry-debug": debug}
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise BenchFailed(f"{answer.status_code}: {(await answer.aread()).decode()[:200]}")
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return ttft_s
                if line.startswith('data: {"error"'):
                    raise BenchFailed(line[:200])
                if line.startswith("data: ") and math.isnan(ttft_s):
                    ttft_s = time.perf_counter() - started_s
    except httpx.TransportError as error:
        raise BenchFailed(f"{type(error).__name__}: {error}") from error
    raise BenchFailed("the stream ended without [DONE]")


async def computed_tokens(running: Fleet) -> dict[str, int]:
    """Prompt tokens that every worker computed since it started."""
    config = parse(running.processes[0].config)
    membership = EtcdMembership(config.membership)
    try:
        members = [m for m in await membership.members() if m.kind in WORKER_KINDS]
    finally:
        await membership.close()
    computed = {}
    for member in members:
        async with grpc.aio.insecure_channel(member.address) as channel:
            welcome = await worker_pb2_grpc.WorkerStub(channel).Describe(worker_pb2.DescribeRequest(), timeout=10)
        computed[member.member_id] = welcome.load.prompt_tokens.local_compute
    return computed


async def replay(
    running: Fleet, case: str, requests: Sequence[Request], advance: Callable[[], None], debug: str = "1"
) -> tuple[list[float], dict[str, int]]:
    """Send all requests at their times. Return the seconds to their first tokens, and what every worker computed.

    Raises an ExceptionGroup with a BenchFailed for the first request that fails, or process of the cluster that ends.
    """
    before = await computed_tokens(running)
    url = running.urls()[0]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=120, limits=limits) as http, asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(process.fail_at_its_end()) for process in running.processes]
        begin_s = time.perf_counter()

        async def at_its_time(number: int, request: Request) -> float:
            await asyncio.sleep(max(0.0, begin_s + request.at_s - time.perf_counter()))
            try:
                ttft_s = await ask(http, url, request, debug)
            except BenchFailed as error:
                raise BenchFailed(f"{case}: request {number} of {len(requests)}: {error}") from error
            advance()
            return ttft_s

        asking = [tasks.create_task(at_its_time(number, request)) for number, request in enumerate(requests, 1)]
        ttfts_s = [await answer for answer in asking]
        after = await computed_tokens(running)
        for task in watching:
            task.cancel()
    return ttfts_s, {worker: after[worker] - before[worker] for worker in after}


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summarize(requests: Sequence[Request], ttfts_s: Sequence[float], computed: dict[str, int]) -> dict[str, Any]:
    ttfts_ms = [ttft_s * 1e3 for ttft_s in ttfts_s]
    prefill = [count for worker, count in computed.items() if worker.startswith("prefill")]
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(r.tokens) for r in requests),
        "prefill_tokens_computed": sum(computed.values()),
        "of_them_on_decode_workers": sum(n for worker, n in computed.items() if worker.startswith("decode")),
        "ttft_p50_ms": round(percentile(ttfts_ms, 0.5), 1),
        "ttft_p99_ms": round(percentile(ttfts_ms, 0.99), 1),
        "prefill_load_max_over_mean": round(max(prefill) / statistics.mean(prefill), 3) if sum(prefill) else None,
    }


def cluster_of(folder: Path, placement: str, tokens_per_s: float, slow: bool = False) -> Any:
    folder.mkdir()

    def overrides(kind: MemberKind, i: int) -> dict[str, Any]:
        if slow and kind is MemberKind.PREFILL and i == 0:
            return {"sim": {**sim, "prefill_tokens_per_s": tokens_per_s / 2}}
        return {}

    sim = {"step_ms": 5.0, "prefill_tokens_per_s": tokens_per_s, "num_pages": 4096, "page_bytes": 256}
    return fleet(
        folder,
        prefill=4,
        decode=4,
        gateways=1,
        sim=sim,
        gateway={"placement": placement, "max_requests": 4096},
        overrides=overrides,
    )


async def run(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    if arguments.trace is not None:
        requests, source = read_trace(arguments.trace, arguments.requests), "trace"
    else:
        requests, source = make_conversations(arguments.requests, arguments.seed), "made from a seed"
    mean_tokens = statistics.mean(len(r.tokens) for r in requests)
    rate = arguments.load * 4 * arguments.tokens_per_s / mean_tokens
    requests = paced(requests, rate)
    results.add(
        {
            "machine": machine_line(),
            "load": f"{len(requests)} requests ({source}), {rate:.1f}/s, {mean_tokens:.0f} prompt tokens on average, "
            f"4 prefill and 4 decode workers of {arguments.tokens_per_s:g} prompt tokens/s and 5 ms steps",
        }
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-routing-") as name, Progress(console=console) as bar:

        async def replayed(
            case: str, placement: str, requests: Sequence[Request], debug: str = "1", *, slow: bool = False
        ) -> tuple[dict[str, Any], dict[str, int], str]:
            """Return the figures, the prompt tokens that each worker computed, and the id of the first one."""
            task = bar.add_task(f"{case}, {placement}", total=len(requests))
            folder = Path(name) / f"{case}-{placement}"
            async with cluster_of(folder, placement, arguments.tokens_per_s, slow) as running:
                advance = functools.partial(bar.advance, task)
                ttfts_s, computed = await replay(running, f"{case}, {placement}", requests, advance, debug)
                first = running.of(MemberKind.PREFILL)[0].member_id
            return summarize(requests, ttfts_s, computed), computed, first

        for placement in PLACEMENTS if "replay" in arguments.cases else ():
            figures, _, _ = await replayed("replay", placement, requests)
            results.add({"replay": {placement: figures}})
        seeded = random.Random(arguments.seed)

        def fresh(count: int) -> list[int]:
            return [seeded.randrange(*VOCABULARY) for _ in range(count)]

        beginning = fresh(1024)
        siblings = [Request(0.0, [*beginning, *fresh(8)], 8) for _ in range(32)]
        for placement in PLACEMENTS if "siblings" in arguments.cases else ():
            figures, computed, _ = await replayed("siblings", placement, siblings)
            figures["prefills_of_the_beginning"] = round((sum(computed.values()) - 32 * 8) / 1024, 2)
            results.add({"siblings": {placement: figures}})
        # All of what three and a half workers compute, and all of it on prefill workers: shares show only where nobody
        # has room to spare.
        count = max(60, arguments.requests // 2)
        at_s = sorted(seeded.uniform(0, 1) for _ in range(count))
        full = 3.5 * arguments.tokens_per_s / 400
        strangers = paced([Request(at, fresh(400), 4) for at in at_s], full)
        for placement in PLACEMENTS if "half_speed" in arguments.cases else ():
            figures, computed, slow = await replayed("half_speed", placement, strangers, "disaggregate", slow=True)
            others = [n for worker, n in computed.items() if worker.startswith("prefill") and worker != slow]
            figures["share_of_the_slow_one"] = round(computed[slow] / statistics.mean(others), 3)
            results.add({"half_speed": {placement: figures}})
    show(results.figures, console)


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=results["load"])
    for column in ("case", "placement", "tokens computed", "TTFT p50 ms", "p99 ms", "max/mean", "note"):
        table.add_column(column, justify="left" if column in ("case", "placement", "note") else "right")

    def row(case: str, placement: str, values: dict[str, Any], note: str = "") -> None:
        table.add_row(
            case,
            placement,
            f"{values['prefill_tokens_computed']:,}",
            str(values["ttft_p50_ms"]),
            str(values["ttft_p99_ms"]),
            str(values["prefill_load_max_over_mean"]),
            note,
        )

    notes = {
        "replay": lambda values: "",
        "siblings": lambda values: f"{values['prefills_of_the_beginning']} prefills of their beginning",
        "half_speed": lambda values: f"share of the slow one {values['share_of_the_slow_one']}",
    }
    for case, note in notes.items():
        for placement, values in results.get(case, {}).items():
            row(case, placement, values, note(values))
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, help="a file in Mooncake's format")
    parser.add_argument("--requests", type=int, default=1200, help="of the replay (default: %(default)s)")
    parser.add_argument("--load", type=float, default=0.7, help="share of what all prefill workers compute uncached")
    parser.add_argument("--tokens-per-s", type=float, default=4000, help="of one prefill worker (default: %(default)s)")
    parser.add_argument("--cases", default="replay,siblings,half_speed", help="some of them (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=160)
    return run_benchmark("bench-routing", lambda results: asyncio.run(run(arguments, results, console)))


if __name__ == "__main__":
    sys.exit(main())
