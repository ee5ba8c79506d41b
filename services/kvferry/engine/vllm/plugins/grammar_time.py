"""Ends requests whose grammar takes an engine's time: an ambiguous one may need seconds for a token."""

# Compiling such a grammar is quick. xgrammar keeps every way in which the tokens so far can be read, and of a pattern
# such as ((a*a*)*(a*a*)*)*b their number grows with the fourth power of the text. vLLM feeds tokens to grammars between
# its steps, so all requests of the engine wait.

from __future__ import annotations

import functools
import time
from typing import Any

from vllm.logger import init_logger
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

logger = init_logger(__name__)

MAX_TOKEN_S = 0.05  # of CPU, for one token
MAX_TOTAL_S = 2.0  # of CPU, for all tokens of a request


def limit_grammar_time() -> None:
    """Idempotent."""
    accept = XgrammarGrammar.accept_tokens
    if hasattr(accept, "__wrapped__"):
        return

    @functools.wraps(accept)
    def accept_in_time(grammar: Any, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            begun_s = time.thread_time()
            if not accept(grammar, request_id, [token]):
                return False
            took_s = time.thread_time() - begun_s
            total_s = grammar.kvferry_s = getattr(grammar, "kvferry_s", 0.0) + took_s
            if took_s > MAX_TOKEN_S or total_s > MAX_TOTAL_S:
                # vLLM ends this request with an error, and no other.
                logger.warning(
                    "the grammar of request %s took %.3f s for a token, %.3f s in all", request_id, took_s, total_s
                )
                return False
        return True

    XgrammarGrammar.accept_tokens = accept_in_time
