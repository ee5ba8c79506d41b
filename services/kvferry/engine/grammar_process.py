"""The grammar process follows grammars as engines do. Its standard input is a ForkServer's connection."""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry.engine.forks import ForkLimits, ForkServer

NICENESS = 5  # streams need the cores more; forks are nicer still

# Texts and their tokens that a grammar is tried with: they find one whose time grows with the text.
NUM_WALKS = 4
MAX_WALK_TOKENS = 48
MAX_TOKEN_S = 0.03  # of CPU time; an engine allows less in the mean (engine/vllm/plugins/grammars.py)
_PATTERN_FAULT = "regex parse error:"
_MAX_SHOWN_CHARS = 200
_FIRST_GRAMMAR = '{"grammars": [{"json_schema": {"type": "object"}}]}'  # so that no fork makes what all need


def grammar_tester(tokenizer: Any) -> Callable[[str], None]:
    """Return a function that raises ValueError, with llguidance's reason, for what engines cannot follow."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)

    def require(matcher: Any) -> None:
        if matcher.is_error():
            raise ValueError(_reason(matcher.get_error()))

    def walk(matcher: Any, seeded: random.Random) -> None:
        """Give it tokens, as an engine does step by step: the same one for as long as it is allowed."""
        token = -1
        for _ in range(MAX_WALK_TOKENS):
            begun_s = time.process_time()
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            require(matcher)
            if token < 0 or not allowed[token]:
                ids = np.flatnonzero(allowed)
                if not len(ids):
                    return
                token = int(ids[seeded.randrange(len(ids))])
            matcher.consume_token(token)
            require(matcher)
            if time.process_time() - begun_s > MAX_TOKEN_S:
                raise ValueError("the grammar is ambiguous: it takes an engine too long to follow")
            if matcher.is_stopped():
                return

    def check(grammar: str) -> None:
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        require(matcher)
        matcher.compute_bitmask()  # the first one makes what later ones use
        for seed in range(NUM_WALKS):
            walk(matcher.deep_copy(), random.Random(seed))

    return check


def _reason(error: str) -> str:
    _, found, of_pattern = error.partition(_PATTERN_FAULT)
    lines = [line.strip() for line in of_pattern.strip().splitlines()]
    end = next((i for i, line in enumerate(lines) if line.startswith("error: ")), None)
    if not found or end is None:
        return error.strip().partition("\n")[0].strip()
    shown = lines[: end + 1] if sum(map(len, lines[:end])) <= _MAX_SHOWN_CHARS else lines[end : end + 1]
    return f"{_PATTERN_FAULT} {' '.join(shown)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Try grammars for a gateway.")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json")
    parser.add_argument("--vocabulary-size", type=int, required=True)
    parser.add_argument("--eos-token", type=int, required=True)
    parser.add_argument("limits")
    arguments = parser.parse_args()
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches it too; it ends with the gateway
    import llguidance

    tokenizer = llguidance.LLTokenizer(
        Path(arguments.tokenizer).read_text(encoding="utf-8"),
        n_vocab=arguments.vocabulary_size,
        eos_token=arguments.eos_token,
    )
    check = grammar_tester(tokenizer)
    check(_FIRST_GRAMMAR)

    def work(payload: bytes) -> bytes:
        check(payload.decode(errors="surrogatepass"))
        return b""

    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it marks
    with socket.socket(fileno=os.dup(0)) as connection:
        limits = msgspec.json.decode(arguments.limits, type=ForkLimits)
        ForkServer(connection, work, limits).run()


if __name__ == "__main__":
    main()
