"""The KV transfer beside raw NIXL: bytes per second from a prefill to a decode engine.

Both are on the CPU device, or with KVFERRY_TEST_DEVICE=gpu on one GPU. They transfer prompts of several lengths; the
decode engine's connector says how long each transfer took. After each one two plain processes with NIXL agents
(bench/raw_nixl.py) move as many bytes in as many descriptors of the same sizes, from and to memory of the same shape.
Both times are NIXL's own: from posting the read to noticing its end. All destination pages were written before the
first measured transfer, on both sides.

Each prompt is computed once and pulled several times, under another cache salt each time: the decode engine never holds
it already. The figures of each length are a line of JSON on stdout when they are measured, and the last line has all:
there `gb_s`, `raw_gb_s` and `ratio` (the first over the second) are those of one transfer of each length at its median
time. The first transfer that fails ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.engine_device import on_gpu
from bench.raw_nixl import Layout, RawReader, Transfer, page_ids, raw_pair
from bench.results import BenchFailed, Results, run_benchmark
from bench.vllm_engines import VllmPair, answer, prefill, start_pair
from kvferry.engine.base import EngineInfo, EngineRequest, RequestId, Sampling
from kvferry.errors import KvferryError

VOCABULARY = (1_000, 40_000)
WARM_UP_TOKENS = 2048
STATISTICS_TIMEOUT_S = 10.0


class KvTransferLog:
    """The transfers of an engine, as its connector reports them."""

    def __init__(self, counters: Any) -> None:
        self._transfers: list[Transfer] = []
        self._failure: BenchFailed | None = None
        self._record = counters.record
        counters.record = self._tap

    def _tap(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
        if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
            try:
                self._transfers.extend(transfers_of(scheduler_stats.kv_connector_stats))
            except BenchFailed as error:  # in vLLM's loop, which it would end
                self._failure = error
        self._record(scheduler_stats, *args, **kwargs)

    async def next(self, since: int, begin_s: float) -> Transfer:
        """The one transfer after the first `since`; its wall time is the caller's from `begin_s` to the first token.

        Raises BenchFailed where a transfer failed, or none comes.
        """
        wall_s = time.perf_counter() - begin_s
        deadline = time.monotonic() + STATISTICS_TIMEOUT_S
        while len(self._transfers) == since:
            if self._failure is not None:
                raise self._failure
            if time.monotonic() > deadline:
                raise BenchFailed("the decode engine reported no transfer: it computed the prompt itself")
            await asyncio.sleep(0.01)
        [seen] = self._transfers[since:]
        return Transfer(seen.size_bytes, seen.num_descriptors, seen.transfer_s, seen.post_s, wall_s)

    def __len__(self) -> int:
        return len(self._transfers)


def transfers_of(statistics_of_step: Mapping[str, Sequence[float]]) -> list[Transfer]:
    """vLLM's NIXL statistics of one step; raises BenchFailed where a transfer failed."""
    if statistics_of_step.get("num_failed_transfers"):
        raise BenchFailed("a transfer between the engines failed")
    columns = ("bytes_transferred", "num_descriptors", "transfer_duration", "post_duration")
    return [
        Transfer(int(size), int(count), transfer_s, post_s, transfer_s)
        for size, count, transfer_s, post_s in zip(*(statistics_of_step.get(c, ()) for c in columns), strict=True)
    ]


class KvTransfer:
    """Hands prompts over, one at a time."""

    def __init__(self, pair: VllmPair) -> None:
        self._pair = pair
        self._log = KvTransferLog(pair.decode._stat_logger)
        self._num_requests = 0

    async def pull(self, prompt: Sequence[int]) -> Transfer:
        """Computed by the prefill engine (or found in its cache), pulled by the decode engine.

        Raises BenchFailed with the request and the reason.
        """
        self._num_requests += 1
        name, once = f"kv-transfer-{self._num_requests}", Sampling(max_tokens=1, temperature=0.0)
        try:
            transfer = await prefill(self._pair.prefill, name, prompt)
            since, begin_s = len(self._log), time.perf_counter()
            request = EngineRequest(RequestId(name), prompt, once, transfer_params=transfer, cache_salt=name)
            await answer(self._pair.decode, request)
            return await self._log.next(since, begin_s)
        except (BenchFailed, KvferryError) as error:
            raise BenchFailed(f"{name}, {len(prompt)} tokens: {error}") from error


