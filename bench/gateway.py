"""Cost of one gateway: CPU per streamed token and per short request, with several workers behind it.

Everything is a process of its own, as in a cluster: the workers (WorkerHost over sim engines, paced by `--step-ms`),
one gateway (GatewayHost, uvicorn and all, on the event loop that a Ray replica has), and the client, which speaks HTTP
over raw sockets and keeps a fixed number of requests open. CPU is utime + stime of the gateway, all its threads, over a
case.

Rendering is real where the default model is there (`make up` fetches it): chat template and tokens of that model,
whose ids the sim engines take as they are, since their vocabulary is larger. Without the model the simulator
renders, and the result says so. Membership is a registry in each process's memory, filled once: no etcd, whose lease
traffic a gateway sees once in seconds.

Each run's figures are a line of JSON on stdout when it ends, and the last line has all; everything else goes to stderr.
The first request that fails ends the benchmark with exit code 1. `--peer-url` measures another server of the same API
with the same client in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import psutil
from rich.console import Console
from rich.table import Table

from bench.results import BenchFailed, Results, run_benchmark
from kvferry import config as configuration
from kvferry import model_folder
from kvferry.config import ClusterConfig
from kvferry.engine.base import Renderer
from kvferry.errors import KvferryError
from kvferry.util import collector
from kvferry_loadtest.machine import machine_line
from kvferry_local.authority import make_certificates

MODEL = "bench"
START_TIMEOUT_S = 120.0
NUM_PROMPT_WORDS = 24
WORDS = ["the", "of", "and", "to", "in", "that", "for", "with", "one", "people", "time", "water", "house", "world"]


@dataclass(frozen=True)
class Case:
    """A closed loop: `concurrency` connections, each with one request open at any time, until `num_requests` ended."""

    name: str
    concurrency: int
    num_requests: int
    max_tokens: int
    stream: bool


def cases(scale: float) -> list[Case]:
    def times(count: int, concurrency: int) -> int:
        return max(concurrency, int(count * scale))

    return [
        Case("256 streams", 256, times(512, 256), 256, stream=True),
        Case("64 streams", 64, times(192, 64), 256, stream=True),
        Case("32 short", 32, times(2000, 32), 8, stream=False),
        Case("32 short, streamed", 32, times(2000, 32), 8, stream=True),
    ]


# --- The processes of the cluster.


def bench_config(arguments: argparse.Namespace, folder: Path) -> ClusterConfig:
    """`folder` is for certificates."""
    tls = {"tls": make_certificates(folder / "tls").model_dump(mode="json")} if arguments.mutual_tls else {}
    return configuration.parse(
        {
            "worker": tls,
            "model": {"served_name": MODEL},
            "engine": {"kind": "sim", "block_size": 16, "max_num_seqs": 512},
            "prefill": {"replicas": arguments.prefill},
            "decode": {"replicas": arguments.decode},
            "gateway": {"http_port": 0, "grpc_port": None},
            "sim": {"step_ms": arguments.step_ms, "prefill_tokens_per_s": 1_000_000, "num_pages": 32_768},
        }
    )


async def run_worker(config: ClusterConfig, kind: str) -> None:
    from kvferry.membership.base import MemberKind
    from kvferry.worker.lifecycle import WorkerHost, build_engine
    from kvferry_sim.membership import MemoryMembership, MemoryRegistry

    member_kind = MemberKind(kind)
    host = WorkerHost(config, member_kind, build_engine(config, member_kind, MODEL), MemoryMembership(MemoryRegistry()))
    await host.start()
    collector.collect_rarely()  # as a replica does
    collector.freeze_loaded()
    try:
        import msgspec

        say({"member": msgspec.to_builtins(host.member)})
        await told_to_end()
    finally:
        await host.stop()


def make_renderer_of(model: str | None) -> Callable[[ClusterConfig, str], Renderer]:
    """Return a gateway's renderer for the tokens of a real model, whose engines are simulated."""
    from kvferry.gateway.lifecycle import build_renderer
    from kvferry_sim.tokenizer import VOCABULARY_SIZE

    def make_renderer(config: ClusterConfig, folder: str) -> Renderer:
        if model is None:
            return build_renderer(config, folder)
        size = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
        if size > VOCABULARY_SIZE:
            raise SystemExit(f"the model has {size} token ids, the sim engines know {VOCABULARY_SIZE}")
        engine = config.engine.model_copy(update={"kind": "vllm"})
        return build_renderer(config.model_copy(update={"engine": engine}), model)

    return make_renderer


