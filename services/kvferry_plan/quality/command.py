"""The command `kvferry quality`."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.engine.quality_report import IntervalRecord, QualityReport, Verdict
from kvferry.errors import ConfigError, KvferryError
from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry_plan.quality.report_file import check_writable, write_report
from kvferry_plan.quality.samples import Dataset, load_dataset

if TYPE_CHECKING:
    from kvferry_plan.quality.measure import Settings

_INTERRUPTED_EXIT_CODE = 130
MAX_LENGTHS, MAX_SAMPLES, MAX_SCORED_TOKENS, MAX_TASKS = 16, 64, 512, 256


@click.command()
@click.option("--kv-cache-dtype", "dtypes", multiple=True, required=True, metavar="TYPE", help="May be repeated.")
@click.option("--baseline", default="auto", show_default=True, help="auto: float32 on a CPU, the model's own on a GPU.")
@click.option("--dataset", type=click.Path(path_type=Path), help="A text; empty lines separate its paragraphs.")
@click.option("--model", help="`default`, a folder, or a hub id.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="YAML file, as of `kvferry up`.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any setting, such as engine.device=gpu.")
@click.option("--lengths", default="", metavar="N,N,...", help="Tokens of contexts; by default 1024 to the model's.")
@click.option("--samples", type=click.IntRange(2, MAX_SAMPLES), default=8, show_default=True, help="Of each length.")
@click.option("--tokens", type=click.IntRange(8, MAX_SCORED_TOKENS), default=64, show_default=True, help="To score.")
@click.option("--tasks", type=click.IntRange(1, MAX_TASKS), default=32, show_default=True, help="For exact match.")
@click.option("--budget", type=click.FloatRange(0, 100, min_open=True), default=0.5, show_default=True, help="Percent.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=7200, show_default=True, help="Of an engine.")
@click.option("--output", type=click.Path(path_type=Path), help="Result file; {dtype} in it stands for the type.")
def quality(
    dtypes: Sequence[str],
    baseline: str,
    dataset: Path | None,
    model: str | None,
    file: Path | None,
    settings: Sequence[str],
    lengths: str,
    samples: int,
    tokens: int,
    tasks: int,
    budget: float,
    timeout_s: float,
    output: Path | None,
) -> None:
    """Measure what quantized KV pages cost, on the engine that is here.

    Exit codes: 0 each type passes, 1 one fails or is undecided, 2 it cannot be measured.
    """
    try:
        _check_numbers(budget=budget, timeout=timeout_s)
        flags = [*settings, *([f"model.path={json.dumps(model)}"] if model is not None else [])]
        config = configuration.load(file, flags=flags)
        if config.engine.kind != "vllm":
            raise ConfigError("engine.kind: simulated engines compute nothing; vllm is needed")
        if output is not None and len(dtypes) > 1 and "{dtype}" not in str(output):
            raise ConfigError("--output: with several types, {dtype} is needed in the name")
        for name in dtypes:
            check_writable(_result_file(output, kv_dtype(name).name))
        from kvferry_plan.quality.measure import Settings

        wanted = Settings(
            dtypes=tuple(dict.fromkeys(dtypes)),
            baseline=baseline,
            lengths=_lengths(lengths),
            num_samples=samples,
            num_scored_tokens=tokens,
            num_tasks=tasks,
            budget=budget / 100,
            timeout_s=timeout_s,
        )
        verdicts = _measured(config, wanted, load_dataset(dataset), output)
    except KeyboardInterrupt:
        click.echo("kvferry: interrupted; nothing is left running", err=True)
        sys.exit(_INTERRUPTED_EXIT_CODE)
    except KvferryError as error:
        click.echo(f"kvferry: {error.message}", err=True)
        sys.exit(2)
    except OSError as error:
        # Folders that engines write to: missing, or full.
        where = f"{error.filename}: " if error.filename else ""
        click.echo(f"kvferry: {where}{error.strerror or error}", err=True)
        sys.exit(2)
    sys.exit(0 if all(verdict == Verdict.PASS for verdict in verdicts) else 1)


def _measured(config: ClusterConfig, wanted: Settings, dataset: Dataset, output: Path | None) -> list[str]:
    from kvferry_plan.quality.measure import measure

    verdicts = []
    with _interrupted_by_signals():
        for report in measure(config, wanted, dataset, lambda line: click.echo(line, err=True)):
            # Printed first: the measurement may have lasted hours, and the disk may be full.
            print_report(report)
            into = _result_file(output, report.kv_cache_dtype)
            write_report(report, into)
            click.echo(f"written to {into}")
            verdicts.append(report.verdict)
    return verdicts


@contextlib.contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    # Engines have sessions of their own: a command that just died would leave them.
    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    # What the caller ignores stays ignored, as with nohup.
    previous = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) != signal.SIG_IGN}
    for number in previous:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _check_numbers(**options: float) -> None:
    for name, value in options.items():
        if not math.isfinite(value):
            raise ConfigError(f"--{name} {value}: expected a number")


def _result_file(output: Path | None, dtype: str) -> Path:
    return Path(str(output or "kv-quality-{dtype}.json").replace("{dtype}", dtype))


def print_report(report: QualityReport) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("context", "samples", "KL, mnats", "perplexity", "change, %", "same likeliest", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.lengths:
        table.add_row(
            f"{row.num_tokens:,}",
            str(row.num_samples),
            _shown(row.divergence_nats, 1000),
            "endless" if row.baseline_perplexity is None else f"{row.baseline_perplexity:.2f}",
            _shown(row.perplexity_ratio, 100, minus=1),
            f"{row.agreement:.1%}",
            row.verdict,
        )
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(
        f"\n{report.model}: KV pages {report.kv_cache_dtype} computed in {report.compute_dtype}, against "
        f"{report.baseline_kv_cache_dtype} in {report.baseline_compute_dtype}; vLLM {report.vllm}, {report.hardware}",
        highlight=False,
    )
    console.print(table)
    for warning in report.warnings:
        console.print(f"warning: {warning}", highlight=False)
    limit_mnats = 1000 * math.log1p(report.budget)
    console.print(
        f"exact match of {report.num_tasks} greedy answers: {_shown(report.exact_match, 100)} %\n"
        f"verdict: {report.verdict} (budget {report.budget:.2%}, that is {limit_mnats:.2f} mnats; 95 % intervals; "
        f"{report.took_s:.0f} s); mode {report.mode}",
        highlight=False,
    )
    if report.verdict == Verdict.UNDECIDED:
        undecided = ", ".join(f"{row.num_tokens:,}" for row in report.lengths if row.verdict == Verdict.UNDECIDED)
        most = max((row.num_samples for row in report.lengths), default=0)
        more = (
            f"take more --samples than {most} (at most {MAX_SAMPLES})" if most < MAX_SAMPLES else "score more --tokens"
        )
        console.print(
            f"undecided at {undecided} tokens: the interval of KL or of the change has the budget in it; {more}, or "
            "--lengths of these alone to begin with",
            highlight=False,
        )


def _shown(interval: IntervalRecord, times: float, minus: float = 0) -> str:
    if interval.mean is None or interval.low is None or interval.high is None:
        return "endless"
    mean, low, high = (times * (value - minus) for value in (interval.mean, interval.low, interval.high))
    return f"{mean:.3f} ({low:.3f} to {high:.3f})"


def _lengths(text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part.strip()]
    if len(parts) > MAX_LENGTHS:
        raise ConfigError(f"--lengths: {len(parts)} lengths; at most {MAX_LENGTHS}")
    try:
        lengths = tuple(int(part) for part in parts)
    except ValueError:
        raise ConfigError(f"--lengths: {text[:80]!r}; expected numbers of tokens, such as 1024,4096") from None
    if any(length < 1 for length in lengths):
        raise ConfigError(f"--lengths: {min(lengths)}; at least 1 token")
    return lengths
