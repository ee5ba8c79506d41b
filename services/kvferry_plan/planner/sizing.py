"""Sizes one candidate: GPUs of one kind in one layout, prefill and decode apart or together."""

# Decode engines: as many as the rate needs with the largest batch that both the KV pages and the TPOT objective allow
# (Little's law: requests in an engine = their rate x their stay). Prefill engines: as many as keep the wait of a queue
# M/G/c, the prefill of the longest prompts, the KV transfer and the first step within the TTFT objective.

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvferry_plan.planner import kv_dtypes
from kvferry_plan.planner.gpu_catalogue import Gpu, Price
from kvferry_plan.planner.layouts import Layout
from kvferry_plan.planner.memory import KvRoom, Memory, kv_room, memory
from kvferry_plan.planner.models import head_dim
from kvferry_plan.planner.question import Question
from kvferry_plan.planner.queueing import wait_quantile_s
from kvferry_plan.planner.roofline import Engine, Roof

MAX_ENGINES: Final = 4096  # of one role
_CAPACITY_STEPS: Final = 12  # of a bisection, to 0.03 % of the largest rate
SMALLEST: Final = "weights: the smallest engine that holds the model has room to spare"


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a candidate cannot do it. `factor`: by how much it misses, above 1; infinite where no amount would do."""

    gpu_name: str
    layout: Layout
    what: str  # what is missing: attention backend, GPU memory, KV pages, TPOT, TTFT, GPUs, budget, price, layout
    message: str
    factor: float
    disaggregated: bool = False


@dataclass(frozen=True, slots=True)
class Ttft:
    """Seconds of the time to first token, at the percentile of the objective."""

    routing_s: float
    wait_s: float
    load_s: float
    prefill_s: float
    transfer_s: float
    first_step_s: float

    @property
    def total_s(self) -> float:
        return self.routing_s + self.wait_s + self.load_s + self.prefill_s + self.transfer_s + self.first_step_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A deployment that meets the demand. Without disaggregation all engines count as decode engines."""

    gpu_name: str
    gpu: Gpu
    layout: Layout
    disaggregated: bool
    engine: Engine
    memory: Memory
    room: KvRoom
    num_prefill: int
    num_decode: int
    max_batch_of_pages: int  # requests that the KV pages of one engine hold
    max_batch_of_tpot: int
    batch: float  # requests in one decode engine on the average
    prefill: Roof  # of the mean prompt
    decode: Roof  # of the mean batch
    ttft: Ttft
    tpot_s: float
    prefill_use: float  # share of their time that prefill engines are busy
    prefill_service_s: float  # of the mean prompt, with the decode steps between its chunks
    transfer_bytes_s: float  # that one decode GPU receives
    restore_bytes_s: float  # that all nodes together read from the lower tier
    binds: str
    backends: tuple[str, ...]
    warnings: tuple[str, ...]
    price: Price | None
    request_tokens: float

    @property
    def num_gpus(self) -> int:
        return (self.num_prefill + self.num_decode) * self.layout.num_gpus

    @property
    def ttft_mean_s(self) -> float:
        """Seconds to the first token of a mean prompt that does not wait."""
        return self.ttft.routing_s + self.prefill.total_s + self.ttft.transfer_s + self.ttft.first_step_s

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.num_gpus / self.gpu.gpus_per_node)

    @property
    def kv_use(self) -> float:
        """Share of a decode engine's KV pages that the mean load takes."""
        return self.batch * self.room.pages_of(self.request_tokens) / self.room.num_pages_in_all

    @property
    def usd_per_hour(self) -> float | None:
        return None if self.price is None else self.price.usd_per_hour * self.num_gpus

    def usd_per_million_tokens(self, rate_per_s: float, tokens_of_a_request: float) -> float | None:
        cost = self.usd_per_hour
        return None if cost is None else cost / (rate_per_s * tokens_of_a_request * 3600) * 1e6