async def run_gateway(
    config: ClusterConfig,
    members: Sequence[dict[str, Any]],
    make_renderer: Callable[[ClusterConfig, str], Renderer],
) -> None:
    import msgspec

    from kvferry.engine.vllm.rendering.renderer import VllmRenderer
    from kvferry.gateway.lifecycle import GatewayHost
    from kvferry.membership.base import Member, MemberKind
    from kvferry_sim.membership import MemoryMembership, MemoryRegistry

    registry = MemoryRegistry()
    membership = MemoryMembership(registry)
    for values in members:
        await membership.register(msgspec.convert(values, Member))
    host = GatewayHost(config, MODEL, MemoryMembership(registry), make_renderer)
    await host.start()
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all(
                len(host.worker_pool.usable(kind)) == role.replicas
                for kind, role in ((MemberKind.PREFILL, config.prefill), (MemberKind.DECODE, config.decode))
            ):
                await host.worker_pool.change()
            (model,) = host._models
            with model.rendering() as renderer:
                if isinstance(renderer, VllmRenderer):
                    # The process that tries grammars starts before the load.
                    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
                    await renderer.render_completion(body)
        say({"port": host.port, "loop": type(asyncio.get_running_loop()).__module__})
        await told_to_end()
    finally:
        await host.stop()


def say(values: dict[str, Any]) -> None:
    """To the process that started this one."""
    print(json.dumps(values), flush=True)


async def told_to_end() -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()


# --- What no gateway can go below here.

FLOOR_STEPS = 600
FLOOR_BYTES = 240  # about what an event with its framing takes


