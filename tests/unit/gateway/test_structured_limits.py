"""Limits of schemas, patterns and grammars, at the limit and one over it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.errors import InvalidRequest
from kvferry.gateway import structured_limits
from kvferry.gateway.openai_bodies import read_chat
from kvferry.gateway.structured_limits import (
    MAX_ALL_PROPERTIES,
    MAX_CHOICES,
    MAX_ENUM_VALUES,
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_REPETITIONS,
    MAX_GRAMMAR_RULES,
    MAX_LENGTH_BOUND,
    MAX_NESTING,
    MAX_PATTERN_CHARS,
    MAX_PATTERN_COST,
    MAX_PATTERN_NESTING,
    MAX_PATTERN_SIZE,
    MAX_PROPERTIES,
    MAX_PROPERTIES_BESIDE_PATTERNS,
    MAX_REGEX_SIZE,
    MAX_SPEC_BYTES,
    pattern_size,
)

NUM_PATTERNS = MAX_PATTERN_COST // MAX_PATTERN_SIZE**2


def body(**changes: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **changes}).encode()


def chain(length: int) -> dict[str, Any]:
    """A schema whose `$defs` refer one to the next."""
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$defs": {**links, f"d{length}": {"type": "string"}}, "$ref": "#/$defs/d0"}


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
        (chain(500), chain(2000), "refs times"),
        (nested(MAX_NESTING - 6), nested(MAX_NESTING + 1), "nesting"),
        (
            {"properties": {f"p{i}": True for i in range(MAX_PROPERTIES)}},
            {"properties": {f"p{i}": True for i in range(MAX_PROPERTIES + 1)}},
            "properties",
        ),
        ({"enum": [1] * MAX_ENUM_VALUES}, {"enum": [1] * (MAX_ENUM_VALUES + 1)}, "enum"),
        ({"pattern": "a" * MAX_PATTERN_SIZE}, {"pattern": "a" * (MAX_PATTERN_SIZE + 1)}, "pattern"),
        (
            {"patternProperties": {f"a{{{MAX_PATTERN_SIZE}}}": {}}},
            {"patternProperties": {f"a{{{MAX_PATTERN_SIZE + 1}}}": {}}},
            "pattern",
        ),
        (
            {"items": [{"pattern": "a" * MAX_PATTERN_SIZE}] * NUM_PATTERNS},
            {"items": [{"pattern": "a" * MAX_PATTERN_SIZE}] * NUM_PATTERNS + [{"pattern": "a"}]},
            "squares",
        ),
        ({"maxItems": MAX_LENGTH_BOUND}, {"maxItems": MAX_LENGTH_BOUND + 1}, "length bound"),
        (
            {"pattern": "(" * MAX_PATTERN_NESTING + ")" * MAX_PATTERN_NESTING},
            {"pattern": "(" * (MAX_PATTERN_NESTING + 1) + ")" * (MAX_PATTERN_NESTING + 1)},
            "size of a pattern",
        ),
        (
            {
                "patternProperties": {"a": {}},
                "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES_BESIDE_PATTERNS)},
            },
            {
                "patternProperties": {"a": {}},
                "properties": {f"p{i}": {} for i in range(MAX_PROPERTIES_BESIDE_PATTERNS + 1)},
            },
            "with patternProperties",
        ),
        (
            {"patternProperties": {"a": {}}},
            {"patternProperties": {"a": {"$ref": "#"}}},
            "patternProperties and",
        ),
        ({"description": "x" * (MAX_SPEC_BYTES - 200)}, {"description": "x" * MAX_SPEC_BYTES}, "bytes are too many"),
    ],
    ids=[
        "refs",
        "nesting",
        "properties",
        "enum",
        "pattern",
        "patternProperties",
        "patterns",
        "bound",
        "groups",
        "mixed",
        "mixed refs",
        "bytes",
    ],
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
        ("choice", ["x"] * MAX_CHOICES, ["x"] * (MAX_CHOICES + 1)),
        ("choice", ["x" * (MAX_SPEC_BYTES - 10)], ["x" * MAX_SPEC_BYTES]),
        ("regex", f"a{{1,{MAX_REGEX_SIZE}}}", f"a{{1,{MAX_REGEX_SIZE + 1}}}"),
        ("regex", "a" * MAX_PATTERN_CHARS, "a" * (MAX_PATTERN_CHARS + 1)),
        ("whitespace_pattern", "a" * MAX_PATTERN_SIZE, "a" * (MAX_PATTERN_SIZE + 1)),
        (
            "grammar",
            f'root ::= "a"{{{MAX_GRAMMAR_REPETITIONS}}}',
            f'root ::= "a"{{{MAX_GRAMMAR_REPETITIONS}}} "b"{{1}}',
        ),
        ("grammar", "x" * MAX_GRAMMAR_BYTES, "x" * (MAX_GRAMMAR_BYTES + 1)),
        ("grammar", "r ::= x\n" * MAX_GRAMMAR_RULES, "r ::= x\n" * (MAX_GRAMMAR_RULES + 1)),
        ("grammar", "a: b\n" * MAX_GRAMMAR_RULES, "a: b\n" * (MAX_GRAMMAR_RULES + 1)),
        ("grammar", "x" * 990 + "y{1000}", "x" * 1990 + "y{1000}"),
        ("json", '{"a": 1}', json.dumps('{"pattern": "a{1,10000}"}')),
        ("json", {}, {f"x{i}": 1 for i in range(100_000)} | {"items": "x" * MAX_SPEC_BYTES}),
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


def test_tools_count_together() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"pattern": "a" * MAX_PATTERN_SIZE}}}
    read_chat(body(tools=[tool] * NUM_PATTERNS))
    with pytest.raises(InvalidRequest, match="squares") as refused:
        read_chat(body(tools=[tool] * (NUM_PATTERNS + 1)))
    assert refused.value.param == f"tools[{NUM_PATTERNS}].function.parameters"


def test_properties_of_all_tools_count_together() -> None:
    def tools(count: int) -> list[dict[str, Any]]:
        schema = {"properties": {f"p{i}": {} for i in range(MAX_PROPERTIES)}}
        more = {"properties": {"q": {}}}
        names = [schema] * (MAX_ALL_PROPERTIES // MAX_PROPERTIES) + [more] * count
        return [{"type": "function", "function": {"name": f"f{i}", "parameters": each}} for i, each in enumerate(names)]

    read_chat(body(tools=tools(0)))
    with pytest.raises(InvalidRequest, match="of all schemas"):
        read_chat(body(tools=tools(1)))


@pytest.mark.parametrize("text", ["{" + " " * 16_000, "{ " * 8000, "{" * 16_000, "a{1" + " ," * 8000])
def test_braces_are_read_in_linear_time(text: str) -> None:
    read_chat(body(structured_outputs={"grammar": text}))


def test_template_arguments_have_limits() -> None:
    read_chat(body(chat_template_kwargs={"documents": ["x"] * 10_000}))
    for arguments in ({"a": ["x"] * 50_000}, {"a": nested(MAX_NESTING + 1)}):
        with pytest.raises(InvalidRequest) as refused:
            read_chat(body(chat_template_kwargs=arguments))
        assert refused.value.param == "chat_template_kwargs"


def test_data_that_looks_like_a_schema_is_let_pass() -> None:
    schema = {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "string"}, "enum": {"type": "array"}}}
    read_chat(body(**within_json_schema(schema)))


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("[a-z]", 1),
        (r"[^\]a]x", 2),
        ("[]a]x", 4),
        ("[abcdefghijklmno]", 3),
        (r"\d\{", 2),
        ("a{3}", 3),
        ("a{2,5}", 5),
        ("a{,5}", 5),
        ("a{3,}", 3),
        ("a{0}", 2),
        ("a{x}", 4),
        ("{3}", 1),
        ("a{1}{1}{1}", 4),
        ("(ab){10}", 30),
        ("((a{2}b){3}c){4}", 56),
        ("a{2}{3}", 6),
        ("(a|b)*c+", 7),
        (")a(b", 4),
        ("[a", 1),
        ("a\\", 2),
    ],
)
def test_pattern_sizes(pattern: str, size: int) -> None:
    assert pattern_size(pattern) == size


@pytest.mark.parametrize(
    "pattern",
    [
        "((){9999}){9999}a",
        "a" + "{1}" * 20_000,
        "(" * 30_000 + "a" + ")" * 30_000,
        "a{1,10000}",
        "(((a{1,100}){1,100}){1,100}){1,100}",
        "a{" + "9" * 5000 + "}",
        "(" * 500 + "a{99}" * 99,
        "[a]{3000}",
    ],
)
def test_patterns_that_unroll_too_far_are_refused(pattern: str) -> None:
    assert pattern_size(pattern) > MAX_PATTERN_SIZE
