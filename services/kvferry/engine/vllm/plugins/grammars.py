"""Grammars in an engine: limits of stack and time, an end that is an error, and a tokenizer without clients' words."""

from __future__ import annotations

import functools
import itertools
import string
import time
from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar

from kvferry.engine.deep_threads import DeepThreads

# vLLM's guidance backend makes a grammar on a thread, and feeds it tokens between steps, so that all requests of the
# engine wait for an ambiguous one. Where a grammar met a limit of llguidance, it allows the end of the answer alone, as
# if that fitted. Where `accept_tokens` refuses, vLLM ends the request with an error, and no other.
logger = init_logger(__name__)

# CPU time that an answer's grammar may take: a fixed time, and a time per token. An ordinary grammar takes 0.03 ms for
# a token, and 0.5 ms for one of a hundred tokens.
MAX_START_S = 1.0
MAX_TOKEN_S = 0.002


def limit_grammars() -> None:
    """Idempotent."""
    if hasattr(GuidanceGrammar.accept_tokens, "__wrapped__"):
        return
    begin, accept, fill = (
        StructuredOutputManager.grammar_init, GuidanceGrammar.accept_tokens, GuidanceGrammar.fill_bitmask
    )  # fmt: skip

    @functools.wraps(begin)
    def begin_on_deep_thread(manager: Any, request: Any) -> None:
        if not isinstance(manager.executor, DeepThreads):  # the manager was there before this
            manager.executor = DeepThreads(manager.executor._max_workers)
        begin(manager, request)

    @functools.wraps(fill)
    def fill_in_time(grammar: Any, *arguments: Any) -> None:
        begun_s = time.thread_time()
        fill(grammar, *arguments)
        grammar.kvferry_s = getattr(grammar, "kvferry_s", 0.0) + time.thread_time() - begun_s

    @functools.wraps(accept)
    def accept_in_time(grammar: Any, request_id: str, tokens: list[int]) -> bool:
        begun_s = time.thread_time()
        is_accepted = accept(grammar, request_id, tokens) and not grammar.ll_matcher.is_error()
        grammar.kvferry_s = getattr(grammar, "kvferry_s", 0.0) + time.thread_time() - begun_s
        grammar.kvferry_tokens = getattr(grammar, "kvferry_tokens", 0) + len(tokens)
        if grammar.kvferry_s > MAX_START_S + MAX_TOKEN_S * grammar.kvferry_tokens:
            logger.warning(
                "the grammar of request %s took %.3f s for %d tokens",
                request_id, grammar.kvferry_s, grammar.kvferry_tokens,
            )  # fmt: skip
            return False
        return bool(is_accepted)

    StructuredOutputManager.grammar_init = begin_on_deep_thread
    GuidanceGrammar.fill_bitmask = fill_in_time
    GuidanceGrammar.accept_tokens = accept_in_time


_NUM_WORDS = 20_000  # twice as many as it keeps: some versions have 64 parts, which fill unequally; 0.1 s
_NUM_LETTERS = 6


def fill_word_caches_of_grammars() -> None:
    """Idempotent."""
    build = GuidanceBackend._build_ll_tokenizer
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(build)
    def build_filled(*arguments: Any) -> Any:
        tokenizer = build(*arguments)
        for word in words():
            tokenizer.tokenize_str(word)
        return tokenizer

    GuidanceBackend._build_ll_tokenizer = staticmethod(build_filled)


def words() -> Iterator[str]:
    """Yield different words without a meaning."""
    # Words of letters alone: a tokenizer does not split them.
    letters = itertools.product(string.ascii_lowercase, repeat=_NUM_LETTERS)
    return ("".join(reversed(word)) for word in itertools.islice(letters, _NUM_WORDS))
