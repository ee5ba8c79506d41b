"""engine/vllm/rendering/tokenizer_words.py"""

from __future__ import annotations

import copy
import copyreg
import inspect
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel

from kvferry import model_folder
from kvferry.config import ModelConfig
from kvferry.engine.vllm.rendering.plain_prompts import copy_of
from kvferry.engine.vllm.rendering.tokenizer_words import keep_no_words_of_clients, keep_none_in, keep_none_in_copies

pytestmark = pytest.mark.vllm
WORD = "qzvkwxjqzvkwxj"


@pytest.fixture
def without_reducer() -> Iterator[None]:
    before = copyreg.dispatch_table.pop(Tokenizer, None)  # type: ignore[call-overload]
    yield
    copyreg.dispatch_table.pop(Tokenizer, None)  # type: ignore[call-overload]
    if before is not None:
        copyreg.dispatch_table[Tokenizer] = before


def of_default_model() -> Any:
    return Tokenizer.from_file(str(model_folder.resolve("default") / "tokenizer.json"))


def keeps(tokenizer: Any, word: str = WORD) -> bool:
    """Whether a tokenizer of BPE gives the tokens that a word had before its model was changed. Changes the model."""
    before = tokenizer.encode(word).ids
    tokenizer.model.continuing_subword_prefix = "##"  # no token begins with it
    after = tokenizer.encode(word).ids
    tokenizer.model.continuing_subword_prefix = None
    return bool(before == after)


def test_a_tokenizer_keeps_words_of_its_vocabulary_alone() -> None:
    tokenizer = of_default_model()
    assert keeps(tokenizer)
    keep_no_words_of_clients(tokenizer)
    assert not keeps(tokenizer)
    assert keeps(tokenizer, " the")


def test_words_that_it_has_are_dropped() -> None:
    tokenizer = of_default_model()
    tokens = tokenizer.encode(WORD).ids
    keep_no_words_of_clients(tokenizer)
    tokenizer.model.continuing_subword_prefix = "##"
    assert tokenizer.encode(WORD).ids != tokens


def test_each_kind_of_model_is_taken() -> None:
    for model in (BPE(), Unigram(), WordLevel()):
        keep_no_words_of_clients(Tokenizer(model))
    keep_none_in(object())  # a slow tokenizer


@pytest.mark.usefixtures("without_reducer")
def test_copies_keep_no_words_and_are_equal_otherwise() -> None:
    tokenizer = of_default_model()
    tokenizer.enable_truncation(3)
    assert keeps(copy.deepcopy(tokenizer))
    keep_none_in_copies()
    keep_none_in_copies()
    for made in (copy.deepcopy(tokenizer), copy.copy(tokenizer)):
        assert made.to_str() == tokenizer.to_str()
        assert made.encode(WORD).ids == tokenizer.encode(WORD).ids
        assert len(made.encode("a b c d").ids) == 3
        assert not keeps(made)


def test_the_tokenizers_of_a_renderer_keep_no_words() -> None:
    from kvferry.engine.vllm.rendering.vllm_prompts import VllmPrompts

    tokenizer = VllmPrompts(str(model_folder.resolve("default")), "m", ModelConfig()).online.renderer.get_tokenizer()
    # vLLM lends one of its copies to each call.
    borrow = inspect.getclosurevars(type(tokenizer).encode).nonlocals["_borrow_from_pool"]
    with ExitStack() as borrowed:
        copies = [borrowed.enter_context(borrow()) for _ in range(3)]  # one more than it has
        assert len({id(each) for each in copies}) == len(copies)
        for each in (tokenizer, *copies):
            assert not keeps(each.backend_tokenizer)
    assert not keeps(copy_of(tokenizer))
