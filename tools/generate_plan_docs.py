"""Write headroom.md, examples of plan.md and tables of plan-data.md from the planner, or with --check compare them."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from click.testing import CliRunner
from generated_pages import write_or_check

from kvferry.cli import main as main_command
from kvferry_plan.planner import engine_settings, published
from kvferry_plan.planner.assumptions import DEFAULTS, describe
from kvferry_plan.planner.gpu_catalogue import shipped
from kvferry_plan.planner.profiles import PROFILES
from kvferry_plan.planner.rules import RULES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "operator"
_RATES: tuple[Literal["bfloat16"], Literal["fp8"], Literal["fp4"]] = ("bfloat16", "fp8", "fp4")
HEADROOM = DOCS / "headroom.md"
PLAN = DOCS / "plan.md"
DATA = DOCS / "plan-data.md"
ALERTS = ROOT / "deploy" / "helm" / "kvferry" / "files" / "alerts.yaml"
_EXAMPLE = re.compile(r"```\n\$ (?P<command>kvferry plan [^\n]*)\n.*?\n```", re.DOTALL)

_HEAD = """\
# Headroom and thresholds

Generated from `services/kvferry_plan/planner/rules.py` and the chart's
[alerts](../../deploy/helm/kvferry/files/alerts.yaml) by `make plan-docs`; `make check` says when it is not up to date.
The same rules are behind `kvferry plan` (it plans KV pages to 85 %) and `kvferry plan --list rules`.

