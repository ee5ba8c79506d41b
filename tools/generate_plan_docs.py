"""Write docs/headroom.md and the tables of docs/plan.md from the planner's data; --check fails when they differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from generated_pages import write_or_check

from kvferry.planner import engine_settings, published
from kvferry.planner.assumptions import DEFAULTS, describe
from kvferry.planner.gpu_catalogue import shipped
from kvferry.planner.profiles import PROFILES
from kvferry.planner.rules import RULES

DOCS = Path(__file__).resolve().parent.parent / "docs"
_RATES: tuple[Literal["bfloat16"], Literal["fp8"], Literal["fp4"]] = ("bfloat16", "fp8", "fp4")
HEADROOM = DOCS / "headroom.md"
PLAN = DOCS / "plan.md"

_HEAD = """\
# Headroom and thresholds

Generated from `services/kvferry/planner/rules.py` by `make plan-docs`; `make check` says when it is not up to date.
The same rules are behind `kvferry plan` (it plans KV pages to 85 %) and `kvferry plan --list rules`.

Conditions are PromQL: `vllm:*` are vLLM's metrics, which workers export with the labels `worker` and `role`,
`kvferry_*` are in [metrics.md](metrics.md). Sources are published guides ([plan.md](plan.md#published-figures)); where
arithmetic or vLLM's sources say otherwise, the last column says it.

"""


def headroom() -> str:
    return _HEAD + "\n".join([*_rules(), "", "## Conditions", "", *_conditions()]) + "\n"


def _rules() -> Iterator[str]:
    yield "| rule | symptom | cause | action | source | remark |"
    yield "|---|---|---|---|---|---|"
    for rule in RULES:
        cells = (f"`{rule.name}`", rule.symptom, rule.cause, rule.action, f"`{rule.source}`", rule.caution or "–")
        yield f"| {' | '.join(map(_cell, cells))} |"


def _conditions() -> Iterator[str]:
    yield "| alert | severity | for | condition |"
    yield "|---|---|---|---|"
    for rule in RULES:
        if rule.condition:
            yield f"| `{rule.alert}` | {rule.severity} | {rule.for_s // 60} min | `{_cell(rule.condition)}` |"


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


def plan_page(page: str) -> str:
    """Return docs/plan.md with its tables written anew, each between `<!-- table NAME -->` and `<!-- end -->`."""
    for name, rows in _TABLES.items():
        before, marker, rest = page.partition(f"<!-- table {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        if not marker or not end:
            raise SystemExit(f"{PLAN.name}: no place for the table {name}")
        page = before + marker + "\n".join(rows()) + "\n" + end + after
    return page


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main() -> int:
    pages = {HEADROOM: headroom(), PLAN: plan_page(PLAN.read_text(encoding="utf-8"))}
    return write_or_check(pages, source="the planner's data", target="plan-docs", description=__doc__)


if __name__ == "__main__":
    sys.exit(main())
