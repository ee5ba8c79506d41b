"""Cost of one tenant's abuse to another tenant on a live cluster of simulated engines.

An innocent tenant sends streamed requests at random times, whatever is answered, through all gateways. It is measured
alone and beside each attack in turn, so that the drift of the machine cancels. Its goodput is the part of its requests
that were answered in full and in time (TTFT_S, WHOLE_S), of those that were due; time counts from when a request was
due. A fall is what of the goodput alone is missing beside an attack. `p90_vs_alone_ATTACK` is the 90th percentile of
the times to first token beside an attack, divided by the one alone, and `answer_p90_vs_alone_ATTACK` that of the times
to the end of the answer; a request without a whole answer counts with GIVE_UP_S. A window begins with the attack, and
the attack lasts until the last request of the window had its time.

Attacks on the lines of a gateway's renderer (grammars, images, long texts) meet one gateway with the real renderer of a
tiny model, with its threads and processes; there the innocent's requests need the same line. Simulated engines get the
prompts without grammars and images. The other attacks meet two gateways with the simulator's renderer. Forks that try
grammars and prepare images have the attacker's work on the cores of the innocent's: on two cores a part of the ratio is
this, and no wait in a line.

The cluster, the innocent's clients and the attacker's clients are a process each. Clients stand for other machines, and
here they share the cores with the cluster. So the attacker has the lowest priority (nice 19): it gets what the others
leave, and the innocent has the highest that the system allows. An attacker that waits for a core sends less, never the
others: so its number of requests is what this machine lets it send, and it is in the result. And times are limits that
an idle machine keeps fifty-fold: goodput falls where requests are refused, starved or stuck, not where each takes some
milliseconds longer; those are seen in the times to first token.

Bodies trickle for a window only: below 30 s the gateway's time for bodies ends none of them.

Refusals (429) and late answers are what is measured. Any other failure of the innocent's, any failure where it is
alone, and a server error that the attacker gets, end the benchmark with exit code 1. The figures of each window are a
line of JSON on stdout when it is over, and the last line has all; everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from rich.table import Table

from bench.abuse import ATTACKS, Attack, run_attack
from bench.abuse_bodies import CONTEXT
from bench.gateway import Children, say, told_to_end
from bench.live_cluster import Cluster, config_of, running
from bench.neighbours import set_niceness
from bench.raw_http import Connection, post_request
from bench.real_rendering import real_rendering
from bench.results import BenchFailed, Results, run_benchmark
from kvferry_loadtest.machine import machine_line

NUM_GATEWAYS = 2
STEP_MS = 10.0
NUM_PAGES = 32_768  # 512k tokens: of a model of 8B on a GPU of 80 GB
TTFT_S = 1.0
WHOLE_S = 3.0
SETTLE_S = 1.0  # between windows
WARM_UP_TRIES = 100
P90_PART = 0.9
FAULT_CHARS = 200
GIVE_UP_S = 10.0  # of a request that came late
OUTCOMES = "outcomes.jsonl"  # of all innocents
LATE = "TimeoutError"  # the fault of a request that was given up
MEASURED_STATUSES = (200, 429, 504)  # of the innocent beside an attack


# --- The innocent.


@dataclass(frozen=True, slots=True)
class Request:
    """One request of the innocent, in seconds of `time.monotonic`; `status` is 0 without a whole answer."""

    due_s: float
    sent_s: float
    status: int = 0
    first_s: float = 0.0
    ended_s: float = 0.0
    fault: str = ""  # why there is no whole answer
    number: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.ttft_s <= TTFT_S and self.ended_s - self.due_s <= WHOLE_S


class Innocent:
    """Open-loop clients of one tenant beside an attack. Each request's outcome is a line of a file."""

    def __init__(self, attack: Attack, ports: Sequence[int], key: str, outcomes: Path) -> None:
        self._attack = attack
        self._key = key
        self._outcomes = outcomes.open("a", encoding="utf-8", buffering=1)
        self._idle: dict[int, list[Connection]] = {port: [] for port in ports}
        self._random = random.Random(7)

    def close(self) -> None:
        self._outcomes.close()
        for connection in itertools.chain.from_iterable(self._idle.values()):
            connection.close()

    async def run(self) -> None:
        due_s = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, port in enumerate(itertools.cycle(self._idle)):
                due_s += self._random.expovariate(self._attack.rate_per_s)
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                tasks.create_task(self._send(number, port, due_s))

    async def _send(self, number: int, port: int, due_s: float) -> None:
        sent = post_request(port, self._attack.path, self._key, self._attack.innocent(number))
        idle = self._idle[port]
        connection = idle.pop() if idle else Connection(port)
        request = Request(due_s, time.monotonic(), number=number)
        try:
            async with asyncio.timeout(GIVE_UP_S):
                reply = await connection.exchange(sent)
        except (OSError, EOFError) as error:  # of which TimeoutError is one
            request = replace(request, fault=type(error).__name__)
        else:
            if reply.status != 200 or (b"[DONE]" in reply.tail and b'"length"' in reply.tail):
                request = replace(request, status=reply.status, first_s=reply.first_s, ended_s=reply.ended_s)
            else:
                request = replace(request, fault=reply.tail.decode(errors="replace")[-FAULT_CHARS:])
        idle.append(connection)
        self._outcomes.write(json.dumps(astuple(request)) + "\n")


