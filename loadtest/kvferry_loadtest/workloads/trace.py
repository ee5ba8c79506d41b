"""Replays a trace: prompts of token ids whose blocks are alike where the trace's hash ids are.

A block of 512 tokens becomes one of 512 * length_scale * scale tokens. Every request is due when the trace says,
counted from its first, whatever became of the requests before.
"""

from __future__ import annotations

from pathlib import Path

from kvferry_loadtest.errors import ScenarioError
from kvferry_loadtest.plan import Segment
from kvferry_loadtest.trace import BLOCK_TOKENS, TraceRequest, read_trace
from kvferry_loadtest.workloads.base import PlanBuilder


def plan(builder: PlanBuilder) -> None:
    """Notes how many prompts were cut. Raises ScenarioError without a path, TraceError for what is no trace."""
    scenario, table = builder.scenario, builder.scenario.trace
    assert table is not None  # as `scenario.load` saw to
    if not table.path:
        raise ScenarioError(f'{scenario.file}: trace.path = "": must be a file; give it with -s trace.path=FILE')
    factor = table.length_scale * scenario.scale
    block_tokens = round(BLOCK_TOKENS * factor)
    # Python sorts stably: requests of one time stay in the file's order.
    requests = sorted(read_trace(Path(table.path), table.max_requests), key=lambda request: request.timestamp)
    if not requests:
        raise ScenarioError(f"{scenario.file}: trace.path = {table.path}: the file is empty")
    tenants = builder.rng("tenants")
    names = [tenant.name for tenant in scenario.tenants] or [""]
    weights = [tenant.weight for tenant in scenario.tenants] or [1.0]
    cut = 0
    for index, request in enumerate(requests):
        tokens = scaled_blocks(request, block_tokens, seed=scenario.seed)
        if table.max_prompt_tokens is not None and sum(part.num_tokens for part in tokens) > table.max_prompt_tokens:
            tokens = tokens[: table.max_prompt_tokens // block_tokens]
            cut += 1
        max_tokens = max(1, round(request.output_length * factor))
        session = builder.session(
            f"request-{index}",
            tenants.choices(names, weights)[0],
            (request.timestamp - requests[0].timestamp) / 1000 / table.time_scale,
            warmup=index < scenario.warmup_sessions,
        )
        builder.add(session, tokens=tokens, max_tokens=min(max_tokens, table.output_tokens_cap or max_tokens))
    builder.notes["prompts_cut"] = cut


def scaled_blocks(request: TraceRequest, block_tokens: int, *, seed: int) -> tuple[Segment, ...]:
    """One segment of `block_tokens` per hash id; a partial last block keeps its share, and at least one token."""
    last_tokens = request.input_length - BLOCK_TOKENS * (len(request.hash_ids) - 1)
    sizes = [block_tokens] * (len(request.hash_ids) - 1)
    sizes.append(max(1, round(last_tokens * block_tokens / BLOCK_TOKENS)))
    return tuple(
        Segment(f"s{seed}/block-{hash_id}", size) for hash_id, size in zip(request.hash_ids, sizes, strict=True)
    )
