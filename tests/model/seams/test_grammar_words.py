"""engine/vllm/plugins/grammar_words.py"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvferry import model_folder

pytestmark = pytest.mark.vllm


class Recorder:
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def tokenize_str(self, text: str) -> None:
        self.encoded.append(text)


def test_a_tokenizer_of_grammars_is_full_before_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend

    from kvferry.engine.vllm.plugins.grammar_words import fill_word_caches_of_grammars

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

    from kvferry.engine.vllm.plugins.grammar_words import words

    tokenizer: Any = Tokenizer.from_file(f"{model_folder.resolve('default')}/tokenizer.json")
    found = [tokenizer.pre_tokenizer.pre_tokenize_str(word) for word in words()]
    assert all(len(parts) == 1 for parts in found)
    vocabulary = tokenizer.get_vocab()
    assert sum(parts[0][0] not in vocabulary for parts in found) > 19_000
