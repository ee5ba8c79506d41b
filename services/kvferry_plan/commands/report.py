"""Shows plans and the planner's data as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry_plan.planner import engine_settings, profiles, published, rules
from kvferry_plan.planner.answer import kv_sizes
from kvferry_plan.planner.assumptions import DEFAULTS, describe
from kvferry_plan.planner.emit import obstacles
from kvferry_plan.planner.explain import explain
from kvferry_plan.planner.gpu_catalogue import Gpu
from kvferry_plan.planner.memory import Memory
from kvferry_plan.planner.plan import Plan
from kvferry_plan.planner.published import Judgement
from kvferry_plan.planner.roofline import Roof
from kvferry_plan.planner.sizing import Candidate

_MAX_ROWS = 12
_BAR_CELLS = 40
_ORIGIN = {
    False: "efficiencies are assumptions, not measurements on GPUs",
    True: "efficiencies of prefill and decode were measured, the others are assumptions",
}
_WIDE_COLUMNS = 200


def console() -> Console:
    """A console as wide as the terminal; wide enough for every table where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDE_COLUMNS)


def print_plan(to: Console, plan: Plan) -> None:
    question, best, demand = plan.question, plan.best, plan.question.demand
    geometry, sizes = question.model.geometry, kv_sizes(plan.question)
    to.print(
        f"[bold]{escape(geometry.name)}[/], weights {question.model.weights}, KV pages {question.kv_dtype}: "
        f"{sizes['kv_bytes_per_token']:,} B a token, "
        f"{sizes['kv_bytes_of_longest_request'] / 1e9:.2f} GB for {demand.context_tokens:,} tokens"
    )
    to.print(f"{demand.text()}\n")
    _print_layouts(to, plan)
    to.print(f"[bold]binds[/]      {escape(best.binds)}")
    for i, change in enumerate(plan.changes[:3]):
        cost = change.candidate.usd_per_hour
        costs = f"{change.candidate.num_gpus} GPUs" + ("" if cost is None else f", {cost:.2f} USD/h")
        label = "next best" if not i else "then"
        to.print(f"[bold]{label:<10}[/] {escape(change.what)}: saves {change.saving:.0%} ({costs}){change.served}")
    if not plan.changes:
        to.print("[bold]next best[/]  none of the changes that were tried saves a GPU")
    _print_needs(to, plan)
    for name in sorted({miss.gpu_name for miss in plan.misses if miss.what == "price"}):
        to.print(f"[bold]left out[/]   {name}: no price known, which --budget needs: --price {name}=USD")
    for rule in rules.at_risk(best.kv_use):
        to.print(f"[bold]rule[/]       {rule.name}: {escape(rule.symptom)}; {escape(rule.action)}")
    for warning in best.warnings:
        to.print(f"[bold]warning[/]    {escape(warning)}")
    if best.price is not None:
        to.print(f"[bold]price[/]      {escape(best.price.text())}")
    elif not best.gpu.is_cpu:
        to.print(
            "[bold]price[/]      no price known: give --price USD, or --price NAME=USD for one GPU, or a catalogue file"
        )
    to.print(
        f"[bold]assumed[/]    {_ORIGIN[question.is_calibrated]}: "
        + escape(", ".join(f"{name} {value:g}" for name, value, _ in _shown_assumptions(plan)))
    )


def _shown_assumptions(plan: Plan) -> list[tuple[str, float, str]]:
    # Those that decide most, and all that are not the defaults.
    deciding = ("prefill_mfu", "decode_mfu", "memory_efficiency", "network_efficiency", "kv_limit", "ttft_percentile")
    defaults = {name: value for name, value, _ in describe(DEFAULTS)}
    return [each for each in describe(plan.question.assumptions) if each[0] in deciding or each[1] != defaults[each[0]]]


def _print_layouts(to: Console, plan: Plan) -> None:
    table = _table(
        ("GPU", "layout", "prefill + decode", "served by"),
        ("GPUs", "USD/h", "USD/M tokens", "TTFT", "TPOT", "requests", "KV GB"),
    )
    demand = plan.question.demand
    shown = _shown(plan.candidates)
    for candidate in shown:
        cost = candidate.usd_per_hour
        per_million = candidate.usd_per_million_tokens(demand.rate_per_s, demand.request_tokens)
        engines = f"{candidate.num_prefill} + {candidate.num_decode}" if candidate.disaggregated else "together"
        table.add_row(
            candidate.gpu_name,
            candidate.layout.text(),
            engines if candidate.disaggregated else f"{candidate.num_decode} {engines}",
            "vLLM" if obstacles(candidate, plan.question) else "kvferry",
            str(candidate.num_gpus),
            "-"
            if cost is None
            else f"{cost:.2f}{' spot' if candidate.price and candidate.price.kind == 'spot' else ''}",
            "-" if per_million is None else f"{per_million:.3g}",
            f"{candidate.ttft.total_s:.2f} s",
            f"{candidate.tpot_s * 1e3:.1f} ms",
            f"{max(1, candidate.batch):.0f} of {min(candidate.max_batch_of_pages, candidate.max_batch_of_tpot)}",
            f"{candidate.memory.kv_bytes / 1e9:.1f}",
        )
    to.print(table)
    if len(plan.candidates) > len(shown):
        to.print(f"and {len(plan.candidates) - len(shown)} more layouts; --json lists them")
    to.print("[dim]requests: that one engine decodes at once in the mean, of those that it may; KV GB: of one GPU[/]\n")


