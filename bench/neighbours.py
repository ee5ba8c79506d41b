"""Effect of one client's worst bodies on the streams of others.

A gateway with the real renderer where the default model is there, simulated workers, a client that reads `--streams`
streams, and one that sends each of WORST_BODIES several times: each is a process. A gap is the time between two tokens
of a stream, as its client sees them, beyond an engine's step. Before each body there is as long a time without one:
the baseline, which shows what the machine does anyway.

Workers and clients stand for other machines: the gateway has a core of its own, and they share the others. Where the
system allows it, the client that reads the streams has them first, then the workers, and the sender last, and other
processes of this machine have a core after each of these but the sender.

A process of the highest real-time priority on each core notes when the core stood still: the machine under this one
had it. A window with such a time is sent again, RETRIES times in all at most, and how many were is said. Without the
right to that priority nothing is sent again.

Beside it stand, of the gateway's event loop, the longest time between two turns, and the most CPU time that its thread
used between two turns: the second does not grow where other processes have the cores.

The first answer with another status than its body's, and the first stream that breaks off, end the benchmark with exit
code 1. Gaps and turns are noted in memory, so as not to disturb what is measured: the figures of all bodies, or of
those so far, are a line of JSON on stdout at the end. The last line has all; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil
from rich.console import Console
from rich.table import Table

from bench.gateway import (
    TAIL_BYTES,
    Children,
    bench_config,
    error_event,
    find_model,
    make_renderer_of,
    run_gateway,
    say,
    told_to_end,
)
from bench.results import BenchFailed, Results, run_benchmark
from bench.worst_bodies import MODEL, WORST_BODIES, WorstBody
from kvferry import config as configuration
from kvferry_loadtest.machine import machine_line

SETTLE_S = 1.0  # of streams, before the first window
MIN_WINDOW_S = 0.25
ANSWER_TIMEOUT_S = 120.0
NOTED_S = 0.003  # shorter ones are not noted
RETRIES = 50  # of all windows


# --- The gateway, with a heartbeat.


class Heartbeat:
    """Notes turns of the event loop that were late, as (when, seconds late, CPU seconds of the thread)."""

    PERIOD_S = 0.001

    def __init__(self) -> None:
        self.noted: list[tuple[float, float, float]] = []
        self._loop = asyncio.get_running_loop()
        self._due_s = time.monotonic()
        self._cpu_s = time.thread_time()
        self._beat()

    def _beat(self) -> None:
        now_s, cpu_s = time.monotonic(), time.thread_time()
        late_s, used_s = now_s - self._due_s, cpu_s - self._cpu_s
        if late_s > NOTED_S or used_s > NOTED_S:
            self.noted.append((now_s, late_s, used_s))
        self._due_s, self._cpu_s = now_s + self.PERIOD_S, cpu_s
        self._loop.call_later(self.PERIOD_S, self._beat)


async def run_watched_gateway(spec: dict[str, Any]) -> None:
    heartbeat = Heartbeat()
    try:
        await run_gateway(configuration.parse(spec["config"]), spec["members"], make_renderer_of(spec["model"]))
    finally:
        write(spec["heartbeats"], heartbeat.noted)


def write(file: str, values: object) -> None:
    Path(file).write_text(json.dumps(values), encoding="utf-8")


# --- The machine.


def watch_core(core: int, connection: Any) -> None:
    """Send (when, seconds late) for each sleep of a millisecond that ended late, until the other end closes."""
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50))
    connection.send(None)
    due_s = time.monotonic() + 0.001
    while not connection.poll():
        time.sleep(max(0.0, due_s - time.monotonic()))
        now_s = time.monotonic()
        if now_s - due_s > NOTED_S:
            connection.send((now_s, now_s - due_s))
        due_s = now_s + 0.001


class Watches:
    """Times in which a core stood still, as (when, seconds). Empty where the system refuses the priority."""

    def __init__(self, cores: set[int]) -> None:
        self.noted: list[tuple[float, float]] = []
        self.num_sent_again = 0
        self._connections = []
        for core in cores:
            here, there = multiprocessing.Pipe()
            process = multiprocessing.Process(target=watch_core, args=(core, there), daemon=True)
            process.start()
            there.close()
            with contextlib.suppress(EOFError):
                here.recv()
                self._connections.append(here)

    @property
    def watches(self) -> bool:
        return bool(self._connections)

    def stood_still(self, begun_s: float, ended_s: float) -> bool:
        for connection in self._connections:
            while connection.poll():
                self.noted.append(connection.recv())
        return any(begun_s <= when_s and when_s - late_s <= ended_s for when_s, late_s in self.noted)

    def end(self) -> None:
        for connection in self._connections:
            connection.send(None)


# --- The innocent.


class Stream(asyncio.Protocol):
    """Reads one stream after the other, and notes gaps between tokens as (when, seconds), and the first failure."""

    def __init__(
        self, port: int, num_tokens: int, step_s: float, gaps: list[tuple[float, float]], failure: asyncio.Future[str]
    ) -> None:
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Tell me a long story."}],
                "max_tokens": num_tokens,
                "stream": True,
                "ignore_eos": True,
            }
        ).encode()
        self._request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        ).encode() + body
        self._step_s = step_s
        self._gaps = gaps
        self._last_s = 0.0
        self._tail = b""
        self._failure = failure

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if not data.startswith((b"HTTP/1.1 200", b"data: ")) and b"data: " not in data:
            self._fail(data[:200].decode(errors="replace"))
        seen = self._tail + data
        if error := error_event(seen):
            self._fail(error)
        self._tail = seen[-TAIL_BYTES:]
        if self._last_s and now_s - self._last_s - self._step_s > NOTED_S:
            self._gaps.append((now_s, now_s - self._last_s - self._step_s))
        self._last_s = now_s
        if data.endswith(b"0\r\n\r\n"):
            self._last_s = 0.0
            self._transport.write(self._request)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection was lost")

    def _fail(self, failure: str) -> None:
        if not self._failure.done():
            self._failure.set_result(failure)


async def run_streams(spec: dict[str, Any]) -> None:
    """Read streams until this process is told to end, or until the first one fails."""
    loop = asyncio.get_running_loop()
    gaps: list[tuple[float, float]] = []
    failure: asyncio.Future[str] = loop.create_future()
    for i in range(spec["streams"]):
        # Streams end at different times: a new one's first token takes its prefill.
        stream = Stream(spec["port"], 1500 + 37 * i, spec["step_s"], gaps, failure)
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", spec["port"])  # type: ignore[misc]
    gc.disable()  # a client's own collection would be a gap of all its streams
    say({"streams": spec["streams"]})
    ending = asyncio.create_task(told_to_end())
    await asyncio.wait((ending, failure), return_when=asyncio.FIRST_COMPLETED)
    ending.cancel()
    write(spec["gaps"], {"gaps": gaps, "failure": failure.result() if failure.done() else ""})


# --- The sender.


@dataclass
class Sent:
    """One body's times: windows of `time.monotonic`, each with as long a one before it."""

    body: WorstBody
    size_bytes: int
    windows: list[tuple[float, float]] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)


