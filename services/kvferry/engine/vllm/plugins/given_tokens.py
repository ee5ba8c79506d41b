"""Answers that another engine began: the last tokens of their prompts count as output (see ADR 9)."""

# vLLM has no such request. To its scheduler, caches and connectors the given tokens stay a part of the prompt, which is
# computed or pulled as any other. To limits, penalties, bad words and grammars they are output.

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from kvferry.engine.vllm.sampling import NUM_GIVEN

_own_prompt_len = NewRequestData.prompt_len.fget


def num_given_of(sampling_params: Any) -> int:
    extra = sampling_params.extra_args if sampling_params is not None else None
    return extra.get(NUM_GIVEN, 0) if extra else 0


def count_given_tokens() -> None:
    """Affects all requests of this process, an engine core. Idempotent."""
    Request.num_output_tokens = property(_num_output_tokens)
    create = StructuredOutputManager._create_grammar
    if not hasattr(create, "__wrapped__"):
        StructuredOutputManager._create_grammar = _replaying(create)


def sample_after_given_tokens() -> None:
    """Affects all requests of this process, a worker of an engine. Idempotent."""
    gpu_model_runner.CachedRequestState = _state  # of vLLM's model runner V1
    NewRequestData.prompt_len = property(_prompt_len)  # of V2


def _num_output_tokens(request: Any) -> int:
    return len(request._output_token_ids) + num_given_of(request.sampling_params)


def _prompt_len(new_request: Any) -> int:
    return int(_own_prompt_len(new_request)) - num_given_of(new_request.sampling_params)


def _state(**fields: Any) -> CachedRequestState:
    if num_given := num_given_of(fields["sampling_params"]):
        tokens = fields["prompt_token_ids"]
        fields |= {"prompt_token_ids": tokens[:-num_given], "output_token_ids": tokens[-num_given:]}
    return CachedRequestState(**fields)


def _replaying(create: Any) -> Any:
    @functools.wraps(create)
    def create_and_replay(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        if num_given := num_given_of(request.sampling_params):
            # One by one, as they were given: a grammar that has ended takes whatever follows.
            for token_id in _constrained(manager, request, list(request.prompt_token_ids[-num_given:])):
                if not grammar.accept_tokens(request.request_id, [token_id]):
                    raise ValueError("the tokens so far do not fit the request's grammar")
        return grammar

    return create_and_replay


def _constrained(manager: Any, request: Any, given: list[int]) -> list[int]:
    """Return the given tokens that followed the grammar: those after the model's reasoning, if it reasons."""
    structured = request.structured_output_request
    prompt = list(request.prompt_token_ids[: -len(given)])
    so_far = SimpleNamespace(prompt_token_ids=prompt, all_token_ids=prompt.copy(), structured_output_request=structured)
    for i, token_id in enumerate(given):
        so_far.all_token_ids.append(token_id)
        start = manager._get_constraint_bounds(so_far, [token_id], spec_tokens_committed=True).grammar_start
        if start <= 1:
            structured.reasoning_ended = True
            return given[i + start :]
    return []
