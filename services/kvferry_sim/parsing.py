"""The simulator's parser: a word's place in the answer decides its kind.

First come `NUM_REASONING_WORDS`, if the model reasons; with tools, then `NUM_CONTENT_WORDS` (none when a call is
required) and one call with the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.engine.base import AnswerDelta, Parse, ToolCallDelta
from kvferry.errors import ConfigError

NAME = "sim"
NUM_REASONING_WORDS = 3
NUM_CONTENT_WORDS = 2

_WORDS = re.compile(r" [^ ]*|[^ ]+")  # whole words, or the rest of one that began earlier


def check_name(key: str, name: str) -> None:
    if name not in ("", NAME):
        raise ConfigError(f"{key}: the sim engine has no parser {name!r}; it has {NAME!r}")


def parse_of(body: Mapping[str, Any], tool_parser: str, reasoning_parser: str) -> Parse | None:
    """Return None for plain text."""
    choice = body.get("tool_choice") or "auto"
    tools = body.get("tools") if tool_parser else None
    if not tools and not reasoning_parser:
        return None
    function = ""
    if tools and choice != "none":
        function = choice["function"]["name"] if isinstance(choice, Mapping) else tools[0]["function"]["name"]
    values = {
        "function": function,
        "num_reasoning": NUM_REASONING_WORDS if reasoning_parser else 0,
        "num_content": NUM_CONTENT_WORDS if choice == "auto" else 0,
        "tell_reasoning": body.get("include_reasoning") is not False,
    }
    return Parse(json.dumps(values).encode())


class SimParser:
    def __init__(self, parse: Parse) -> None:
        values = json.loads(parse.request)
        self._function: str = values["function"]
        self._num_reasoning: int = values["num_reasoning"]
        self._num_before_call: int = values["num_reasoning"] + values["num_content"]
        self._tell_reasoning: bool = values["tell_reasoning"]
        self._num_words = 0
        self._calls = False

    def feed(self, token_ids: Sequence[int], text: str, *, finished: bool) -> AnswerDelta | None:
        content = reasoning = arguments = ""
        began = False
        for word in _WORDS.findall(text):
            self._num_words += word[0] == " "
            if self._num_words <= self._num_reasoning:
                reasoning += word
            elif self._function and self._num_words > self._num_before_call:
                if not self._calls:
                    self._calls = began = True
                    arguments = '{"words": "'
                arguments += json.dumps(word)[1:-1]
            else:
                content += word
        if finished and self._calls:
            arguments += '"}'
        if not self._tell_reasoning:
            reasoning = ""
        if not (content or reasoning or arguments):
            return None
        calls: tuple[ToolCallDelta, ...] = ()
        if began:
            calls = (ToolCallDelta(0, f"call-{self._function}", self._function, arguments),)
        elif arguments:
            calls = (ToolCallDelta(0, arguments=arguments),)
        return AnswerDelta(content, reasoning, calls)
