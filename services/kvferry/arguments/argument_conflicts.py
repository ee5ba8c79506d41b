"""Arguments of one engine that do not fit each other or its settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from kvferry.arguments.argument_values import whole
from kvferry.arguments.vllm_arguments import LOADER_OPTIONS, SPECULATION, draft_model, why_no_loading


def why_in_conflict(
    args: Mapping[str, Any], settings: Mapping[str, Any], keys: Mapping[str, str], *, unproven: Collection[str]
) -> str:
    """Return the reason with its keys, or an empty string. `keys` has those of arguments and settings, by name."""
    ranks, most = settings["tensor_parallel_size"], settings["max_num_batched_tokens"]
    if ranks > 1 and draft_model(args) and SPECULATION not in unproven:
        return (
            f"{keys['tensor_parallel_size']}: expected 1 beside a draft model ({keys[SPECULATION]}), which was not "
            f"shown on several ranks of tensor parallelism, not {ranks}"
        )
    if most is not None:
        key = f"{keys['max_num_batched_tokens']} ({most})"
        scheduled = whole(args.get("max_num_scheduled_tokens"))
        if scheduled is not None and scheduled > most:
            return f"{keys['max_num_scheduled_tokens']}: expected at most {key}, not {scheduled}"
        if (num_seqs := settings["max_num_seqs"]) > most:
            return f"{keys['max_num_seqs']}: expected at most {key}, not {num_seqs}"
    nodes = args.get("numa_bind_nodes")
    if nodes is not None and len(nodes) < ranks:
        return f"{keys['numa_bind_nodes']}: expected a node for each of {ranks} ranks, not {len(nodes)}"
    context, threshold = settings["max_model_len"], whole(args.get("long_prefill_token_threshold"))
    if context is not None and threshold is not None and threshold > context:
        return (
            f"{keys['long_prefill_token_threshold']}: expected at most model.max_model_len ({context}), not {threshold}"
        )
    reason = why_no_loading(args)
    return f"{keys[LOADER_OPTIONS]}.{reason}" if reason else ""
