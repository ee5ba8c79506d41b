"""Prompts are encoded alike with and without the kept tokens of a chat template, for tokenizers of many kinds."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.engine.vllm.rendering.template_tokens import TemplateTokens, tokens_to_cut_at

tokenizers = pytest.importorskip("tokenizers")

PIECES = [
    "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "|>", "<", "system\n", "user\n", "assistant\n", "You are terse.",
    " ", "\n", "  ", "a", "ab", "é", "e\u0301", "12", "\x00",
]  # fmt: skip
ADDED = ["<|im_start|>", "<|im_end|>"]
BEFORE = "<|im_start|>system\nYou are terse.<|im_end|>\n"


def make_tokenizer(
    *added: dict[str, Any], pre_tokenizer: Any = None, normalizer: Any = None
) -> Any:  # tokenizers.Tokenizer
    """Return a BPE tokenizer of bytes with a few merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("Y", "o"), ("Yo", "u"), ("a", "b"), ("e", "r"), ("er", "s"), ("<", "|"), ("u", "s"), ("us", "er")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizer or tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens([tokenizers.AddedToken(content, normalized=False, special=True) for content in ADDED])
    made.add_tokens([tokenizers.AddedToken(values.pop("content"), **values) for values in map(dict, added)])
    return made


def encoder(tokenizer: Any) -> Callable[[str], array[int]]:
    return lambda text: array("I", tokenizer.encode(text, add_special_tokens=False).ids)


def render(message: str) -> str:
    return f"{BEFORE}<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"


def template_tokens(tokenizer: Any, render: Callable[[str], str] = render) -> TemplateTokens:
    return TemplateTokens.of(json.loads(tokenizer.to_str()), encoder(tokenizer), render)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("plain", {}),
        ("normalized", {"normalizer": "NFC"}),
        ("digits", {"pre_tokenizer": "digits"}),
        ("another added token", {"added": {"content": "<|tool|>", "normalized": False}}),
        ("a stripping token", {"added": {"content": "<mask>", "lstrip": True, "rstrip": True}}),
    ],
)
def test_kept_tokens_change_no_prompt(kind: str, values: dict[str, Any]) -> None:
    parts = tokenizers.pre_tokenizers
    pre_tokenizer = (
        parts.Sequence([parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)])
        if values.get("pre_tokenizer")
        else None
    )
    tokenizer = make_tokenizer(
        *([values["added"]] if "added" in values else []),
        pre_tokenizer=pre_tokenizer,
        normalizer=tokenizers.normalizers.NFC() if values.get("normalizer") else None,
    )
    kept = template_tokens(tokenizer)
    assert (
        repr(kept) == f"<TemplateTokens {BEFORE!r} ... {'<|im_end|>' + chr(10) + '<|im_start|>assistant' + chr(10)!r}>"
    )
    encode, chance = encoder(tokenizer), random.Random(kind)
    pieces = [*PIECES, *([values["added"]["content"]] if "added" in values else [])]
    for _ in range(1500):
        text = "".join(chance.choices(pieces, k=chance.choice([0, 1, 3, 12])))
        for prompt in (text, BEFORE + text, render(text), text + "<|im_end|>\n<|im_start|>assistant\n"):
            assert kept.encode(prompt) == encode(prompt), prompt


def test_the_kept_parts_are_not_encoded_again() -> None:
    tokenizer = make_tokenizer()
    encoded: list[str] = []

    def encode(text: str) -> array[int]:
        encoded.append(text)
        return encoder(tokenizer)(text)

    kept = TemplateTokens.of(json.loads(tokenizer.to_str()), encode, render)
    encoded.clear()
    kept.encode(render("hello"))
    kept.encode("<|im_start|>system\nAnother one.<|im_end|>\n<|im_start|>assistant\n")
    assert encoded == ["<|im_start|>user\nhello", "<|im_start|>system\nAnother one."]


@pytest.mark.parametrize(
    "added",
    [
        {"content": "<|im_start|>user", "normalized": False},  # contains the cut, and is the longer match
        {"content": "|>user", "normalized": False},  # overlaps with its end
        {"content": "\n<|im", "normalized": False},  # overlaps with its beginning
        {"content": "<word>", "single_word": True},  # looks at its neighbours
    ],
)
def test_tokens_that_a_text_cannot_be_cut_at(added: dict[str, Any]) -> None:
    tokenizer = make_tokenizer(added)
    assert "<|im_start|>" not in tokens_to_cut_at(json.loads(tokenizer.to_str()), render("a"))
    kept, encode = template_tokens(tokenizer), encoder(tokenizer)
    chance = random.Random(5)
    for _ in range(500):
        prompt = render("".join(chance.choices([*PIECES, added["content"]], k=5)))
        assert kept.encode(prompt) == encode(prompt), prompt


def test_nothing_is_cut_where_the_tokenizer_looks_at_places() -> None:
    parts = tokenizers.pre_tokenizers
    for pre_tokenizer in (parts.Metaspace(), parts.ByteLevel(add_prefix_space=True), parts.Whitespace()):
        assert tokens_to_cut_at(json.loads(make_tokenizer(pre_tokenizer=pre_tokenizer).to_str()), render("a")) == []
    unknown = make_tokenizer(normalizer=tokenizers.normalizers.Prepend("_"))
    assert tokens_to_cut_at(json.loads(unknown.to_str()), render("a")) == []


def test_templates_without_a_constant_part() -> None:
    tokenizer = make_tokenizer()
    assert repr(template_tokens(tokenizer, lambda message: message)) == "<TemplateTokens '' ... ''>"
    only_end = template_tokens(tokenizer, lambda message: f"{message}<|im_end|>")
    assert repr(only_end) == "<TemplateTokens '' ... '<|im_end|>'>"
    assert only_end.encode("a<|im_end|>") == encoder(tokenizer)("a<|im_end|>")


def test_only_tokens_of_the_template_are_compared_with_all_others() -> None:
    reserved = [{"content": f"<|reserved_{i}|>", "normalized": False, "special": True} for i in range(50)]
    values = json.loads(make_tokenizer(*reserved).to_str())
    assert tokens_to_cut_at(values, render("a")) == ADDED
    assert tokens_to_cut_at(values, "<|reserved_7|>") == ["<|reserved_7|>"]
