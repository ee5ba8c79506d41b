"""Limits of schemas, patterns and grammars, at the limit and one over it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies import structured_limits
from kvferry.gateway.bodies.openai_bodies import read_chat
from kvferry.gateway.bodies.structured_limits import MAX_NESTING, MAX_SPEC_BYTES


def body(**changes: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}).encode()


def nested(num_levels: int) -> Any:
    value: Any = {}
    for _ in range(num_levels - 1):
        value = {"items": value}
    return value


def within_json_schema(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def within_structural_tag(schema: Any) -> dict[str, Any]:
    tag = {"type": "structural_tag", "structures": [{"begin": "<", "schema": schema, "end": ">"}], "triggers": ["<"]}
    return {"response_format": tag}


def within_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


WAYS = {
    "json_schema": (within_json_schema, "response_format"),
    "structural_tag": (within_structural_tag, "response_format"),
    "tool": (within_tool, "tools[0].function.parameters"),
    "json": (lambda schema: {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
    "json text": (lambda schema: {"structured_outputs": {"json": json.dumps(schema)}}, "structured_outputs.json"),
    "structural tag text": (
        lambda schema: {"structured_outputs": {"structural_tag": json.dumps({"format": schema})}},
        "structured_outputs.structural_tag",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fits", "over", "says"),
    [
        (nested(MAX_NESTING - 6), nested(MAX_NESTING + 1), "nesting"),
        ({"description": "x" * (MAX_SPEC_BYTES - 200)}, {"description": "x" * MAX_SPEC_BYTES}, "bytes are too many"),
    ],
    ids=["nesting", "bytes"],
)
def test_schemas_have_limits_wherever_they_stand(way: str, fits: Any, over: Any, says: str) -> None:
    put, field = WAYS[way]
    read_chat(body(**put(fits)))
    with pytest.raises(InvalidRequest, match=says) as refused:
        read_chat(body(**put(over)))
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("name", "fits", "over"),
    [
        ("choice", ["x" * (MAX_SPEC_BYTES - 10)], ["x" * MAX_SPEC_BYTES]),
        ("regex", "a" * (MAX_SPEC_BYTES - 2), "a" * MAX_SPEC_BYTES),
        ("grammar", "x" * (MAX_SPEC_BYTES - 2), "x" * MAX_SPEC_BYTES),
        ("choice", ["x"], []),
        ("regex", "a", "a\0"),
        ("json", '{"a": 1}', json.dumps({"pattern": "a" * MAX_SPEC_BYTES})),
        ("json", {}, {f"x{i}": 1 for i in range(100_000)}),
        ("json", "{}", "[" * 100_000 + "]" * 100_000),
        ("json", "{}", "{"),
    ],
)
def test_structured_outputs_have_limits(name: str, fits: Any, over: Any) -> None:
    read_chat(body(structured_outputs={name: fits}))
    with pytest.raises(InvalidRequest) as refused:
        read_chat(body(structured_outputs={name: over}))
    assert refused.value.param == f"structured_outputs.{name}"


def test_tools_have_a_limit_together() -> None:
    def tools(num_bytes: int) -> list[dict[str, Any]]:
        schema = {"description": "x" * (num_bytes // 8 - 18)}
        return [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(8)]

    read_chat(body(tools=tools(structured_limits.MAX_TOOLS_BYTES)))
    with pytest.raises(InvalidRequest, match="bytes are too many") as refused:
        read_chat(body(tools=tools(structured_limits.MAX_TOOLS_BYTES + 8)))
    assert refused.value.param == "tools"


def test_template_arguments_have_limits() -> None:
    read_chat(body(chat_template_kwargs={"documents": ["x"] * 10_000}))
    for arguments in ({"a": ["x"] * 50_000}, {"a": nested(MAX_NESTING + 1)}):
        with pytest.raises(InvalidRequest) as refused:
            read_chat(body(chat_template_kwargs=arguments))
        assert refused.value.param == "chat_template_kwargs"