def post(port: int, path: str, raw: bytes) -> int:
    """Send one body and read the whole answer. Returns the status. Raises BenchFailed without an answer."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\nconnection: close\r\n\r\n"
    ).encode()
    answer = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_TIMEOUT_S) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(head + raw)
            while piece := connection.recv(1 << 18):
                answer = answer or piece
    except OSError as error:  # of which TimeoutError is one
        raise BenchFailed(f"{type(error).__name__}: {error}") from error
    if not answer:
        raise BenchFailed("the connection was closed without an answer")
    return int(answer.split(b" ", 2)[1])


def send_all(
    port: int, bodies: Sequence[WorstBody], repeat: int, watches: Watches, console: Console, *, simulated: bool
) -> Iterator[Sent]:
    """Yield each body's times. Raises BenchFailed for another status than the body's."""
    for body in bodies:
        raw = body.build()
        one = Sent(body, len(raw))
        with console.status(body.name):
            while len(one.windows) < repeat:
                begun_s = time.monotonic()
                try:
                    status = post(port, body.path, raw)
                except BenchFailed as error:
                    raise BenchFailed(f"{body.name}: {error}") from error
                if status != (expected := body.expected(simulated=simulated)):
                    raise BenchFailed(f"{body.name}: {status} instead of {expected}")
                # What follows the answer counts too: freeing, and collecting garbage.
                time.sleep(max(0.05, MIN_WINDOW_S - (time.monotonic() - begun_s)))
                ended_s = time.monotonic()
                if watches.num_sent_again < RETRIES and watches.stood_still(begun_s, ended_s):
                    watches.num_sent_again += 1
                    continue
                one.windows.append((begun_s, ended_s))
                time.sleep(min(2.0, ended_s - begun_s))
                one.quiet.append((ended_s, time.monotonic()))
        yield one


def cores_of_gateway() -> tuple[set[int], set[int]]:
    """Return a core for the gateway, and those of all others: the same where there is only one."""
    first, *rest = sorted(os.sched_getaffinity(0))
    return {first}, set(rest) or {first}


def pin_all(pid: int, cores: set[int]) -> None:
    """Let all threads and children of a process run only on these cores."""
    process = psutil.Process(pid)
    for each in (process, *process.children(recursive=True)):
        for thread in each.threads():
            os.sched_setaffinity(thread.id, cores)


def set_niceness(pid: int, niceness: int) -> None:
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)


# --- Measuring.


def worst_ms(noted: Sequence[Sequence[float]], windows: Sequence[tuple[float, float]], column: int) -> list[float]:
    """Return the largest value of a column in each window, in milliseconds."""
    return [
        1e3 * max((entry[column] for entry in noted if begun_s <= entry[0] <= ended_s), default=0.0)
        for begun_s, ended_s in windows
    ]


def results_of(
    sent: Sequence[Sent], gaps: Sequence[Sequence[float]], heartbeats: Sequence[Sequence[float]], *, simulated: bool
) -> list[dict[str, Any]]:
    return [
        {
            "name": one.body.name,
            "size_bytes": one.size_bytes,
            "status": one.body.expected(simulated=simulated),
            "gap_ms": round(max(worst_ms(gaps, one.windows, 1)), 1),
            "median_gap_ms": round(statistics.median(worst_ms(gaps, one.windows, 1)), 1),
            "quiet_gap_ms": round(max(worst_ms(gaps, one.quiet, 1)), 1),
            "loop_late_ms": round(max(worst_ms(heartbeats, one.windows, 1)), 1),
            "loop_cpu_ms": round(max(worst_ms(heartbeats, one.windows, 2)), 1),
        }
        for one in sent
    ]


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    baseline = sorted(result["quiet_gap_ms"] for result in results)
    worst = max(results, key=lambda result: result["gap_ms"])
    return {
        "worst_gap_ms": worst["gap_ms"],
        "worst_body": worst["name"],
        "worst_median_gap_ms": max(result["median_gap_ms"] for result in results),
        "bodies": len(results),
        "baseline_gap_ms": baseline[-1],
        "baseline_median_gap_ms": statistics.median(baseline),
        "loop_cpu_ms": max(result["loop_cpu_ms"] for result in results),
    }


def table(results: Sequence[dict[str, Any]]) -> Table:
    shown = Table(title="gaps of other clients' streams beyond a step, in ms", title_justify="left")
    for column in ("body", "bytes", "status", "worst", "median", "without", "loop late", "loop CPU"):
        shown.add_column(column, justify="left" if column == "body" else "right")
    for result in sorted(results, key=lambda result: -float(result["median_gap_ms"])):
        shown.add_row(
            result["name"],
            f"{result['size_bytes']:,}",
            str(result["status"]),
            *(
                f"{result[key]:.1f}"
                for key in ("gap_ms", "median_gap_ms", "quiet_gap_ms", "loop_late_ms", "loop_cpu_ms")
            ),
        )
    return shown


def bench(arguments: argparse.Namespace, results: Results) -> None:
    console = Console(stderr=True) if sys.stderr.isatty() else Console(stderr=True, width=120)
    model = find_model(arguments)
    results.add(
        {
            "machine": f"{machine_line()}, load {os.getloadavg()[0]:.2f} before",
            "load": f"{arguments.streams} streams at {arguments.step_ms:g} ms steps over {arguments.decode} workers, "
            f"sim; each body {arguments.repeat} times",
            "rendering": "chat template and tokens of a real model" if model else "the simulator's",
        }
    )
    bodies = [body for body in WORST_BODIES if arguments.only in body.name]
    own, others = cores_of_gateway()
    watches = Watches(own | others)
    sent: list[Sent] = []
    with tempfile.TemporaryDirectory(prefix="bench-neighbours-") as name:
        folder = Path(name)
        gap_file, heartbeat_file = folder / "gaps.json", folder / "heartbeats.json"
        config = bench_config(arguments, folder).model_dump(mode="json")
        children = Children(folder, "bench.neighbours")
        workers = Children(folder)
        try:
            members = []
            for _ in range(arguments.decode):
                process, said = workers.start("worker", {"config": config, "kind": "decode"})
                pin_all(process.pid, others)
                set_niceness(process.pid, -10)
                members.append(said["member"])
            with console.status("starting the gateway (a real renderer takes about 10 s)"):
                spec = {"config": config, "members": members, "model": model, "heartbeats": str(heartbeat_file)}
                process, said = children.start("gateway", spec)
                pin_all(process.pid, own)
                set_niceness(process.pid, -10)
            port = said["port"]
            if model is not None:
                # The first grammar waits for the grammar process.
                post(port, "/v1/chat/completions", grammar_body())
            spec = {
                "port": port,
                "streams": arguments.streams,
                "step_s": arguments.step_ms / 1e3,
                "gaps": str(gap_file),
            }
            streams, _ = children.start("streams", spec)
            pin_all(streams.pid, others)
            set_niceness(streams.pid, -15)
            os.sched_setaffinity(0, others)
            set_niceness(os.getpid(), 5)
            time.sleep(SETTLE_S)
            for one in send_all(port, bodies, arguments.repeat, watches, console, simulated=model is None):
                sent.append(one)
                if streams.poll() is not None:
                    raise BenchFailed(f"after {one.body.name}: a stream failed: {_read(gap_file).get('failure')}")
        finally:
            watches.end()
            children.end()
            workers.end()
            if sent:
                rows = results_of(
                    sent, _read(gap_file).get("gaps", []), _read(heartbeat_file) or [], simulated=model is None
                )
                results.add(
                    {
                        **summary(rows),
                        "windows_sent_again": watches.num_sent_again if watches.watches else None,
                        "results": rows,
                    }
                )
    console.print(table(rows))


def _read(file: Path) -> Any:
    """Return what a process wrote at its end; nothing where it was killed."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def grammar_body() -> bytes:
    values = {"model": MODEL, "prompt": "hi", "max_tokens": 1, "structured_outputs": {"regex": "a+"}}
    return json.dumps(values).encode()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what the worst bodies do to the streams of others.")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--decode", type=int, default=2, help="decode workers, each a process")
    parser.add_argument("--prefill", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--step-ms", type=float, default=5.0, help="length of an engine step")
    parser.add_argument("--repeat", type=int, default=3, help="how often each body is sent")
    parser.add_argument("--only", default="", help="only bodies whose name contains this")
    parser.add_argument("--no-model", action="store_true", help="render with the simulator")
    parser.add_argument("--mutual-tls", action="store_true", help="between gateway and workers, as `kvferry up` has it")
    parser.add_argument("--role", choices=("bench", "gateway", "streams"), default="bench", help=argparse.SUPPRESS)
    parser.add_argument("--spec", type=json.loads, default={}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "bench":
        return run_benchmark("bench-neighbours", lambda results: bench(arguments, results))
    import uvloop

    uvloop.run(run_watched_gateway(arguments.spec) if arguments.role == "gateway" else run_streams(arguments.spec))
    return 0


if __name__ == "__main__":
    sys.exit(main())
