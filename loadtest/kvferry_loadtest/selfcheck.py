"""The harness measured against a server with known delays, which runs in a process of its own.

Three questions: are its percentiles right, does a stall show in scheduled latency (and not only in the requests that
were under way), and does it send in time at a high rate.
"""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from kvferry_loadtest.apis import Sampling
from kvferry_loadtest.arrivals import fixed_times
from kvferry_loadtest.engine import Engine
from kvferry_loadtest.histogram import Latencies
from kvferry_loadtest.http_client import Endpoint, HttpClient
from kvferry_loadtest.machine import machine_line
from kvferry_loadtest.plan import Message, Plan, PlannedRequest, RequestId, Segment
from kvferry_loadtest.record import Outcome, Record
from kvferry_loadtest.run import apis_of
from kvferry_loadtest.watch import Watch, punctual

PERCENTS = (50.0, 90.0, 99.0, 99.9)
# A percentile is right within 2 % or 1 ms, whichever is more.
TOLERANCE_SHARE = 0.02
TOLERANCE_MS = 1.0
RATE_PER_S = 2000.0
MAX_LATENESS_MS = 5.0
MOST_TRIES = 5
STALL_S = 2.0


class Delays(msgspec.Struct):
    """Times that the fake server really took, in microseconds."""

    ttft_us: list[int]
    itl_us: list[int]


@contextmanager
def fake_server(*arguments: str) -> Iterator[str]:
    """The address of a fake server in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvferry_loadtest.fake_server", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)


@contextmanager
def own_core(*, first: bool) -> Iterator[None]:
    """On the first or the last of this process's cores within, with all that it starts there."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores) if first else max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def plan_at(arrivals_s: Sequence[float], max_tokens: int) -> Plan:
    """Requests of a few words, each a session of its own."""
    messages = (Message("user", (Segment("hello", 4),)),)
    return Plan(
        scenario="selfcheck",
        seed=0,
        requests=tuple(
            PlannedRequest(
                request_id=RequestId(i), session_id=f"s{i}", arrival_s=at_s, messages=messages, max_tokens=max_tokens
            )
            for i, at_s in enumerate(arrivals_s)
        ),
    )


def driven(url: str, plan: Plan) -> tuple[list[Record], Delays, Watch]:
    """Send a plan to a fake server, as a run does; its own view of the delays comes with it."""
    with punctual():
        driven: tuple[list[Record], Delays, Watch] = uvloop.run(_drive(url, plan))
    return driven


async def _drive(url: str, plan: Plan) -> tuple[list[Record], Delays, Watch]:
    url, _, grpc_url = url.partition(" ")
    client = HttpClient(Endpoint(url))
    apis = apis_of([grpc_url or url])
    try:
        watch = Watch()
        engine = Engine(plan, apis, Sampling(model="fake", timeout_s=30.0), loop_kind="open")
        watch.begin()
        records = await engine.run()
        watch.end()
        _, body = await client.fetch("/fake/delays", {})
    finally:
        await client.close()
        for api in apis:
            await api.close()
    return records, msgspec.json.decode(body, type=Delays), watch


def check_accuracy(rate_per_s: float = 100.0, num_requests: int = 1500, *, grpc: bool = False) -> dict[str, Any]:
    """Percentiles of TTFT and of the time between tokens beside those that the server really took.

    A server behind grpc.aio cannot say when a request came, only when its handler began. So what a call takes in which
    nothing happens counts as the server's: its median, measured before.
    """
    speaks = ("--grpc",) if grpc else ()
    with fake_server("--ttft-ms", "40", "--ttft-spread", "0.5", "--itl-ms", "5", *speaks) as url:
        transport_ms = uvloop.run(_empty_call_ms(url)) if grpc else 0.0
        records, delays, _ = driven(url, plan_at(fixed_times(rate_per_s, num_requests), 8))
    compared = {
        "ttft": (_latencies(delays.ttft_us), _of(records, lambda record: record.ttft_sent_s)),
        "itl": (_latencies(delays.itl_us), _gaps(records)),
    }
    figures: dict[str, Any] = {}
    worst = 0.0
    for name, (true, measured) in compared.items():
        for percent in PERCENTS:
            true_ms, measured_ms = true.percentile_ms(percent), measured.percentile_ms(percent)
            if name == "ttft":
                true_ms += transport_ms
            allowed_ms = max(TOLERANCE_MS, TOLERANCE_SHARE * true_ms)
            worst = max(worst, abs(measured_ms - true_ms) / allowed_ms)
            figures[f"{name}_p{percent:g}_ms"] = {"true": round(true_ms, 3), "measured": round(measured_ms, 3)}
    all_ok = all(record.outcome is Outcome.OK for record in records)
    if grpc:
        figures["empty_call_ms"] = round(transport_ms, 3)
    return {"ok": all_ok and worst <= 1.0, "requests": len(records), "worst_of_tolerance": round(worst, 3), **figures}


async def _empty_call_ms(url: str, count: int = 300) -> float:
    """Median of calls in which nothing happens, paced as requests are: both ends sleep in between."""
    (api,) = apis_of([url.partition(" ")[2]])
    try:
        took_ms = []
        for _ in range(count):
            begun_s = time.perf_counter()
            await api.models("")
            took_ms.append((time.perf_counter() - begun_s) * 1e3)
            await asyncio.sleep(0.01)
        return statistics.median(took_ms)
    finally:
        await api.close()


