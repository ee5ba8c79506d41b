"""kvferry.inference.v1 messages as HTTP bodies, so that both share checks and renderer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from google.protobuf.message import DecodeError

from kvferry.errors import InvalidRequest, RequestError
from kvferry.gateway.bodies.json_text import object_of, require_few_values
from kvferry.gateway.bodies.large_bodies import fields_of_bytes, read_varint
from kvferry.gateway.bodies.long_texts import LONG_BYTES, join_in_steps
from kvferry.gateway.bodies.openai_bodies import (
    MAX_MESSAGES,
    MAX_TOKEN_IDS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    ChatBody,
    CompletionBody,
    chat_of,
    completion_of,
)
from kvferry.inference.v1 import inference_pb2 as pb

# Reading a string field decodes it in one call, of up to 15 ms for 8 MiB. Here, the field is found in the parsed bytes.
_STEP_BYTES = 64 << 10

_CONTENT = pb.Message.DESCRIPTOR.fields_by_name["content"].number
_MESSAGES = pb.Conversation.DESCRIPTOR.fields_by_name["messages"].number

_Request = pb.GenerateRequest | pb.TokenizeRequest


def text_of(message: _Request, raw: bytes) -> str:
    """Return `message.text`; `raw` is what was parsed."""
    if len(raw) < LONG_BYTES:
        return message.text
    return _last_text(raw, 0, len(raw), _number(message, "text"))


def contents_of(message: _Request, raw: bytes) -> Sequence[str]:
    """Return the content of each message of the conversation."""
    if len(raw) < LONG_BYTES:
        return [each.content for each in message.conversation.messages]
    return [
        _last_text(raw, *span, _CONTENT)
        for conversation in fields_of_bytes(raw, 0, len(raw), _number(message, "conversation"))
        for span in fields_of_bytes(raw, *conversation, _MESSAGES)
    ]


def _number(message: _Request, name: str) -> int:
    number: int = type(message).DESCRIPTOR.fields_by_name[name].number
    return number


def _last_text(raw: bytes, start: int, end: int, number: int) -> str:
    *_, span = [(0, 0), *fields_of_bytes(raw, start, end, number)]  # the last one counts
    return join_in_steps([raw[i:j].decode() for i, j in _steps(raw, *span)])


def _steps(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
    while start < end:
        stop = min(end, start + _STEP_BYTES)
        while stop < end and 0x80 <= raw[stop] < 0xC0:
            stop += 1
        yield start, stop
        start = stop


# Fields of a body -> of a message; of what is below them only the first part differs.
_SAMPLING = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "logprobs", "logit_bias",
    "skip_special_tokens", "allowed_token_ids", "bad_words",
)  # fmt: skip
_FIELDS: Mapping[str, str] = {
    "model": "model",
    "n": "num_choices",
    "cache_salt": "cache_salt",
    "cache_ttl_s": "cache_ttl_s",
    "messages": "conversation.messages",
    "tools": "conversation.tools",
    "tool_choice": "conversation.tool_choice",
    "chat_template_kwargs": "conversation.template_arguments",
    "top_logprobs": "sampling.logprobs",
    "max_completion_tokens": "sampling.max_tokens",
    "include_stop_str_in_output": "sampling.include_stop_text",
    "structured_outputs": "structured_output",
    "response_format": "structured_output",
    **{name: f"sampling.{name}" for name in _SAMPLING},
}
_MAX_FIELDS = 64  # far more than a message has

_PROMPTS = {2: "text", 3: "token_ids", 4: "conversation"}  # numbers in GenerateRequest; 3 is 2 in TokenizeRequest

_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_OPTIONAL = ("max_tokens", "min_tokens", "top_k", "seed", *_FLOATS, "skip_special_tokens")
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


class _Message(Protocol):
    @classmethod
    def FromString(cls, raw: bytes) -> Any: ...  # noqa: N802  protobuf's name


M = TypeVar("M", bound=_Message)


def read_generate(raw: bytes) -> tuple[pb.GenerateRequest, ChatBody | CompletionBody]:
    """Return the message and its body. Raises a RequestError whose `param` is the wrong field."""
    message = _read(raw, pb.GenerateRequest)
    _refuse_several(raw, _PROMPTS)
    values = {"model": message.model, "n": message.num_choices or None, **_sampling(message.sampling)}
    if message.HasField("cache_salt"):
        values["cache_salt"] = message.cache_salt
    if message.HasField("cache_ttl_s"):
        if math.isnan(message.cache_ttl_s):
            raise InvalidRequest("cache_ttl_s: not a number", param="cache_ttl_s")
        values["cache_ttl_s"] = message.cache_ttl_s
    if message.HasField("structured_output"):
        values["structured_outputs"] = _structure(message.structured_output)
    kind = message.WhichOneof("prompt")
    try:
        return message, _body(message, raw, kind, values)
    except RequestError as error:
        raise in_fields(error, kind) from None


def read_tokenize(raw: bytes) -> tuple[pb.TokenizeRequest, ChatBody | CompletionBody]:
    message = _read(raw, pb.TokenizeRequest)
    _refuse_several(raw, {2: "text", 3: "conversation"})
    kind = message.WhichOneof("prompt")
    try:
        return message, _body(message, raw, kind, {"model": message.model, "max_tokens": 1})
    except RequestError as error:
        raise in_fields(error, kind) from None


def in_fields(error: RequestError, kind: str | None) -> RequestError:
    """Return the error with the message's field as `param`; `kind` is the prompt's."""
    if error.param is not None:
        error.param = _field(error.param, kind)
    return error


def _field(param: str, kind: str | None) -> str:
    name, rest = re.fullmatch(r"(\w*)(.*)", param, re.DOTALL).groups()  # type: ignore[union-attr]
    if name == "prompt":
        return "token_ids.ids" if kind == "token_ids" else (kind or "prompt")
    return _FIELDS.get(name, name) + rest.replace(".function", "")


def _body(
    message: pb.GenerateRequest | pb.TokenizeRequest, raw: bytes, kind: str | None, values: dict[str, Any]
) -> ChatBody | CompletionBody:
    match kind:
        case "text":
            return completion_of({**values, "prompt": text_of(message, raw)})
        case "token_ids" if isinstance(message, pb.GenerateRequest):
            return completion_of({**values, "prompt": list(message.token_ids.ids)})
        case "conversation":
            num_top = values.pop("logprobs", None)
            if num_top is not None:
                values |= {"logprobs": True, "top_logprobs": num_top}
            return chat_of({**values, **_conversation(message, raw)})
        case _:
            raise InvalidRequest("a prompt is required: a text, token ids or a conversation", param="prompt")


def _sampling(sampling: pb.Sampling) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(sampling, name) for name in _OPTIONAL if sampling.HasField(name)}
    for name in _FLOATS:
        _require_finite(f"sampling.{name}", values.get(name, 0.0))
    values |= {name: list(listed) for name in _LISTS if (listed := getattr(sampling, name))}
    if sampling.HasField("logprobs"):
        values["logprobs"] = sampling.logprobs
    if sampling.ignore_eos:
        values["ignore_eos"] = True
    if sampling.include_stop_text:
        values["include_stop_str_in_output"] = True
    if sampling.logit_bias:
        _require_few("sampling.logit_bias", len(sampling.logit_bias), MAX_TOKEN_IDS)
        for bias in sampling.logit_bias.values():
            _require_finite("sampling.logit_bias", bias)
        values["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return values


def _require_finite(field: str, value: float) -> None:
    # JSON has neither; a comparison lets the one pass that is no number.
    if not math.isfinite(value):
        raise InvalidRequest(f"{field}: expected a finite number, not {value}", param=field)


def _structure(structure: pb.StructuredOutput) -> dict[str, Any]:
    field = "structured_output"
    match structure.WhichOneof("kind"):
        case "json_schema":
            return {"json": object_of(f"{field}.json_schema", structure.json_schema)}
        case "json_object":
            if not structure.json_object:
                raise InvalidRequest(f"{field}.json_object: true is all it can be", param=f"{field}.json_object")
            return {"json_object": True}
        case "regex":
            return {"regex": _not_empty(f"{field}.regex", structure.regex)}
        case "grammar":
            return {"grammar": _not_empty(f"{field}.grammar", structure.grammar)}
        case "one_of":
            texts = _not_empty(f"{field}.one_of.texts", list(structure.one_of.texts))
            for text in texts:
                _not_empty(f"{field}.one_of.texts", text)
            return {"choice": texts}
        case _:
            raise InvalidRequest(f"{field}: says nothing; leave it out for plain text", param=field)


T = TypeVar("T", str, list[str])


def _not_empty(field: str, value: T) -> T:
    if not value:
        raise InvalidRequest(f"{field}: must not be empty", param=field)
    return value


def _conversation(request: pb.GenerateRequest | pb.TokenizeRequest, raw: bytes) -> dict[str, Any]:
    conversation = request.conversation
    _require_few("conversation.tools", len(conversation.tools), MAX_TOOLS)
    _require_few("conversation.messages", len(conversation.messages), MAX_MESSAGES)
    require_few_values("conversation.tools", *(tool.parameters for tool in conversation.tools))
    num_calls = sum(len(message.tool_calls) for message in conversation.messages)
    _require_few("conversation.messages", num_calls, MAX_TOOL_CALLS)
    contents = contents_of(request, raw)
    values: dict[str, Any] = {"messages": list(map(_message, conversation.messages, contents))}
    if conversation.tools:
        values["tools"] = [
            {"type": "function", "function": _function(f"conversation.tools[{i}].parameters", tool)}
            for i, tool in enumerate(conversation.tools)
        ]
    match conversation.tool_choice:
        case "":
            pass
        case "auto" | "none" | "required" as choice:
            values["tool_choice"] = choice
        case name:
            values["tool_choice"] = {"type": "function", "function": {"name": name}}
    if conversation.template_arguments:
        field = "conversation.template_arguments"
        values["chat_template_kwargs"] = object_of(field, conversation.template_arguments)
    return values


def _require_few(field: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{field}: {count} are too many; at most {most} are allowed", param=field)


def _message(message: pb.Message, content: str) -> dict[str, Any]:
    values: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        values["content"] = content or None
        values["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool" or message.tool_call_id:
        values["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        values["reasoning"] = message.reasoning
    return values


def _function(field: str, tool: pb.Tool) -> dict[str, Any]:
    values: dict[str, Any] = {"name": tool.name}
    if tool.description:
        values["description"] = tool.description
    if tool.parameters:
        values["parameters"] = object_of(field, tool.parameters)
    return values


def _read(raw: bytes, kind: type[M]) -> M:
    try:
        message: M = kind.FromString(raw)
    except DecodeError:
        raise InvalidRequest(f"the message is no {kind.__name__} of kvferry.inference.v1") from None
    return message


def _refuse_several(raw: bytes, number_to_prompt: Mapping[int, str]) -> None:
    """Refuse several prompts, of which protobuf would silently keep the last."""
    found = {number_to_prompt[number] for number in _field_numbers(raw) if number in number_to_prompt}
    if len(found) > 1:
        raise InvalidRequest(f"one prompt is enough: the message has {' and '.join(sorted(found))}", param="prompt")


def _field_numbers(raw: bytes) -> Iterable[int]:
    position, end, num_fields = 0, len(raw), 0
    while position < end:
        num_fields += 1
        if num_fields > _MAX_FIELDS:
            raise InvalidRequest(f"the message has more than {_MAX_FIELDS} fields", param="message")
        tag, position = read_varint(raw, position)
        yield tag >> 3
        match tag & 7:
            case 0:
                _, position = read_varint(raw, position)
            case 1:
                position += 8
            case 2:
                length, position = read_varint(raw, position)
                position += length
            case 5:
                position += 4
            case _:
                return  # a group of an unknown field: what comes after it is not looked at
