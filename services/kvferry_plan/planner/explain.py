"""Each number of a plan with its formula and the numbers in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvferry_plan.planner.models import WEIGHT_BYTES
from kvferry_plan.planner.plan import Plan
from kvferry_plan.planner.queueing import erlang_c


@dataclass(frozen=True, slots=True)
class Explained:
    """A number: `formula` in names, `numbers` the same with values."""

    name: str
    value: str
    formula: str
    numbers: str


def explain(plan: Plan) -> Iterator[Explained]:
    """Yield the numbers of the best candidate, in the order in which they follow from each other."""
    yield from _memory(plan)
    yield from _decode(plan)
    yield from _prefill(plan)
    yield from _ttft(plan)
    yield from _cost(plan)


def _memory(plan: Plan) -> Iterator[Explained]:
    question, best = plan.question, plan.best
    model, geometry, layout, assume = question.model, question.model.geometry, best.layout, question.assumptions
    parts = best.memory
    per_token = geometry.bytes_per_token(question.kv_dtype)
    yield Explained(
        "KV bytes of a token",
        f"{per_token:,} B",
        "sum over layers of KV heads x (K + V) bytes of a head, latents once, scales included",
        f"{geometry.name}, {question.kv_dtype}; {geometry.lasting_bytes_per_token(question.kv_dtype):,} B once all "
        "windows are full",
    )
    per_parameter = model.bytes_per_parameter(assume)
    yield Explained(
        "weights of a GPU",
        _gb(parts.weight_bytes),
        "parameters x bytes of a parameter / (TP x PP); a share of a quantized model stays in bfloat16",
        f"{model.num_parameters:,} x {per_parameter:g} ({model.weights}: {WEIGHT_BYTES[model.weights]:g}) / "
        f"{layout.num_gpus}",
    )
    yield Explained(
        "activations of a GPU",
        _gb(parts.activation_bytes),
        "activation_factor x hidden size x 2 B x max_num_batched_tokens",
        f"{assume.activation_factor:g} x {geometry.hidden_size} x 2 x {question.max_num_batched_tokens}",
    )
    yield Explained(
        "KV pages of a GPU",
        _gb(parts.kv_bytes),
        "memory x gpu_memory_utilization - weights - activations - engine",
        f"{_gb(parts.total_bytes)} x {question.gpu_memory_utilization:g} - {_gb(parts.weight_bytes)} - "
        f"{_gb(parts.activation_bytes)} - {_gb(parts.engine_bytes)}",
    )
    room = best.room
    yield Explained(
        "KV pages of an engine",
        f"{room.num_pages_in_all:,} pages",
        "KV bytes x PP / bytes of a page on one rank, less one that vLLM keeps",
        f"{_gb(parts.kv_bytes)} x {layout.pipeline_parallel_size} / {room.pool.block_bytes:,} B, pages of "
        f"{room.pool.block_size} tokens",
    )
    demand = question.demand
    yield Explained(
        "requests that pages hold",
        f"{best.max_batch_of_pages:,}",
        "n with n x pages of a mean request + 2.33 x deviation x sqrt(n) = pages x kv_limit, shared pages once",
        f"{room.pages_of(demand.request_tokens)} pages a request of {demand.request_tokens:.0f} tokens, "
        f"{room.num_pages:,} pages at kv_limit {assume.kv_limit:g}",
    )


def _decode(plan: Plan) -> Iterator[Explained]:
    question, best, demand = plan.question, plan.best, plan.question.demand
    assume, model, tensor = question.assumptions, question.model, best.layout.tensor_parallel_size
    context = demand.prompt.mean + demand.output.mean / 2
    batch = max(1.0, best.batch / best.layout.pipeline_parallel_size)
    weights = model.touched_bytes(batch, assume) / tensor
    kv = batch * model.kv_read_bytes(context, question.kv_dtype, tensor)
    experts = f", {model.touched_share(batch):.0%} of the experts" if model.is_mixture else ""
    yield Explained(
        "decode step",
        _ms(best.decode.total_s),
        "max(compute, memory) + links + step_overhead_s",
        f"max({_ms(best.decode.compute_s)}, {_ms(best.decode.memory_s)}) + {_ms(best.decode.link_s)} + "
        f"{_ms(best.decode.overhead_s)}",
    )
    yield Explained(
        "its memory part",
        _ms(best.decode.memory_s),
        "(touched weights + batch x KV of a request) / (bandwidth x memory_efficiency), of one GPU",
        f"({_gb(weights)}{experts} + {_gb(kv)}) / ({best.gpu.memory_bytes_s / 1e12:g} TB/s x "
        f"{assume.memory_efficiency:g}), batch {batch:.1f}, {context:.0f} tokens",
    )
    yield Explained(
        "requests within the TPOT objective",
        f"{best.max_batch_of_tpot:,}",
        "largest batch whose step takes at most the objective",
        f"{demand.tpot_s * 1e3:g} ms, at most {question.max_num_seqs}",
    )
    yield Explained(
        "arrivals",
        f"{demand.rate_per_s:.3g} requests/s",
        "users / (TTFT + (answer - 1) x TPOT + think time), at the objectives (Little's law)",
        f"{demand.users:.4g} / ({demand.ttft_s:g} + {demand.output.mean - 1:.0f} x {demand.tpot_s:g} + "
        f"{demand.think_s:g})",
    )
    yield Explained(
        "decode engines",
        str(best.num_decode),
        "arrivals x answer x step(largest batch) / largest batch, rounded up; not fewer than the network needs",
        f"{demand.rate_per_s:.3g} x {demand.output.mean:.0f} tokens, batch {best.batch:.1f} in each engine then",
    )


def _prefill(plan: Plan) -> Iterator[Explained]:
    question, best, demand = plan.question, plan.best, plan.question.demand
    assume, model = question.assumptions, question.model
    engine, tensor = best.engine, best.layout.tensor_parallel_size
    rate, dtype = best.gpu.flops_of(model.compute_dtype())
    computed = round(demand.computed_tokens(demand.prompt.mean))
    cached = round(demand.prompt.mean) - computed
    weights_s = engine.weights_s(computed, assume.prefill_mfu)
    attention_s = engine.attention_s(computed, cached, assume.prefill_mfu)
    yield Explained(
        "prefill of the mean prompt",
        _ms(best.prefill.total_s),
        "max(products with weights + attention, reading the weights) + links + prefill_overhead_s",
        f"max({_ms(weights_s)} + {_ms(attention_s)}, {_ms(best.prefill.memory_s)}) + {_ms(best.prefill.link_s)} + "
        f"{_ms(best.prefill.overhead_s)}",
    )
    yield Explained(
        "its products with weights",
        _ms(weights_s),
        "2 x active parameters x tokens / (FLOP/s by the weights' type x TP x prefill_mfu)",
        f"2 x {model.num_active_parameters:,} x {computed:,} / ({rate / 1e12:g} TFLOP/s in {dtype} x {tensor} x "
        f"{assume.prefill_mfu:g})",
    )
    attention_dtype = best.gpu.flops_of(model.geometry.dtype)[1]
    yield Explained(
        "its attention",
        _ms(attention_s),
        "FLOPs of Q x K and P x V over all pairs of tokens / (FLOP/s by the model's own type x TP x prefill_mfu)",
        f"{model.attention_flops(computed, cached) / 1e12:.4g} TFLOP / ({engine.attention_flops_s / 1e12:g} TFLOP/s "
        f"in {attention_dtype} x {tensor} x {assume.prefill_mfu:g})",
    )
    yield Explained(
        "its links",
        _ms(best.prefill.link_s),
        "2 all-reduces a layer x (2 (TP - 1) / TP x tokens x hidden size x 2 B / (bytes/s between peers x "
        "peer_efficiency) + peer_latency_s), and activations between pipeline stages",
        _links(plan, computed),
    )


def _ttft(plan: Plan) -> Iterator[Explained]:
    best, demand, assume = plan.best, plan.question.demand, plan.question.assumptions
    ttft = best.ttft
    yield Explained(
        "wait for prefill",
        _ms(ttft.wait_s),
        "M/G/c: service time / (engines - busy ones) x (1 + cv2) / 2 x ln(share that waits / (1 - ttft_percentile)); "
        "0 where fewer wait",
        _waiting(plan),
    )
    yield Explained(
        "prefill of the p99 prompt",
        _ms(ttft.prefill_s),
        "as of the mean prompt"
        if best.disaggregated
        else "as of the mean prompt, and a decode step of the others between its chunks of max_num_batched_tokens",
        f"{demand.computed_tokens(demand.prompt.p99):,.0f} tokens computed of {demand.prompt.p99:,.0f}",
    )
    yield Explained(
        f"TTFT, {assume.ttft_percentile:.0%} of requests",
        _ms(ttft.total_s),
        "routing + wait (M/G/c) + load + prefill of the p99 prompt + KV transfer + first decode step",
        " + ".join(
            _ms(part)
            for part in (
                ttft.routing_s, ttft.wait_s, ttft.load_s, ttft.prefill_s, ttft.transfer_s, ttft.first_step_s,
            )
        ),
    )  # fmt: skip
    if best.disaggregated:
        yield Explained(
            "prefill engines",
            str(best.num_prefill),
            "smallest number that keeps the TTFT, and its use below utilization_limit",
            f"use {best.prefill_use:.0%} of {assume.utilization_limit:.0%}",
        )
        yield Explained(
            "KV transfer to one decode GPU",
            f"{best.transfer_bytes_s / 1e9:.3g} GB/s",
            "arrivals x KV of the mean prompt on one rank / decode engines",
            f"of {best.gpu.network_bytes_s / 1e9:g} GB/s x {assume.network_efficiency:g}",
        )


def _links(plan: Plan, tokens: int) -> str:
    best, assume, geometry = plan.best, plan.question.assumptions, plan.question.model.geometry
    tensor, pipeline = best.layout.tensor_parallel_size, best.layout.pipeline_parallel_size
    said = []
    if tensor > 1:
        rate = best.gpu.peer_bytes_s or best.gpu.host_bytes_s
        said.append(
            f"2 x {geometry.num_layers} x (2 x {tensor - 1}/{tensor} x {tokens:,} x {geometry.hidden_size} x 2 B / "
            f"({rate / 1e9:g} GB/s x {assume.peer_efficiency:g}) + {_ms(assume.peer_latency_s)})"
        )
    if pipeline > 1:
        said.append(
            f"{pipeline - 1} x ({tokens:,} x {geometry.hidden_size} x 2 B / ({best.gpu.network_bytes_s / 1e9:g} GB/s x "
            f"{assume.network_efficiency:g}) + {_ms(assume.peer_latency_s)})"
        )
    return " + ".join(said) or "one GPU"


def _waiting(plan: Plan) -> str:
    best, demand, assume = plan.best, plan.question.demand, plan.question.assumptions
    service_s = best.prefill_service_s
    servers, rate, of = best.layout.pipeline_parallel_size, demand.rate_per_s, "all prefill engines"
    if best.disaggregated:
        servers *= best.num_prefill
    else:
        rate, of = rate / best.num_decode, "one engine"
    busy = rate * service_s
    return (
        f"{of}: service time {_ms(service_s)}, {servers} x {busy / servers:.1%} busy at {rate:.3g} requests/s, cv2 "
        f"{demand.prompt.cv2:.3g}; {erlang_c(servers, busy):.2%} wait, {1 - assume.ttft_percentile:.2%} may for longer"
    )


def _cost(plan: Plan) -> Iterator[Explained]:
    best, demand = plan.best, plan.question.demand
    cost = best.usd_per_hour
    if cost is None or best.price is None:
        return
    yield Explained("cost", f"{cost:.2f} USD/h", "GPUs x price", f"{best.num_gpus} x {best.price.text()}")
    per_million = best.usd_per_million_tokens(demand.rate_per_s, demand.request_tokens)
    yield Explained(
        "cost of a million tokens",
        f"{per_million:.3g} USD",
        "USD/h / (arrivals x (prompt + answer) x 3600) x 1e6, at this load",
        f"{cost:.2f} / ({demand.rate_per_s:.3g} x {demand.request_tokens:.0f} x 3600) x 1e6",
    )


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms" if seconds < 1 else f"{seconds:.4g} s"
