"""Grammars of continued answers begin after the tokens that another engine gave (see ADR 9)."""

# vLLM counts those tokens as prompt, and would ask for the whole structure once more. Runs in the engine core, on the
# thread that compiles grammars.

from __future__ import annotations

import functools
from typing import Any

from vllm.v1.structured_output import StructuredOutputManager

# In SamplingParams.extra_args: how many of the prompt's last tokens belong to the answer.
NUM_GIVEN = "kvferry_num_given"


def replay_given_tokens() -> None:
    """Idempotent."""
    create = StructuredOutputManager._create_grammar
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_and_replay(manager: Any, request: Any) -> Any:
        grammar = create(manager, request)
        if num_given := (request.sampling_params.extra_args or {}).get(NUM_GIVEN, 0):
            if manager.reasoner_cls is not None:
                # Which of the tokens the grammar constrained depends on where the reasoning ended.
                raise ValueError("an answer with reasoning and a grammar cannot go on in another engine")
            if not grammar.accept_tokens(request.request_id, list(request.prompt_token_ids[-num_given:])):
                raise ValueError("the tokens so far do not fit the request's grammar")
        return grammar

    StructuredOutputManager._create_grammar = create_and_replay
