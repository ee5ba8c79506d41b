"""Parsed answers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from kvferry.engine.base import AnswerDelta


class DeltaParser(Protocol):
    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """Return the new deltas. After `finished` no text is held back."""
        ...


class ParsedAnswer:
    """Feeds one answer to its parser from the start; the delivered part of a continued one is left out (`resume`)."""

    def __init__(self, parser: DeltaParser) -> None:
        self._parser = parser

    def resume(self, pieces: Sequence[tuple[int, str]], num_chars: int, sizes: Sequence[int] = ()) -> None:
        """Feed answer tokens in outputs of these `sizes`, or one by one: parsers hold text back between calls.

        Text after the delivered `num_chars` characters comes with the next output.
        """
        left = iter(pieces)
        for size in sizes if sum(sizes) == len(pieces) else itertools.repeat(1, len(pieces)):
            token_ids, texts = zip(*itertools.islice(left, size), strict=True)
            text = "".join(texts)
            self._parser.feed(list(token_ids), text[:num_chars], finished=False)
            num_chars -= min(num_chars, len(text))

    def on_output(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """Return what the output adds; None if that is nothing."""
        return self._parser.feed(token_ids, text, finished=finished)