def check_stall(rate_per_s: float = 200.0, seconds: float = 8.0) -> dict[str, Any]:
    """A server that does nothing for 2 s: what was due meanwhile waited, on average, half as long."""
    with fake_server("--ttft-ms", "5", "--itl-ms", "1", "--stall-at-s", "3", "--stall-for-s", f"{STALL_S:g}") as url:
        plan = plan_at(fixed_times(rate_per_s, int(rate_per_s * seconds)), 2)
        records, _, _ = driven(url, plan)
    scheduled = _of(records, lambda record: record.e2e_s)
    due_in_stall = STALL_S / seconds
    expected_ms = STALL_S * 1e3 * (1 - 0.01 / due_in_stall)  # of a wait that falls evenly from 2 s to nothing
    p99_ms = scheduled.percentile_ms(99)
    return {
        "ok": abs(p99_ms - expected_ms) <= 0.1 * expected_ms,
        "scheduled_p50_ms": round(scheduled.percentile_ms(50), 1),
        "scheduled_p99_ms": round(p99_ms, 1),
        "expected_p99_ms": round(expected_ms, 1),
        "share_over_200_ms": round(sum((record.e2e_s or 0) > 0.2 for record in records) / len(records), 3),
        "expected_share_over_200_ms": round((STALL_S - 0.2) / seconds, 3),
    }


def check_rate(rate_per_s: float = RATE_PER_S, seconds: float = 10.0) -> dict[str, Any]:
    """Short streams at a high rate, sent from one core: can every one leave in time.

    A virtual machine's core is taken away for milliseconds now and then (seen: 4 to 14 ms, several times in ten seconds
    once both of two cores are busy), which no program can do anything about. So there are several tries, all of them
    reported, with what was stolen meanwhile; one in which nothing was late shows that the harness can.
    """
    plan = plan_at(fixed_times(rate_per_s, int(rate_per_s * seconds)), 4)
    tries: list[dict[str, Any]] = []
    while len(tries) < MOST_TRIES and not (tries and tries[-1]["ok"]):
        stolen_s = _stolen_s()
        with own_core(first=True), fake_server("--ttft-ms", "10", "--itl-ms", "5") as url, own_core(first=False):
            records, _, watch = driven(url, plan)
        lateness = _of(records, lambda record: record.lateness_s)
        tries.append(
            {
                "ok": lateness.max_ms <= MAX_LATENESS_MS and all(record.outcome is Outcome.OK for record in records),
                "lateness_p50_ms": round(lateness.percentile_ms(50), 3),
                "lateness_p99_ms": round(lateness.percentile_ms(99), 3),
                "lateness_max_ms": round(lateness.max_ms, 3),
                "cpu_share": round(watch.verdict(records).cpu_share, 3),
                "stolen_ms": round((_stolen_s() - stolen_s) * 1e3),
            }
        )
    return {"requests": len(plan.requests), "requests_per_s": rate_per_s, **tries[-1], "tries": tries}


def _stolen_s() -> float:
    """Processor time that the hypervisor gave to others, of all cores; 0 where nobody says."""
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def check_all(console: Console) -> dict[str, Any]:
    """All of them, with a table of what was found."""
    table = Table(title=f"kvferry-loadtest on {machine_line()}", title_justify="left")
    for column in ("question", "figure", "wanted", ""):
        table.add_column(column)
    figures: dict[str, Any] = {"machine": machine_line()}
    questions: tuple[tuple[str, Callable[[], dict[str, Any]]], ...] = (
        ("accuracy", check_accuracy),
        ("accuracy_grpc", functools.partial(check_accuracy, 50.0, 750, grpc=True)),
        ("stall", check_stall),
        ("rate", check_rate),
    )
    for name, check in questions:
        with console.status(f"{name} ..."):
            figures[name] = check()
    stall, rate = figures["stall"], figures["rate"]
    for name, over in (("accuracy", "HTTP"), ("accuracy_grpc", "gRPC")):
        table.add_row(
            f"percentiles of TTFT and ITL beside the true ones, {over}",
            f"off by {figures[name]['worst_of_tolerance']:.2f} of the tolerance at most",
            "2 % or 1 ms",
            _verdict(figures[name]),
        )
    table.add_row(
        f"a stall of {STALL_S:g} s shows in scheduled latency, p99",
        f"{stall['scheduled_p99_ms']:.0f} ms",
        f"{stall['expected_p99_ms']:.0f} ms ± 10 %",
        _verdict(stall),
    )
    table.add_row(
        f"{rate['requests_per_s']:g} streams/s, latest of {rate['requests']}",
        f"{rate['lateness_max_ms']:.1f} ms late, {rate['cpu_share']:.0%} of a core (try {len(rate['tries'])})",
        f"{MAX_LATENESS_MS:g} ms",
        _verdict(rate),
    )
    console.print(table)
    figures["ok"] = all(figures[name]["ok"] for name, _ in questions)
    return figures


def _verdict(figures: dict[str, Any]) -> str:
    return "[green]✓[/]" if figures["ok"] else "[red]✗[/]"


def _latencies(values_us: Sequence[int]) -> Latencies:
    latencies = Latencies()
    for value_us in values_us:
        latencies.add_s(value_us / 1e6)
    return latencies


def _of(records: Sequence[Record], read: Callable[[Record], float | None]) -> Latencies:
    latencies = Latencies()
    for record in records:
        if (value_s := read(record)) is not None:
            latencies.add_s(value_s)
    return latencies


def _gaps(records: Sequence[Record]) -> Latencies:
    latencies = Latencies()
    for record in records:
        for before_s, after_s in zip(record.token_s, record.token_s[1:], strict=False):
            latencies.add_s(after_s - before_s)
    return latencies
