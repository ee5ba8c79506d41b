"""Validated request bodies of the OpenAI API.

`IGNORED` fields have no effect, `DROPPED` ones are for the cluster only; unknown ones are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies import structured_limits
from kvferry.gateway.bodies.json_text import decode_json, json_type, object_of, require_few_values, surrogate_fault
from kvferry.gateway.bodies.long_texts import LONG_BYTES, decode_in_steps
from kvferry.gateway.bodies.message_parts import check_part
from kvferry.tenancy.terms import MAX_WANTED_S

# Sent by ordinary clients, without effect on one answer (of an endpoint that has no such field).
IGNORED = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
        "reasoning_effort", "verbosity", "prediction",
    }
)  # fmt: skip

# Would let a client reach into the data path (remote hosts and ports, other tenants' pages): dropped from each body.
DROPPED = frozenset({"kv_transfer_params", "ec_transfer_params", "priority", "request_id"})

# Known, not served; the value that means "not asked for" passes.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ((), []),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "prompt_logprobs": (0,),
    "use_beam_search": (False,),
    "prompt_embeds": (),
}

# What the wire to the workers carries for a token id or a count.
MAX_INT32 = 2**31 - 1

# Choices of one answer: each is a request of its own on the workers, which refuse more than `worker.max_requests`.
MAX_CHOICES = 512

# Tools of one request; OpenAI has the same limit.
MAX_TOOLS = 128

# Lists of a body travel in each choice's Submit, to a prefill and to a decode worker: their length counts up to
# 2 x MAX_CHOICES times.
MAX_TOKEN_IDS = 1024  # of stop_token_ids, allowed_token_ids and logit_bias, each
MAX_STOP_STRINGS = 4  # as vLLM (VLLM_MAX_STOP_STRINGS) and OpenAI
MAX_STOP_CHARS = 4096  # of one
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256

MAX_CACHE_SALT_CHARS = 256

# Limits of one conversation. Each message costs the gateway's event loop some microseconds, however short it is.
MAX_MESSAGES = 4096
MAX_PARTS = 4096  # in all messages
MAX_TOOL_CALLS = 4096  # in all messages

Count = Annotated[int, Meta(ge=1, le=MAX_INT32)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_INT32)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKEN_IDS)]
PromptTokenIds = Annotated[list[TokenId], Meta(min_length=1)]
LogitBias = Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_TOKEN_IDS)]
StopStrings = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]], Meta(max_length=MAX_STOP_STRINGS)
]
BadWords = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_WORD_CHARS)]], Meta(max_length=MAX_BAD_WORDS)
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_INT32)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_INT32)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[str, Meta(max_length=MAX_STOP_CHARS)] | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None
    cache_ttl_s: Annotated[float, Meta(ge=0, le=MAX_WANTED_S)] | None = None
    prompt_cache_retention: Any = None

    @property
    def wanted_s(self) -> float | None:
        # As in `TierHints`.
        if self.cache_ttl_s is None and self.prompt_cache_retention == "24h":
            return MAX_WANTED_S
        return self.cache_ttl_s


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function that a model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatBody(SharedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionBody(SharedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_special_tokens: bool | None = None


# Settled by the gateway: the renderer never sees them.
_GATEWAY_ONLY = ("model", "stream", "stream_options", "n", "cache_salt", "cache_ttl_s", "prompt_cache_retention")

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Body = TypeVar("Body", ChatBody, CompletionBody)


def read_chat(raw: bytes) -> ChatBody:
    return chat_of(_object(raw))


def chat_of(values: Mapping[str, Any]) -> ChatBody:
    body = _checked(values, ChatBody)
    _check_sizes(body.messages)
    _check_arguments(body.messages)
    for i, message in enumerate(body.messages):
        _check_message(f"messages[{i}]", message)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    _check_tools(body)
    return body


def read_completion(raw: bytes) -> CompletionBody:
    return completion_of(_object(raw))


def completion_of(values: Mapping[str, Any]) -> CompletionBody:
    body = _checked(values, CompletionBody)
    prompt = body.prompt
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))
        if not prompt:
            raise InvalidRequest("prompt: must not be empty", param="prompt")
        if len(kinds) > 1 or not kinds <= {str, int, list}:
            raise InvalidRequest("prompt: expected a string, token ids, or a list of one kind of these", param="prompt")
        count = num_prompts(body)
        if count * (body.n or 1) > MAX_CHOICES:
            raise InvalidRequest(
                f"{count} prompts with n={body.n or 1} make {count * (body.n or 1)} choices; "
                f"at most {MAX_CHOICES} are allowed",
                param="prompt",
            )
        for i, part in enumerate(prompt if kinds == {list} else [prompt] if kinds == {int} else []):
            try:
                msgspec.convert(part, PromptTokenIds)
            except msgspec.ValidationError:
                raise InvalidRequest(
                    f"prompt[{i}]: expected token ids, at least one, none negative, none over {MAX_INT32}",
                    param="prompt",
                ) from None
        if kinds == {str} and not all(prompt):
            raise InvalidRequest("prompt: no part may be empty", param="prompt")
    elif not prompt:
        raise InvalidRequest("prompt: must not be empty", param="prompt")
    return body


def num_prompts(body: CompletionBody) -> int:
    return len(body.prompt) if isinstance(body.prompt, list) and type(body.prompt[0]) is not int else 1


def for_renderer(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Return the client's fields, without the gateway's own, as JSON values."""
    values: dict[str, Any] = msgspec.to_builtins(body)
    if isinstance(body, ChatBody):
        if not body.tools:
            for name in ("tools", "tool_choice", "parallel_tool_calls"):
                values[name] = None
        for message in values["messages"]:
            _leave_known_keys(message)
    return {key: value for key, value in values.items() if value is not None and key not in _GATEWAY_ONLY}


