from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.base import FinishReason, Sampling, TokenLogprob
from kvferry.pages.keys import pack_tokens
from kvferry_sim import SimTokenizer
from kvferry_sim.answer import Answer
from kvferry_sim.tokenizer import EOS

tokenizer = SimTokenizer()
PROMPT = tokenizer.encode("what does the ferry carry")


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)


def generate(
    prompt: list[int] = PROMPT,
    *,
    max_tokens: int = 20,
    temperature: float = 0.0,
    default_seed: int = 0,
    answer_tokens: int = 1_000_000,
    **values: Any,
) -> Generated:
    """A whole answer. It ends early only when `answer_tokens` or `values` say so."""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, **values)
    answer = Answer(pack_tokens(prompt), sampling, tokenizer, answer_tokens=answer_tokens, default_seed=default_seed)
    generated = Generated()
    while answer.finish_reason is None:
        before = answer.digest()
        token_id = answer.next_token()
        generated.token_ids.append(token_id)
        generated.texts.append(answer.text)
        generated.logprobs.append(list(answer.logprobs(before, token_id)))
    generated.finish_reason, generated.stop_reason = answer.finish_reason, answer.stop_reason
    return generated


def test_an_answer_follows_from_its_prompt() -> None:
    assert generate().token_ids == generate().token_ids
    assert generate([*PROMPT[:-1], 99]).token_ids != generate().token_ids
    assert len(set(generate().token_ids)) > 15


@given(st.integers(1, 19))
def test_an_answer_continues_from_any_of_its_tokens(cut: int) -> None:
    whole = generate()
    rest = generate([*PROMPT, *whole.token_ids[:cut]], max_tokens=20 - cut)
    assert whole.token_ids == whole.token_ids[:cut] + rest.token_ids


def test_text_is_the_tokens_decoded() -> None:
    generated = generate()
    assert generated.text == tokenizer.decode(generated.token_ids)
    assert tokenizer.encode(generated.text) == generated.token_ids


def test_the_seed_counts_only_above_temperature_zero() -> None:
    assert generate(seed=1).token_ids == generate(seed=2).token_ids == generate().token_ids
    warm = generate(temperature=1.0, seed=1).token_ids
    assert generate(temperature=0.5, seed=1).token_ids == warm
    assert generate(temperature=1.0, seed=2).token_ids != warm
    assert generate(temperature=1.0, default_seed=1).token_ids == warm
    assert generate(temperature=1.0, seed=-1).token_ids not in (warm, generate().token_ids)


def test_end_of_sequence_comes_after_the_mean_length() -> None:
    lengths = []
    for i in range(300):
        generated = generate([*PROMPT, i], max_tokens=1000, answer_tokens=20)
        assert generated.finish_reason is FinishReason.STOP
        assert generated.stop_reason is None
        assert generated.token_ids[-1] == EOS
        assert generated.text == tokenizer.decode(generated.token_ids[:-1])
        lengths.append(len(generated.token_ids))
    # Geometric: standard error of the mean is 20 / sqrt(300).
    assert 16 < mean(lengths) < 24


def test_end_of_sequence_can_be_ignored() -> None:
    generated = generate(answer_tokens=1, ignore_eos=True)
    assert EOS not in generated.token_ids
    assert generated.finish_reason is FinishReason.LENGTH


def test_min_tokens_come_before_end_of_sequence() -> None:
    generated = generate(answer_tokens=1, min_tokens=7)
    assert len(generated.token_ids) == 8
    assert generated.token_ids[-1] == EOS


def test_a_stop_token_ends_it_and_is_not_shown() -> None:
    plain = generate()
    stop_id = plain.token_ids[5]
    generated = generate(stop_token_ids=(stop_id,))
    assert generated.token_ids == plain.token_ids[:6]
    assert (generated.finish_reason, generated.stop_reason) == (FinishReason.STOP, stop_id)
    assert generated.text == tokenizer.decode(plain.token_ids[:5])
    assert generate(stop_token_ids=(stop_id,), include_stop_str_in_output=True).text == tokenizer.decode(
        generated.token_ids
    )


def test_a_stop_token_before_min_tokens_is_not_chosen() -> None:
    stop_id = generate().token_ids[2]
    generated = generate(stop_token_ids=(stop_id,), min_tokens=10)
    assert stop_id not in generated.token_ids[:10]


