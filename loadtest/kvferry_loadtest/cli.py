"""The command line. Bad input is one line on stderr and exit code 2; a harness that could not keep up is 3."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from kvferry_loadtest import __version__, selfcheck
from kvferry_loadtest import scenario as scenarios
from kvferry_loadtest.compare import compare as compare_results
from kvferry_loadtest.compare import print_comparison
from kvferry_loadtest.errors import LoadtestError, ScenarioError
from kvferry_loadtest.floor import floor_of
from kvferry_loadtest.importers import import_result
from kvferry_loadtest.report import write_report
from kvferry_loadtest.result import read_result, write_result
from kvferry_loadtest.run import Outcomes, Target, run
from kvferry_loadtest.run import Progress as RunProgress
from kvferry_loadtest.terminal import Progress, print_summary
from kvferry_loadtest.workloads import make_plan

LATE = 3  # exit code: the harness was the bottleneck

console = Console()


def one_line_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapped(*arguments: Any, **values: Any) -> Any:
        try:
            return function(*arguments, **values)
        except LoadtestError as error:
            click.echo(f"kvferry-loadtest: {error}", err=True)
            sys.exit(2)
        except KeyboardInterrupt:
            click.echo("interrupted; nothing was written", err=True)
            sys.exit(130)

    return wrapped


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__)
def main() -> None:
    """Load tests of OpenAI-compatible endpoints."""


settings = click.option(
    "-s",
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a scenario's value: rag.cold_fraction=0.3",
)
seed_option = click.option("--seed", type=int, default=None, help="Instead of the scenario's.")


@main.command("scenarios")
@one_line_errors
def list_scenarios() -> None:
    """List the scenarios that there are."""
    width = max(map(len, scenarios.names()))
    for name in scenarios.names():
        click.echo(f"{name:<{width}}  {scenarios.load(name).description}")


@main.command("plan")
@click.argument("scenario")
@settings
@seed_option
@one_line_errors
def show_plan(scenario: str, overrides: Sequence[str], seed: int | None) -> None:
    """Say what a run of SCENARIO (a name, or a TOML file) would send, without sending it."""
    loaded = load(scenario, overrides, seed)
    plan = make_plan(loaded)
    floor = floor_of(plan, loaded.page_tokens, loaded.chat_template)
    counted = [request for request in plan.requests if request.request_id not in plan.warmup]
    arrivals = [request.arrival_s for request in counted if request.arrival_s is not None]
    click.echo(
        json.dumps(
            {
                "scenario": plan.scenario,
                "seed": plan.seed,
                "requests": len(counted),
                "warmup_requests": len(plan.warmup),
                "sessions": len({request.session_id for request in counted}),
                "tenants": sorted({request.tenant for request in counted}),
                "last_arrival_s": round(max(arrivals, default=0.0), 3),
                "output_tokens": sum(request.max_tokens for request in counted),
                "floor": msgspec.to_builtins(floor),
                "parameters": loaded.parameters(),
            },
            indent=1,
        )
    )


@main.command("run")
@click.argument("scenario")
@click.option(
    "--url", "urls", required=True, multiple=True, help="The endpoint: http://HOST:PORT, before /v1. Several: in turn."
)
@click.option("--model", default="", help="Model to ask for; without it the first that the endpoint lists.")
@click.option("--api-key-env", default="", metavar="NAME", help="Environment variable with the API key.")
@click.option(
    "--metrics-url",
    "metrics_urls",
    multiple=True,
    help="Where servers tell their metrics; without it /metrics of --url.",
)
@click.option("--name", "deployment", default="", help="What reports call this deployment; without it the URL.")
@settings
@seed_option
@click.option("--repeats", type=click.IntRange(1), default=1, help="Runs, each with a seed of its own.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("loadtest-results"))
@click.option(
    "--records", "keep_records", is_flag=True, help="Write what happened to every request as well (JSON lines)."
)
@click.option("--report/--no-report", "with_report", default=True, help="Write an HTML report of these runs.")
@one_line_errors
def run_scenario(
    scenario: str,
    urls: Sequence[str],
    model: str,
    api_key_env: str,
    metrics_urls: Sequence[str],
    deployment: str,
    overrides: Sequence[str],
    seed: int | None,
    repeats: int,
    out: Path,
    keep_records: bool,
    with_report: bool,
) -> None:
    """Run SCENARIO (a name, or a TOML file) against an endpoint, and write results and a report."""
    target = Target(urls, deployment or urls[0], model, api_key_env, metrics_urls or None)
    results = []
    for repeat in range(repeats):
        loaded = load(scenario, overrides, seed)
        if repeat:
            loaded = msgspec.structs.replace(loaded, seed=loaded.seed + repeat)
        results.append(run_once(loaded, target, repeat, out, keep_records=keep_records).result)
    if with_report:
        click.echo(f"report: {write_report(results, out)}")
    if not all(result.harness.ok for result in results):
        sys.exit(LATE)


def run_once(
    loaded: scenarios.Scenario, target: Target, repeat: int, out: Path, *, keep_records: bool = False
) -> Outcomes:
    """One run with its progress, its files and its summary."""
    plan = make_plan(loaded)
    with Progress(console, f"{loaded.name} on {target.deployment}") as progress:

        def show(now: RunProgress) -> None:
            progress.update(
                sent=now.sent,
                in_flight=now.in_flight,
                ok=now.ok,
                missed=now.missed,
                planned=now.planned,
                elapsed_s=now.elapsed_s,
                ttft_p50_ms=now.ttft_p50_ms,
            )

        outcomes = run(loaded, plan, target, repeat=repeat, on_progress=show)
    result = outcomes.result
    out.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{result.deployment}-{result.scenario}-{repeat}").strip("-")
    write_result(out / f"{stem}.json", result)
    if keep_records:
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in outcomes.records)
        (out / f"{stem}.records.jsonl").write_bytes(lines)
    if result.harness.ok:
        print_summary(console, result)
    else:
        # A table would be believed.
        console.print(f"[bold red]no figures: the harness was the bottleneck:[/] {result.harness.reason}")
    console.print(f"result: {out / f'{stem}.json'}", highlight=False)
    return outcomes


@main.command("report")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("loadtest-report"))
@click.option("--title", default="Load test")
@one_line_errors
def report(files: Sequence[Path], out: Path, title: str) -> None:
    """Write one HTML report of result FILES; those of one deployment are repeats."""
    click.echo(f"report: {write_report([read_result(file) for file in files], out, title)}")


@main.command("compare")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--allow-different", is_flag=True, help="Compare runs of different scenarios, objectives or machines.")
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=None, help="Write a report as well.")
@one_line_errors
def compare(files: Sequence[Path], allow_different: bool, as_json: bool, out: Path | None) -> None:
    """Put deployments side by side; result FILES of one deployment are repeats. Others are related to the first."""
    results = [read_result(file) for file in files]
    comparison = compare_results(results, allow_different=allow_different)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(comparison), indent=1))
    else:
        print_comparison(console, comparison)
    if out is not None:
        click.echo(f"report: {write_report(results, out)}", err=as_json)


@main.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(["aiperf", "guidellm"]), default=None, help="Without it, as the file says.")
@click.option("--name", "deployment", required=True, help="What reports are to call the deployment.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The result file to write.")
@one_line_errors
def import_file(file: Path, kind: Any, deployment: str, out: Path) -> None:
    """Make a result of what aiperf or guidellm wrote."""
    result = import_result(file, deployment, kind)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_result(out, result)
    click.echo(f"result: {out}")


@main.command("selfcheck")
@one_line_errors
def check_harness() -> None:
    """Measure the harness itself on this machine: accuracy, a stall, a high rate. The last line is JSON."""
    figures = selfcheck.check_all(console)
    click.echo(json.dumps(figures))
    if not figures["ok"]:
        sys.exit(1)


def load(name: str, overrides: Sequence[str], seed: int | None) -> scenarios.Scenario:
    """Raises ScenarioError."""
    pairs = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ScenarioError(f"--set {override}: it must be KEY=VALUE")
        pairs[key] = value
    if seed is not None:
        pairs["seed"] = str(seed)
    return scenarios.load(name, pairs)


if __name__ == "__main__":
    main()
