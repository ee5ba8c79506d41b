"""A plan as plain values for JSON. Bytes, seconds, US dollars; the units stand in the names."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from kvferry_plan.planner import emit, rules
from kvferry_plan.planner.assumptions import describe
from kvferry_plan.planner.memory import Memory
from kvferry_plan.planner.plan import Change, Plan
from kvferry_plan.planner.question import Question
from kvferry_plan.planner.roofline import Roof
from kvferry_plan.planner.sizing import Candidate

MAX_LAYOUTS: Final = 64  # that an answer lists


def as_json(plan: Plan) -> dict[str, Any]:
    question, best = plan.question, plan.best
    demand, geometry = question.demand, question.model.geometry
    return {
        "model": geometry.name,
        "weights": question.model.weights,
        "num_parameters": question.model.num_parameters,
        "num_active_parameters": question.model.num_active_parameters,
        "kv_cache_dtype": question.kv_dtype,
        **kv_sizes(question),
        "demand": {
            "context_tokens": demand.context_tokens,
            "prompt_tokens": {"mean": demand.prompt.mean, "p99": demand.prompt.p99},
            "output_tokens": {"mean": demand.output.mean, "p99": demand.output.p99},
            "users": demand.users,
            "rate_per_s": demand.rate_per_s,
            "ttft_s": demand.ttft_s,
            "tpot_s": demand.tpot_s,
            "think_s": demand.think_s,
            "prefix_share": demand.prefix_share,
            "restored_share": demand.restored_share,
        },
        "binds": best.binds,
        "rules_at_risk": [rule.name for rule in rules.at_risk(best.kv_use)],
        "layouts": [candidate_as_json(each, question) for each in plan.candidates[:MAX_LAYOUTS]],
        "num_layouts": len(plan.candidates),
        "tiers": [
            {
                "tier": tier.name,
                "bytes": tier.num_bytes,
                "tokens": tier.num_tokens,
                "requests": tier.num_requests,
                "load_s_of_mean_prompt": tier.load_s,
            }
            for tier in plan.tiers()
        ],
        "changes": [_change(change) for change in plan.changes],
        "missed": [
            {"gpu": miss.gpu_name, "layout": miss.layout.text(), "what": miss.what, "message": miss.message}
            for miss in plan.misses[:MAX_LAYOUTS]
        ],
        "is_calibrated": question.is_calibrated,
        "assumptions": {name: value for name, value, _ in describe(question.assumptions)},
    }


def kv_sizes(question: Question) -> dict[str, Any]:
    """Return the bytes of KV of one token, and of one request of the longest context, of all ranks of TP 1."""
    geometry = question.model.geometry
    pool = geometry.pool(question.kv_dtype, block_size=question.block_size)
    return {
        "kv_bytes_per_token": geometry.bytes_per_token(question.kv_dtype),
        "kv_bytes_per_token_past_windows": geometry.lasting_bytes_per_token(question.kv_dtype),
        "kv_bytes_of_longest_request": pool.bytes_of_sequence(question.demand.context_tokens),
    }


def candidate_as_json(candidate: Candidate, question: Question) -> dict[str, Any]:
    demand, price = question.demand, candidate.price
    tokens = demand.request_tokens
    return {
        "gpu": candidate.gpu_name,
        "layout": candidate.layout.text(),
        "tensor_parallel_size": candidate.layout.tensor_parallel_size,
        "pipeline_parallel_size": candidate.layout.pipeline_parallel_size,
        "expert_parallel": candidate.layout.expert_parallel,
        "disaggregated": candidate.disaggregated,
        "prefill_engines": candidate.num_prefill,
        "decode_engines": candidate.num_decode,
        "prefill_gpus": candidate.num_prefill * candidate.layout.num_gpus,
        "decode_gpus": candidate.num_decode * candidate.layout.num_gpus,
        "prefill_to_decode": candidate.num_prefill / candidate.num_decode if candidate.disaggregated else None,
        "gpus": candidate.num_gpus,
        "nodes": candidate.num_nodes,
        "served_by_kvferry": not emit.obstacles(candidate, question),
        "gpu_memory_bytes": _memory(candidate.memory),
        "kv_pages_of_engine": candidate.room.num_pages_in_all,
        "kv_block_bytes": candidate.room.pool.block_bytes,
        "max_requests_by_kv_pages": candidate.max_batch_of_pages,
        "max_requests_by_tpot": candidate.max_batch_of_tpot,
        "requests_of_decode_engine": candidate.batch,
        "ttft_s": candidate.ttft.total_s,
        "ttft_parts_s": {
            name.removesuffix("_s"): seconds for name, seconds in dataclasses.asdict(candidate.ttft).items()
        },
        "tpot_s": candidate.tpot_s,
        "prefill_s_of_mean_prompt": _roof(candidate.prefill),
        "decode_step_s": _roof(candidate.decode),
        "prefill_use": candidate.prefill_use,
        "transfer_bytes_s_of_decode_gpu": candidate.transfer_bytes_s,
        "restore_bytes_s": candidate.restore_bytes_s,
        "binds": candidate.binds,
        "attention_backends": list(candidate.backends),
        "warnings": list(candidate.warnings),
        "price": None
        if price is None
        else {
            "usd_per_gpu_hour": price.usd_per_hour,
            "kind": price.kind,
            "source": price.source,
            "date": None if price.date is None else price.date.isoformat(),
        },
        "usd_per_hour": candidate.usd_per_hour,
        "usd_per_million_tokens": candidate.usd_per_million_tokens(demand.rate_per_s, tokens),
        "usd_per_million_output_tokens": candidate.usd_per_million_tokens(demand.rate_per_s, demand.output.mean),
    }


def _memory(parts: Memory) -> dict[str, Any]:
    return {
        "all": parts.total_bytes,
        "usable": parts.usable_bytes,
        "weights": parts.weight_bytes,
        "activations": parts.activation_bytes,
        "engine": parts.engine_bytes,
        "kv": parts.kv_bytes,
    }


def _roof(roof: Roof) -> dict[str, Any]:
    return {
        "total": roof.total_s,
        "compute": roof.compute_s,
        "memory": roof.memory_s,
        "link": roof.link_s,
        "overhead": roof.overhead_s,
        "binds": roof.binds,
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "what": change.what,
        "saving": change.saving,
        "gpus": change.candidate.num_gpus,
        "usd_per_hour": change.candidate.usd_per_hour,
        "layout": change.candidate.layout.text(),
    }
