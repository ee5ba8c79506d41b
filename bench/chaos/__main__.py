"""`python -m bench.chaos`: break a cluster of real processes under load, and say what its clients saw.

Prints a table, and as its last line one JSON object. Exits with 1 when a request failed that should not have, or an
answer differs from the undisturbed one. Bounded: by the number of kills, and by --timeout in all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.chaos.faults import Fault, etcd_away, hanging, killing, leaving
from bench.chaos.fleet import Fleet, fleet
from bench.chaos.load import Client, Load, make_prompts, summarize
from kvferry.membership.base import MemberKind
from kvferry_loadtest.machine import machine_line

# More than the workers keep: most prompts have to be computed when they come again.
NUM_PROMPTS = 320


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
    load.outcomes = []
    before = sum(process.num_kills for process in running.processes)
    async with load.running():
        await fault(running, seeded, times, say)
    kills = sum(process.num_kills for process in running.processes) - before
    return summarize(load.outcomes, expected, kills or times)


async def run(arguments: argparse.Namespace, console: Console) -> dict[str, dict[str, Any]]:
    prompts = make_prompts(NUM_PROMPTS, arguments.seed)
    kills = arguments.kills
    plan: dict[str, tuple[Fault, int]] = {
        "prefill": (killing(MemberKind.PREFILL), kills),
        "decode": (killing(MemberKind.DECODE), kills),
        "gateway": (killing(MemberKind.GATEWAY), kills),
        "etcd": (etcd_away(arguments.outage_s), 1),
        "drain": (leaving, max(1, kills // 2)),
        "hang": (hanging, max(1, kills // 10)),
    }
    chosen = arguments.faults.split(",") if arguments.faults else list(plan)
    rows: dict[str, dict[str, Any]] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="kvferry-chaos-") as folder, Progress(*columns, console=console) as bar:
        task = bar.add_task("starting the cluster")
        async with fleet(Path(folder)) as running:
            bar.update(task, description="asking every prompt once, undisturbed")
            expected = await ask_undisturbed(running, prompts, arguments.max_tokens)
            for name in chosen:
                client = Client(running.urls, prompts, arguments.max_tokens)
                load = Load(client, len(prompts), arguments.streams)

                def say(what: str, load: Load = load) -> None:
                    failed = sum(bool(outcome.error) for outcome in load.outcomes)
                    bar.update(task, description=f"{what}: {len(load.outcomes)} requests, {failed} failed")

                say(name)
                fault, times = plan[name]
                try:
                    seeded = random.Random(arguments.seed)
                    rows[name] = await run_fault(running, fault, times, load, expected, seeded, say)
                finally:
                    await client.close()
    return rows


def show(rows: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title="what clients saw")
    for column in ("fault", "kills", "requests", "failed", "continued", "recomputed", "retried", "inexact", "extra ms"):
        table.add_column(column, justify="left" if column == "fault" else "right")
    for name, row in rows.items():
        extra = "" if row["extra_ms_p50"] is None else f"{row['extra_ms_p50']:.0f}"
        names = ("kills", "requests", "failed", "continued", "recomputed", "retried", "inexact")
        table.add_row(name, *(str(row[key]) for key in names), extra)
    console.print(table)
    for name, row in rows.items():
        for error in row["errors"]:
            console.print(f"{name}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.chaos", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32, help="requests at a time (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of each kind (default: %(default)s)")
    parser.add_argument("--outage-s", type=float, default=60, help="how long etcd is away (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=120, help="of each answer (default: %(default)s)")
    parser.add_argument("--faults", default="", help="some of: prefill,decode,gateway,etcd,drain,hang")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=1500, help="seconds in all (default: %(default)s)")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    started_s = time.perf_counter()
    rows = asyncio.run(asyncio.wait_for(run(arguments, console), arguments.timeout))
    show(rows, console)
    print(
        json.dumps(
            {
                "machine": machine_line(),
                "load": f"{arguments.streams} streams, closed loop, {arguments.max_tokens} tokens each, greedy, sim "
                "engines at 10 ms a step and 2,000 prompt tokens/s; 2 prefill workers, 3 decode workers, 2 gateways, "
                "1 etcd",
                "seconds": round(time.perf_counter() - started_s),
                "faults": rows,
            }
        )
    )
    if any(row["failed"] or row["inexact"] for row in rows.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