@dataclass(frozen=True, slots=True)
class _Base:
    # What prefill and decode of a candidate share.

    question: Question
    gpu_name: str
    gpu: Gpu
    engine: Engine
    memory: Memory
    room: KvRoom
    max_batch_of_pages: int
    max_batch_of_tpot: int
    backends: tuple[str, ...]
    warnings: tuple[str, ...]
    prefill: Roof  # of the mean prompt
    alone: Ttft  # of the longest prompts before their first step, with a transfer

    @property
    def context_tokens(self) -> float:
        demand = self.question.demand
        return demand.prompt.mean + demand.output.mean / 2

    def miss(self, what: str, message: str, factor: float) -> Miss:
        return Miss(self.gpu_name, self.engine.layout, what, message, factor)


def size(question: Question, gpu_name: str, layout: Layout, *, disaggregated: bool) -> Candidate | Miss:
    """Return the smallest deployment of this kind that meets the demand, or what it misses."""
    found = _sized(question, gpu_name, layout, disaggregated=disaggregated)
    return dataclasses.replace(found, disaggregated=disaggregated) if isinstance(found, Miss) else found


def _sized(question: Question, gpu_name: str, layout: Layout, *, disaggregated: bool) -> Candidate | Miss:
    base = _base(question, gpu_name, layout)
    if isinstance(base, Miss):
        return base
    found = _disaggregated(base) if disaggregated else _aggregated(base)
    if isinstance(found, Miss):
        return found
    if found.num_gpus > question.max_gpus:
        return base.miss(
            "GPUs",
            f"{found.num_gpus} GPUs are needed; --max-gpus is {question.max_gpus}",
            found.num_gpus / question.max_gpus,
        )
    if question.budget_usd_per_hour is not None:
        cost = found.usd_per_hour
        if cost is None:
            return base.miss("price", f"{gpu_name}: no price known: give --price or a catalogue file", math.inf)
        if cost > question.budget_usd_per_hour:
            return base.miss(
                "budget",
                f"{cost:.2f} USD/h are needed; --budget is {question.budget_usd_per_hour:g}",
                cost / question.budget_usd_per_hour,
            )
    return found


def _base(question: Question, gpu_name: str, layout: Layout) -> _Base | Miss:
    model, gpu, assume, demand = question.model, question.gpus[gpu_name], question.assumptions, question.demand
    supported = kv_dtypes.support(question.kv_dtype, gpu, weights=model.weights, head_dim=head_dim(model.geometry))
    if not supported.runs:
        return Miss(gpu_name, layout, "attention backend", supported.refusal, math.inf)
    parts = memory(
        model,
        gpu,
        layout,
        assume,
        gpu_memory_utilization=question.gpu_memory_utilization,
        max_num_batched_tokens=question.max_num_batched_tokens,
        kv_cache_bytes=question.kv_cache_bytes,
    )
    if parts.kv_bytes <= 0:
        needed = parts.usable_bytes - parts.kv_bytes
        message = (
            f"weights, activations and the engine take {needed / 1e9:.1f} GB of each GPU; "
            f"{parts.usable_bytes / 1e9:.1f} GB are usable"
        )
        return Miss(gpu_name, layout, "GPU memory", message, needed / parts.usable_bytes)
    if parts.kv_bytes > parts.left_bytes:
        left = max(0.0, parts.left_bytes)
        message = (
            f"--kv-cache-gib asks for {parts.kv_bytes / 1e9:.1f} GB of each GPU; weights, activations and the engine "
            f"leave {left / 1e9:.1f} GB"
        )
        return Miss(gpu_name, layout, "GPU memory", message, parts.kv_bytes / left if left else math.inf)
    room = kv_room(model, layout, parts.kv_bytes, question.kv_dtype, question.block_size, assume)
    longest = room.pages_of(demand.context_tokens)
    pages = room.max_requests(demand)
    if longest > room.num_pages_in_all or not pages:
        needed_pages = max(longest, math.ceil(room.pages_of(demand.request_tokens) / assume.kv_limit))
        there = room.num_pages_in_all
        message = f"one request takes {needed_pages} KV pages of {question.block_size} tokens; an engine has {there}"
        return Miss(gpu_name, layout, "KV pages", message, needed_pages / max(1, there))
    engine = Engine(model, gpu, layout, question.kv_dtype, assume)
    context = demand.prompt.mean + demand.output.mean / 2
    within = engine.max_requests_within(demand.tpot_s, context, question.max_num_seqs)
    if not within:
        alone_s = engine.decode_step(1, context).total_s
        message = f"a decode step of one request takes {alone_s * 1e3:.1f} ms; --tpot is {demand.tpot_s * 1e3:g} ms"
        return Miss(gpu_name, layout, "TPOT", message, alone_s / demand.tpot_s)
    warnings = (supported.warning,) if supported.warning else ()
    computed = demand.computed_tokens(demand.prompt.mean)
    prefill = engine.prefill(computed, demand.prompt.mean - computed)
    alone = _ttft_alone(question, engine)
    return _Base(
        question, gpu_name, gpu, engine, parts, room, pages, within, supported.backends, warnings, prefill, alone
    )


