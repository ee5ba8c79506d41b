"""engine/vllm/plugins/grammars.py and engine/deep_threads.py"""

from __future__ import annotations

import inspect
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry import model_folder
from kvferry.engine.deep_threads import STACK_BYTES, DeepThreads

from .support import parameters

pytestmark = pytest.mark.vllm


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    from kvferry.engine.vllm.plugins.grammars import limit_grammars

    for kind, name in (
        (GuidanceGrammar, "accept_tokens"),
        (GuidanceGrammar, "fill_bitmask"),
        (StructuredOutputManager, "grammar_init"),
    ):
        monkeypatch.setattr(kind, name, inspect.unwrap(getattr(kind, name)))
    limit_grammars()
    limit_grammars()


def made(kind: str, spec: str) -> tuple[Any, Any]:
    """Return a tokenizer and vLLM's grammar."""
    from vllm.config import ModelConfig
    from vllm.tokenizers import cached_tokenizer_from_config
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from vllm.v1.structured_output.backend_types import StructuredOutputOptions

    from kvferry.engine.vllm.rendering.structured_outputs import structured_outputs_config

    folder = str(model_folder.resolve("default"))
    model = ModelConfig(model=folder, tokenizer=folder)
    tokenizer = cached_tokenizer_from_config(model)
    config = SimpleNamespace(
        structured_outputs_config=structured_outputs_config(), model_config=model, speculative_config=None
    )
    backend = GuidanceBackend(config, tokenizer=tokenizer, vocab_size=model.get_vocab_size())
    return tokenizer, backend.compile_grammar(StructuredOutputOptions[kind], spec)


def test_vllm_still_has_what_is_replaced_and_ends_a_request_whose_grammar_refuses() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager
    from vllm.v1.structured_output.backend_guidance import GuidanceGrammar

    assert parameters(inspect.unwrap(GuidanceGrammar.accept_tokens)) == ["self", "request_id", "tokens"]
    assert parameters(inspect.unwrap(GuidanceGrammar.fill_bitmask)) == ["self", "bitmask", "idx"]
    assert parameters(inspect.unwrap(StructuredOutputManager.grammar_init)) == ["self", "request"]
    assert "self.executor.submit(" in inspect.getsource(inspect.unwrap(StructuredOutputManager.grammar_init))
    assert "FINISHED_ERROR" in inspect.getsource(Scheduler.update_from_output)


@pytest.mark.usefixtures("limited")
def test_a_grammar_that_takes_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine.vllm.plugins import grammars

    tokenizer, grammar = made("REGEX", "(a|b)*")
    (token,) = tokenizer.encode("a", add_special_tokens=False)
    assert grammar.accept_tokens("r", [token])
    monkeypatch.setattr(grammars, "MAX_START_S", 0.0)
    monkeypatch.setattr(grammars, "MAX_TOKEN_S", 0.0)
    assert not grammar.accept_tokens("r", [token])


@pytest.mark.usefixtures("limited")
def test_a_grammar_that_met_a_limit_of_the_library_is_no_answer_that_fits() -> None:
    import torch

    properties = {f"p{i}": {"type": "string"} for i in range(2_500)}
    tokenizer, grammar = made("JSON", json.dumps({"type": "object", "properties": properties}))
    mask = torch.zeros((1, (len(tokenizer) + 31) // 32), dtype=torch.int32)
    grammar.fill_bitmask(mask, 0)
    (token,) = tokenizer.encode('{"', add_special_tokens=False)
    grammar.accept_tokens("r", [token])
    grammar.fill_bitmask(mask, 0)
    assert grammar.ll_matcher.is_error()
    # All that the library allows then is an end, as if `{"` fitted.
    assert not grammar.accept_tokens("r", [tokenizer.eos_token_id])


@pytest.mark.usefixtures("limited")
def test_grammars_are_made_on_threads_with_deep_stacks() -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    manager = SimpleNamespace(executor=ThreadPoolExecutor(3), backend=object(), _use_async_grammar_compilation=True)
    request = SimpleNamespace(structured_output_request=None)
    StructuredOutputManager.grammar_init(manager, request)
    assert isinstance(manager.executor, DeepThreads)
    assert manager.executor._max_workers == 3
    first = manager.executor
    StructuredOutputManager.grammar_init(manager, request)
    assert manager.executor is first


def test_a_deep_thread_holds_a_chain_of_references_that_another_one_does_not() -> None:
    """Of 4,000 levels at 8.4 KiB each, which a thread of Python's 8 MiB would end the process with."""
    import llguidance

    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2_500)}
    schema = {"$defs": {**links, "d2500": {"type": "string"}}, "$ref": "#/$defs/d0"}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    before = threading.stack_size()
    with DeepThreads(1) as threads:
        assert threads.submit(llguidance.LLMatcher.validate_grammar, grammar).result() == ""
    assert threading.stack_size() == before
    assert 2_500 * 8.4 * 1024 > 16 << 20 < STACK_BYTES


class Recorder:
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def tokenize_str(self, text: str) -> None:
        self.encoded.append(text)


def test_a_tokenizer_of_grammars_is_full_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend

    from kvferry.engine.vllm.plugins.grammars import fill_word_caches_of_grammars

    recorder = Recorder()
    build = inspect.unwrap(GuidanceBackend._build_ll_tokenizer)
    assert list(inspect.signature(build).parameters) == ["tokenizer", "vocab_size"]
    assert "self._build_ll_tokenizer(self.tokenizer, self.vocab_size)" in inspect.getsource(GuidanceBackend)
    monkeypatch.setattr(GuidanceBackend, "_build_ll_tokenizer", staticmethod(lambda *_: recorder))
    fill_word_caches_of_grammars()
    fill_word_caches_of_grammars()
    assert GuidanceBackend._build_ll_tokenizer(None, 0) is recorder
    assert len(recorder.encoded) == len(set(recorder.encoded)) == 20_000


def test_each_of_the_words_is_one_that_a_tokenizer_keeps() -> None:
    # Two words that it takes for one would leave room.
    from tokenizers import Tokenizer

    from kvferry.engine.vllm.plugins.grammars import words

    tokenizer: Any = Tokenizer.from_file(f"{model_folder.resolve('default')}/tokenizer.json")
    found = [tokenizer.pre_tokenizer.pre_tokenize_str(word) for word in words()]
    assert all(len(parts) == 1 for parts in found)
    vocabulary = tokenizer.get_vocab()
    assert sum(parts[0][0] not in vocabulary for parts in found) > 19_000
