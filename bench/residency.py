#!/usr/bin/env python3
"""Bench of placement at a gateway: route keys, the residency index, a whole decision.

Prompts of 10,240 tokens in pages of 16, with 8, 64 and 512 workers, half of them prefill and half decode. Every worker
is full: each stored event of 640 pages comes with a removed event of 640 pages. The figures of each number of workers
are a line of JSON on stdout when they are measured, and the last line has all.

    make bench-residency
    make bench-residency ARGS="--peer-python PYTHON --peer-bench SCRIPT --peer-select SCRIPT"

With the peer's scripts the peer runs beside it, on this machine, in the same minutes. `--peer-bench` is a script that
takes `--impl` and prints a JSON object per number of workers; it runs twice, with the peer's index and with `Adapter`
of this file, on one workload. `--peer-select` is a script that prints a dictionary per kind of decision.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.results import BenchFailed, Results, run_benchmark
from kvferry.engine.base import EngineStats, KvEventBatch, PagesRemoved, PagesStored, RequestId
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.pages.keys import KEY_BYTES, pack_keys, route_keys, seed_of, unpack_keys
from kvferry.residency.index import Holder, ResidencyIndex, Tier
from kvferry.router.placement import Candidate, PlacementRequest
from kvferry.router.priced_placement import Placer
from kvferry.worker.page_mirror import PageMirror
from kvferry_loadtest.machine import machine_line

PROMPT_TOKENS = 10_240
BLOCK_SIZE = 16
PAGES = PROMPT_TOKENS // BLOCK_SIZE
MAX_PAGES_PER_WORKER = 60_000
MAX_PAGES = 4_000_000  # over all workers: what fits a laptop
NUM_TIMED_EVENTS = 4000
NUM_TIMED = 600

Say = Callable[[str], None]


class Adapter:
    """This index for the peer's bench, which names pages by block hash and by the hash of their tokens alone.

    The hash of tokens is what its queries name; it stands for the route key here. Encoding is not timed there.
    """

    name = "kvferry"

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._index = ResidencyIndex()
        self._hash_to_key: dict[int, int] = {}

    def encode_stored(
        self, _event: int, worker: int, _parent: int | None, block_hashes: Sequence[int], local_hashes: Sequence[int]
    ) -> tuple[bool, Holder, bytes]:
        self._hash_to_key.update(zip(block_hashes, local_hashes, strict=True))
        return True, Holder(str(worker), Tier.GPU), pack_keys(local_hashes)

    def encode_removed(self, _event: int, worker: int, block_hashes: Sequence[int]) -> tuple[bool, Holder, bytes]:
        keys = pack_keys(self._hash_to_key[block_hash] for block_hash in block_hashes)
        return False, Holder(str(worker), Tier.GPU), keys

    def apply(self, _worker: int, event: tuple[bool, Holder, bytes]) -> None:
        is_stored, holder, packed = event
        (self._index.store if is_stored else self._index.remove)(holder, unpack_keys(packed))

    def find(self, keys: Sequence[int]) -> dict[str, int]:
        return self._index.find(keys).gpu

    def hash(self, token_ids: Sequence[int]) -> list[int]:
        return route_keys(token_ids, self._block_size, seed_of(""))


def percentiles_us(run: Callable[[int], object], num: int = NUM_TIMED) -> tuple[float, float]:
    """p50 and p99 of one call."""
    taken = []
    for i in range(num):
        begin = time.perf_counter()
        run(i)
        taken.append(time.perf_counter() - begin)
    taken.sort()
    return round(taken[num // 2] * 1e6, 1), round(taken[num * 99 // 100] * 1e6, 1)


def resident_bytes() -> int:
    statm = Path("/proc/self/statm").read_text(encoding="ascii")
    return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Cluster:
    """Workers, full of random prompts, and the index of a gateway."""

    def __init__(self, num_workers: int, say: Say) -> None:
        self.random = random.Random(7)
        self.index = ResidencyIndex()
        stats = EngineStats(num_running=4, num_pages=100_000, num_pages_used=4000)
        self.prefill = [self._candidate(f"prefill-{i}", stats) for i in range(num_workers // 2)]
        self.decode = [self._candidate(f"decode-{i}", stats) for i in range(num_workers // 2)]
        self.holders = [Holder(candidate.member.member_id, Tier.GPU) for candidate in (*self.prefill, *self.decode)]
        self.prompts: dict[Holder, deque[bytes]] = {holder: deque() for holder in self.holders}
        per_worker = min(MAX_PAGES_PER_WORKER, MAX_PAGES // num_workers) // PAGES
        say(f"filling {num_workers} workers with {per_worker * PAGES:,} pages each")
        events = [(holder, self.packed()) for _ in range(per_worker) for holder in self.holders]
        gc.collect()
        before = resident_bytes()
        for holder, packed in events:
            self.index.store(holder, unpack_keys(packed))
        self.bytes_per_page = (resident_bytes() - before) / self.index.num_pages
        for holder, packed in events:
            self.prompts[holder].append(packed)

    def packed(self) -> bytes:
        """The keys of a prompt as they come over the wire."""
        return self.random.randbytes(PAGES * KEY_BYTES)

    def token_ids(self) -> list[int]:
        return [self.random.getrandbits(15) for _ in range(PROMPT_TOKENS)]

    def spread(self, keys: Sequence[int]) -> None:
        """Every worker holds another depth of this prompt, as far as there are pages."""
        step = max(1, PAGES // len(self.holders))
        for i, holder in enumerate(self.holders):
            self.index.store(holder, keys[: 1 + (i * step) % PAGES])

    @staticmethod
    def _candidate(name: str, stats: EngineStats) -> Candidate:
        member = Member(
            kind=MemberKind.PREFILL,
            member_id=MemberId(name),
            address="127.0.0.1:1",
            model="model",
            version="0",
            block_size=BLOCK_SIZE,
            kv_cache_dtype="auto",
        )
        return Candidate(member, stats)


def bench_events(cluster: Cluster) -> float:
    """Events applied per CPU second, of full workers: one removed for each stored."""
    events = []
    for i in range(NUM_TIMED_EVENTS // 2):
        holder = cluster.holders[i % len(cluster.holders)]
        new, old = cluster.packed(), cluster.prompts[holder].popleft()
        cluster.prompts[holder].append(new)
        events.append((cluster.index.store, holder, new))
        events.append((cluster.index.remove, holder, old))
    begin = time.process_time()
    for apply, holder, packed in events:
        apply(holder, unpack_keys(packed))
    return len(events) / (time.process_time() - begin)


def bench_mirror() -> float:
    """Microseconds at a worker for 640 pages stored, 640 removed, and the delta that tells of it."""
    seeded = random.Random(3)
    mirror = PageMirror(BLOCK_SIZE, 100_000)
    batches: list[KvEventBatch] = []
    for i in range(300):
        hashes = [seeded.getrandbits(64) for _ in range(PAGES)]
        token_ids = [seeded.getrandbits(15) for _ in range(PROMPT_TOKENS)]
        stored = PagesStored(hashes, None, token_ids, BLOCK_SIZE)
        removed = [PagesRemoved(batches[i - 50].events[0].page_hashes)] if i >= 50 else []  # type: ignore[union-attr]
        batches.append(KvEventBatch(i, [stored, *removed]))

    def tell(i: int) -> None:
        mirror.apply(batches[i])
        delta = mirror.next_delta()
        assert delta is not None
        for keys in (*delta.stored.values(), *delta.removed.values()):
            pack_keys(keys)

    return percentiles_us(tell, len(batches))[0]


def bench(num_workers: int, say: Say) -> dict[str, float]:
    """All figures with this many workers."""
    cluster = Cluster(num_workers, say)
    index = cluster.index
    say("applying events")
    events_per_cpu_s = bench_events(cluster)
    say("hashing and finding")
    prompts = [cluster.token_ids() for _ in range(48)]
    arrays = [array("I", prompt) for prompt in prompts]
    seed = seed_of("tenant")
    keys_us = percentiles_us(lambda i: route_keys(prompts[i % 48], BLOCK_SIZE, seed))
    keys_array_us = percentiles_us(lambda i: route_keys(arrays[i % 48], BLOCK_SIZE, seed))
    keys = [route_keys(prompt, BLOCK_SIZE, seed) for prompt in prompts]
    # Four kinds of prompts: nobody has it; all have its first 128 pages and four have 384; one has it all; and the
    # worst, everybody has another part of it. All workers having all of it is measured for `find` alone.
    shared, single, worst = keys[12:24], keys[24:36], keys[36:48]
    for i, (common, own, every) in enumerate(zip(shared, single, worst, strict=True)):
        for holder in cluster.holders:
            index.store(holder, common[:128])
        for holder in cluster.random.sample(cluster.holders, 4):
            index.store(holder, common[:384])
        index.store(cluster.holders[i % num_workers], own)
        cluster.spread(every)
    full = [unpack_keys(cluster.packed()).tolist() for _ in range(12)]
    for prompt in full:
        for holder in cluster.holders:
            index.store(holder, prompt)

    def find(prompts: Sequence[Sequence[int]], i: int) -> None:
        index.find(prompts[i % 12])

    find_us = {
        name: percentiles_us(functools.partial(find, some))
        for name, some in (("full", full), ("worst", worst), ("shared", shared), ("miss", keys[:12]))
    }
    say("deciding")
    placer = Placer(index, seed=1)

    def decide(token_ids: Sequence[int]) -> PlacementRequest:
        keys = route_keys(token_ids, BLOCK_SIZE, seed)
        request = PlacementRequest(RequestId("request"), keys, PROMPT_TOKENS, BLOCK_SIZE, 256)
        assert placer.place(request, cluster.prefill, cluster.decode, 1.0) is not None
        return request

    def account(i: int) -> None:
        request = PlacementRequest(RequestId("request"), keys[i % 48], PROMPT_TOKENS, BLOCK_SIZE, 256)
        begin_s = 10.0 * i  # so late that the pages of the request before are expected no more
        decision = placer.place(request, cluster.prefill, cluster.decode, begin_s)
        assert decision is not None
        placer.began(request, decision, begin_s)
        placer.prefilled(request.request_id, begin_s + 0.1)
        placer.first_token(request.request_id, begin_s + 0.2)
        placer.ended(request.request_id, begin_s + 0.3)

    # 12 and 48 share a divisor: 5 of 48 at a time visits all kinds in turn.
    # Requests carry their tokens as arrays from the gateway's rendering on.
    decide_us = percentiles_us(lambda i: decide(arrays[i * 5 % 48]))
    decide_worst_us = percentiles_us(lambda i: decide(arrays[36 + i % 12]))
    decide_list_us = percentiles_us(lambda i: decide(prompts[i * 5 % 48]))
    place = [PlacementRequest(RequestId("r"), some, PROMPT_TOKENS, BLOCK_SIZE, 256) for some in keys]
    place_us = percentiles_us(lambda i: placer.place(place[i * 5 % 48], cluster.prefill, cluster.decode, 1.0))
    account_us = percentiles_us(account)
    num_pages = index.num_pages
    begin = time.perf_counter()
    index.drop_holder(cluster.holders[0].owner)
    drop_us = (time.perf_counter() - begin) * 1e6
    return {
        "keys_us": keys_array_us[0],
        "find_full_us": find_us["full"][0],
        "find_worst_us": find_us["worst"][0],
        "decide_us": decide_us[0],
        "events_per_cpu_s": round(events_per_cpu_s),
        "bytes_per_page": round(cluster.bytes_per_page, 1),
        "keys_p99_us": keys_array_us[1],
        "keys_of_list_us": keys_us[0],
        "find_shared_us": find_us["shared"][0],
        "find_miss_us": find_us["miss"][0],
        "find_full_p99_us": find_us["full"][1],
        "find_worst_p99_us": find_us["worst"][1],
        "place_us": place_us[0],
        "decide_p99_us": decide_us[1],
        "decide_worst_us": decide_worst_us[0],
        "decide_of_list_us": decide_list_us[0],
        "place_and_accounts_us": account_us[0],
        "page_ops_per_cpu_s": round(events_per_cpu_s * PAGES),
        "drop_worker_us": round(drop_us, 1),
        "mirror_event_us": bench_mirror(),
        "num_pages": num_pages,
    }


def _child(num_workers: int, pipe: Connection) -> None:
    pipe.send(bench(num_workers, pipe.send))
    pipe.close()


def bench_apart(num_workers: int, say: Say) -> dict[str, float]:
    """In a process of its own: what one run frees must not hide what the next one takes."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(num_workers, there))
    child.start()
    there.close()
    try:
        while True:
            message = here.recv()
            if isinstance(message, dict):
                return message
            say(message)
    except EOFError:
        child.join()
        raise BenchFailed(f"the run with {num_workers} workers ended with {child.exitcode}") from None
    finally:
        child.join()


