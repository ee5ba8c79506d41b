from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies.large_bodies import UNCOUNTED_BYTES, check_num_message_values
from kvferry.inference.v1 import inference_pb2 as pb

MOST = 40_000
PADDING = "x" * UNCOUNTED_BYTES


async def check(message: pb.GenerateRequest | bytes, most: int = MOST) -> None:
    raw = message if isinstance(message, bytes) else message.SerializeToString()
    await check_num_message_values(raw, pb.GenerateRequest.DESCRIPTOR, most)


async def refused(message: pb.GenerateRequest | bytes, most: int = MOST) -> str:
    with pytest.raises(InvalidRequest) as error:
        await check(message, most)
    return error.value.message


async def test_token_ids_are_counted() -> None:
    await check(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100_000] * (MOST - 2))))
    assert "too many values" in await refused(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[100_000] * (MOST - 1))))


async def test_messages_and_what_is_in_them_are_counted() -> None:
    def conversation(num_calls: int) -> pb.GenerateRequest:
        message = pb.Message(role="user", content=PADDING, tool_calls=[pb.ToolCall()] * num_calls)
        return pb.GenerateRequest(conversation=pb.Conversation(messages=[message]))

    await check(conversation(6), most=10)
    assert "at most 10 are allowed" in await refused(conversation(7), most=10)
    messages = pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.Message()] * 40_000))
    assert "too many values" in await refused(messages)


async def test_text_counts_once() -> None:
    await check(pb.GenerateRequest(model="m", text=PADDING * 10), most=2)


async def test_a_small_message_is_not_counted() -> None:
    await check(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1000)), most=1)


@pytest.mark.parametrize(
    "raw",
    [
        pb.GenerateRequest(text=PADDING).SerializeToString()[:-1],
        pb.GenerateRequest(text=PADDING).SerializeToString() + b"\x80",
        pb.GenerateRequest(text=PADDING).SerializeToString() + b"\xfb\x01\xfc\x01",  # a group of an unknown field
        b"\xff" * (UNCOUNTED_BYTES + 1),
        b"\x22\xff\xff\xff\x7f" + b"\x0a\x00" * UNCOUNTED_BYTES,
    ],
    ids=["cut", "open varint", "group", "endless varint", "longer than all"],
)
async def test_what_cannot_be_counted_is_refused(raw: bytes) -> None:
    assert await refused(raw) == "the message is no GenerateRequest of kvferry.inference.v1"


async def test_other_tasks_run_meanwhile() -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    await check(pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.Message(role="user")] * 15_000)))
    counting.cancel()
    assert turns > 20
