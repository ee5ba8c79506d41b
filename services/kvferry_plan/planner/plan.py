"""Ranks deployments that meet a demand, and says what binds and which change would gain most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvferry.errors import ConfigError, LocalError
from kvferry_plan.planner import kv_dtypes, layouts
from kvferry_plan.planner.emit import obstacles
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.models import WEIGHT_BYTES
from kvferry_plan.planner.question import Question
from kvferry_plan.planner.sizing import SMALLEST, Candidate, Miss, above, size

# In the order in which a message names them: what is nearest to a plan first.
_MISSES: Final = ("budget", "price", "GPUs", "TTFT", "TPOT", "KV pages", "GPU memory", "attention backend", "layout")
# What a smaller engine may miss although it holds the model, by the part that has to be faster or larger.
_OBJECTIVES: Final = {"TTFT": "prefill", "TPOT": "decode", "KV pages": "memory", "GPUs": "load"}


MAX_HELPING: Final = 4  # changes that are printed where nothing meets the demand
_SLACK: Final = 1.05
_TRIED_FACTOR: Final = 10.0  # a longer objective is no small change


class NoPlan(LocalError):
    """Nothing meets the demand; the message says by how much the nearest candidates miss it."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one thing, and the best plan with it. `saving` is the share of cost, or of GPUs, that it saves."""

    what: str
    question: Question
    candidate: Candidate
    saving: float

    @property
    def served(self) -> str:
        """Return a remark where vLLM alone would serve the plan with this change; else nothing."""
        return " by vLLM alone" if obstacles(self.candidate, self.question) else ""