def _leave_known_keys(message: dict[str, Any]) -> None:
    # vLLM takes a part of text with a `uuid` for what a key such as `image_url` names.
    content = message.get("content")
    if isinstance(content, list) and any(len(part) > 2 for part in content):
        message["content"] = [
            {"type": "text", "text": part["text"]} if part["type"] == "text" else part for part in content
        ]


def _object(raw: bytes) -> dict[str, Any]:
    if not raw or raw.isspace():
        raise InvalidRequest("the body is empty")
    try:
        values = decode_json(raw) if len(raw) < LONG_BYTES else decode_in_steps(raw, decode_json)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = surrogate_fault(raw) or str(error)
        raise InvalidRequest(f"the body is not valid JSON: {reason}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    if not isinstance(values, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {json_type(values)}")
    return values


def _checked(values: Mapping[str, Any], kind: type[Body]) -> Body:
    known: tuple[str, ...] = kind.__struct_fields__
    held = {key: value for key, value in values.items() if (key in known or key not in IGNORED) and key not in DROPPED}
    for name, not_asked in UNSUPPORTED.items():
        asked = held.pop(name, None)
        if asked is not None and asked not in not_asked:
            raise InvalidRequest(f"{name} is not supported", param=name)
    if unknown := next((key for key in held if key not in known), None):
        raise InvalidRequest(f"unrecognized request argument: {unknown}", param=unknown)
    for required in ("model", "messages" if kind is ChatBody else "prompt"):
        if held.get(required) is None:
            hint = ": one of the names that /v1/models lists" if required == "model" else ""
            raise InvalidRequest(f"{required} is required{hint}", param=required)
    try:
        body = msgspec.convert(held, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        where = path.strip("`.")
        raise InvalidRequest(f"{where or 'body'}: {text[0].lower()}{text[1:]}", param=where or None) from None
    for token in body.logit_bias or ():
        if not (token.isascii() and token.isdigit() and len(token) <= 10 and int(token) <= MAX_INT32):
            raise InvalidRequest(f"logit_bias: {token!r} is not a token id", param="logit_bias")
    if body.response_format is not None:
        structured_limits.check_response_format(body.response_format)
    if body.structured_outputs is not None:
        structured_limits.check_structured_outputs(body.structured_outputs)
    if isinstance(body, ChatBody) and body.chat_template_kwargs is not None:
        structured_limits.check_template_arguments(body.chat_template_kwargs)
    if isinstance(body, ChatBody) and body.tools:
        structured_limits.check_tools([tool.function.parameters for tool in body.tools])
    return body


def _check_sizes(messages: Sequence[Mapping[str, Any]]) -> None:
    for name, most in (("content", MAX_PARTS), ("tool_calls", MAX_TOOL_CALLS)):
        lists = [value for message in messages if isinstance(value := message.get(name), list)]
        if (count := sum(map(len, lists))) > most:
            kind = "parts" if name == "content" else "tool calls"
            raise InvalidRequest(f"messages: {count} {kind} are too many; at most {most} are allowed", param="messages")


def _check_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """Limit the values in arguments of tool calls, which are JSON in texts."""
    calls = [call for message in messages if isinstance(calls := message.get("tool_calls"), list) for call in calls]
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    if not arguments:
        return
    require_few_values("messages", *(text for text in arguments if isinstance(text, str)))


def _check_message(where: str, message: Mapping[str, Any]) -> None:
    role = message.get("role")
    if role not in ROLES:
        found = repr(role[:64]) if isinstance(role, str) else json_type(role)
        raise InvalidRequest(f"{where}.role: expected one of {', '.join(ROLES)}, not {found}", param=f"{where}.role")
    content = message.get("content")
    if role == "function":
        raise InvalidRequest(f"{where}: functions are not supported; use tools", param=where)
    if content is None and role != "assistant":
        raise InvalidRequest(f"{where}.content is required", param=f"{where}.content")
    if role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise InvalidRequest(f"{where}.tool_call_id: expected a string", param=f"{where}.tool_call_id")
    if message.get("tool_calls") is not None:
        _check_tool_calls(f"{where}.tool_calls", role, message["tool_calls"])
    # vLLM tells a wrong name as a fault of the role, of each kind of message.
    if not isinstance(message.get("name", ""), str):
        found = json_type(message["name"])
        raise InvalidRequest(f"{where}.name: expected a string, not {found}", param=f"{where}.name")
    for name in ("reasoning", "reasoning_content"):
        if not isinstance(message.get(name), str | None):
            raise InvalidRequest(f"{where}.{name}: expected a string", param=f"{where}.{name}")
    if isinstance(content, list):
        for i, part in enumerate(content):
            check_part(f"{where}.content[{i}]", role, part)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content: expected a string or a list of parts, not {json_type(content)}",
            param=f"{where}.content",
        )


def _check_tool_calls(where: str, role: str, calls: object) -> None:
    if role != "assistant":
        raise InvalidRequest(f"{where}: only messages of the assistant have them, not of {role}", param=where)
    try:
        read = msgspec.convert(calls, list[ToolCall])
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        place = where + path.strip("`")
        raise InvalidRequest(f"{place}: {text[0].lower()}{text[1:]}", param=place) from None
    for i, call in enumerate(read):
        object_of(f"{where}[{i}].function.arguments", call.function.arguments or "{}")


def _check_tools(body: ChatBody) -> None:
    choice = body.tool_choice
    if choice in (None, "none", "auto") and not body.tools:
        return
    if not body.tools:
        raise InvalidRequest("tool_choice needs tools", param="tool_choice")
    names = [tool.function.name for tool in body.tools]
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise InvalidRequest(
            f"tool_choice: {choice.function.name!r} is not one of the tools ({', '.join(names)})", param="tool_choice"
        )
