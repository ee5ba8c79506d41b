"""`python -m bench.chaos`: break a cluster of real processes under load, and say what its clients saw.

Each fault's figures are a line of JSON on stdout when it is over, and the last line has all. The run ends with exit
code 1 at the first request that fails although it should not, after a fault under which an answer differed from the
undisturbed one or came from a worker of another model than its gateway's, and where overload costs more than it may.
After the faults of a cluster, its bills are compared with what clients got and what engines computed: `bills`. A
disagreement ends the run with exit code 1, too. Bounded: by the number of kills, and by --timeout in all.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.chaos import overload
from bench.chaos.bills import compare_bills
from bench.chaos.faults import Fault, etcd_away, hanging, killing, leaving, poisoning, refusing, upgrading
from bench.chaos.fleet import SIM_ENGINE, Fleet, billed, fleet
from bench.chaos.load import (
    UNDISTURBED_AT_ONCE,
    Client,
    Load,
    LongStreams,
    compare,
    make_prompts,
    raise_failure,
    summarize,
)
from bench.results import BenchFailed, Results, run_benchmark
from kvferry.membership.base import MemberKind
from kvferry_loadtest.machine import machine_line

# More than the workers keep: most prompts have to be computed when they come again.
NUM_PROMPTS = 320
NUM_LONG_STREAMS = 2
LONG_TOKENS = 3000  # 30 s at 10 ms a step


def client_of(running: Fleet, prompts: list[str], max_tokens: int) -> Client:
    return Client(running.urls, prompts, max_tokens, running.tenant_to_headers, running.receipts)


async def ask_undisturbed(running: Fleet, prompts: list[str], max_tokens: int) -> list[str]:
    """Return what every prompt must give. Raises BenchFailed at the first request that fails or is disturbed."""
    client = client_of(running, prompts, max_tokens)
    texts: list[str] = []
    try:
        for first in range(0, len(prompts), UNDISTURBED_AT_ONCE):
            numbers = range(first, min(first + UNDISTURBED_AT_ONCE, len(prompts)))
            for outcome in await asyncio.gather(*map(client.ask, numbers)):
                raise_failure(outcome)
                if outcome.affected:
                    raise BenchFailed(f"prompt {outcome.prompt} at {outcome.url}: disturbed, without a fault")
                texts.append(outcome.text)
    finally:
        await client.close()
    return texts


async def run_fault(
    running: Fleet,
    fault: Fault,
    times: int,
    load: Load,
    expected: list[str],
    seeded: random.Random,
    say: Callable[[str], None],
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Inflict a fault under load and `add` its row, also where a request fails, which raises what Load.running does.

    Raises BenchFailed for a wrong answer.
    """
    revision = _revision(running)
    before = sum(process.num_kills for process in running.processes)
    try:
        async with load.running():
            await fault(running, seeded, times, say)
    finally:
        kills = sum(process.num_kills for process in running.processes) - before
        # Below zero where processes left for good.
        add(summarize(load.outcomes, kills if kills > 0 else times))
    # Another model has other answers, and none that is of both.
    by_revision = {revision: expected}
    if (changed := _revision(running)) != revision:
        by_revision[changed] = await ask_undisturbed(running, load.client.prompts, load.client.max_tokens)
        assert by_revision[changed] != expected
    compare(load.outcomes, lambda url: by_revision[running.models[url]["revision"]], running.is_foreign)


def _revision(running: Fleet) -> str:
    (revision,) = {process.config["model"]["revision"] for process in running.processes}
    return str(revision)