def _shown(candidates: Sequence[Candidate]) -> list[Candidate]:
    # The best candidate of each GPU, with prefill apart and together.
    first: dict[tuple[str, bool], Candidate] = {}
    for candidate in candidates:
        first.setdefault((candidate.gpu_name, candidate.disaggregated), candidate)
    return list(first.values())[:_MAX_ROWS]


def _print_needs(to: Console, plan: Plan) -> None:
    best = plan.best
    if best.disaggregated:
        to.print(
            f"[bold]P:D[/]        {best.num_prefill * best.layout.num_gpus} : "
            f"{best.num_decode * best.layout.num_gpus} GPUs"
        )
        to.print(f"[bold]network[/]    {best.transfer_bytes_s / 1e9:.3g} GB/s of KV into each decode GPU")
    demand = plan.question.demand
    stay_s = best.ttft_mean_s + (demand.output.mean - 1) * best.tpot_s
    to.print(
        f"[bold]load[/]       {demand.rate_per_s:.3g} requests/s, of which {demand.rate_per_s * stay_s:,.0f} are under "
        f"way at once at the planned TPOT; {_count(demand.users)} users who ask again at once would send "
        f"{demand.users / (stay_s + demand.think_s):.3g}/s: plan that with --rate"
    )
    for tier in plan.tiers():
        restored = "" if tier.load_s is None else f", a mean prompt back in {tier.load_s:.3g} s"
        pays = ""
        if tier.load_s is not None:
            prefill_s = best.engine.prefill(plan.question.demand.prompt.mean).total_s
            pays = f" (computing it: {prefill_s:.3g} s)"
        to.print(
            f"[bold]{tier.name:<10}[/] {tier.num_bytes / 1e9:,.0f} GB of KV: {tier.num_tokens:,.0f} tokens, "
            f"{tier.num_requests:,.0f} requests{restored}{pays}"
        )
    if best.restore_bytes_s:
        to.print(f"[bold]restores[/]   {best.restore_bytes_s / 1e9:.3g} GB/s from lower tiers, all nodes together")


def print_bars(to: Console, plan: Plan) -> None:
    """Print memory of one GPU, and the parts of a prefill and a decode step, as bars."""
    to.print("\n[bold]memory of one GPU[/]")
    for name, num_bytes in memory_parts(plan.best.memory):
        to.print(_bar(name, num_bytes, plan.best.memory.total_bytes, f"{num_bytes / 1e9:7.1f} GB"), highlight=False)
    for title, roof in (("prefill of the mean prompt", plan.best.prefill), ("decode step", plan.best.decode)):
        to.print(f"\n[bold]{title}[/], {roof.total_s * 1e3:.1f} ms")
        for name, seconds in roof_parts(roof):
            to.print(_bar(name, seconds, roof.total_s, f"{seconds * 1e3:7.2f} ms"), highlight=False)


def memory_parts(memory: Memory) -> list[tuple[str, float]]:
    return [
        ("weights", memory.weight_bytes),
        ("activations", memory.activation_bytes),
        ("engine", memory.engine_bytes),
        ("KV pages", memory.kv_bytes),
        ("not used", memory.total_bytes - memory.usable_bytes),
    ]


def roof_parts(roof: Roof) -> list[tuple[str, float]]:
    return [
        ("compute", roof.compute_s),
        ("memory", roof.memory_s),
        ("links", roof.link_s),
        ("overhead", roof.overhead_s),
    ]


def _bar(name: str, value: float, whole: float, text: str) -> str:
    cells = round(_BAR_CELLS * min(1.0, value / whole)) if whole else 0
    return f"  {name:<12} {'█' * cells}{'·' * (_BAR_CELLS - cells)} {text}"


def print_explanation(to: Console, plan: Plan) -> None:
    to.print(f"\n[bold]how the numbers of {plan.best.gpu_name} {plan.best.layout.text()} follow[/]")
    for each in explain(plan):
        to.print(f"[bold]{escape(each.name)}[/] = {escape(each.value)}", highlight=False)
        to.print(f"  {escape(each.formula)}", highlight=False)
        to.print(f"  [dim]{escape(each.numbers)}[/]", highlight=False)
    to.print("\n[bold]assumptions[/]")
    for name, value, text in describe(plan.question.assumptions):
        to.print(f"  {name} {value:g}: {escape(text)}", highlight=False)


