"""OpenAI bodies to tokens and sampling parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from kvferry.engine.base import ANYBODY, Asker, ChatImage, RenderedPrompt, RenderOutcomes, Sampling
from kvferry.errors import ContextLengthExceeded, InvalidRequest
from kvferry_sim.answer import check_name, parse_of
from kvferry_sim.tokenizer import ROLE_TO_MARKER, SimTokenizer

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for completions; chat has none

# name -> lowest, highest; what OpenAI and vLLM allow.
_NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, math.inf),
}
_INTEGERS: Mapping[str, tuple[float, float]] = {
    "top_k": (-1, math.inf),
    "min_tokens": (0, math.inf),
    "seed": (-(2**63), 2**63 - 1),
}
_SWITCHES = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens")


class SimRenderer:
    """Validates only the fields it uses."""

    def __init__(
        self,
        max_model_len: int,
        *,
        tool_parser: str = "",
        reasoning_parser: str = "",
    ) -> None:
        check_name("model.tool_parser", tool_parser)
        check_name("model.reasoning_parser", reasoning_parser)
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._max_model_len = max_model_len
        self._tokenizer = SimTokenizer()

    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def outcomes(self) -> RenderOutcomes:
        return RenderOutcomes()  # engines of the simulation carry grammars and compile none

    def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    @property
    def takes_images(self) -> bool:
        return False

    async def render_chat(
        self, body: Mapping[str, Any], images: Sequence[ChatImage] = (), *, asker: Asker = ANYBODY
    ) -> RenderedPrompt:
        if images:
            raise InvalidRequest(f"{images[0].where}: this model takes no images", param=images[0].where)
        if body.get("tools") and body.get("tool_choice") != "none" and not self._tool_parser:
            raise InvalidRequest("tools need model.tool_parser, which is not set", param="tools")
        token_ids = self._chat_tokens(body)
        name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        max_tokens = _integer(body, name, 1, math.inf)
        logprobs = None
        top_logprobs = _integer(body, "top_logprobs", 0, 20)
        if _switch(body, "logprobs"):
            logprobs = top_logprobs or 0
        elif top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        rendered = self._rendered(body, token_ids, max_tokens, max_tokens_param=name, logprobs=logprobs)
        return structs.replace(rendered, parse=parse_of(body, self._tool_parser, self._reasoning_parser))

    async def render_completion(self, body: Mapping[str, Any], *, asker: Asker = ANYBODY) -> Sequence[RenderedPrompt]:
        max_tokens = _integer(body, "max_tokens", 1, math.inf)
        if max_tokens is None:
            max_tokens = DEFAULT_COMPLETION_TOKENS
        logprobs = _integer(body, "logprobs", 0, 20)
        with_bos = _switch(body, "add_special_tokens", unset=True)
        rendered = []
        for prompt in _prompts(body.get("prompt")):
            if isinstance(prompt, str):
                token_ids = [self._tokenizer.bos_token_id] if with_bos else []
                token_ids += self._tokenizer.encode(prompt)
            else:
                token_ids = self._checked_tokens(prompt)
            if not token_ids:
                raise InvalidRequest("prompt: has no tokens", param="prompt")
            rendered.append(
                self._rendered(body, token_ids, max_tokens, max_tokens_param="max_tokens", logprobs=logprobs)
            )
        return rendered

    def _rendered(
        self,
        body: Mapping[str, Any],
        token_ids: Sequence[int],
        max_tokens: int | None,
        *,
        max_tokens_param: str,
        logprobs: int | None,
    ) -> RenderedPrompt:
        room = self._max_model_len - len(token_ids)
        if room < 1:
            wanted = "" if max_tokens is None else f" and {max_tokens} more are asked for"
            raise ContextLengthExceeded(
                f"this model's context is {self._max_model_len} tokens; the prompt alone has {len(token_ids)}{wanted}",
                param="messages" if "messages" in body else "prompt",
            )
        if max_tokens is None:
            max_tokens = room
        elif max_tokens > room:
            raise ContextLengthExceeded(
                f"this model's context is {self._max_model_len} tokens; {len(token_ids) + max_tokens} are asked for: "
                f"{len(token_ids)} in the prompt and {max_tokens} to generate",
                param=max_tokens_param,
            )
        sampling = self._sampling(body, max_tokens, logprobs)
        return RenderedPrompt(token_ids=token_ids, sampling=sampling)

    def _sampling(self, body: Mapping[str, Any], max_tokens: int, logprobs: int | None) -> Sampling:
        _refuse_structure(body)
        values: dict[str, Any] = {}
        for name, (lowest, highest) in _NUMBERS.items():
            values[name] = _number(body, name, lowest, highest)
        for name, (lowest, highest) in _INTEGERS.items():
            values[name] = _integer(body, name, lowest, highest)
        for name in _SWITCHES:
            if body.get(name) is not None:
                values[name] = _switch(body, name)
        for name in ("top_p", "repetition_penalty"):
            if values[name] == 0:
                raise InvalidRequest(f"{name}: must be over 0", param=name)
        if (values["min_tokens"] or 0) > max_tokens:
            raise InvalidRequest(
                f"min_tokens: {values['min_tokens']} is over max_tokens ({max_tokens})", param="min_tokens"
            )
        values["stop"] = _texts(body, "stop")
        values["bad_words"] = _texts(body, "bad_words")
        for name in ("stop_token_ids", "allowed_token_ids"):
            value = body.get(name)
            if value is not None:
                values[name] = tuple(self._checked_tokens(value, param=name))
        values["logit_bias"] = self._logit_bias(body)
        given = {name: value for name, value in values.items() if value is not None}
        return Sampling(max_tokens=max_tokens, logprobs=logprobs, **given)

    def _chat_tokens(self, body: Mapping[str, Any]) -> list[int]:
        messages = body.get("messages")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InvalidRequest("messages: expected at least one message", param="messages")
        turns: list[tuple[str, str]] = []
        if body.get("tools"):
            turns.append(("system", json.dumps(body["tools"])))
        for i, message in enumerate(messages):
            where = f"messages[{i}]"
            role = message.get("role") if isinstance(message, Mapping) else None
            if not isinstance(role, str) or role not in ROLE_TO_MARKER:
                raise InvalidRequest(
                    f"{where}.role: expected one of {', '.join(ROLE_TO_MARKER)}, not {role!r}", param=f"{where}.role"
                )
            text = _content_text(message.get("content"), f"{where}.content")
            if message.get("tool_calls"):
                text += " " + json.dumps(message["tool_calls"])
            turns.append((role, text))
        if _switch(body, "continue_final_message"):
            if body.get("add_generation_prompt"):
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            return self._tokenizer.encode_chat(turns, open_turn=None)
        if not _switch(body, "add_generation_prompt", unset=True):
            return [*self._tokenizer.encode_chat(turns, open_turn=None), self._tokenizer.end_of_turn_token_id]
        return self._tokenizer.encode_chat(turns, open_turn="assistant")

    def _checked_tokens(self, token_ids: object, param: str = "prompt") -> list[int]:
        size = self._tokenizer.vocabulary_size
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, str):
            raise InvalidRequest(f"{param}: expected token ids, not {token_ids!r}", param=param)
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < size:
                raise InvalidRequest(f"{param}: {token_id!r} is not a token id (0 to {size - 1})", param=param)
        return list(token_ids)

    def _logit_bias(self, body: Mapping[str, Any]) -> dict[int, float] | None:
        value = body.get("logit_bias")
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"logit_bias: expected an object, not {value!r}", param="logit_bias")
        biases = {}
        for key, bias in value.items():
            try:
                (token_id,) = self._checked_tokens([int(key)], param="logit_bias")
            except ValueError:
                raise InvalidRequest(f"logit_bias: {key!r} is not a token id", param="logit_bias") from None
            biases[token_id] = _number({"logit_bias": bias}, "logit_bias", -100, 100) or 0.0
        return biases


def _prompts(prompt: object) -> Sequence[str | Sequence[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, Sequence) and prompt:
        if all(type(part) is int for part in prompt):
            return [prompt]
        kinds = {type(part) for part in prompt}
        if kinds == {str} or (kinds <= {list, tuple} and all(prompt)):
            return prompt
    raise InvalidRequest("prompt: expected a string, token ids, or a list of one kind of these", param="prompt")


def _content_text(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where}: expected a string or a list of parts, not {content!r}", param=where)
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}: only parts of type text are supported", param=where)
        texts.append(part["text"])
    return "\n".join(texts)


def _refuse_structure(body: Mapping[str, Any]) -> None:
    response_format = body.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise InvalidRequest("response_format: the sim engine writes plain text only", param="response_format")
    if body.get("structured_outputs"):
        raise InvalidRequest("structured_outputs: the sim engine writes plain text only", param="structured_outputs")


def _number(body: Mapping[str, Any], name: str, lowest: float, highest: float) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
        raise InvalidRequest(f"{name}: expected {_range(lowest, highest)}, not {value!r}", param=name)
    return float(value)


def _integer(body: Mapping[str, Any], name: str, lowest: float, highest: float) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidRequest(f"{name}: expected a whole number, {_range(lowest, highest)}, not {value!r}", param=name)
    return value


def _range(lowest: float, highest: float) -> str:
    return f"at least {lowest:g}" if highest == math.inf else f"a number from {lowest:g} to {highest:g}"


def _switch(body: Mapping[str, Any], name: str, *, unset: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return unset
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: expected true or false, not {value!r}", param=name)
    return value


def _texts(body: Mapping[str, Any], name: str) -> tuple[str, ...] | None:
    value = body.get(name)
    if value is None:
        return None
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, Sequence) or not all(isinstance(text, str) and text for text in values):
        raise InvalidRequest(f"{name}: expected a string or a list of strings, none empty", param=name)
    return tuple(values)
