"""Parsed answers."""

from __future__ import annotations

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

    def resume(self, pieces: Sequence[tuple[int, str]], num_chars: int) -> None:
        """Feed answer tokens one by one, because parsers may hold text back between calls.

        Text after the delivered `num_chars` characters comes with the next output.
        """
        for token_id, text in pieces:
            self._parser.feed([token_id], text[:num_chars], finished=False)
            num_chars -= min(num_chars, len(text))

    def on_output(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """Return what the output adds; None if that is nothing."""
        return self._parser.feed(token_ids, text, finished=finished)
