from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvferry_sim import SimTokenizer
from kvferry_sim.tokenizer import BOS, END_OF_TURN, EOS, NUM_SPECIAL, ROLE_TO_MARKER, VOCABULARY_SIZE

tokenizer = SimTokenizer()


def test_every_word_decodes_to_its_own_text_and_back() -> None:
    texts = tokenizer.texts
    assert len(texts) == len(set(texts)) == VOCABULARY_SIZE == 50_000
    words = range(NUM_SPECIAL, VOCABULARY_SIZE)
    assert tokenizer.encode("".join(texts[NUM_SPECIAL:])) == list(words)
    assert all(texts[token_id].startswith(" ") for token_id in words)


@given(st.lists(st.integers(NUM_SPECIAL, VOCABULARY_SIZE - 1)))
def test_an_answer_sent_again_has_the_same_tokens(token_ids: list[int]) -> None:
    assert tokenizer.encode(tokenizer.decode(token_ids)) == token_ids


@given(st.text())
def test_a_foreign_word_is_one_token_and_always_the_same(text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert len(token_ids) == len(text.split())
    assert all(NUM_SPECIAL <= token_id < VOCABULARY_SIZE for token_id in token_ids)
    assert tokenizer.encode(tokenizer.decode(token_ids)) == token_ids


def test_foreign_words_have_the_same_ids_on_every_machine() -> None:
    assert tokenizer.encode("Hello wörld") == SimTokenizer().encode(" Hello\nwörld ") == [16806, 2180]


def test_half_a_surrogate_pair_is_a_word_too() -> None:
    assert len(tokenizer.encode("\ud800 x")) == 2


def test_markers_cannot_be_written_as_text() -> None:
    assert tokenizer.encode("<eos>")[0] >= NUM_SPECIAL


def test_markers_are_seen_only_on_demand() -> None:
    word = tokenizer.encode("word")
    assert tokenizer.decode([BOS, *word, EOS]) == tokenizer.decode(word)
    assert tokenizer.decode([BOS, EOS], skip_special_tokens=False) == "<bos><eos>"


def test_a_chat_opens_and_closes_turns() -> None:
    turns = [("system", "be brief"), ("user", "hello")]
    be, brief, hello = tokenizer.encode("be brief hello")
    closed = [BOS, ROLE_TO_MARKER["system"], be, brief, END_OF_TURN, ROLE_TO_MARKER["user"], hello, END_OF_TURN]
    assert tokenizer.encode_chat(turns, open_turn="assistant") == [*closed, ROLE_TO_MARKER["assistant"]]
    assert tokenizer.encode_chat(turns, open_turn=None) == closed[:-1]