class Raw:
    """Repeats the engines' KV transfers between plain processes, at other pages each time."""

    def __init__(self, reader: RawReader, layout: Layout) -> None:
        self._reader = reader
        self._layout = layout
        self._next = 0

    def repeat(self, transferred: Transfer) -> Transfer:
        num_pages, num_runs = shape_of(transferred, self._layout)
        span = num_pages + num_runs
        if self._next + span > self._layout.num_pages:
            self._next = 0
        pages = page_ids(num_pages, num_runs, self._next, self._layout.num_pages)
        self._next += span
        pulled = self._reader.pull(pages, pages)
        if (pulled.size_bytes, pulled.num_descriptors) != (transferred.size_bytes, transferred.num_descriptors):
            raise BenchFailed(
                f"raw NIXL moved {pulled.size_bytes} bytes in {pulled.num_descriptors} descriptors, "
                f"the KV transfer {transferred.size_bytes} in {transferred.num_descriptors}"
            )
        return pulled


def shape_of(transfer: Transfer, layout: Layout) -> tuple[int, int]:
    """Pages and runs of adjacent pages that give a transfer's bytes and descriptors; all layers have the same pages."""
    num_pages, odd_bytes = divmod(transfer.size_bytes, layout.num_layers * layout.row_bytes)
    num_runs, odd_descriptors = divmod(transfer.num_descriptors, layout.num_layers)
    if odd_bytes or odd_descriptors:
        raise BenchFailed(
            f"{transfer.size_bytes} bytes in {transfer.num_descriptors} descriptors are no whole pages of "
            f"{layout.num_layers} layers of {layout.row_bytes} bytes"
        )
    return num_pages, num_runs


def layout_of(info: EngineInfo, num_layers: int, first: Transfer, *, is_on_gpu: bool) -> Layout:
    """Return how the engines' memory is registered: layer by layer, or with all layers of a page side by side."""
    for num_ranges in (num_layers, 1):
        layout = Layout(num_ranges, info.num_pages, info.page_bytes // num_ranges, is_on_gpu)
        with contextlib.suppress(BenchFailed):
            num_pages, num_runs = shape_of(first, layout)
            if 1 <= num_runs <= num_pages:
                return layout
    raise BenchFailed(f"{first.num_descriptors} descriptors of {first.size_bytes} bytes are no known layout of pages")


def summarize(num_tokens: int, transferred: Sequence[Transfer], raw: Sequence[Transfer]) -> dict[str, Any]:
    """Figures of one prompt length: each side's median and best rate, and the medians' ratio."""
    size_bytes = transferred[0].size_bytes
    num_descriptors = statistics.median(transfer.num_descriptors for transfer in transferred)
    figures: dict[str, Any] = {
        "tokens": num_tokens,
        "transfers": len(transferred),
        "bytes": size_bytes,
        "descriptors": round(num_descriptors),
        "descriptor_bytes": round(size_bytes / num_descriptors),
    }
    for prefix, transfers in (("", transferred), ("raw_", raw)):
        figures[f"{prefix}gb_s"] = size_bytes / statistics.median(t.transfer_s for t in transfers) / 1e9
        figures[f"{prefix}best_gb_s"] = size_bytes / min(t.transfer_s for t in transfers) / 1e9
        figures[f"{prefix}transfer_ms"] = statistics.median(t.transfer_s for t in transfers) * 1e3
        figures[f"{prefix}post_ms"] = statistics.median(t.post_s for t in transfers) * 1e3
        figures[f"{prefix}wall_ms"] = statistics.median(t.wall_s for t in transfers) * 1e3
    figures["ratio"] = figures["gb_s"] / figures["raw_gb_s"]
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}


