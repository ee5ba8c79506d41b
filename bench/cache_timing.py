"""Whether the time of a request tells a tenant what another tenant has sent: a paired test of each cache.

One tenant sends content. Then another one sends the same, and new content of the same shape, in random order, with
requests of a third tenant between. The signed-rank test of the pairs must not find that the times differ (p > 0.01).
Each cache has a control, which the same test must find (p < 0.01): where content is kept for its tenant, that tenant
sends it again; where nothing is kept, the library is asked as it comes, with its cache. So no test passes because it
cannot see.

Of true hypotheses one in a hundred is rejected, so that one of eight runs of 13 tests would fail by chance. A test that
fails is made once more with new contents: p of 0.0001 or less fails at once, as a library's cache may be full at the
second try, and p of 0.01 or less where both tries have it. One of 400 runs fails by chance. What this misses is small
beside the noise of a request: the gap (the median of the differences) stands beside p.

Requests go through the objects that a gateway has (a renderer with its grammar and image process, tokens, tenants) and
through an engine's worker to a real engine, in one process and one after the other; a network and other requests would
only add noise. A model with few layers and random weights computes. What the processor's own caches and branch
predictors know of the last few requests is kept out (`bench/paired_times.py`): no program can turn that off.

The last line of stdout is JSON; exit code 1 where a cache fails, or a control.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine_turn import machine_turn
from bench.paired_times import Ask, PairedTimes, Pairs
from bench.results import BenchFailed, Results, run_benchmark
from bench.timed_requests import EngineRequests, GatewayRequests, GrammarSteps, IdentityRequests, LibraryCalls
from bench.tiny_models import make_image_model
from kvferry_loadtest.machine import machine_line

LIMIT = 0.01  # where two tries fail
CERTAIN = 0.0001  # where one does
_PART = 4  # a part of the pairs, for requests that take long
_FEWEST_PAIRS = 40


@dataclass(frozen=True)
class Case:
    """A cache, and requests that reach it."""

    name: str
    ask: Ask
    control: Ask | None = None  # the library with its cache; None: the same tenant asks again
    is_slow: bool = False


@dataclass
class Measured:
    other: Pairs
    control: Pairs

    @property
    def is_told(self) -> bool:
        return self.other.p <= LIMIT

    @property
    def is_blind(self) -> bool:
        return self.control.p >= LIMIT

    def figures(self) -> dict[str, Any]:
        return {"pairs": len(self.other.sent), "other": self.other.figures(), "control": self.control.figures()}


async def measure_case(case: Case, times: PairedTimes, num_pairs: int) -> Measured:
    num_between = 64
    if case.is_slow:
        num_pairs, num_between = max(num_pairs // _PART, _FEWEST_PAIRS), 1
    control = case.control or case.ask
    return Measured(
        await times.measure(case.ask, num_pairs, first="one", second="other", num_between=num_between),
        await times.measure(control, num_pairs, first="one", second="one", num_between=num_between),
    )


async def measure_cases(
    cases: Sequence[Case], arguments: argparse.Namespace, results: Results, console: Console
) -> dict[str, list[Measured]]:
    """Measure each cache, and once more where that fails."""
    times = PairedTimes(arguments.seed)
    measured: dict[str, list[Measured]] = {}
    for case in cases:
        if arguments.only not in case.name:
            continue
        tries = measured.setdefault(case.name, [])
        while len(tries) < 2 and (not tries or tries[-1].is_told or tries[-1].is_blind):
            with console.status(case.name):
                tries.append(await measure_case(case, times, arguments.pairs))
            results.add({"caches": {case.name: [tries[-1].figures()]}})
    return measured


def faults(measured: dict[str, list[Measured]]) -> list[str]:
    """Return a line for each cache that fails, and for each control."""
    told = [
        name
        for name, tries in measured.items()
        if all(each.is_told for each in tries) or any(each.other.p <= CERTAIN for each in tries)
    ]
    blind = [name for name, tries in measured.items() if all(each.is_blind for each in tries)]
    return [
        *(f"{name}: the time tells another tenant what was sent" for name in told),
        *(f"{name}: the test does not see its control" for name in blind),
    ]


def table(measured: dict[str, list[Measured]]) -> Table:
    shown = Table("cache", "pairs", "other tenant: sent, new (us)", "gap", "p", "control: kept, new (us)", "p")
    for name, tries in measured.items():
        for each in tries:
            other, control = each.other.figures(), each.control.figures()
            shown.add_row(
                name,
                str(len(each.other.sent)),
                f"{other['sent_us']:,.1f}, {other['new_us']:,.1f}",
                f"{other['gap_us']:+,.1f}",
                f"{other['p']:.2g}",
                f"{control['sent_us']:,.1f}, {control['new_us']:,.1f}",
                f"{control['p']:.2g}",
            )
    return shown


@contextlib.asynccontextmanager
async def all_cases(*, with_engine: bool) -> AsyncIterator[list[Case]]:
    with tempfile.TemporaryDirectory(prefix="cache-timing-") as name:
        folder = await asyncio.to_thread(make_image_model, "idefics3", Path(name))
        async with contextlib.AsyncExitStack() as started:
            # First: it sets variables that vLLM reads when it is imported.
            engine = await started.enter_async_context(EngineRequests.running(folder)) if with_engine else None
            library = LibraryCalls(folder)
            gateway = await started.enter_async_context(GatewayRequests.running(folder))
            steps = await asyncio.to_thread(GrammarSteps, folder)
            identity = IdentityRequests(Path(name))
            cases = [
                Case("parameters with stop strings", gateway.parameters),
                Case("words of plain chats", gateway.words, library.words),
                Case("words that vLLM's renderer encodes", gateway.words_by_vllm, library.words),
                Case("names of template arguments", gateway.template_arguments, library.template_arguments),
                Case("grammar verdicts", gateway.grammar, is_slow=True),
                Case("prepared images", gateway.image, is_slow=True),
                Case("verified tokens", identity.forged_token, identity.token),
                Case("tenants of a key's group", identity.tenant),
                Case("grammars: compiling and steps", steps.ours, steps.of_library),
            ]
            if engine is not None:
                await engine.take_image(gateway)
                cases += [
                    Case("an engine's prefixes", engine.prefix, is_slow=True),
                    Case("an engine's encoded images", engine.image, is_slow=True),
                    Case("an engine's grammars", engine.grammar, steps.of_library, is_slow=True),
                    Case("bad words that a worker encodes", engine.bad_words, library.words),
                ]
            yield cases


async def measure(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    machine = f"{machine_line()}, load {os.getloadavg()[0]:.2f} before"
    console.print(machine)
    results.add({"pairs": arguments.pairs, "seed": arguments.seed, "machine": machine})
    async with all_cases(with_engine=arguments.engine) as cases:
        measured = await measure_cases(cases, arguments, results, console)
    console.print(table(measured))
    results.add({"load_after": round(os.getloadavg()[0], 2)})
    if found := faults(measured):
        raise BenchFailed("; ".join(found))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.cache_timing",
        description="Whether the time of a request tells a tenant what another tenant has sent.",
    )
    parser.add_argument("--pairs", type=int, default=300, help="of each cache; a quarter where requests take long")
    parser.add_argument("--only", default="", help="only caches whose name contains this")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--no-engine", dest="engine", action="store_false", help="without a real engine (4 GiB)")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it writes to stdout
    console = Console(stderr=True, width=160)

    def run(results: Results) -> None:
        with machine_turn(console):
            asyncio.run(measure(arguments, results, console))

    return run_benchmark("bench-caches", run)


if __name__ == "__main__":
    sys.exit(main())
