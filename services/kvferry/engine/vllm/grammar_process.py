"""The grammar process: compiles structured outputs as vLLM's engines do (`python -m`, with ForkLimits as JSON).

Its standard input is the connection to the process that asks.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from kvferry.engine.forks import ForkLimits, ForkServer
from kvferry.engine.vllm.text_model import text_model_config

NICENESS = 5  # its start takes seconds of CPU, which streams need; forks are nicer still

# Of texts that a grammar is tried with: enough to find one whose time grows with what it was given.
NUM_WALKS = 4
MAX_WALK_TOKENS = 48
MAX_TOKEN_S = 0.02  # of CPU; an engine allows more (plugins/grammar_time.py)

# Compiled before the first fork, so that no fork imports what vLLM imports late.
_FIRST_SPECS = (
    '{"json": {"type": "object", "properties": {"a": {"type": "string"}}}}',
    '{"regex": "a+"}',
    '{"choice": ["a", "b"]}',
)


def grammar_compiler(model_folder: str, *, trust_remote_code: bool) -> Callable[[str], None]:
    """Return a function that validates and compiles a Sampling's `structured_outputs`, and raises what vLLM raises.

    vLLM's front end validates, its engine compiles; some grammars pass only the first.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend
    from vllm.v1.structured_output.request import get_structured_output_key

    from kvferry.engine.vllm.sampling import structured_from_json
    from kvferry.engine.vllm.structured_outputs import structured_outputs_config

    model = text_model_config(model_folder, trust_remote_code=trust_remote_code)
    config = structured_outputs_config()
    tokenizer = cached_tokenizer_from_config(model)
    backend = XgrammarBackend(
        SimpleNamespace(structured_outputs_config=config, model_config=model, speculative_config=None),
        tokenizer=tokenizer,
        vocab_size=model.get_vocab_size(),
    )
    bitmask = backend.allocate_token_bitmask(1)

    def compile_spec(spec: str) -> None:
        params = SamplingParams(structured_outputs=structured_from_json(spec))
        params._validate_structured_outputs(model, config, tokenizer)
        assert params.structured_outputs is not None
        grammar = backend.compile_grammar(*get_structured_output_key(params.structured_outputs))
        for seed in range(NUM_WALKS):
            _walk(grammar, bitmask, random.Random(seed))

    return compile_spec


def _walk(grammar: Any, bitmask: Any, seeded: random.Random) -> None:
    """Give the grammar tokens, as an engine does step by step: the same one for as long as it is allowed.

    Raises ValueError for a token that takes too long: an ambiguous grammar takes the longer the more it was given.
    """
    grammar.reset()
    token = -1
    for _ in range(MAX_WALK_TOKENS):
        grammar.fill_bitmask(bitmask, 0)
        # numpy: the threads of torch's operations are not there in a fork.
        allowed = np.unpackbits(bitmask[0].numpy().view(np.uint8), bitorder="little")
        if token < 0 or not allowed[token]:
            ids = np.flatnonzero(allowed)
            if not len(ids):
                return
            token = int(ids[seeded.randrange(len(ids))])
        begun_s = time.process_time()
        if not grammar.accept_tokens("", [token]) or grammar.is_terminated():
            return
        if time.process_time() - begun_s > MAX_TOKEN_S:
            raise ValueError(
                "the grammar is ambiguous: it takes an engine too long to follow; nested repetitions are a cause"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile grammars for a gateway.")
    parser.add_argument("--model-folder", required=True)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("limits")
    arguments = parser.parse_args()
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches it too; it ends with the gateway
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    compile_spec = grammar_compiler(arguments.model_folder, trust_remote_code=arguments.trust_remote_code)
    for spec in _FIRST_SPECS:
        compile_spec(spec)

    def work(payload: bytes) -> bytes:
        compile_spec(payload.decode(errors="surrogatepass"))
        return b""

    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it marks
    with socket.socket(fileno=os.dup(0)) as connection:
        limits = msgspec.json.decode(arguments.limits, type=ForkLimits)
        ForkServer(connection, work, limits).run()


if __name__ == "__main__":
    main()