def read_outcomes(file: Path) -> list[Request]:
    """Return requests that have ended so far. Raises OSError before the first client opened the file."""
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [Request(*json.loads(line)) for line in lines if line.endswith("\n")]


async def run_innocent(name: str, ports: Sequence[int], key: str, outcomes: Path) -> None:
    with contextlib.closing(Innocent(ATTACKS[name], ports, key, outcomes)) as innocent:
        sending = asyncio.create_task(innocent.run())
        say({"outcomes": str(outcomes)})
        await told_to_end()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending


# --- Measuring.


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time, in seconds of `time.monotonic`, with the CPU time that the cluster used in it."""

    begun_s: float
    ended_s: float
    cpu_s: float


@dataclass
class Pair:
    """One attack's windows, each beside it after one alone."""

    alone: list[Window] = field(default_factory=list)
    beside: list[Window] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=dict)

    def add_counts(self, counts: dict[str, dict[str, int]]) -> None:
        for label, each in counts.items():
            self.counts.setdefault(label, Counter()).update(each)


def due_in(requests: Sequence[Request], windows: Sequence[Window]) -> list[Request]:
    return [each for each in requests if any(window.begun_s <= each.due_s < window.ended_s for window in windows)]


def raise_unexpected(requests: Sequence[Request], where: str, *, alone: bool) -> None:
    """Raise BenchFailed for the first request that failed, unless it was refused or late beside an attack."""
    for each in requests:
        if each.status == 200 or (not alone and (each.status in MEASURED_STATUSES or each.fault == LATE)):
            continue
        raise BenchFailed(f"{where}: request {each.number}: {each.status or each.fault}")


def goodput(requests: Sequence[Request]) -> float:
    """Return the part of the requests that was answered in time. Raises ValueError without any."""
    if not requests:
        raise ValueError("no request was due: the windows are too short")
    return sum(each.is_good for each in requests) / len(requests)


def fall(alone: Sequence[Request], beside: Sequence[Request]) -> float:
    """Return what of the goodput alone is missing beside the attack, as a fraction; below 0 where there was more."""
    if not (before := goodput(alone)):
        raise ValueError("no request was answered in time even alone: nothing can be compared")
    return 1 - goodput(beside) / before


def ttft_ms(requests: Sequence[Request], part: float) -> float:
    """Return a percentile of the times to first token of whole answers; 0 without any."""
    times_s = sorted(each.ttft_s for each in requests if each.status == 200)
    return 1e3 * times_s[min(len(times_s) - 1, int(len(times_s) * part))] if times_s else 0.0