def print_published(to: Console, judgements: Sequence[Judgement], collection: published.Collection) -> None:
    """Print figures that differ from arithmetic, and those that agree only under a convention."""
    table = _table(("id", "source", "published", "kind", "ours", "difference", "why"), ())
    counts: dict[str, int] = {}
    for judgement in judgements:
        figure, kind = judgement.figure, published.kind_of(judgement)
        counts[kind] = counts.get(kind, 0) + 1
        if kind not in ("error", "convention"):
            continue
        ours = judgement.ours
        ratio = judgement.ratio
        difference = "" if ratio is None or kind != "error" else f"x {ratio:.3g}"
        why = figure.note
        if kind == "convention":
            why = "; ".join(collection.conventions[name] for name in figure.conventions)
        shown = "does not hold" if ours is False else "holds" if ours is True else "" if ours is None else f"{ours:.6g}"
        table.add_row(
            figure.id,
            figure.source,
            f"{_value(figure.value)} {figure.unit}".removesuffix(" -"),
            kind,
            shown,
            difference,
            escape(why),
        )
    to.print(table)
    to.print(
        f"{len(judgements)} figures: {counts.get('agrees', 0)} agree, {counts.get('convention', 0)} agree under "
        f"the convention that is named, {counts.get('error', 0)} do not hold, {counts.get('not checked', 0)} are "
        "nothing that arithmetic or the engines' sources decide"
    )


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _value(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(f"{each:g}" for each in value)
    return f"{value:g}" if isinstance(value, float) else escape(str(value))


def print_gpus(to: Console, gpus: Iterable[tuple[str, Gpu]]) -> None:
    table = _table(
        ("name", "title", "price"), ("memory GB", "TB/s", "TFLOP/s bf16", "fp8", "peer GB/s", "network GB/s")
    )
    for name, gpu in gpus:
        price = gpu.price()
        table.add_row(
            name,
            escape(gpu.title),
            "none known" if price is None else escape(price.text()),
            f"{gpu.memory_bytes / 1e9:.1f}",
            f"{gpu.memory_bytes_s / 1e12:g}",
            f"{gpu.flops.get('bfloat16', 0) / 1e12:g}",
            f"{gpu.flops['fp8'] / 1e12:g}" if "fp8" in gpu.flops else "-",
            f"{gpu.peer_bytes_s / 1e9:g}" if gpu.peer_bytes_s else "-",
            f"{gpu.network_bytes_s / 1e9:g}",
        )
    to.print(table)


def print_profiles(to: Console) -> None:
    for profile in profiles.PROFILES:
        to.print(f"\n[bold]{profile.name}[/]  {escape(profile.title)}")
        to.print(
            f"  context {profile.context_tokens}, prompt {profile.prompt}, answer {profile.output}, "
            f"TTFT {profile.ttft_s:g} s, TPOT {profile.tpot_s * 1e3:g} ms, "
            f"offload {'allowed' if profile.offload else 'barred'}",
            highlight=False,
        )
        for reason in profile.reasons:
            to.print(f"  {escape(reason.setting)}: {escape(reason.value)}: {escape(reason.why)}", highlight=False)


def print_rules(to: Console) -> None:
    for rule in rules.RULES:
        to.print(f"\n[bold]{rule.name}[/]  ({rule.severity}) {escape(rule.symptom)}", highlight=False)
        to.print(f"  cause: {escape(rule.cause)}\n  look at: {escape(rule.look)}", highlight=False)
        to.print(f"  action: {escape(rule.action)}\n  disrupts: {escape(rule.disrupts)}", highlight=False)


def print_settings(to: Console) -> None:
    table = _table(("what", "kvferry", "vLLM 0.32", "SGLang", "TensorRT-LLM", "llama.cpp", "note"), ())
    # Names are whole: they are copied. In a narrow terminal they are folded, the remark first.
    for column in table.columns:
        column.overflow = "fold"
    if not to.is_terminal:
        to.width = 2 * _WIDE_COLUMNS
        for column in table.columns[1:-1]:
            column.no_wrap = True
    for each in engine_settings.COUNTERPARTS:
        names = (each.kvferry, each.vllm, each.sglang, each.tensorrt_llm, each.llama_cpp)
        table.add_row(escape(each.meaning), *(escape(name) or "none" for name in names), escape(each.note))
    to.print(table)
    to.print("Names of other engines are not checked by a test: compare them with the release that you come from.")


def _table(texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in texts:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