def _ttft_alone(question: Question, engine: Engine) -> Ttft:
    demand = question.demand
    longest = demand.prompt.p99
    computed, restored = demand.computed_tokens(longest), demand.restored_tokens(longest)
    return Ttft(
        routing_s=question.assumptions.routing_s,
        wait_s=0.0,
        load_s=engine.load_s(restored, from_volume=question.volume_tier_bytes > 0) if restored else 0.0,
        prefill_s=engine.prefill(computed, longest - computed).total_s,
        transfer_s=engine.transfer_s(longest),
        first_step_s=0.0,
    )


def _disaggregated(base: _Base) -> Candidate | Miss:
    question, engine, demand = base.question, base.engine, base.question.demand
    rate, batch_limit = demand.rate_per_s, min(base.max_batch_of_pages, base.max_batch_of_tpot)
    step_s = engine.decode_step(batch_limit, base.context_tokens).total_s
    by_batch = math.ceil(rate * demand.output.mean * step_s / batch_limit - 1e-9)
    moved = engine.kv_bytes_of_rank(demand.prompt.mean)
    by_link = math.ceil(rate * moved / (base.gpu.network_bytes_s * question.assumptions.network_efficiency) - 1e-9)
    num_decode = max(1, by_batch, by_link)
    if num_decode > MAX_ENGINES:
        return base.miss("GPUs", f"{num_decode} decode engines; {MAX_ENGINES} is the limit", num_decode / MAX_ENGINES)
    batch = _settled_batch(base, rate / num_decode)
    first_step_s = engine.decode_step(batch, base.context_tokens).total_s

    def ttft(num_prefill: int) -> Ttft:
        return _ttft(base, rate, num_prefill, first_step_s=first_step_s, transfers=True, delay_s=0.0)

    service_s = base.prefill.total_s
    servers = engine.layout.pipeline_parallel_size
    least = max(1, math.ceil(rate * service_s / (question.assumptions.utilization_limit * servers) - 1e-9))
    num_prefill = _smallest(lambda n: ttft(n).total_s <= demand.ttft_s, least)
    if num_prefill is None:
        return _ttft_miss(base, ttft(MAX_ENGINES))
    decode = engine.decode_step(batch, base.context_tokens)
    prefill = base.prefill
    if num_prefill == num_decode == 1:
        binds = SMALLEST
    elif num_prefill > num_decode:
        binds = f"prefill: {'TTFT' if num_prefill > least else prefill.binds}"
    elif by_link > max(1, by_batch):
        binds = "KV transfer: network"
    else:
        binds = _binds_decode(base)
    return _candidate(
        base, disaggregated=True, num_prefill=num_prefill, num_decode=num_decode, batch=batch, prefill=prefill,
        decode=decode, ttft=ttft(num_prefill), tpot_s=decode.total_s, binds=binds,
        prefill_use=rate * service_s / (num_prefill * servers), transfer_bytes_s=rate / num_decode * moved,
        prefill_service_s=service_s,
    )  # fmt: skip