# Faults of one cluster, in this order; the last one changes its model.
FAULTS: dict[str, Callable[[argparse.Namespace], tuple[Fault, int]]] = {
    "prefill": lambda given: (killing(MemberKind.PREFILL), given.kills),
    "decode": lambda given: (killing(MemberKind.DECODE), given.kills),
    "gateway": lambda given: (killing(MemberKind.GATEWAY), given.kills),
    "refuse": lambda given: (refusing, max(1, given.kills // 10)),
    "etcd": lambda given: (etcd_away(given.outage_s), 1),
    "drain": lambda given: (leaving, max(1, given.kills // 2)),
    "hang": lambda given: (hanging, max(1, given.kills // 10)),
    "poison": lambda given: (poisoning, max(1, given.kills // 4)),
    "upgrade": lambda given: (upgrading, 1),
}
# Members that leave wait for their streams.
LEAVING = {"drain", "upgrade"}
FAULTED = "faulted"  # the cluster of FAULTS, in the figures of bills
# Name of the cluster whose second gateway speaks as the previous release does.
RELEASES = "releases"
OVERLOAD = "overload"


async def run(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    """Add a row per fault, and that of the overload. Raises BenchFailed where --timeout is over."""
    chosen = arguments.faults.split(",") if arguments.faults else [*FAULTS, RELEASES, OVERLOAD]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as folder, Progress(*columns, console=console) as bar:
        task = bar.add_task("starting the cluster")

        def say(what: str) -> None:
            bar.update(task, description=what)

        try:
            async with asyncio.timeout(arguments.timeout) as limit:
                if faults := {name: FAULTS[name](arguments) for name in chosen if name in FAULTS}:
                    await _run_faults(FAULTED, Path(folder), faults, arguments, results, say)
                if RELEASES in chosen:
                    plan = {RELEASES: (killing(MemberKind.DECODE), max(1, arguments.kills // 4))}
                    await _run_faults(
                        RELEASES, Path(folder) / RELEASES, plan, arguments, results, say, _of_two_releases
                    )
                if OVERLOAD in chosen:
                    await overload.measure(Path(folder) / OVERLOAD, arguments.overload_s, arguments.seed, say, results)
        except TimeoutError as error:
            if limit.expired():
                raise BenchFailed(f"not over within --timeout {arguments.timeout:g} s") from error
            raise


async def _run_faults(
    cluster: str,
    folder: Path,
    plan: Mapping[str, tuple[Fault, int]],
    arguments: argparse.Namespace,
    results: Results,
    say: Callable[[str], None],
    overrides: Callable[[MemberKind, int], dict[str, Any]] = lambda kind, i: {},
) -> None:
    prompts = make_prompts(NUM_PROMPTS, arguments.seed)
    values = billed(folder, arguments.streams)
    async with fleet(folder, mortal=True, overrides=overrides, **values) as running:
        say("asking every prompt once, undisturbed")
        expected = await ask_undisturbed(running, prompts, arguments.max_tokens)
        async with long_streams(running, prompts) as leave:
            for name, (fault, times) in plan.items():
                if name in LEAVING:
                    await leave()
                client = client_of(running, prompts, arguments.max_tokens)
                load = Load(client, len(prompts), arguments.streams)

                def tell(what: str, load: Load = load) -> None:
                    say(f"{what}: {len(load.outcomes)} requests")

                def add(row: dict[str, Any], name: str = name) -> None:
                    results.add({"faults": {name: row}})

                tell(name)
                try:
                    await run_fault(running, fault, times, load, expected, random.Random(arguments.seed), tell, add)
                finally:
                    await client.close()
        say("comparing the bills")
        await compare_bills(running, folder, lambda figures: results.add({"bills": {cluster: figures}}))


@asynccontextmanager
async def long_streams(running: Fleet, prompts: list[str]) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Keep long streams while the block runs, or until it calls the function that it gets."""
    client = client_of(running, prompts, LONG_TOKENS)
    streams = LongStreams(client, NUM_LONG_STREAMS)
    try:
        yield streams.leave
    finally:
        try:
            await streams.leave()
        finally:
            await client.close()


def _of_two_releases(kind: MemberKind, i: int) -> dict[str, Any]:
    # Slots for all streams. When a worker is killed, nobody can say which requests only waited for its slots: they are
    # blamed, and one that waits at two of them in a row is refused.
    if kind is MemberKind.DECODE:
        return {"engine": SIM_ENGINE}
    return {"release": "previous"} if kind is MemberKind.GATEWAY and i else {}


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title="what clients saw")
    names = ("kills", "requests", "continued", "recomputed", "retried", "preempted", "refused")
    for column in ("fault", *names, "extra ms"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for name, row in results.get("faults", {}).items():
        extra = "" if row["extra_ms_p50"] is None else f"{row['extra_ms_p50']:.0f}"
        table.add_row(name, *(str(row[key]) for key in names), extra)
    console.print(table)
    for cluster, figures in results.get("bills", {}).items():
        console.print(f"bills of {cluster}: {figures['disagreements']} disagreements")
        console.print_json(data=figures)
    if overloaded := results.get("overload"):
        console.print(
            f"overload: {overloaded['overload_per_s']} answers/s of {overloaded['capacity_per_s']} at capacity "
            f"({overloaded['goodput']}); {overloaded['refused']} refused"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="requests at a time (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--outage-s", type=float, default=60, help="how long etcd is away (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=120, help="of each answer (default: %(default)s)")
    parser.add_argument("--faults", default="", help=f"some of: {','.join([*FAULTS, RELEASES, OVERLOAD])}")
    parser.add_argument("--overload-s", type=float, default=20, help="of each of its two loads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1500, help="seconds in all (default: %(default)s)")
    arguments = parser.parse_args()
    console = Console(stderr=True)

    def measure(results: Results) -> None:
        results.add(
            {
                "machine": machine_line(),
                "load": f"{arguments.streams} streams, closed loop, {arguments.max_tokens} tokens each, greedy, sim "
                "engines at 10 ms a step and 2,000 prompt tokens/s; 2 prefill workers, 3 decode workers, 2 gateways, "
                "1 etcd",
            }
        )
        started_s = time.perf_counter()
        asyncio.run(run(arguments, results, console))
        results.add({"seconds": round(time.perf_counter() - started_s)})
        show(results.figures, console)

    return run_benchmark("chaos", measure)


if __name__ == "__main__":
    sys.exit(main())
