"""Tokens of the text that a chat template puts before and after every conversation."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

# These treat the text after an added token as they treat it alone. Others (Metaspace) look at its place in the prompt.
_NORMALIZERS = frozenset({"NFC", "NFD", "NFKC", "NFKD", "Lowercase"})
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Split", "Digits", "Punctuation"})

_MESSAGES = ("a", "0 b\n")  # their prompts begin and end alike, and differ between


class TemplateTokens:
    """Encodes prompts of a chat template; tokens of its own beginning and end are kept."""

    def __init__(
        self, encode: Callable[[str], array[int]], *, before: str = "", cut: str = "", after: str = ""
    ) -> None:
        """Keep the tokens of `before`, where `cut` follows it, and of `after`.

        `cut` and the beginning of `after` must be added tokens at which a text may be cut (`tokens_to_cut_at`).
        """
        self._encode = encode
        self._before, self._before_and_cut, self._after = before, before + cut, after
        self._before_ids, self._after_ids = encode(before), encode(after)

    def __repr__(self) -> str:
        return f"<TemplateTokens {self._before!r} ... {self._after!r}>"

    @classmethod
    def of(
        cls, tokenizer: Mapping[str, Any], encode: Callable[[str], array[int]], render: Callable[[str], str]
    ) -> Self:
        """Find the constant beginning and end of a template's prompts.

        `tokenizer` has the values of a tokenizer.json, `render` returns the prompt of one message of a user.
        """
        texts = [render(message) for message in _MESSAGES]
        cuts = tokens_to_cut_at(tokenizer, texts[0])
        begin = _common_beginning(*texts)
        end = _common_beginning(*(text[::-1] for text in texts))[::-1]
        start, cut = max(((begin.rfind(cut), cut) for cut in cuts), default=(-1, ""))
        first = min((at for cut in cuts if (at := end.find(cut)) >= 0), default=len(end))
        return (
            cls(encode, before=begin[:start], cut=cut, after=end[first:])
            if start > 0
            else cls(encode, after=end[first:])
        )

    def encode(self, text: str) -> array[int]:
        """Return the token ids of a prompt."""
        first, end = 0, len(text)
        if self._after and text.endswith(self._after):
            end -= len(self._after)
        if self._before and text.startswith(self._before_and_cut, 0, end):
            first = len(self._before)
        token_ids = self._encode(text[first:end])
        if first:
            token_ids = self._before_ids + token_ids
        return token_ids + self._after_ids if end < len(text) else token_ids


def tokens_to_cut_at(tokenizer: Mapping[str, Any], prompt: str) -> Sequence[str]:
    """Return added tokens in `prompt` before which a text can be cut: its parts have the tokens of the whole, in order.

    Empty for tokenizers with other parts than those that are known to treat each part between added tokens alone.
    """
    added = tokenizer.get("added_tokens") or []
    normalizers, pre_tokenizers = _parts(tokenizer.get("normalizer")), _parts(tokenizer.get("pre_tokenizer"))
    if (
        any(part["type"] not in _NORMALIZERS for part in normalizers)
        or any(part["type"] not in _PRE_TOKENIZERS or part.get("add_prefix_space") for part in pre_tokenizers)
        or any(token["single_word"] for token in added)
    ):
        return []
    contents = [token["content"] for token in added if token["content"]]
    return [
        token["content"]
        for token in added
        # Each is compared with all: of the 1,000 that some models have, a template uses a few.
        if token["content"].strip() == token["content"] != ""
        and token["content"] in prompt
        and not (token["normalized"] or token["lstrip"] or token["rstrip"])
        and not any(_may_overlap(token["content"], other) for other in contents)
    ]


def _common_beginning(one: str, other: str) -> str:
    length = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _parts(value: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    if value is None:
        return []
    if value["type"] == "Sequence":
        parts = value.get("normalizers") or value.get("pretokenizers") or []
        return [part for each in parts for part in _parts(each)]
    return [value]


def _may_overlap(one: str, other: str) -> bool:
    """Whether a text can have both in places that overlap, or one inside the other; a token with itself, too."""
    shorter = min(len(one), len(other))
    borders = range(1, shorter + (one != other))
    return (one != other and (one in other or other in one)) or any(
        one.endswith(other[:length]) or other.endswith(one[:length]) for length in borders
    )