def bench_peer(options: argparse.Namespace, workers: Sequence[int], say: Say, results: Results) -> None:
    """Add the peer's figures, and this index's on the peer's workload. Raises BenchFailed where a script fails."""
    if options.peer_bench:
        shape = ["--workers", ",".join(map(str, workers)), "--requests", "200", "--max-requests", "12800"]
        for name, python, impl in (
            ("index", options.peer_python, "dynamo"),
            ("kvferry_index", sys.executable, "bench.residency:Adapter"),
        ):
            say(f"the peer's workload on {'its own index' if name == 'index' else 'this index'}")
            lines = _output([python, options.peer_bench, "--impl", impl, *shape])
            rows = [json.loads(line) for line in lines if line.startswith("{")]
            results.add({"peer": {name: {str(row["workers"]): row for row in rows}}})
    if options.peer_select:
        say("the peer's decisions")
        lines = _output([options.peer_python, options.peer_select])
        rows = [ast.literal_eval(line) for line in lines if line.startswith("{'op'")]
        results.add({"peer": {"decide": {str(n): [row for row in rows if row["W"] == n] for n in workers}}})


def _output(command: list[str]) -> list[str]:
    root = str(Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # Logging of every decision is not what is measured; nor is an index fed by nobody.
    quiet = {"PYTHONPATH": path, "DYN_LOG": "error", "DYN_ROUTER_USE_KV_EVENTS": "false"}
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, env=os.environ | quiet)
    if done.returncode:
        raise BenchFailed(f"{command[1]} ended with {done.returncode}")
    return done.stdout.splitlines()


