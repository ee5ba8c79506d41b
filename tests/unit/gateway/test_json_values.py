from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies import large_bodies
from kvferry.gateway.bodies.grpc_bodies import read_generate
from kvferry.gateway.bodies.large_bodies import (
    MAX_BACKSLASHES,
    MAX_NUMBER_CHARS,
    MAX_VALUES,
    UNCOUNTED_BYTES,
    check_num_values,
    num_values_at_most,
)
from kvferry.gateway.bodies.openai_bodies import read_chat, read_completion
from kvferry.inference.v1 import inference_pb2 as pb

MOST = 1000


def count(value: Any) -> int:
    """Values as they are counted: of every object, list and element, less the first of each."""
    if isinstance(value, dict):
        return 1 + sum(count(each) for each in value.values()) + max(0, len(value) - 1)
    if isinstance(value, list):
        return 1 + sum(count(each) for each in value) + max(0, len(value) - 1)
    return 0


@pytest.mark.parametrize("value", ["0", '""', "[]", "{}", '{"a":0}', "null", '"a,b"'])
async def test_a_body_has_so_many_values_and_no_more(value: str) -> None:
    async def check(num: int) -> None:
        body = json.dumps({"a": [json.loads(value)] * num, "text": ",[{" * UNCOUNTED_BYTES})
        await check_num_values(body.encode(), MOST)

    per_value = 2 if value[0] in "[{" else 1
    most = (MOST - 2) // per_value
    await check(most)
    with pytest.raises(InvalidRequest, match=f"at most {MOST} are allowed"):
        await check(most + 2)


@pytest.mark.parametrize("piece", [",", "[{", '\\"', "\\\\", '\\",', "\\\\\\\\\\", '{"a": [1, 2]}', "é,", "\n"])
async def test_texts_hold_any_number_of_commas_and_brackets(piece: str) -> None:
    await check_num_values(json.dumps({"prompt": piece * 100_000, "n": 1}).encode(), MOST)


async def test_texts_have_a_limited_number_of_escapes() -> None:
    await check_num_values(b"\\" * MAX_BACKSLASHES, MOST)
    with pytest.raises(InvalidRequest, match="too many backslashes"):
        await check_num_values(b"\\" * (MAX_BACKSLASHES + 1), MOST)


@pytest.mark.parametrize("begin", ["", "-", "0.", "1e"])
async def test_a_number_of_megabytes_is_refused_before_it_is_decoded(begin: str) -> None:
    texts = '"text": "' + "7" * 300_000 + '", "\\"": "' + '\\"8' * 100_000 + '"'
    for num_digits in (MAX_NUMBER_CHARS, 2 * UNCOUNTED_BYTES):
        body = f'{{{texts}, "n": {begin}{"1" * num_digits}, "more": "{"9" * 5000}"}}'.encode()
        if num_digits == MAX_NUMBER_CHARS:
            await check_num_values(body, MOST)
        else:
            with pytest.raises(InvalidRequest, match="a number has more than 1024 characters"):
                await check_num_values(body, MOST)


async def test_a_small_body_is_not_counted() -> None:
    await check_num_values(b"[" + b"0," * (UNCOUNTED_BYTES // 2 - 1) + b"0", 1)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='a\\",[{:'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a\\",[{:'), inner),
        max_leaves=30,
    ),
    st.integers(1, 64),
)
async def test_slices_do_not_change_the_count(value: Any, slice_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "_SLICE_BYTES", slice_bytes)
        raw = json.dumps(value).encode()
        counted = await large_bodies._num_values_outside_texts(raw, 1_000_000)
    assert counted == count(value)
    assert counted <= num_values_at_most(raw)


LISTS = json.dumps({"a": [[]] * (MAX_VALUES // 3)})


def test_arguments_of_all_tool_calls_have_a_limited_number_of_values() -> None:
    def chat(num: int) -> bytes:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": LISTS}}
        messages = [{"role": "assistant", "tool_calls": [call] * num}, {"role": "user", "content": "hi"}]
        return json.dumps({"model": "m", "messages": messages}).encode()

    read_chat(chat(1))
    with pytest.raises(InvalidRequest, match=f"messages: .* values are too many; at most {MAX_VALUES}"):
        read_chat(chat(2))


def test_parameters_of_all_tools_have_a_limited_number_of_values() -> None:
    def message(num: int) -> bytes:
        tools = [pb.Tool(name=f"f{i}", parameters=LISTS) for i in range(num)]
        conversation = pb.Conversation(messages=[pb.Message(role="user", content="hi")], tools=tools)
        return pb.GenerateRequest(model="m", conversation=conversation).SerializeToString()

    read_generate(message(1))
    with pytest.raises(InvalidRequest, match=f"values are too many; at most {MAX_VALUES}") as refused:
        read_generate(message(2))
    assert refused.value.param == "conversation.tools"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1." + "1" * 2000])
def test_a_number_that_is_no_float_is_refused(number: str) -> None:
    body = json.dumps({"model": "m", "prompt": "hi", "temperature": 0.125}).replace("0.125", number)
    with pytest.raises(InvalidRequest, match="the body is not valid JSON: a number"):
        read_completion(body.encode())