@given(st.data())
def test_a_stop_string_cuts_at_its_first_place(data: st.DataObject) -> None:
    plain = generate().text
    start = data.draw(st.integers(0, len(plain) - 2))
    stop = plain[start : start + data.draw(st.integers(1, 12))]
    included = data.draw(st.booleans())
    generated = generate(stop=(stop, "never"), include_stop_str_in_output=included)
    at = plain.index(stop)
    assert generated.text == plain[: at + len(stop) if included else at]
    assert (generated.finish_reason, generated.stop_reason) == (FinishReason.STOP, stop)


@given(st.data())
def test_text_once_shown_is_never_part_of_a_stop_string(data: st.DataObject) -> None:
    """A client keeps what it got: at every moment the text shown is a beginning of the final text."""
    texts = generate().texts
    plain = "".join(texts)
    stops = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(plain) - 1))
        stops.append(plain[start : start + data.draw(st.integers(1, 20))] + data.draw(st.sampled_from(["", "!"])))
    generated = generate(stop=tuple(stops))
    expected = plain
    for i in range(len(texts)):
        so_far = "".join(texts[: i + 1])
        # The first to be complete ends the answer; of several complete at once, the one that begins first.
        complete = [so_far.index(stop) for stop in stops if stop in so_far]
        if complete:
            expected = plain[: min(complete)]
            break
    assert generated.text == expected
    assert (generated.finish_reason is FinishReason.STOP) == (generated.stop_reason is not None)


def test_held_back_text_comes_with_the_last_token() -> None:
    plain = generate(max_tokens=5)
    generated = generate(max_tokens=5, stop=(plain.texts[-1] + "never",))
    assert generated.text == plain.text
    assert generated.texts[-1] == plain.texts[-1]
    held = generate(max_tokens=5, stop=("".join(plain.texts[1:4]) + "never",))
    assert held.texts[1:4] == ["", "", ""]
    assert held.text == plain.text


def test_the_earlier_of_two_stop_strings_wins() -> None:
    plain = generate().text
    early, late = plain[10:13], plain[11:13]
    assert generate(stop=(late, early)).text == plain[: plain.index(early)]


def test_stop_strings_wait_for_min_tokens() -> None:
    plain = generate()
    generated = generate(stop=(plain.texts[1],), min_tokens=4)
    assert len(generated.token_ids) == 20
    assert generated.text == plain.text


def test_allowed_tokens_are_all_there_is() -> None:
    generated = generate(allowed_token_ids=(100, 200))
    assert set(generated.token_ids) == {100, 200}


def test_logit_bias_forces_and_bans() -> None:
    plain = generate()
    assert set(generate(logit_bias={100: 100.0}).token_ids) == {100}
    first = plain.token_ids[0]
    assert generate(logit_bias={first: -100.0}).token_ids[0] != first
    assert generate(logit_bias={EOS: 100.0}).finish_reason is FinishReason.STOP


def test_bad_words_are_not_said() -> None:
    plain = generate()
    one, two = plain.token_ids[3:5]
    assert one not in generate(bad_words=(tokenizer.decode([one]),)).token_ids
    generated = generate(bad_words=(tokenizer.decode([one, two]),))
    assert generated.token_ids[:4] == plain.token_ids[:4]
    assert generated.token_ids[4] != two


@pytest.mark.parametrize("num_alternatives", [0, 1, 20])
def test_logprobs_are_a_distribution(num_alternatives: int) -> None:
    generated = generate(logprobs=num_alternatives)
    for token_id, position in zip(generated.token_ids, generated.logprobs, strict=True):
        assert position[0].token_id == token_id
        assert position[0].text == tokenizer.decode([token_id])
        assert len(position) == num_alternatives + 1
        assert len({entry.token_id for entry in position}) == len(position)
        logprobs = [entry.logprob for entry in position]
        assert logprobs == sorted(logprobs, reverse=True)
        assert sum(math.exp(logprob) for logprob in logprobs) <= 1


def test_markers_are_shown_on_demand() -> None:
    generated = generate(answer_tokens=1, skip_special_tokens=False, include_stop_str_in_output=True)
    assert generated.text == "<eos>"