def overall(sizes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One transfer of each length at its median time: all bytes over all time."""
    size_bytes = sum(size["bytes"] for size in sizes)
    gb_s = size_bytes / sum(size["transfer_ms"] for size in sizes) / 1e6
    raw_gb_s = size_bytes / sum(size["raw_transfer_ms"] for size in sizes) / 1e6
    return {"gb_s": round(gb_s, 3), "raw_gb_s": round(raw_gb_s, 3), "ratio": round(gb_s / raw_gb_s, 3)}


def num_layers(model_folder: str) -> int:
    return int(json.loads((Path(model_folder) / "config.json").read_text())["num_hidden_layers"])


def machine() -> str:
    name = platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{os.cpu_count()} cores, {name}, Python {platform.python_version()}"


def prompts(lengths: Sequence[int], count: int, seed: int) -> dict[int, list[list[int]]]:
    seeded = random.Random(seed)
    return {n: [[seeded.randrange(*VOCABULARY) for _ in range(n)] for _ in range(count)] for n in lengths}


async def measure(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    load_before = os.getloadavg()[0]
    async with contextlib.AsyncExitStack() as stack:
        with console.status("starting a prefill and a decode engine"):
            pair = await start_pair()
            stack.push_async_callback(pair.stop)
        info = pair.decode.info
        longest = max(arguments.tokens)
        if longest >= info.max_model_len:
            raise BenchFailed(f"--tokens {longest}: the model takes fewer than {info.max_model_len}")
        results.add(
            {
                "device": "gpu" if on_gpu() else "cpu",
                "machine": machine(),
                "kv_cache_dtype": info.kv_cache_dtype,
                "block_size": info.block_size,
                "ucx_tls": os.environ.get("UCX_TLS", ""),
            }
        )
        kv_transfer = KvTransfer(pair)
        made = prompts(arguments.tokens, arguments.prompts, arguments.seed)
        [warm] = prompts([WARM_UP_TOKENS], 1, arguments.seed + 1)[WARM_UP_TOKENS]
        first = await kv_transfer.pull(warm)
        layout = layout_of(info, num_layers(info.model), first, is_on_gpu=on_gpu())
        with console.status("starting raw NIXL"):
            # After the engines: they have set what UCX reads from the environment.
            raw = Raw(stack.enter_context(raw_pair(layout)), layout)
        # The first transfer waits for the handshake. From then on the decode engine takes its longest unused page next,
        # so once around all of them none is touched for the first time any more.
        rounds = 2 + info.num_pages * info.block_size // WARM_UP_TOKENS
        pulls = arguments.prompts * arguments.pulls
        sizes = []
        with Progress(console=console) as bar:
            task = bar.add_task("warm-up", total=rounds)
            for _ in range(rounds):
                await asyncio.to_thread(raw.repeat, await kv_transfer.pull(warm))
                bar.advance(task)
            for num_tokens, of_length in made.items():
                task = bar.add_task(f"{num_tokens:,} tokens", total=pulls)
                transferred, repeated = [], []
                for prompt in of_length:
                    for _ in range(arguments.pulls):
                        transferred.append(await kv_transfer.pull(prompt))
                        repeated.append(await asyncio.to_thread(raw.repeat, transferred[-1]))
                        bar.advance(task)
                sizes.append(summarize(num_tokens, transferred, repeated))
                results.add({"sizes": sizes[-1:]})
    results.add({**overall(sizes), "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)]})
    show(results.figures, console)


def show(results: Mapping[str, Any], console: Console) -> None:
    table = Table(title="GB/s of a KV transfer beside raw NIXL")
    columns = ("tokens", "MB", "descriptors", "KiB each", "KV transfer median", "best", "raw median", "best", "ratio")
    for column in columns:
        table.add_column(column, justify="right")
    for size in results["sizes"]:
        table.add_row(
            f"{size['tokens']:,}",
            f"{size['bytes'] / 1e6:.1f}",
            f"{size['descriptors']:,}",
            f"{size['descriptor_bytes'] / 1024:.0f}",
            *(f"{size[name]:.2f}" for name in ("gb_s", "best_gb_s", "raw_gb_s", "raw_best_gb_s", "ratio")),
        )
    table.add_section()
    table.add_row("all", *[""] * 3, *(f"{results[n]:.2f}" if n else "" for n in ("gb_s", "", "raw_gb_s", "", "ratio")))
    console.print(table)
    console.print(f"{results['machine']}; UCX_TLS={results['ucx_tls']}; {results['kv_cache_dtype']} pages of "
                  f"{results['block_size']} tokens; load average {results['load_average']}")  # fmt: skip


def lengths(text: str) -> list[int]:
    try:
        values = sorted({int(value) for value in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None
    if not values or values[0] < 1:
        raise argparse.ArgumentTypeError("prompts have at least one token")
    return values


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=lengths, default=[512, 1024, 2048, 4096], help="lengths of prompts, by commas")
    parser.add_argument("--prompts", type=positive, default=2, help="of each length (default: %(default)s)")
    parser.add_argument("--pulls", type=positive, default=10, help="of each prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=120)
    for package in ("vllm", "nixl"):
        if importlib.util.find_spec(package) is None:
            console.print(f"bench-handoff needs {package}, which is not installed here", style="red")
            return 2
    return run_benchmark("bench-handoff", lambda results: asyncio.run(measure(arguments, results, console)))


if __name__ == "__main__":
    sys.exit(main())