def show(console: Console, runs: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"{PROMPT_TOKENS:,} tokens, pages of {BLOCK_SIZE}; p50 in µs unless it says otherwise")
    table.add_column("")
    for num_workers in runs:
        table.add_column(f"{num_workers} workers", justify="right")
    for name in next(iter(runs.values())):
        table.add_row(name, *(f"{run[name]:,}" for run in runs.values()))
    console.print(table)


def show_peer(console: Console, peer: dict[str, Any]) -> None:
    table = Table(title="The peer's workload and decisions")
    for column in ("", "workers", "events per CPU s", "find full µs", "find doc µs", "keys µs", "memory MB"):
        table.add_column(column, justify="right")
    for name, label in (("index", "peer"), ("kvferry_index", "kvferry")):
        for num_workers, row in peer.get(name, {}).items():
            table.add_row(
                label,
                num_workers,
                f"{row['events_per_cpu_s']:,}",
                str(row["find_full"]["p50_us"]),
                str(row["find_doc"]["p50_us"]),
                str(row["hash_10k_tokens_us"]["p50"]),
                str(row["rss_growth_MB"]),
            )
    console.print(table)
    for num_workers, rows in peer.get("decide", {}).items():
        for row in rows:
            console.print(f"  peer, {num_workers} workers: {row['op']}: p50 {row['p50_us']} µs, p99 {row['p99_us']} µs")