`kvferry_*` are in [metrics.md](metrics.md); `vllm:*` are vLLM's metrics, which workers export with the labels `worker`
and `role` (`monitoring.members` of the chart). Sources are [published guides](plan-data.md#published-figures); where
arithmetic or vLLM's sources say otherwise, the last column says it. FP8 pages, which guides advise, are no action here:
measure first what they cost ([quality](../user/quality.md)). To add workers: [scaling](scale-and-upgrade.md#scale).

"""
_ALERTS_HEAD = """\

## Alerts

What `monitoring.alerts` of the chart installs. `monitoring.alerts.thresholds` takes other thresholds by these names,
`monitoring.alerts.without` leaves alerts out. Alerts without a rule watch faults.

"""
_QUERIES_HEAD = """\

## Queries

No alert of the chart watches these, as they need metrics of workers: what to look at where a rule above says so.

"""


def headroom() -> str:
    tables = (_HEAD, _rules), (_ALERTS_HEAD, _alerts), (_QUERIES_HEAD, _queries)
    return "".join(head + "\n".join(rows()) + "\n" for head, rows in tables)


def _rules() -> Iterator[str]:
    alerts = _chart_alerts()
    yield "| rule | symptom | cause | look first at | safe action | it disrupts | alert | source | remark |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for rule in RULES:
        alert = ", ".join(f"`{each['alert']}`" for each in alerts if each.get("rule") == rule.name) or "–"
        cells = (
            f"`{rule.name}`", rule.symptom, rule.cause, rule.look, rule.action, rule.disrupts, alert,
            f"`{rule.source}`", rule.caution or "–",
        )  # fmt: skip
        yield f"| {' | '.join(map(_cell, cells))} |"


def _chart_alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _alerts() -> Iterator[str]:
    yield "| alert | rule | severity | for | threshold | condition | what its message advises |"
    yield "|---|---|---|---|---|---|---|"
    for each in _chart_alerts():
        selected = each["expr"].replace(",SELECTOR", "").replace("{SELECTOR}", "")
        condition = selected.replace("THRESHOLD", f"{each['threshold']:g}")
        rule = f"`{each['rule']}`" if "rule" in each else "–"
        threshold = f"{each['threshold']:g}" if each["unit"] == "1" else f"{each['threshold']:g}, {each['unit']}"
        cells = (f"`{each['alert']}`", rule, each["severity"], each["for"], threshold, f"`{condition}`", each["action"])
        yield f"| {' | '.join(map(_cell, cells))} |"


def _queries() -> Iterator[str]:
    yield "| rule | PromQL |"
    yield "|---|---|"
    for rule in RULES:
        if rule.query:
            yield f"| `{rule.name}` | `{_cell(rule.query)}` |"


def _gpus() -> Iterator[str]:
    yield "| name | GPU | memory, GB | TB/s | TFLOP/s bfloat16 | FP8 | FP4 | peers, GB/s | price |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, gpu in shipped().items():
        rates = [f"{gpu.flops.get(each, 0) / 1e12:g}" for each in _RATES]
        price = gpu.price()
        cells = (
            f"`{name}`",
            gpu.title,
            f"{gpu.memory_bytes / 1e9:.2f}",
            f"{gpu.memory_bytes_s / 1e12:g}",
            *(rate if rate != "0" else "–" for rate in rates),
            f"{gpu.peer_bytes_s / 1e9:g}" if gpu.peer_bytes_s else "PCIe",
            price.text() if price else "none known",
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _assumptions() -> Iterator[str]:
    yield "| name | default | meaning |"
    yield "|---|---|---|"
    for name, value, text in describe(DEFAULTS):
        yield f"| `{name}` | {value:g} | {_cell(text)} |"


def _profiles() -> Iterator[str]:
    yield "| profile | context | prompt, answer | TTFT, TPOT | lower tiers | settings and reasons |"
    yield "|---|---|---|---|---|---|"
    for profile in PROFILES:
        reasons = "<br>".join(f"{each.setting}: {each.value} ({each.why})" for each in profile.reasons)
        tiers = f"{profile.cpu_tier_gib} GiB CPU, {profile.volume_tier_gib} GiB NVMe" if profile.offload else "barred"
        cells = (
            f"`{profile.name}`",
            f"{profile.context_tokens:,}",
            f"{profile.prompt}, {profile.output}",
            f"{profile.ttft_s:g} s, {profile.tpot_s * 1e3:g} ms",
            tiers,
            reasons,
        )
        yield f"| {' | '.join(map(_cell, cells))} |"


def _settings() -> Iterator[str]:
    yield "| what | kvferry | vLLM 0.32 | SGLang | TensorRT-LLM | llama.cpp | remark |"
    yield "|---|---|---|---|---|---|---|"
    for each in engine_settings.COUNTERPARTS:
        names = (each.kvferry, each.vllm, each.sglang, each.tensorrt_llm, each.llama_cpp)
        shown = [f"`{name}`" if name else "none" for name in names]
        yield f"| {' | '.join(map(_cell, (each.meaning, *shown, each.note or '–')))} |"


def _published() -> Iterator[str]:
    """Numbers that arithmetic contradicts; settings that no longer hold are left to the command."""
    collection = published.load()
    yield "| id | source | quantity | published | arithmetic | remark |"
    yield "|---|---|---|---|---|---|"
    for figure in collection.figures:
        if figure.agrees is False and figure.check is not None and figure.expected is not None:
            value = " to ".join(map(str, figure.value)) if isinstance(figure.value, list) else f"{figure.value:g}"
            source = collection.sources[figure.source].title.partition(":")[0]
            cells = (
                f"`{figure.id}`",
                source,
                figure.quantity,
                f"{value} {figure.unit}",
                f"{figure.expected:g}",
                figure.note,
            )
            yield f"| {' | '.join(map(_cell, cells))} |"


_TABLES = {
    "gpus": _gpus,
    "assumptions": _assumptions,
    "profiles": _profiles,
    "settings": _settings,
    "published": _published,
}


def data_page(page: str) -> str:
    """Return plan-data.md with its tables anew, each between `<!-- table NAME -->` and `<!-- end -->`."""
    for name, rows in _TABLES.items():
        before, marker, rest = page.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not marker or not end:
            raise SystemExit(f"{DATA.name}: no place for the table {name}")
        page = before + marker + "\n".join(rows()) + "\n" + end + after
    return page


def plan_page(page: str) -> str:
    """Return plan.md with what the commands of its examples print today."""
    return _EXAMPLE.sub(_example, page)


def _example(block: re.Match[str]) -> str:
    """Return a block of an example with what its command prints today."""
    command = block["command"]
    words = shlex.split(command)[1:]
    if "--calibrate" in words:
        return block[0]  # it measures a deployment
    result = CliRunner().invoke(main_command, words)
    printed = result.stdout if result.exit_code == 0 else result.stderr
    lines = [line.rstrip() for line in printed.splitlines()]
    return "\n".join(["```", f"$ {command}", *lines, "```"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    pages = {
        HEADROOM: headroom(),
        PLAN: plan_page(PLAN.read_text(encoding="utf-8")),
        DATA: data_page(DATA.read_text(encoding="utf-8")),
    }
    return write_or_check(pages, source="the planner's data", target="plan-docs", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