def p90_ms(requests: Sequence[Request], *, whole: bool = False) -> float:
    """Return the 90th percentile of the times to first token, or to the end of `whole` answers.

    A request without a whole answer counts with GIVE_UP_S. Raises ValueError without any request.
    """
    if not requests:
        raise ValueError("no request was due: the windows are too short")
    times_s = sorted(
        GIVE_UP_S if each.status != 200 else each.ended_s - each.due_s if whole else each.ttft_s for each in requests
    )
    return 1e3 * times_s[min(len(times_s) - 1, int(len(times_s) * P90_PART))]


def p90_ratio(alone: Sequence[Request], beside: Sequence[Request], *, whole: bool = False) -> float:
    return round(p90_ms(beside, whole=whole) / p90_ms(alone, whole=whole), 3)


class Bench:
    """Runs windows of attacks against one cluster; its clients are children with files in `folder`."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        attacks: Sequence[str],
        *,
        seconds: float,
        results: Results,
        console: Console,
    ) -> None:
        self.pairs = {name: Pair() for name in attacks}
        self._folder = folder
        self._ports = [gateway.port for gateway in cluster.gateways]
        self._seconds = seconds
        self._results = results
        self._console = console
        self._admin = cluster.admin
        self._keys: dict[str, str] = {}
        self._outcomes = folder / OUTCOMES

    async def create_tenants(self) -> None:
        """Create the innocent and a tenant for each attack, so that none pays for another one's."""
        for name in ("innocent", *self.pairs):
            await self._admin.create(name)
            self._keys[name] = await self._admin.add_key(name, "bench")
        for name in self.pairs:
            if limits := ATTACKS[name].limits:
                await self._admin.set_limits(name, limits)

    async def run(self, rounds: int) -> None:
        for port, name in itertools.product(self._ports, self.pairs):
            await self._warm_up(port, ATTACKS[name])
        for number in range(rounds):
            for name in self.pairs:
                where = f"round {number + 1} of {rounds}"
                async with self._innocent(name):
                    self.pairs[name].alone.append(await self._window(f"{where}: alone", alone=True))
                    await self._attack(name, f"{where}: {ATTACKS[name].shown}")

    async def _warm_up(self, port: int, attack: Attack) -> None:
        # Gateways hear of keys a moment later, and the processes of a renderer take seconds to start.
        with contextlib.closing(Connection(port)) as connection:
            for number in itertools.count():
                request = post_request(port, attack.path, self._keys["innocent"], attack.innocent(number))
                if (reply := await connection.exchange(request)).status == 200:
                    return
                if number == WARM_UP_TRIES:
                    raise BenchFailed(f"before {attack.shown}: {reply.status}, {reply.tail.decode(errors='replace')}")
                await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def _innocent(self, name: str) -> AsyncIterator[None]:
        innocent = Children(self._folder, "bench.isolation")
        key = self._keys["innocent"]
        spec = {"attack": name, "ports": self._ports, "key": key, "outcomes": str(self._outcomes)}
        try:
            process, _ = await asyncio.to_thread(innocent.start, "innocent", spec)
            set_niceness(process.pid, -10)
            await asyncio.sleep(SETTLE_S)
            yield
        finally:
            await asyncio.to_thread(innocent.end)

    async def _attack(self, name: str, shown: str) -> None:
        attacker = Children(self._folder, "bench.isolation")
        spec = {"attack": name, "ports": self._ports, "key": self._keys[name]}
        try:
            process, _ = await asyncio.to_thread(attacker.start, "attacker", spec)
            self.pairs[name].beside.append(await self._window(shown, alone=False))
            set_niceness(process.pid, 0)  # or it would take long to end
        finally:
            await asyncio.to_thread(attacker.end)
        assert process.stdout is not None
        said = await asyncio.to_thread(process.stdout.read)
        if not said:
            logs = "".join(log.read_text(errors="replace")[-2000:] for log in self._folder.glob("attacker-*.log"))
            raise BenchFailed(f"the attack {name} ended: {logs}")
        counts = json.loads(said)
        self._results.add({"windows": [{"window": shown, "sent": counts}]})
        for label, answers in counts.items():
            if errors := [status for status in answers if status.startswith("5")]:
                raise BenchFailed(f"{shown}: {answers[errors[0]]} of {label} got {errors[0]}")
        self.pairs[name].add_counts(counts)
        await asyncio.sleep(SETTLE_S)

    async def _window(self, shown: str, *, alone: bool) -> Window:
        begun_s, cpu_s = time.monotonic(), time.process_time()
        with self._console.status(shown):
            await asyncio.sleep(self._seconds)
            window = Window(begun_s, begun_s + self._seconds, time.process_time() - cpu_s)
            await asyncio.sleep(WHOLE_S)
        requests = due_in(self.requests(), [window])
        figures = {
            "window": shown,
            "requests": len(requests),
            "goodput": round(goodput(requests), 4),
            "ttft_p50_ms": round(ttft_ms(requests, 0.5)),
            "ttft_p90_ms": round(p90_ms(requests)),
            "ttft_p99_ms": round(ttft_ms(requests, 0.99)),
        }
        self._results.add({"windows": [figures]})
        self._console.print(", ".join(f"{name} {value}" for name, value in figures.items()), highlight=False)
        raise_unexpected(requests, shown, alone=alone)
        return window

    def requests(self) -> list[Request]:
        return read_outcomes(self._outcomes)


