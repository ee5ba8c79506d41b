"""Long texts of gRPC messages, decoded in short steps."""

# Reading a string field decodes it in one call, of up to 15 ms for 8 MiB. Here, the field is found in the parsed bytes.

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvferry.gateway.bodies.large_bodies import fields_of_bytes
from kvferry.gateway.bodies.long_texts import LONG_BYTES, join_in_steps
from kvferry.inference.v1 import inference_pb2 as pb

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
