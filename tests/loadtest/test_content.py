"""Content of segments: deterministic, and as many tokens as it says in a real tokenizer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_loadtest.content import FIRST_TOKEN_ID, NUM_TOKEN_IDS, TOOLS, text_of, token_ids_of
from kvferry_loadtest.plan import Segment
from kvferry_loadtest.words import WORDS

MODEL = Path("~/.cache/kvferry/models/SmolLM2-135M-Instruct").expanduser()

segments = st.builds(Segment, key=st.text("abc/0123", min_size=1, max_size=6), num_tokens=st.integers(1, 300))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    if not (MODEL / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer in {MODEL}")
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def test_words_are_many_short_plain_and_unique() -> None:
    assert len(set(WORDS)) == len(WORDS) == 1024
    assert all(word.isascii() and word.isalpha() and word.islower() and 3 <= len(word) <= 8 for word in WORDS)


@given(segment=segments)
@settings(max_examples=50)
def test_a_text_has_a_word_for_every_token_each_after_a_space(segment: Segment) -> None:
    text = text_of(segment)
    assert text.startswith(" ")
    assert not text.endswith(" ")
    assert len(text.split(" ")) == segment.num_tokens + 1
    assert set(text.split()) <= set(WORDS)


@given(segment=segments)
@settings(max_examples=50)
def test_token_ids_lie_in_a_range_that_every_vocabulary_has(segment: Segment) -> None:
    ids = token_ids_of(segment)
    assert len(ids) == segment.num_tokens
    assert all(1000 <= FIRST_TOKEN_ID <= token < FIRST_TOKEN_ID + NUM_TOKEN_IDS <= 30_000 for token in ids)


def test_content_is_the_same_in_every_process() -> None:
    assert text_of(Segment("a", 4)) == " choice each dog talk"
    assert token_ids_of(Segment("a", 4)) == [3181, 3270, 3258, 17230]


def test_keys_make_the_difference_and_lengths_do_not() -> None:
    long, short, other = Segment("block-7", 512), Segment("block-7", 100), Segment("block-8", 512)
    assert text_of(long).startswith(text_of(short) + " ")
    assert token_ids_of(long)[:100] == token_ids_of(short)
    assert token_ids_of(long)[0] != token_ids_of(other)[0]
    shared = sum(one == two for one, two in zip(text_of(long).split(), text_of(other).split(), strict=True))
    assert shared < 10


def test_a_caller_may_change_the_list_that_it_got() -> None:
    token_ids_of(Segment("mine", 3)).clear()
    assert len(token_ids_of(Segment("mine", 3))) == 3


@pytest.mark.parametrize("make", [text_of, token_ids_of])
def test_content_is_cheap(make: Any) -> None:
    def seconds(index: int) -> float:
        start = time.perf_counter()
        make(Segment(f"cheap-{index}", 10_000))
        return time.perf_counter() - start

    assert min(seconds(index) for index in range(20)) < 0.002


def test_tools_are_definitions_that_a_server_accepts() -> None:
    assert json.loads(json.dumps(TOOLS)) == list(TOOLS)
    assert len({tool["function"]["name"] for tool in TOOLS}) == len(TOOLS) >= 2
    for tool in TOOLS:
        parameters = tool["function"]["parameters"]
        assert tool["type"] == "function"
        assert parameters["required"] == list(parameters["properties"])


def test_every_word_is_one_token_with_and_without_its_space(tokenizer: Any) -> None:
    assert [word for word in WORDS if len(tokenizer.encode(f" {word}").ids) != 1] == []
    assert [word for word in WORDS if len(tokenizer.encode(word).ids) != 1] == []


@settings(max_examples=50)
@given(parts=st.lists(segments, min_size=1, max_size=6))
def test_texts_that_follow_one_another_keep_their_tokens(tokenizer: Any, parts: list[Segment]) -> None:
    alone = [token for part in parts for token in tokenizer.encode(text_of(part)).ids]
    together = tokenizer.encode("".join(map(text_of, parts))).ids
    assert together == alone
    assert len(together) == sum(part.num_tokens for part in parts)


def test_messages_keep_their_tokens_in_a_chat_template(tokenizer: Any) -> None:
    def prompt(*texts: str) -> str:
        return "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in texts)

    system, first, second = (text_of(Segment(key, 200)) for key in ("system", "first", "second"))
    empty = len(tokenizer.encode(prompt("", "")).ids)
    one = tokenizer.encode(prompt(system, first)).ids
    other = tokenizer.encode(prompt(system, second)).ids
    assert len(one) == len(other) == 400 + empty
    # <|im_start|>, user, newline, 200 words, <|im_end|>, newline, and three again.
    assert one[:208] == other[:208]
    assert one[208] != other[208]


def test_a_template_that_strips_messages_keeps_the_count(tokenizer: Any) -> None:
    assert len(tokenizer.encode(text_of(Segment("stripped", 2000)).strip()).ids) == 2000
