"""Parsed answers, less the part that was delivered before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.engine.base import AnswerDelta, Parse


class DeltaParser(Protocol):
    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """Return the new deltas. After `finished` no text is held back."""
        ...


class ParsedAnswer:
    """Feeds one answer to its parser from the start, and leaves out the delivered part.

    That part is in a continued request's prompt (`resume`), or in the output of a request that is computed again
    (`Parse.num_tokens_before`).
    """

    def __init__(self, parser: DeltaParser, parse: Parse) -> None:
        self._parser = parser
        self._num_tokens_again = parse.num_tokens_before
        self._num_chars_again = parse.num_chars_before

    def resume(self, pieces: Sequence[tuple[int, str]], num_chars: int) -> None:
        """Feed answer tokens one by one, because parsers may hold text back between calls.

        Text after the delivered `num_chars` characters comes with the next output.
        """
        for token_id, text in pieces:
            self._parser.feed([token_id], text[:num_chars], finished=False)
            num_chars -= min(num_chars, len(text))

    def on_output(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """Return the part that was not delivered before; None if empty."""
        num_tokens = min(self._num_tokens_again, len(token_ids))
        num_chars = min(self._num_chars_again, len(text))
        if num_tokens or num_chars:
            self._parser.feed(token_ids[:num_tokens], text[:num_chars], finished=False)
            self._num_tokens_again -= num_tokens
            self._num_chars_again -= num_chars
            token_ids, text = token_ids[num_tokens:], text[num_chars:]
            if not (token_ids or text or finished):
                return None
        return self._parser.feed(token_ids, text, finished=finished)