def table(pairs: dict[str, Pair], requests: Sequence[Request]) -> Table:
    shown = Table("attack", "goodput", "beside", "fall", "TTFT p50, 90, 99 (ms)", "beside", "cluster's CPU", "sent")
    for name, pair in pairs.items():
        alone, beside = due_in(requests, pair.alone), due_in(requests, pair.beside)
        cpu = [sum(each.cpu_s for each in windows) for windows in (pair.alone, pair.beside)]
        wall_s = sum(each.ended_s - each.begun_s for each in pair.beside)
        shown.add_row(
            ATTACKS[name].shown,
            f"{goodput(alone):.1%}",
            f"{goodput(beside):.1%}",
            f"{fall(alone, beside):.1%}",
            f"{ttft_ms(alone, 0.5):.0f}, {p90_ms(alone):.0f}, {ttft_ms(alone, 0.99):.0f}",
            f"{ttft_ms(beside, 0.5):.0f}, {p90_ms(beside):.0f}, {ttft_ms(beside, 0.99):.0f}",
            f"{cpu[0] / wall_s:.0%}, {cpu[1] / wall_s:.0%}",
            "; ".join(f"{label}: {told(counts)}" for label, counts in pair.counts.items()),
        )
    return shown


def told(counts: Counter[str]) -> str:
    answers = [f"{number:,} {'got ' if what.isdigit() else ''}{what}" for what, number in sorted(counts.items())]
    return ", ".join(answers)


