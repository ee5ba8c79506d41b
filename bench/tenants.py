"""Hits of tenants that share a cache tier, on Mooncake's conversation trace, beside LRU and beside partitions.

    make bench-tenants ARGS="--trace FILE"        or KVFERRY_TRACES=FOLDER

First one tenant alone, by size of the cache, on the whole trace and on each half of its sessions. Then three tenants
with 15, 35 and 50 % of the sessions, floors of 25, 15 and 15 %, caps of 50 % and equal weights, beside a neighbour
whose blocks never return, from none of all blocks to four fifths of them. Hits are those of 512-token blocks before the
first miss of a request. The partition is a quarter of the cache with this same policy; LRU is one list over all
tenants; aggregates leave the neighbour out. Bonus, levels and ghosts are the study's; weights and floors were looked at
with other splits of the trace (`--seeds 1,2`) than those that the defaults report. Each row is a line of JSON on stdout
when it is measured, and the last line has all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.results import Results, run_benchmark
from kvferry.tenancy.pages.outcome import Stored
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings
from kvferry_loadtest.machine import machine_line

TRACE = "mooncake_conversation_trace.jsonl"
TRACE_BLOCK = 512
SIZES = (1000, 2000, 4000, 8000, 16_000, 32_000, 64_000)
TENANT_CAPACITIES = (6000, 12_000, 24_000)
NEIGHBOURS = (0.0, 0.17, 0.38, 0.62, 0.8)  # of all blocks
SESSIONS = {"premium": 0.15, "standard": 0.35, "basic": 0.5}
FLOORS = {"premium": 0.25, "standard": 0.15, "basic": 0.15}
PARTITION = 0.25
NEIGHBOUR = "neighbour"


class Request(NamedTuple):
    at_s: float
    tenant: str
    session: int
    blocks: Sequence[int]


class Cache(Protocol):
    def use(self, request: Request) -> int:
        """Return the number of blocks before the first miss, and hold all of them from here on."""
        ...


class LruCache:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[str, int], None] = OrderedDict()

    def use(self, request: Request) -> int:
        keys = [(request.tenant, block) for block in request.blocks]
        num_hits = next((i for i, key in enumerate(keys) if key not in self._blocks), len(keys))
        for key in reversed(keys):  # the end of a prefix goes before its beginning
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return num_hits


class RetentionCache:
    def __init__(self, capacity: int, contracts: Mapping[str, TierContract] | None = None) -> None:
        self.policy = Retention(TierSettings(capacity))
        self.policy.configure(contracts or {})
        self._pages: dict[Hashable, Page] = {}

    def use(self, request: Request) -> int:
        keys = [(request.tenant, block) for block in request.blocks]
        num_hits = next((i for i, key in enumerate(keys) if key not in self._pages), len(keys))
        for key in reversed(keys):
            if (page := self._pages.get(key)) is not None:
                self.policy.touch(page, request.at_s)
                continue
            stored = self.policy.store(request.tenant, key, 1, request.at_s)
            if isinstance(stored, Stored):
                for victim in stored.victims:
                    del self._pages[victim.page.key]
                self._pages[key] = stored.page
        return num_hits


@dataclass
class Hits:
    """Blocks by tenant."""

    hits: Counter[str]
    queries: Counter[str]

    def percent(self, tenants: Sequence[str]) -> float:
        return 100 * sum(self.hits[t] for t in tenants) / max(1, sum(self.queries[t] for t in tenants))


def replay(requests: Sequence[Request], cache: Cache) -> Hits:
    result = Hits(Counter(), Counter())
    for request in requests:
        result.queries[request.tenant] += len(request.blocks)
        result.hits[request.tenant] += cache.use(request)
    return result


def read_trace(file: Path) -> list[Request]:
    """The full blocks of each request; a session is known by the block after the system prompt, which all share."""
    requests = []
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        blocks = row["hash_ids"]
        session = blocks[1] if len(blocks) > 1 else -1
        full = tuple(blocks[: row["input_length"] // TRACE_BLOCK])
        requests.append(Request(row["timestamp"] / 1e3, "all", session, full))
    return requests


def find_trace(named: Path | None) -> Path:
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "traces"
    return named or Path(os.environ.get("KVFERRY_TRACES") or beside) / TRACE


def split(requests: Sequence[Request], shares: Mapping[str, float], seed: int) -> list[Request]:
    """Give each session to a tenant."""
    tenants, weights = list(shares), list(shares.values())

    def tenant_of(session: int) -> str:
        return random.Random(f"{seed} {session}").choices(tenants, weights)[0]

    return [request._replace(tenant=tenant_of(request.session)) for request in requests]


def neighbour(requests: Sequence[Request], share: float, seed: int) -> Iterator[Request]:
    """Bursts of blocks that never return, together `share` of all blocks."""
    seeded = random.Random(f"{seed} {NEIGHBOUR} {share}")
    begin_s, end_s = requests[0].at_s, requests[-1].at_s
    num_blocks = int(sum(len(request.blocks) for request in requests) * share / (1 - share))
    starts = [seeded.uniform(begin_s, end_s) for _ in range(12)]
    while num_blocks > 0:
        size = min(num_blocks, seeded.randint(4, 100))
        num_blocks -= size
        at_s = min(end_s, seeded.choice(starts) + seeded.expovariate(1 / 60))
        yield Request(at_s, NEIGHBOUR, -1, range(-num_blocks - size, -num_blocks))


def bench_one_tenant(requests: Sequence[Request], advance: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    halves = split(requests, {"one": 0.5, "other": 0.5}, seed=0)
    traces = {"whole": list(requests)} | {
        half: [request for request in halves if request.tenant == half] for half in ("one", "other")
    }
    tables: dict[str, Any] = {}
    for name, trace in traces.items():
        for size in SIZES:
            lru, ours = replay(trace, LruCache(size)), replay(trace, RetentionCache(size))
            tenants = [trace[0].tenant]
            percents = lru.percent(tenants), ours.percent(tenants)
            tables.setdefault(name, {})[str(size)] = {
                "lru": round(percents[0], 2),
                "retention": round(percents[1], 2),
                "gain": round(percents[1] / percents[0], 3),
                "points": round(percents[1] - percents[0], 2),
            }
            advance({"one_tenant": {name: {str(size): tables[name][str(size)]}}})
    return tables


def bench_tenants(
    requests: Sequence[Request], seeds: Sequence[int], advance: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    rows = []
    tenants = list(SESSIONS)
    for seed in seeds:
        ours = split(requests, SESSIONS, seed)
        premium = [request for request in ours if request.tenant == "premium"]
        for capacity in TENANT_CAPACITIES:
            contracts = {name: TierContract(floor=int(share * capacity)) for name, share in FLOORS.items()}
            partition = replay(premium, RetentionCache(int(PARTITION * capacity)))
            partition_lru = replay(premium, LruCache(int(PARTITION * capacity)))
            for share in NEIGHBOURS:
                trace = sorted([*ours, *neighbour(ours, share, seed)], key=lambda request: request.at_s)
                lru = replay(trace, LruCache(capacity))
                cache = RetentionCache(capacity, contracts)
                kept = replay(trace, cache)
                cache.policy.check()
                rows.append(
                    {
                        "seed": seed,
                        "capacity": capacity,
                        "neighbour": share,
                        "premium": round(kept.percent(["premium"]), 2),
                        "premium_partition": round(partition.percent(["premium"]), 2),
                        "premium_lru_partition": round(partition_lru.percent(["premium"]), 2),
                        "premium_lru": round(lru.percent(["premium"]), 2),
                        "premium_vs_static": round(kept.hits["premium"] / partition.hits["premium"], 4),
                        "aggregate": round(kept.percent(tenants), 2),
                        "aggregate_lru": round(lru.percent(tenants), 2),
                        "aggregate_points": round(kept.percent(tenants) - lru.percent(tenants), 2),
                        "neighbour_used": cache.policy.usage_of(NEIGHBOUR).used,
                    }
                )
                advance({"tenants": rows[-1:]})
    return rows


def show(console: Console, one: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    table = Table("blocks", "trace", "LRU %", "retention %", "gain", "points", title="one tenant")
    for name, sizes in one.items():
        for size, row in sizes.items():
            table.add_row(size, name, *(str(row[key]) for key in ("lru", "retention", "gain", "points")))
    console.print(table)
    table = Table(*(name.replace("_", " ") for name in rows[0]), title="tenants and a neighbour")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)


def measure(file: Path, seeds: Sequence[int], results: Results) -> None:
    console = Console(stderr=True, width=200)
    requests = read_trace(file)
    results.add({"seeds": seeds, "machine": machine_line()})
    with Progress(console=console) as bar:
        task = bar.add_task("replay", total=3 * len(SIZES) + len(seeds) * len(TENANT_CAPACITIES) * len(NEIGHBOURS))

        def advance(row: dict[str, Any]) -> None:
            results.add({"tables": row})
            bar.advance(task)

        one = bench_one_tenant(requests, advance)
        rows = bench_tenants(requests, seeds, advance)
    show(console, one, rows)
    results.add(
        {
            "premium_vs_static_min": min(row["premium_vs_static"] for row in rows),
            "aggregate_vs_lru_points_min": min(row["aggregate_points"] for row in rows),
            "gain_over_lru_2k": one["whole"]["2000"]["gain"],
            "gain_over_lru_4k": one["whole"]["4000"]["gain"],
            "worst_vs_lru_points": min(row["points"] for row in one["whole"].values()),
        }
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help=f"the file; else {TRACE} in the folder KVFERRY_TRACES")
    parser.add_argument("--seeds", default="11,12,13", help="splits of the sessions, with commas")
    arguments = parser.parse_args()
    file = find_trace(arguments.trace)
    if not file.is_file():
        print(f"skipped: no {file}; --trace or KVFERRY_TRACES names Mooncake's conversation trace")
        return 0
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    return run_benchmark("bench-tenants", lambda results: measure(file, seeds, results))


if __name__ == "__main__":
    sys.exit(main())
