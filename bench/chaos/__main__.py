"""`python -m bench.chaos`: break a cluster of real processes under load, and say what its clients saw.

Prints a table, and as its last line one JSON object. Exits with 1 when a request failed that should not have, an answer
differs from the undisturbed one or came from a worker of another model than its gateway's, or when overload costs more
than it may. Bounded: by the number of kills, and by --timeout in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.chaos import overload
from bench.chaos.faults import Fault, etcd_away, hanging, killing, leaving, poisoning, upgrading
from bench.chaos.fleet import Fleet, fleet
from bench.chaos.load import Client, Load, make_prompts, summarize
from kvferry.membership.base import MemberKind
from kvferry_loadtest.machine import machine_line

# More than the workers keep: most prompts have to be computed when they come again.
NUM_PROMPTS = 320
MIN_GOODPUT = 0.95  # of the capacity, under overload


async def ask_undisturbed(running: Fleet, prompts: list[str], max_tokens: int) -> list[str]:
    """What every prompt must give."""
    client = Client(running.urls, prompts, max_tokens)
    try:
        outcomes = [
            outcome
            for first in range(0, len(prompts), 32)
            for outcome in await asyncio.gather(*(client.ask(i) for i in range(first, min(first + 32, len(prompts)))))
        ]
    finally:
        await client.close()
    broken = [outcome.error for outcome in outcomes if outcome.error or outcome.affected]
    assert not broken, f"an undisturbed request failed: {broken[0]}"
    return [outcome.text for outcome in outcomes]


async def run_fault(
    running: Fleet,
    fault: Fault,
    times: int,
    load: Load,
    expected: list[str],
    seeded: random.Random,
    say: Any,
) -> dict[str, Any]:
    load.outcomes, revision = [], _revision(running)
    before = sum(process.num_kills for process in running.processes)
    async with load.running():
        await fault(running, seeded, times, say)
    kills = sum(process.num_kills for process in running.processes) - before
    outcomes, load.outcomes = load.outcomes, []
    # Another model has other answers, and none that is of both.
    by_revision = {revision: expected}
    if (changed := _revision(running)) != revision:
        by_revision[changed] = await ask_undisturbed(running, load.client.prompts, load.client.max_tokens)
        assert by_revision[changed] != expected

    def expected_at(url: str) -> list[str]:
        return by_revision[running.models[url]["revision"]]

    # Below zero where processes left for good.
    return summarize(outcomes, expected_at, kills if kills > 0 else times, running.is_foreign)


def _revision(running: Fleet) -> str:
    (revision,) = {process.config["model"]["revision"] for process in running.processes}
    return str(revision)


# Faults of one cluster, in this order; the last one changes its model.
FAULTS: dict[str, Callable[[argparse.Namespace], tuple[Fault, int]]] = {
    "prefill": lambda given: (killing(MemberKind.PREFILL), given.kills),
    "decode": lambda given: (killing(MemberKind.DECODE), given.kills),
    "gateway": lambda given: (killing(MemberKind.GATEWAY), given.kills),
    "etcd": lambda given: (etcd_away(given.outage_s), 1),
    "drain": lambda given: (leaving, max(1, given.kills // 2)),
    "hang": lambda given: (hanging, max(1, given.kills // 10)),
    "poison": lambda given: (poisoning, max(1, given.kills // 4)),
    "upgrade": lambda given: (upgrading, 1),
}
# Of a cluster whose second gateway speaks as the previous release does.
RELEASES = "releases"
OVERLOAD = "overload"


async def run(arguments: argparse.Namespace, console: Console) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return a row per fault, and that of the overload, empty unless it was chosen."""
    chosen = arguments.faults.split(",") if arguments.faults else [*FAULTS, RELEASES, OVERLOAD]
    rows: dict[str, dict[str, Any]] = {}
    overloaded: dict[str, Any] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as folder, Progress(*columns, console=console) as bar:
        task = bar.add_task("starting the cluster")

        def say(what: str) -> None:
            bar.update(task, description=what)

        if faults := [name for name in chosen if name in FAULTS]:
            rows |= await _run_faults(Path(folder), {name: FAULTS[name](arguments) for name in faults}, arguments, say)
        if RELEASES in chosen:
            plan = {RELEASES: (killing(MemberKind.DECODE), max(1, arguments.kills // 4))}
            rows |= await _run_faults(Path(folder) / RELEASES, plan, arguments, say, overrides=_of_two_releases)
        if OVERLOAD in chosen:
            overloaded = await overload.measure(Path(folder) / OVERLOAD, arguments.overload_s, arguments.seed, say)
    return rows, overloaded


async def _run_faults(
    folder: Path,
    plan: Mapping[str, tuple[Fault, int]],
    arguments: argparse.Namespace,
    say: Callable[[str], None],
    **values: Any,
) -> dict[str, dict[str, Any]]:
    prompts = make_prompts(NUM_PROMPTS, arguments.seed)
    rows: dict[str, dict[str, Any]] = {}
    async with fleet(folder, **values) as running:
        say("asking every prompt once, undisturbed")
        expected = await ask_undisturbed(running, prompts, arguments.max_tokens)
        for name, (fault, times) in plan.items():
            client = Client(running.urls, prompts, arguments.max_tokens)
            load = Load(client, len(prompts), arguments.streams)

            def tell(what: str, load: Load = load) -> None:
                failed = sum(bool(outcome.error) for outcome in load.outcomes)
                say(f"{what}: {len(load.outcomes)} requests, {failed} failed")

            tell(name)
            try:
                rows[name] = await run_fault(running, fault, times, load, expected, random.Random(arguments.seed), tell)
            finally:
                await client.close()
    return rows


def _of_two_releases(kind: MemberKind, i: int) -> dict[str, Any]:
    return {"release": "previous"} if kind is MemberKind.GATEWAY and i else {}


def show(rows: dict[str, dict[str, Any]], overloaded: dict[str, Any], console: Console) -> None:
    table = Table(title="what clients saw")
    names = ("kills", "requests", "failed", "continued", "recomputed", "retried", "inexact", "foreign")
    for column in ("fault", *names, "extra ms"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for name, row in rows.items():
        extra = "" if row["extra_ms_p50"] is None else f"{row['extra_ms_p50']:.0f}"
        table.add_row(name, *(str(row[key]) for key in names), extra)
    console.print(table)
    for name, row in rows.items():
        for error in row["errors"]:
            console.print(f"{name}: {error}")
    if overloaded:
        console.print(
            f"overload: {overloaded['overload_per_s']} answers/s of {overloaded['capacity_per_s']} at capacity "
            f"({overloaded['goodput']}); {overloaded['refused']} refused, for which "
            f"{overloaded['refused_tokens_computed']} prompt tokens were computed"
        )


def main() -> None:
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
    started_s = time.perf_counter()
    rows, overloaded = asyncio.run(asyncio.wait_for(run(arguments, console), arguments.timeout))
    show(rows, overloaded, console)
    print(
        json.dumps(
            {
                "machine": machine_line(),
                "load": f"{arguments.streams} streams, closed loop, {arguments.max_tokens} tokens each, greedy, sim "
                "engines at 10 ms a step and 2,000 prompt tokens/s; 2 prefill workers, 3 decode workers, 2 gateways, "
                "1 etcd",
                "seconds": round(time.perf_counter() - started_s),
                "faults": rows,
                "overload": overloaded,
            }
        )
    )
    if any(row["failed"] or row["inexact"] or row["foreign"] for row in rows.values()):
        sys.exit(1)
    if overloaded and (
        overloaded["goodput"] < MIN_GOODPUT or overloaded["refused_tokens_computed"] > 0 or overloaded["errors"]
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
