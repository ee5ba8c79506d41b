"""What of a parsed answer is told, where some of it was told before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvferry.engine.base import AnswerDelta, Parse


class DeltaParser(Protocol):
    """Takes an answer apart as it comes. For one answer, once."""

    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """What these tokens and this raw text add. `finished`: nothing follows, and nothing is held back any more."""
        ...


class ParsedAnswer:
    """One answer on its way through its parser.

    An answer in the middle needs a parser in the middle: it is fed everything from the start, and what was told before
    is left out. There are two ways for it to come again:
    - a continued request's tokens are part of its prompt: `resume` feeds them;
    - a request that is computed again (`Parse.num_tokens_before`) gives them as outputs: `take` leaves them out. An
      output that holds the last of what is old and the first of what is new is fed in two pieces, cut where the
      delivered text ends.
    """

    def __init__(self, parser: DeltaParser, parse: Parse) -> None:
        self._parser = parser
        self._num_tokens_again = parse.num_tokens_before
        self._num_chars_again = parse.num_chars_before

    def resume(self, pieces: Sequence[tuple[int, str]], num_chars: int) -> None:
        """Feed tokens of the answer with the text that each added, of which `num_chars` characters were delivered.

        Text beyond these comes with the engine's next output. Token by token, as it came: parsers may hold something
        back from one call to the next.
        """
        for token_id, text in pieces:
            self._parser.feed([token_id], text[:num_chars], finished=False)
            num_chars -= min(num_chars, len(text))

    def take(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        """What an output adds to what was told. None: nothing."""
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
