"""Conversion of arguments to the endpoint's messages, for both clients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict

from google.protobuf.message import Message as ProtobufMessage

from kvferry.inference.v1 import inference_pb2 as pb

SERVICE = "/kvferry.inference.v1.Inference"

# Fields of HTTP bodies that have another name here.
_INSTEAD = {
    "prompt_cache_retention": "it is a field of HTTP bodies; give cache_ttl_s, in seconds (86400 for '24h')",
    "max_completion_tokens": "it is a field of HTTP bodies; give max_tokens",
    "n": "it is a field of HTTP bodies; give num_choices",
}

# A message as it is, (role, content), or the fields of one.
MessageLike = pb.Message | tuple[str, str] | Mapping[str, str]


class SamplingOptions(TypedDict, total=False):
    """Sampling parameters; absent ones have the model's defaults (`Sampling` in inference.proto)."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    logit_bias: Mapping[int, float]
    include_stop_text: bool
    skip_special_tokens: bool
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]


def generate_request(
    model: str,
    text: str | None,
    messages: Sequence[MessageLike] | None,
    token_ids: Sequence[int] | None,
    *,
    tools: Sequence[pb.Tool],
    tool_choice: str,
    structured_output: pb.StructuredOutput | None,
    num_choices: int,
    return_token_ids: bool,
    cache_salt: str | None,
    cache_ttl_s: float | None,
    sampling: SamplingOptions,
) -> pb.GenerateRequest:
    _require_one_prompt({"text": text, "messages": messages, "token_ids": token_ids})
    if tools and messages is None:
        raise ValueError("tools need messages")
    request = pb.GenerateRequest(return_token_ids=return_token_ids)
    _put_prompt(request, model, text, messages)
    request.num_choices = _checked("num_choices", num_choices)
    if cache_salt is not None:
        _put(request, "cache_salt", cache_salt)
    if cache_ttl_s is not None:
        _put(request, "cache_ttl_s", cache_ttl_s)
    if messages is not None:
        request.conversation.tools.extend(tools)
        _put(request.conversation, "tool_choice", tool_choice)
    if token_ids is not None:
        request.token_ids.SetInParent()
        _put(request.token_ids, "ids", token_ids)
    if structured_output is not None:
        request.structured_output.CopyFrom(structured_output)
    for name, value in sampling.items():
        _put(request.sampling, name, value)
    return request


def tokenize_request(model: str, text: str | None, messages: Sequence[MessageLike] | None) -> pb.TokenizeRequest:
    _require_one_prompt({"text": text, "messages": messages})
    request = pb.TokenizeRequest()
    _put_prompt(request, model, text, messages)
    return request


def only_model(response: pb.ListModelsResponse) -> str:
    names = [model.name for model in response.models if not model.parent]  # adapters are asked for by name
    if len(names) != 1:
        raise ValueError(f"model: one of {', '.join(names) or 'none'} has to be chosen")
    return names[0]


def _put_prompt(
    request: pb.GenerateRequest | pb.TokenizeRequest,
    model: str,
    text: str | None,
    messages: Sequence[MessageLike] | None,
) -> None:
    _put(request, "model", model)
    if text is not None:
        _put(request, "text", text)
    if messages is not None:
        request.conversation.SetInParent()
        for at, message in enumerate(messages):
            with _naming(f"messages[{at}]", message):
                _add(request.conversation, message)


def _add(conversation: pb.Conversation, message: MessageLike) -> None:
    if isinstance(message, pb.Message):
        conversation.messages.append(message)
    elif isinstance(message, Mapping):
        conversation.messages.add(**message)
    else:
        role, content = message
        conversation.messages.add(role=role, content=content)


def _require_one_prompt(prompts: Mapping[str, object]) -> None:
    given = [name for name, value in prompts.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"exactly one of {', '.join(prompts)} is needed, not {' and '.join(given) or 'none'}")


def _put(message: ProtobufMessage, name: str, value: object) -> None:
    if name not in message.DESCRIPTOR.fields_by_name:
        raise TypeError(f"{name}: {value!r} cannot be sent: {_INSTEAD.get(name, 'there is no such parameter')}")
    with _naming(name, value):
        try:
            if isinstance(value, Mapping):
                getattr(message, name).update(value)
            elif isinstance(value, Sequence) and not isinstance(value, str):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        except AttributeError:
            raise TypeError(f"expected {_kind(getattr(message, name))}") from None


@contextmanager
def _naming(name: str, value: object) -> Iterator[None]:
    """Name an argument in errors of protobuf, and the text in it that UTF-8 does not have."""
    try:
        yield
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 20) : error.start + 20]
        raise ValueError(
            f"{name}{_place_of(error.object, value)}: {around!r} cannot be sent: character {error.start} is half of a"
            " surrogate pair, which UTF-8 does not have"
        ) from None
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {value!r} cannot be sent: {error}") from None


def _place_of(text: str, value: object) -> str:
    """Return the index of a text in an argument, "" for the argument itself."""
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return ""
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    return next((f"[{key!r}]" for key, held in items if held == text), "")


def _kind(held: object) -> str:
    return "a mapping" if hasattr(held, "update") else "a list" if hasattr(held, "extend") else "one value"


def _checked(name: str, value: int) -> int:
    if not 0 < value < 2**32:
        raise ValueError(f"{name}: expected a number from 1, not {value}")
    return value