def _aggregated(base: _Base) -> Candidate | Miss:
    question, engine, demand = base.question, base.engine, base.question.demand
    service_s = base.prefill.total_s
    chunks = math.ceil(demand.computed_tokens(demand.prompt.p99) / question.max_num_batched_tokens)
    limit = min(base.max_batch_of_pages, question.max_num_seqs)

    @functools.cache
    def state(num_engines: float) -> tuple[float, float, float, Ttft]:
        """Share of prefill, batch, TPOT and TTFT of one of `num_engines` engines."""
        rate = demand.rate_per_s / num_engines
        share = rate * service_s / engine.layout.pipeline_parallel_size
        if share >= question.assumptions.utilization_limit:
            return share, math.inf, math.inf, Ttft(0, math.inf, 0, 0, 0, 0)
        batch = _settled_batch(base, rate / (1 - share))
        step_s = engine.decode_step(batch, base.context_tokens).total_s
        ttft = _ttft(base, rate, 1, first_step_s=step_s, transfers=False, delay_s=chunks * step_s)
        return share, batch, step_s / (1 - share), ttft

    def keeps_up(num_engines: int) -> bool:
        _, batch, tpot_s, _ = state(num_engines)
        return batch <= limit and tpot_s <= demand.tpot_s

    def fits(num_engines: int) -> bool:
        return keeps_up(num_engines) and state(num_engines)[3].total_s <= demand.ttft_s

    def keeps_ttft_only_idle(num_engines: int) -> bool:
        """Return whether several engines keep the TTFT only below `least_load` of what one could serve otherwise."""
        least = question.assumptions.least_load
        # One engine has no smaller load to be compared with; prefill busy for more than the limit is load enough.
        if num_engines == 1 or state(num_engines)[0] >= least:
            return False
        return idlest_ttft().total_s > demand.ttft_s

    def idlest_ttft() -> Ttft:
        """Return the TTFT of one engine with `least_load` of what KV pages, TPOT and prefill let it serve."""
        low, high = 0.0, question.assumptions.utilization_limit * engine.layout.pipeline_parallel_size / service_s
        for _ in range(_CAPACITY_STEPS):
            rate = (low + high) / 2
            _, batch, tpot_s, _ = state(demand.rate_per_s / rate)
            low, high = (rate, high) if batch <= limit and tpot_s <= demand.tpot_s else (low, rate)
        return state(demand.rate_per_s / (question.assumptions.least_load * high))[3]

    num_engines = _smallest(fits, 1)
    if num_engines is None:
        return _ttft_miss(base, state(MAX_ENGINES)[3])
    if keeps_ttft_only_idle(num_engines):
        return _idle_miss(base, num_engines, state(num_engines)[3], idlest_ttft())
    share, batch, tpot_s, ttft = state(num_engines)
    decode = engine.decode_step(batch, base.context_tokens)
    prefill = base.prefill
    binds = f"prefill: {prefill.binds}" if share > 0.5 else _binds_decode(base)
    if num_engines == 1:
        binds = SMALLEST
    elif keeps_up(num_engines - 1):
        binds = "prefill: TTFT"
    return _candidate(
        base, disaggregated=False, num_prefill=0, num_decode=num_engines, batch=batch, prefill=prefill, decode=decode,
        ttft=ttft, tpot_s=tpot_s, binds=binds, prefill_use=share, transfer_bytes_s=0.0,
        prefill_service_s=service_s + chunks * decode.total_s,
    )  # fmt: skip


def _candidate(
    base: _Base, *, disaggregated: bool, num_prefill: int, num_decode: int, batch: float, prefill: Roof, decode: Roof,
    ttft: Ttft, tpot_s: float, binds: str, prefill_use: float, prefill_service_s: float, transfer_bytes_s: float,
) -> Candidate:  # fmt: skip
    demand, engine = base.question.demand, base.engine
    restored = engine.kv_bytes_of_rank(demand.restored_tokens(demand.prompt.mean)) * engine.layout.num_gpus
    restore_bytes_s = demand.rate_per_s * restored
    num_nodes = math.ceil((num_prefill + num_decode) * engine.layout.num_gpus / base.gpu.gpus_per_node)
    if base.question.volume_tier_bytes and restore_bytes_s > num_nodes * base.question.assumptions.volume_bytes_s:
        binds = "restored prefixes: NVMe"
    return Candidate(
        gpu_name=base.gpu_name, gpu=base.gpu, layout=engine.layout, disaggregated=disaggregated, engine=engine,
        memory=base.memory, room=base.room, num_prefill=num_prefill, num_decode=num_decode,
        max_batch_of_pages=base.max_batch_of_pages, max_batch_of_tpot=base.max_batch_of_tpot, batch=batch,
        prefill=prefill, decode=decode, ttft=ttft, tpot_s=tpot_s, prefill_use=prefill_use,
        prefill_service_s=prefill_service_s, transfer_bytes_s=transfer_bytes_s, restore_bytes_s=restore_bytes_s,
        binds=binds,
        backends=base.backends, warnings=base.warnings, price=base.gpu.price(),
        request_tokens=demand.request_tokens,
    )  # fmt: skip