@dataclass(frozen=True, slots=True)
class TierRoom:
    """Capacity of one tier of the deployment, and the time in which a mean prompt comes back from it."""

    name: str
    num_bytes: float
    num_tokens: float
    num_requests: float
    load_s: float | None  # None: it is there already


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidates, best first, of all legal layouts that meet the demand."""

    question: Question
    candidates: tuple[Candidate, ...]
    misses: tuple[Miss, ...]
    changes: tuple[Change, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    def tiers(self) -> Iterator[TierRoom]:
        """Yield device memory and the lower tiers of the best candidate."""
        best, question = self.best, self.question
        demand = question.demand
        tokens = math.ceil(demand.request_tokens)
        ranks = best.layout.tensor_parallel_size
        per_request = best.room.pool.bytes_of_sequence(tokens) * ranks
        device = best.room.num_pages_in_all * best.room.pool.block_bytes * ranks * best.num_decode
        sizes = {
            "device": (device, None),
            "cpu": (question.cpu_tier_bytes * best.num_nodes, False),
            "volume": (question.volume_tier_bytes * best.num_nodes, True),
        }
        for name, (num_bytes, from_volume) in sizes.items():
            if num_bytes:
                load_s = (
                    None if from_volume is None else best.engine.load_s(demand.prompt.mean, from_volume=from_volume)
                )
                requests = num_bytes / per_request
                yield TierRoom(name, num_bytes, requests * tokens, requests, load_s)


def make(question: Question) -> Plan:
    """Raises ConfigError for illegal sizes, and NoPlan where nothing meets the demand."""
    candidates, misses = _all(question)
    if not candidates:
        raise NoPlan(_no_plan(question, misses))
    return Plan(question, tuple(candidates), tuple(misses), tuple(_changes(question, candidates[0])))


def _all(question: Question) -> tuple[list[Candidate], list[Miss]]:
    candidates: list[Candidate] = []
    misses: list[Miss] = []
    modes = {"any": (False, True), "aggregated": (False,), "disaggregated": (True,)}[question.mode]
    illegal: list[ConfigError] = []
    tensor, pipeline = question.tensor_parallel_size, question.pipeline_parallel_size
    for name, gpu in question.gpus.items():
        try:
            legal = list(layouts.legal(question.model, gpu, tensor_parallel=tensor, pipeline_parallel=pipeline))
        except ConfigError as error:
            illegal.append(error)
            given = Layout(1 if tensor is None else tensor, 1 if pipeline is None else pipeline)
            misses.append(Miss(name, given, "layout", error.message, math.inf))
            continue
        for layout in legal:
            for disaggregated in modes:
                found = size(question, name, layout, disaggregated=disaggregated)
                if isinstance(found, Candidate):
                    candidates.append(found)
                else:
                    misses.append(found)
    if illegal and len(illegal) == len(question.gpus):
        raise illegal[0]
    candidates = [_with_what_binds(each, candidates, misses) for each in candidates]
    candidates.sort(key=_rank)
    misses.sort(key=lambda miss: miss.factor)
    return candidates, misses


def _with_what_binds(candidate: Candidate, candidates: list[Candidate], misses: list[Miss]) -> Candidate:
    # Where one engine does, its size is what costs: say what a smaller one that holds the model would miss.
    def is_smaller(other: Candidate | Miss) -> bool:
        return (
            other.gpu_name == candidate.gpu_name
            and other.disaggregated == candidate.disaggregated
            and other.layout.num_gpus < candidate.layout.num_gpus
        )

    if candidate.binds != SMALLEST:
        return candidate
    if smaller := [each for each in candidates if is_smaller(each)]:
        least = min(smaller, key=lambda each: each.num_gpus)
        if least.num_gpus <= candidate.num_gpus:
            return dataclasses.replace(candidate, binds="layout: smaller engines meet the demand too")
        said = f"{least.binds}; {least.num_gpus} GPUs would be needed with smaller engines, {least.layout.text()}"
        return dataclasses.replace(candidate, binds=said)
    missed = [miss for miss in misses if is_smaller(miss) and miss.what in _OBJECTIVES]
    if not missed:
        return candidate
    nearest = min(missed, key=lambda miss: miss.factor)
    by = "" if math.isinf(nearest.factor) else f" by {nearest.factor - 1:.1%}"
    return dataclasses.replace(
        candidate,
        binds=f"{_OBJECTIVES[nearest.what]}: one engine has room to spare, but the next smaller that holds the model, "
        f"{nearest.layout.text()}, misses {nearest.what}{by}",
    )


def _rank(candidate: Candidate) -> tuple[bool, float, int, int, int, bool]:
    # By cost; those without a price after all others, by GPUs. Ties: the simpler layout.
    cost = candidate.usd_per_hour
    layout = candidate.layout
    return (
        cost is None,
        cost or 0.0,
        candidate.num_gpus,
        layout.pipeline_parallel_size,
        layout.tensor_parallel_size,
        layout.expert_parallel,
    )


def _no_plan(question: Question, misses: list[Miss]) -> str:
    # Name the demand, the nearest candidate, and what helps. What misses an objective is nearer than what does not fit.
    if not misses:
        return "no layout is legal for this model on these GPUs"
    miss = min(misses, key=lambda each: (_MISSES.index(each.what), each.factor))
    by = "" if math.isinf(miss.factor) else f" ({above(miss.factor, 1.0)} times too much)"
    lines = [
        f"no layout meets the demand: {question.demand.text()}",
        f"  nearest   {miss.what}: {miss.gpu_name} {miss.layout.text()}: {miss.message}{by}",
    ]
    helping = [*_planned(_looser(question, miss)), *sorted(_planned(_variants(question)), key=_num_gpus)]
    lines += [
        f"  would do  {change.what}: {_costs(change.candidate)}{change.served}" for change in helping[:MAX_HELPING]
    ]
    if not helping:
        lines.append(
            "  none of the changes that were tried meets it alone: objectives twice as long, shared prompts, ..."
        )
    return "\n".join(lines)


def _planned(variants: Iterator[tuple[str, Question]]) -> Iterator[Change]:
    for what, changed in variants:
        candidates, _ = _all(changed)
        if candidates:
            yield Change(what, changed, candidates[0], 0.0)


def _num_gpus(change: Change) -> int:
    return change.candidate.num_gpus


def _costs(candidate: Candidate) -> str:
    cost = candidate.usd_per_hour
    return f"{candidate.num_gpus} GPUs ({candidate.gpu_name} {candidate.layout.text()})" + (
        "" if cost is None else f", {cost:.2f} USD/h"
    )


def _looser(question: Question, miss: Miss) -> Iterator[tuple[str, Question]]:
    # An objective as long as the nearest candidate needs, and a little more, so that a few engines keep it.
    demand = question.demand
    if miss.what in ("TTFT", "TPOT") and miss.factor < _TRIED_FACTOR:
        seconds = {"TTFT": demand.ttft_s, "TPOT": demand.tpot_s}[miss.what] * miss.factor * _SLACK
        unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
        rounded = float(f"{math.ceil(seconds / unit) * unit:.3g}")  # up, to two digits
        if miss.what == "TTFT":
            changed = dataclasses.replace(demand, ttft_s=rounded, ttft_is_default=False)
        else:
            changed = dataclasses.replace(demand, tpot_s=rounded)
        yield f"--{miss.what.lower()} {rounded:g}", question.with_changes(demand=changed)


def _changes(question: Question, best: Candidate) -> list[Change]:
    # Return changes that save something, best first: each is planned anew, with everything else as it is.
    found = []
    for what, changed in _variants(question.with_changes(gpus={best.gpu_name: best.gpu})):
        candidates, _ = _all(changed)
        if candidates and (saving := _saving(best, candidates[0])) > 0:
            found.append(Change(what, changed, candidates[0], saving))
    found.sort(key=lambda change: -change.saving)
    return found


def _saving(before: Candidate, after: Candidate) -> float:
    old, new = before.usd_per_hour, after.usd_per_hour
    if old is not None and new is not None:
        return 1 - new / old
    return 1 - after.num_gpus / before.num_gpus


def _variants(question: Question) -> Iterator[tuple[str, Question]]:
    # Changes of one thing each.
    demand = question.demand
    for dtype in ("fp8", "nvfp4"):
        if not dtype.startswith(question.kv_dtype[:3]) and _dtype_fits(question, dtype):
            yield f"KV pages in {dtype} instead of {question.kv_dtype}", question.with_changes(kv_cache_dtype=dtype)
    if WEIGHT_BYTES[question.model.weights] > 1 and not all(gpu.is_cpu for gpu in question.gpus.values()):
        model = dataclasses.replace(question.model, weights="fp8")
        yield f"weights in fp8 instead of {question.model.weights}", question.with_changes(model=model)
    if question.gpu_memory_utilization < 0.95:
        yield "gpu_memory_utilization 0.95", question.with_changes(gpu_memory_utilization=0.95)
    if demand.prefix_share + demand.restored_share < 0.45:
        shared = dataclasses.replace(demand, prefix_share=demand.prefix_share + 0.5)
        yield "half of each prompt shared by all requests", question.with_changes(demand=shared)
    yield (
        "TPOT objective twice as long",
        question.with_changes(demand=dataclasses.replace(demand, tpot_s=2 * demand.tpot_s)),
    )
    yield (
        "TTFT objective twice as long",
        question.with_changes(demand=dataclasses.replace(demand, ttft_s=2 * demand.ttft_s)),
    )


def _dtype_fits(question: Question, dtype: str) -> bool:
    changed = question.with_changes(kv_cache_dtype=dtype)
    weights = question.model.weights
    if not any(kv_dtypes.support(dtype, gpu, weights=weights).runs for gpu in question.gpus.values()):
        return False
    try:
        changed.model.geometry.bytes_per_token(dtype)
    except ConfigError:
        return False
    return True