async def run_floor(spec: dict[str, Any]) -> None:
    """Writes as the gateway does for as many streams, and nothing else: one write per stream and step, in groups."""
    num_streams, num_groups, step_s = spec["streams"], spec["groups"], spec["step_ms"] / 1e3
    transports: list[asyncio.Transport] = []

    class Accepting(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.append(cast(asyncio.Transport, transport))
            if len(transports) == num_streams:
                complete.set()

    complete = asyncio.Event()
    server = await asyncio.get_running_loop().create_server(Accepting, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    reader = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.gateway", "--role", "floor_reader"),
        "--spec",
        json.dumps({"port": port, "streams": num_streams}),
    )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await complete.wait()
        await asyncio.sleep(0.2)  # the reader settles
        payload, per_group = b"x" * FLOOR_BYTES, num_streams // num_groups
        before, due_s = time.process_time(), time.perf_counter()
        for i in range(FLOOR_STEPS * num_groups):
            due_s += step_s / num_groups
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            first = i % num_groups * per_group
            for transport in transports[first : first + per_group]:
                transport.write(payload)
        used_s = time.process_time() - before
    finally:
        reader.kill()
        await reader.wait()
    say({"us_per_write": round(used_s * 1e6 / (FLOOR_STEPS * num_streams), 2)})


async def run_floor_reader(spec: dict[str, Any]) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(spec["streams"]):
        await loop.create_connection(asyncio.Protocol, "127.0.0.1", spec["port"])
    await told_to_end()


class Children:
    """Roles of a benchmark's module, each with a log; ended in reverse order."""

    def __init__(self, folder: Path, module: str = "bench.gateway") -> None:
        self._folder = folder
        self._module = module
        self._children: list[subprocess.Popen[str]] = []

    def start(self, role: str, spec: dict[str, Any]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
        """The process and the first thing it says. Raises BenchFailed with the end of its log."""
        log = self._folder / f"{role}-{len(self._children)}.log"
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", self._module, "--role", role, "--spec", json.dumps(spec)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )
        self._children.append(child)
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            child.wait()
            raise BenchFailed(f"{role} ended: {log.read_text(errors='replace')[-2000:].strip()}")
        return child, json.loads(line)

    def end(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in reversed(self._children):
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


# --- The client.


class Load:
    """Measurements of one case."""

    def __init__(self, case: Case, host: str, port: int, path: str, model: str, time_limit_s: float) -> None:
        self.case = case
        self.host, self.port, self.path, self.model = host, port, path, model
        self.num_started = 0
        self.num_events = 0
        self.ttft_s: list[float] = []
        self.latency_s: list[float] = []
        self.inter_token_s: list[float] = []
        self.give_up_s = time.perf_counter() + time_limit_s

    def next_body(self) -> bytes | None:
        """None when all were sent or the time is up."""
        if self.num_started >= self.case.num_requests or time.perf_counter() > self.give_up_s:
            return None
        number = self.num_started
        self.num_started += 1
        words = [WORDS[(number * 7 + i * (1 + number % 5)) % len(WORDS)] for i in range(NUM_PROMPT_WORDS)]
        values = {
            "model": self.model,
            "messages": [{"role": "user", "content": f"{' '.join(words)} {number}"}],
            "max_tokens": self.case.max_tokens,
            "stream": self.case.stream,
            "ignore_eos": True,
        }
        body = json.dumps(values).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nhost: {self.host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


_ERROR_EVENT = b'data: {"error"'
TAIL_BYTES = len(_ERROR_EVENT)


def error_event(data: bytes) -> str:
    """Return the event of a stream that fails after its status was 200, or an empty string."""
    start = data.find(_ERROR_EVENT)
    return "" if start < 0 else data[start : start + 200].decode(errors="replace")


class Connection(asyncio.Protocol):
    """One request at a time, over and over. `ended` raises BenchFailed where one fails."""

    def __init__(self, load: Load, *, quick_ack: bool) -> None:
        self._load = load
        self._quick_ack = quick_ack
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of that class
        self._socket = transport.get_extra_info("socket")
        self._next()

    def _next(self) -> None:
        body = self._load.next_body()
        if body is None:
            self.ended.set_result(None)
            self._transport.close()
            return
        self._number = self._load.num_started
        self._head = b""
        self._in_head = True
        self._tail = b""
        self._refusal = b""
        self._num_events = 0
        self._first_s = 0.0
        self._sent_s = time.perf_counter()
        self._transport.write(body)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._quick_ack and self._socket is not None:
            # Some servers leave Nagle's algorithm on: they would wait for our delayed acknowledgement, 40 ms a token.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if self._in_head:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._in_head = False
            lines = head.lower().split(b"\r\n")
            self._status = lines[0].split(b" ")[1].decode()
            length = [line.split(b":")[1] for line in lines if line.startswith(b"content-length:")]
            self._missing = int(length[0]) if length else None
        if self._status != "200":
            self._refusal += data
        seen = self._tail + data
        if self._status == "200" and (error := error_event(seen)):
            self._fail(error)
            return
        num_events = data.count(b"data: {")
        if not self._first_s and (num_events or not self._load.case.stream):
            self._first_s = now
        self._num_events += num_events
        if self._missing is not None:
            self._missing -= len(data)
            finished = self._missing <= 0
        else:
            finished = seen.endswith(b"\r\n0\r\n\r\n") or seen == b"0\r\n\r\n"
        self._tail = seen[-TAIL_BYTES:]
        if finished:
            self._finish(now)

    def _finish(self, now: float) -> None:
        load, case = self._load, self._load.case
        if self._status != "200":
            self._fail(f"{self._status}: {self._refusal[:200].decode(errors='replace')}")
            return
        # A stream that broke off has fewer events than tokens (some servers send one for two tokens now and then).
        if case.stream and self._num_events < case.max_tokens // 2:
            self._fail(f"cut short after {self._num_events} events")
            return
        load.num_events += self._num_events
        load.ttft_s.append(self._first_s - self._sent_s)
        load.latency_s.append(now - self._sent_s)
        if case.stream and case.max_tokens > 1:
            load.inter_token_s.append((now - self._first_s) / (case.max_tokens - 1))
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self._fail("the connection was lost")

    def _fail(self, reason: str) -> None:
        self.ended.set_exception(BenchFailed(f"request {self._number}: {reason}"))
        self._transport.close()


async def run_client(spec: dict[str, Any]) -> None:
    case = Case(**spec["case"])
    parts = urlsplit(spec["url"])
    assert parts.hostname is not None
    assert parts.port is not None
    path = parts.path.rstrip("/") or ""
    load = Load(case, parts.hostname, parts.port, f"{path}/v1/chat/completions", spec["model"], spec["time_limit_s"])
    loop = asyncio.get_running_loop()
    connections = []
    started_s = time.perf_counter()
    for _ in range(case.concurrency):
        _, connection = await loop.create_connection(
            lambda: Connection(load, quick_ack=spec["quick_ack"]), load.host, load.port
        )
        connections.append(connection)
    ending = [connection.ended for connection in connections]
    done, pending = await asyncio.wait(ending, timeout=spec["time_limit_s"] + 60, return_when=asyncio.FIRST_EXCEPTION)
    if failed := [error for each in done if (error := each.exception()) is not None]:
        say({"failure": str(failed[0])})
        return
    if pending:
        say({"failure": f"{len(pending)} requests have no answer {spec['time_limit_s'] + 60:g} s after the start"})
        return
    elapsed_s = time.perf_counter() - started_s
    say(
        {
            "requests": load.num_started,
            "elapsed_s": elapsed_s,
            "events_per_answer": load.num_events / load.num_started,
            "requests_per_s": load.num_started / elapsed_s,
            "tokens_per_s": load.num_started * case.max_tokens / elapsed_s,
            "ttft_p50_ms": quantile_ms(load.ttft_s, 0.5),
            "ttft_p99_ms": quantile_ms(load.ttft_s, 0.99),
            "latency_p50_ms": quantile_ms(load.latency_s, 0.5),
            "latency_p99_ms": quantile_ms(load.latency_s, 0.99),
            "inter_token_p50_ms": quantile_ms(load.inter_token_s, 0.5),
            "client_cpu_s": time.process_time(),
        }
    )


def quantile_ms(values_s: Sequence[float], fraction: float) -> float | None:
    ordered = sorted(values_s)
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))] * 1e3 if ordered else None


# --- Measuring.


def cpu_s(pid: int) -> float:
    """utime + stime of all threads of a process, to 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def system_s(pid: int) -> float:
    """stime of all threads of a process, to 10 ms."""
    return float(psutil.Process(pid).cpu_times().system)


def measure(
    children: Children, case: Case, url: str, model: str, pids: Sequence[int], arguments: argparse.Namespace
) -> dict[str, Any]:
    """One case against a server; `pids[0]` is its front, the others are reported beside it.

    Raises BenchFailed for the first request that fails.
    """
    before, system_before_s = [cpu_s(pid) for pid in pids], system_s(pids[0]) if pids else 0.0
    spec = {
        "case": vars(case),
        "url": url,
        "model": model,
        "quick_ack": not arguments.no_quick_ack,
        "time_limit_s": arguments.time_limit_s,
    }
    _, seen = children.start("client", spec)
    if "failure" in seen:
        raise BenchFailed(f"{case.name}: {seen['failure']}")
    used = [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)]
    num_tokens = seen["requests"] * case.max_tokens
    if used:
        seen["cpu_us_per_token"] = used[0] * 1e6 / num_tokens
        seen["cpu_ms_per_request"] = used[0] * 1e3 / seen["requests"]
        # The kernel's part, as it accounts it.
        seen["system_ms_per_request"] = (system_s(pids[0]) - system_before_s) * 1e3 / seen["requests"]
        seen["cpu_share"] = used[0] / seen["elapsed_s"]
        seen["cpu_us_per_token_of_others"] = [each * 1e6 / num_tokens for each in used[1:]]
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in seen.items()}


def measure_all(
    children: Children,
    name: str,
    url: str,
    model: str,
    pids: Sequence[int],
    arguments: argparse.Namespace,
    console: Console,
    add: Callable[[dict[str, Any]], None],
    profile: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """The best of `--repeat` runs of each case, by CPU. Adds each run, and their summary."""
    measure(children, Case("warm-up", 32, 256, 8, stream=True), url, model, pids, arguments)
    results: dict[str, dict[str, Any]] = {}
    for case in cases(arguments.scale):
        if arguments.only and arguments.only not in case.name:
            continue
        runs = []
        for number in range(arguments.repeat):
            what = f"{name}: {case.name} x {case.max_tokens} tokens, run {number + 1} of {arguments.repeat}"
            with console.status(what):
                if not console.is_terminal:
                    console.print(what)
                with profiling(pids[0], profile, case.name) if profile else contextlib.nullcontext():
                    runs.append(measure(children, case, url, model, pids, arguments))
            add({"runs": {case.name: runs[-1:]}})
        results[case.name] = min(runs, key=lambda run: run.get("cpu_us_per_token", float("inf")))
    add(summary(results))
    return results


@contextlib.contextmanager
def profiling(pid: int, file: Path, case: str) -> Iterator[None]:
    """Samples the gateway with py-spy; adds a table of functions to `file`."""
    py_spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    raw = file.with_suffix(".raw")
    process = subprocess.Popen(
        [py_spy, "record", "-p", str(pid), "-r", "200", "-f", "raw", "-F", "-o", str(raw), "-d", "3600"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
    own, total = Counter[str](), Counter[str]()
    for line in raw.read_text(encoding="utf-8").splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        own[frames[-1]] += int(count)
        for frame in set(frames):
            total[frame] += int(count)
    raw.unlink()
    num_samples = max(1, sum(own.values()))
    with file.open("a", encoding="utf-8") as output:
        output.write(f"{case}: {num_samples} samples\n  own %  total %  function\n")
        for frame, count in own.most_common(30):
            output.write(f"{count * 100 / num_samples:7.1f} {total[frame] * 100 / num_samples:8.1f}  {frame}\n")


def table(title: str, results: dict[str, dict[str, Any]]) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in ("case", "us/token", "ms/request", "tokens/s", "requests/s", "TTFT p50", "TTFT p99"):
        shown.add_column(column, justify="left" if column == "case" else "right")
    for name, seen in results.items():
        shown.add_row(
            name,
            *(
                f"{seen.get(key) or 0:,.{digits}f}"
                for key, digits in (
                    ("cpu_us_per_token", 2),
                    ("cpu_ms_per_request", 3),
                    ("tokens_per_s", 0),
                    ("requests_per_s", 0),
                    ("ttft_p50_ms", 1),
                    ("ttft_p99_ms", 1),
                )
            ),
        )
    return shown


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The figures that targets are set for."""
    streams, short = results.get("256 streams", {}), results.get("32 short", {})
    return {
        "cpu_us_per_token": streams.get("cpu_us_per_token"),
        "cpu_us_per_token_64": results.get("64 streams", {}).get("cpu_us_per_token"),
        "cpu_ms_per_request": short.get("cpu_ms_per_request"),
        "system_ms_per_request": short.get("system_ms_per_request"),
        "cpu_ms_per_request_streamed": results.get("32 short, streamed", {}).get("cpu_ms_per_request"),
        "requests_per_s": short.get("requests_per_s"),
        "tokens_per_s": streams.get("tokens_per_s"),
        "ttft_p50_ms": streams.get("ttft_p50_ms"),
        "ttft_p99_ms": streams.get("ttft_p99_ms"),
    }


def find_model(arguments: argparse.Namespace) -> str | None:
    if arguments.no_model:
        return None
    try:
        return str(model_folder.resolve("default"))
    except KvferryError as error:
        Console(stderr=True).print(f"no rendering with a real model: {error.message}")
        return None


def bench(arguments: argparse.Namespace, results: Results) -> None:
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=120)
    model = find_model(arguments)
    results.add(
        {
            "machine": f"{machine_line()}, load {os.getloadavg()[0]:.2f} before",
            "load": f"{arguments.decode} decode and {arguments.prefill} prefill workers, sim, {arguments.step_ms:g}"
            f" ms steps; closed loop of raw sockets; best of {arguments.repeat}",
            "rendering": "chat template and tokens of a real model" if model else "the simulator's",
        }
    )
    with tempfile.TemporaryDirectory(prefix="bench-gateway-") as folder:
        config = bench_config(arguments, Path(folder))
        children = Children(Path(folder))
        try:
            shared = {"config": config.model_dump(mode="json"), "loop": arguments.loop}
            members = []
            for kind, count in (("prefill", arguments.prefill), ("decode", arguments.decode)):
                for _ in range(count):
                    with console.status(f"starting a {kind} worker"):
                        _, said = children.start("worker", {**shared, "kind": kind})
                    members.append(said["member"])
            with console.status("starting the gateway (a real renderer takes about 10 s)"):
                gateway, said = children.start("gateway", {**shared, "members": members, "model": model})
            results.add({"event_loop": said["loop"]})
            url = f"http://127.0.0.1:{said['port']}"
            best = measure_all(
                children, "kvferry", url, MODEL, [gateway.pid], arguments, console, results.add, arguments.profile
            )
            floors: dict[int, float] = {}
            for streams in (256, 64):
                with console.status(f"the floor: {streams} streams written and nothing else"):
                    spec = {"streams": streams, "groups": arguments.decode, "step_ms": arguments.step_ms}
                    _, floor = children.start("floor", spec)
                floors[streams] = floor["us_per_write"]
                results.add({f"write_floor_us_per_token{'' if streams == 256 else '_64'}": floors[streams]})
            console.print(table("kvferry", best))
            console.print(f"written and nothing else: {floors[256]} us/token at 256 streams, {floors[64]} at 64")
            if arguments.peer_url:
                pids = [int(pid) for pid in arguments.peer_pids.split(",") if pid]

                def add(figures: dict[str, Any]) -> None:
                    results.add({"peer": figures})

                peer = measure_all(
                    children, "peer", arguments.peer_url, arguments.peer_model, pids, arguments, console, add
                )
                console.print(table("peer", peer))
        finally:
            children.end()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure CPU per token and per request of one gateway.")
    parser.add_argument("--decode", type=int, default=4, help="decode workers, each a process")
    parser.add_argument("--prefill", type=int, default=0, help="prefill workers; requests then pass both")
    parser.add_argument("--step-ms", type=float, default=5.0, help="length of an engine step")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer requests per case")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each case; the best counts")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--time-limit-s", type=float, default=120.0, help="no new requests in a run after this")
    parser.add_argument("--mutual-tls", action="store_true", help="between gateway and workers, as `kvferry up` has it")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="event loop of the gateway")
    parser.add_argument("--no-model", action="store_true", help="render with the simulator")
    parser.add_argument("--no-quick-ack", action="store_true", help="let the client delay its acknowledgements")
    parser.add_argument("--profile", type=Path, help="write where the gateway's time goes to this file (needs py-spy)")
    parser.add_argument("--peer-url", default="", help="another server of the same API, as in http://127.0.0.1:18431")
    parser.add_argument("--peer-pids", default="", help="its processes; the first is the one compared")
    parser.add_argument("--peer-model", default="", help="the model's name there")
    parser.add_argument(
        "--role",
        choices=("bench", "worker", "gateway", "client", "floor", "floor_reader"),
        default="bench",
        help=argparse.SUPPRESS,
    )
    parser.add_argument("--spec", type=json.loads, default={}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    spec = arguments.spec
    if arguments.role == "bench":
        return run_benchmark("bench-gateway", lambda results: bench(arguments, results))
    program = {
        "worker": lambda: run_worker(configuration.parse(spec["config"]), spec["kind"]),
        "gateway": lambda: run_gateway(
            configuration.parse(spec["config"]), spec["members"], make_renderer_of(spec["model"])
        ),
        "client": lambda: run_client(spec),
        "floor": lambda: run_floor(spec),
        "floor_reader": lambda: run_floor_reader(spec),
    }[arguments.role]
    if arguments.role == "gateway" and spec["loop"] == "asyncio":
        asyncio.run(program())
    else:
        import uvloop

        uvloop.run(program())
    return 0


if __name__ == "__main__":
    sys.exit(main())