def measure(options: argparse.Namespace, results: Results) -> None:
    workers = [int(num) for num in options.workers.split(",")]
    console = Console(stderr=True)
    results.add({"prompt_tokens": PROMPT_TOKENS, "machine": machine_line()})
    with console.status("starting") as status:
        for num_workers in workers:
            say = functools.partial(_say, status.update, f"{num_workers} workers: ")
            run = bench_apart(num_workers, say)
            results.add({"runs": {str(num_workers): run}})
            console.print(f"  {num_workers} workers: a decision takes {run['decide_us']} µs")
        bench_peer(options, workers, status.update, results)
    show(console, results.figures["runs"])
    if peer := results.figures.get("peer"):
        show_peer(console, peer)
    else:
        console.print("The peer was skipped: --peer-bench and --peer-select name its scripts.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="8,64,512", help="numbers of workers, with commas")
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has the peer installed")
    parser.add_argument("--peer-bench", help="script that benches the peer's index")
    parser.add_argument("--peer-select", help="script that benches the peer's whole decision")
    options = parser.parse_args()
    return run_benchmark("bench-residency", lambda results: measure(options, results))


def _say(update: Callable[[str], None], prefix: str, text: str) -> None:
    update(prefix + text)


if __name__ == "__main__":
    sys.exit(main())