def _settled_batch(base: _Base, rate_per_s: float) -> float:
    # Return b with b = rate x answer x step(b). The step grows by less than the batch, so the iteration settles.
    demand, batch = base.question.demand, 1.0
    for _ in range(64):
        step_s = base.engine.decode_step(batch, base.context_tokens).total_s
        after = max(1e-9, rate_per_s * demand.output.mean * step_s)
        if after > 1e7:
            return math.inf
        if math.isclose(after, batch, rel_tol=1e-6):
            break
        batch = after
    return batch


def _ttft(
    base: _Base, rate_per_s: float, num_servers: int, *, first_step_s: float, transfers: bool, delay_s: float
) -> Ttft:
    servers, assume = num_servers * base.engine.layout.pipeline_parallel_size, base.question.assumptions
    service_s, cv2 = base.prefill.total_s + delay_s, base.question.demand.prompt.cv2
    alone = base.alone
    return Ttft(
        routing_s=alone.routing_s,
        wait_s=wait_quantile_s(servers, rate_per_s, service_s, cv2, assume.ttft_percentile),
        load_s=alone.load_s,
        prefill_s=alone.prefill_s + delay_s,
        transfer_s=alone.transfer_s if transfers else 0.0,
        first_step_s=first_step_s,
    )


def _ttft_miss(base: _Base, best: Ttft) -> Miss:
    goal_s = base.question.demand.ttft_s
    # The time is not finite where even the limit of engines is overloaded.
    if best.total_s <= goal_s or not math.isfinite(best.total_s):
        return base.miss("GPUs", f"more than {MAX_ENGINES} engines of a role would be needed", math.inf)
    parts = f"{best.prefill_s:.3f} s of prefill, {best.transfer_s:.3f} s of KV transfer"
    found = above(best.total_s, goal_s)
    message = f"TTFT of {found} s with any number of engines ({parts}); --ttft is {goal_s:g} s"
    return base.miss("TTFT", message, best.total_s / goal_s)


def _idle_miss(base: _Base, num_engines: int, kept: Ttft, loaded: Ttft) -> Miss:
    goal_s, least = base.question.demand.ttft_s, base.question.assumptions.least_load
    message = (
        f"TTFT of {above(loaded.total_s, goal_s)} s with {least:.0%} of the load that an engine could serve; --ttft "
        f"is {goal_s:g} s, which only {num_engines} nearly idle engines keep (an idle one has "
        f"{kept.total_s - kept.wait_s:.3g} s)"
    )
    return base.miss("TTFT", message, loaded.total_s / goal_s)


def above(value: float, goal: float) -> str:
    """Return a value with as many digits as show that it is above the goal, two behind the point or more."""
    shown = (f"{value:.{digits}f}" for digits in range(2, 7))
    return next((text for text in shown if float(text) > goal), f"{value:.9g}")


def _binds_decode(base: _Base) -> str:
    # Return what keeps the decode batch from growing.
    if base.max_batch_of_pages < base.max_batch_of_tpot:
        return "decode: KV pages"
    if base.max_batch_of_tpot >= base.question.max_num_seqs:
        return "decode: max_num_seqs"
    return f"decode: {base.engine.decode_step(base.max_batch_of_tpot, base.context_tokens).binds}"


def _smallest(fits: Callable[[int], bool], least: int) -> int | None:
    # Return the smallest number from `least` on that fits, if larger ones fit too; None above the limit.
    if least > MAX_ENGINES or not fits(MAX_ENGINES):
        return None
    low, high = least - 1, MAX_ENGINES
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle
    return high