def result_of(pairs: dict[str, Pair], requests: Sequence[Request]) -> dict[str, Any]:
    windows = {name: (due_in(requests, pair.alone), due_in(requests, pair.beside)) for name, pair in pairs.items()}
    falls = {name: round(fall(alone, beside), 4) for name, (alone, beside) in windows.items()}
    everything = [each for pair in windows.values() for part in pair for each in part]
    return {
        "goodput_fall_max": max(falls.values()),
        "falls": falls,
        **{f"p90_vs_alone_{name}": p90_ratio(*both) for name, both in windows.items()},
        **{f"answer_p90_vs_alone_{name}": p90_ratio(*both, whole=True) for name, both in windows.items()},
        # First token and whole answer, each alone and beside the attack.
        "p90_ms": {
            name: {
                "ttft": [round(p90_ms(each), 1) for each in both],
                "answer": [round(p90_ms(each, whole=True), 1) for each in both],
            }
            for name, both in windows.items()
        },
        "attacks": {
            name: {label: dict(counts) for label, counts in pair.counts.items()} for name, pair in pairs.items()
        },
        "goodput_alone": round(goodput([each for alone, _ in windows.values() for each in alone]), 4),
        "innocent_statuses": {
            name: dict(sorted(Counter(str(each.status) for each in beside).items()))
            for name, (_, beside) in windows.items()
        },
        "innocent_faults": sorted({each.fault for each in everything if each.fault})[:3],
        "ttft_p99_ms": {
            name: [round(ttft_ms(alone, 0.99)), round(ttft_ms(beside, 0.99))]
            for name, (alone, beside) in windows.items()
        },
        # How late the innocent's own process was: many ms tell of a machine with other work on it.
        "client_late_max_ms": round(1e3 * max(each.sent_s - each.due_s for each in everything), 1),
    }


async def measure(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    machine = f"{machine_line()}, load {os.getloadavg()[0]:.2f} before"
    console.print(machine)
    results.add({"pages": arguments.pages, "machine": machine})
    # As many requests as a gateway takes unless it is told otherwise.
    config = config_of(step_ms=STEP_MS, num_pages=arguments.pages, max_requests=1024)
    chosen = {name: attack for name, attack in ATTACKS.items() if arguments.only in name}
    simulated = [name for name, attack in chosen.items() if not attack.needs_renderer]
    rendered = [name for name, attack in chosen.items() if attack.needs_renderer]
    pairs: dict[str, Pair] = {}
    with tempfile.TemporaryDirectory(prefix="bench-isolation-") as folder_name:
        folder = Path(folder_name)

        async def run_attacks(attacks: Sequence[str], cluster: Cluster) -> None:
            bench = Bench(cluster, folder, attacks, seconds=arguments.seconds, results=results, console=console)
            pairs.update(bench.pairs)
            await bench.create_tenants()
            await bench.run(arguments.rounds)

        if simulated:
            async with running(config, NUM_GATEWAYS) as cluster:
                await run_attacks(simulated, cluster)
        if rendered:
            make_renderer = await asyncio.to_thread(real_rendering, folder / "model", CONTEXT)
            async with running(config, 1, make_renderer) as cluster:
                await run_attacks(rendered, cluster)
        requests = read_outcomes(folder / OUTCOMES)
    results.add(result_of(pairs, requests))
    for attack, pair in pairs.items():
        # Also those that failed after the end of their window.
        raise_unexpected(due_in(requests, pair.alone), f"alone before {attack}", alone=True)
        raise_unexpected(due_in(requests, pair.beside), f"beside {attack}", alone=False)
    console.print(table(pairs, requests))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.isolation", description="Measure what the abuse of one tenant costs another one."
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each window")
    parser.add_argument("--rounds", type=int, default=2, help="windows alone and beside each attack")
    parser.add_argument("--only", default="", help="only attacks whose name contains this")
    parser.add_argument("--pages", type=int, default=NUM_PAGES, help="of 16 tokens, in the memory of each engine")
    roles = ("bench", "innocent", "attacker")
    parser.add_argument("--role", choices=roles, default="bench", help=argparse.SUPPRESS)
    parser.add_argument("--spec", type=json.loads, default={}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    spec = arguments.spec
    if arguments.role == "innocent":
        uvloop.run(run_innocent(spec["attack"], spec["ports"], spec["key"], Path(spec["outcomes"])))
    elif arguments.role == "attacker":
        uvloop.run(run_attack(spec["attack"], spec["ports"], spec["key"]))
    else:
        console = Console(stderr=True, width=140)
        logging.disable(logging.WARNING)  # links that end with the cluster
        return run_benchmark("bench-isolation", lambda results: uvloop.run(measure(arguments, results, console)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
