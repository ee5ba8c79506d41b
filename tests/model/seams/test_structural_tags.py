"""rendering/structural_tags.py: grammars for llguidance mean what the tags of vLLM's parsers mean to xgrammar."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import pytest

from kvferry.engine.vllm.rendering import structural_tags
from kvferry.engine.vllm.rendering.grammars import prepared_schema, special_tokens_of
from kvferry.engine.vllm.rendering.structural_tags import SpecialTokens, lark_of
from kvferry.errors import InvalidRequest
from support.grammar_walks import GrammarWalker

pytestmark = pytest.mark.vllm

NONE = SpecialTokens({})
PREPARE = functools.partial(prepared_schema, special_tokens=NONE)
UNIT = {"enum": ["c", "f"]}
CITY = {"type": "string", "pattern": "^[A-Z][a-z]{1,4}$"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": CITY, "days": {"type": "boolean"}, "unit": UNIT},
    "required": ["city", "unit"],
    "additionalProperties": False,
}  # fmt: skip


class Libraries:
    """Both on one tokenizer."""

    def __init__(self) -> None:
        import xgrammar

        self._walker = GrammarWalker()
        self.tokenizer = self._walker.tokenizer
        info = xgrammar.TokenizerInfo.from_huggingface(self.tokenizer, vocab_size=len(self.tokenizer))
        self._xgrammar = xgrammar.GrammarCompiler(info, max_threads=1)
        self._special_tokens = special_tokens_of(self.tokenizer)

    def _grammar(self, tag: Mapping[str, Any]) -> str:
        import llguidance

        prepare = functools.partial(prepared_schema, special_tokens=self._special_tokens)
        return str(llguidance.LLMatcher.grammar_from_lark(lark_of(tag, self._special_tokens, prepare)))

    def walk(self, tag: Mapping[str, Any], seed: int) -> list[int] | None:
        """Return random tokens that our grammar allows, or None for an answer that did not end."""
        return self._walker.walk(self._grammar(tag), seed, most_tokens=120)

    def accepts(self, tag: Any, tokens: list[int]) -> bool:
        """Return whether xgrammar takes the tokens, and an end after them."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._xgrammar.compile_structural_tag(tag))
        return all(map(matcher.accept_token, tokens)) and matcher.accept_token(self.tokenizer.eos_token_id)

    def accepts_text(self, tag: Any, text: str) -> bool:
        return self.accepts(tag, self.tokenizer.encode(text, add_special_tokens=False))

    def follows(self, tag: Mapping[str, Any], text: str) -> bool:
        """Return whether our grammar takes a text, and an end after it."""
        matcher = self._walker.matcher(self._grammar(tag))
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries()


def tag_of(model: str, choice: Any, parameters: Any = PARAMETERS) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

    tools = [
        ChatCompletionToolsParam.model_validate(
            {"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}}
        )
        for name in ("weather", "news")
    ]
    return get_model_structural_tag(model, tools, choice, reasoning=False)


def models() -> list[str]:
    from vllm.tool_parsers.structural_tag_registry import SUPPORTED_STRUCTURAL_TAG_MODELS

    return sorted(SUPPORTED_STRUCTURAL_TAG_MODELS)


def test_each_format_of_vllm_is_enforced(libraries: Libraries) -> None:
    num_walks = 0
    for model in models():
        tag = tag_of(model, "required")
        walks = [libraries.walk(tag.model_dump(), seed) for seed in range(6)]
        ended = [tokens for tokens in walks if tokens is not None]
        num_walks += len(ended)
        for tokens in ended:
            assert libraries.accepts(tag, tokens), (model, libraries.tokenizer.decode(tokens))
    assert num_walks >= 12


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "unit": "c"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "text", "is_right"),
    [
        ("required", CALL, True),
        ("required", CALL.replace("Ulm", "Ulm an der Donau"), False),
        ("required", CALL.replace('"c"', '"k"'), False),
        ("required", CALL.replace("weather", "whether"), False),
        ("required", "no call", False),
        ("auto", "no call", True),
        ("auto", f"Let me see.{CALL}", True),
        ("auto", f"{CALL}\n{CALL}", True),
        ("auto", CALL.replace('"c"', '"k"'), False),
        ({"type": "function", "function": {"name": "news"}}, CALL, False),
        ({"type": "function", "function": {"name": "news"}}, CALL.replace("weather", "news"), True),
    ],
)
def test_calls_in_hermes_format(libraries: Libraries, choice: Any, text: str, is_right: bool) -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionNamedToolChoiceParam

    if isinstance(choice, dict):
        choice = ChatCompletionNamedToolChoiceParam.model_validate(choice)
    assert libraries.follows(tag_of("hermes", choice).model_dump(), text) is is_right


OBJECT = {"type": "object"}
DIGIT = {"type": "regex", "pattern": "[0-9]"}
FORMATS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "const_string": ({"type": "const_string", "value": "a.b"}, ("a.b",), ("axb", "")),
    "empty": ({"type": "const_string", "value": ""}, ("",), ("a",)),
    "regex": ({"type": "regex", "pattern": r"\d{2}/[a-z]+"}, ("12/ab",), ("1/ab", "12/")),
    "sequence": (
        {
            "type": "sequence",
            "elements": [{"type": "const_string", "value": "a"}, {"type": "json_schema", "json_schema": OBJECT}],
        },
        ('a{"b":1}',), ("a",),
    ),
    "or": (
        {"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "const_string", "value": "b"}]},
        ("a", "b"), ("ab", "c"),
    ),
    "tag": (
        {"type": "tag", "begin": "<q>", "content": {"type": "any_text"}, "end": ["</q>", "<!q>"]},
        ("<q>a b</q>", "<q></q>", "<q>c<!q>"), ("<q>a", "<q>a</q>b"),
    ),
    "any_text": ({"type": "any_text", "excludes": ["no"]}, ("yes", ""), ("a no b",)),
    "triggered_tags": (
        {
            "type": "triggered_tags", "triggers": ["<"],
            "tags": [{"type": "tag", "begin": f"<{c}>", "content": DIGIT, "end": "."} for c in "ab"],
        },
        ("", "text", "x<a>1.y<b>2.z"), ("<c>1.", "x<a>q."),
    ),
    "tags_with_separator": (
        {
            "type": "tags_with_separator", "separator": ", ", "at_least_one": True,
            "tags": [{"type": "tag", "begin": "a", "content": {"type": "regex", "pattern": "[0-9]"}, "end": ""}],
        },
        ("a1", "a1, a2"), ("", "a1,a2", "a1, "),
    ),
    "repeat": (
        {"type": "repeat", "content": {"type": "const_string", "value": "ab"}, "min": 1, "max": 2},
        ("ab", "abab"), ("", "ababab"),
    ),
    "repeat without end": (
        {"type": "repeat", "content": {"type": "const_string", "value": "ab"}, "min": 1, "max": -1},
        ("ab", "ababab"), ("",),
    ),
    "repeat never": (
        {"type": "repeat", "content": {"type": "const_string", "value": "ab"}, "min": 0, "max": 0},
        ("",), ("ab",),
    ),
    "any JSON": ({"type": "json_schema", "json_schema": True}, ("1", '"a"', "[1]"), ("a",)),
    "escapes": ({"type": "regex", "pattern": "a\\\\d/\\w"}, ("a\\d/x",), ("a\\1/x", "a\\d/é")),
    "a line end that may not be": ({"type": "any_text", "excludes": ["a\nb"]}, ("a b",), ("xa\nbx",)),
    "star": ({"type": "star", "content": {"type": "const_string", "value": "ab"}}, ("", "abab"), ("aba",)),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_clients(libraries: Libraries, name: str) -> None:
    node, right, wrong = FORMATS[name]
    tag = {"type": "structural_tag", "format": node}
    assert [text for text in (*right, *wrong) if libraries.follows(tag, text)] == list(right)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_clients_are_those_of_xgrammar(libraries: Libraries, name: str) -> None:
    node, right, wrong = FORMATS[name]
    tag = {"type": "structural_tag", "format": node}
    assert [text for text in (*right, *wrong) if libraries.accepts_text(tag, text)] == list(right)


TEXTS = (
    "abc",
    '"abc"',
    "abcdefgh",
    "null",
    "a b",
    '"a b"',
    "1",
    "ab",
    '"ab"',
    "true",
    "x\ny",
    "",
    "[1]",
    '{"a":1}',
    "1.5",
)
XML = {
    "qwen_xml": ("<parameter=n>\n", "\n</parameter>\n"),
    "minimax_xml": ('<parameter name="n">', "</parameter>\n"),
    "glm_xml": ("<arg_key>n</arg_key>\n<arg_value>", "</arg_value>\n"),
    "deepseek_v4_1_xml": ('<｜DSML｜ parameter name="n" string="true">', "</｜DSML｜ parameter>\n"),
    "deepseek_xml": ('<｜DSML｜parameter name="n" string="true">', "</｜DSML｜parameter>\n"),
}
VALUES: list[Any] = [
    {},
    True,
    {"type": "string"},
    {"type": "string", "pattern": "^[a-z]{1,5}$"},
    {"type": "string", "maxLength": 3},
    {"type": ["string", "null"]},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"enum": ["a b", 1, None]},
    {"type": "string", "enum": ["ab"]},
    {"const": "ab"},
    {"type": "boolean"},
    {"type": "number"},
    {"type": "array", "items": {"type": "integer"}},
    {"$ref": "#/$defs/Word"},
    {"allOf": [{"$ref": "#/$defs/Word"}], "description": "pydantic's"},
    {"anyOf": [{"$ref": "#/$defs/Word"}, {"type": "null"}]},
]


@pytest.mark.parametrize("style", XML)
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_parameters_that_are_no_json_are_those_of_xgrammar(libraries: Libraries, style: str, value: Any) -> None:
    begin, end = XML[style]
    definitions = {"Word": {"type": "string", "enum": ["ab", "abc"]}}
    schema = {"type": "object", "properties": {"n": value}, "required": ["n"], "$defs": definitions}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": style, "json_schema": schema}}
    begins = (begin, begin.replace('"true"', '"false"')) if "true" in begin else (begin,)
    texts = [f"{begin}{text}{end}" for text in TEXTS for begin in begins]
    by_xgrammar = [text for text in texts if libraries.accepts_text(tag, text)]
    assert by_xgrammar
    assert [text for text in texts if libraries.follows(tag, text)] == by_xgrammar


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ({"type": "string", "pattern": "b"}, ["abc", '"abc"', "abcdefgh", "a b", '"a b"', "ab", '"ab"', '{"a":1}'][:7]),
        (
            {"type": "string", "pattern": "^[a-z]", "minLength": 3, "maxLength": 4},
            ["abc", "null", "a b", "true", "x\ny"],
        ),
        ({"type": "string", "pattern": "e$"}, ["true"]),
    ],
)
def test_patterns_are_found_anywhere_as_the_standard_says(
    libraries: Libraries, value: dict[str, Any], right: list[str]
) -> None:
    """To xgrammar they are the whole text."""
    begin, end = XML["qwen_xml"]
    schema = {"type": "object", "properties": {"n": value}, "required": ["n"]}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}
    assert [text for text in TEXTS if libraries.follows(tag, f"{begin}{text}{end}")] == right


@pytest.mark.parametrize(
    "node", [{"type": "any_text", "max_tokens": 3}, {"type": "json_schema", "json_schema": OBJECT, "any_order": True}]
)
def test_limits_that_cannot_be_kept_are_refused(libraries: Libraries, node: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="cannot be enforced"):
        libraries.follows({"type": "structural_tag", "format": node}, "")


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "format": "date"},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "pattern": 5},
        {"type": "string", "minLength": "0}/ | /x"},
        {"type": "string", "minLength": True},
        {"type": ["string", "integer"], "maxLength": 3},
        {"type": 5},
        {"enum": None},
        {"enum": []},
        {"$ref": "#/components/schemas/X"},
        {"type": "array", "items": {"$ref": "#"}},
        {"allOf": [{"type": "string"}, {"maxLength": 3}]},
        {"anyOf": [{"type": "string"}], "maxLength": 3},
        {"type": "string", "not": {"const": "a"}},
        False,
        [],
    ],
    ids=str,
)
def test_what_a_parameter_that_is_no_json_cannot_have(libraries: Libraries, value: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"n": value}}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}
    with pytest.raises(InvalidRequest):
        libraries.follows(tag, "")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"c": {"type": "string"}}, "required": 5},
        {"properties": {"c": {"type": "string"}}, "required": [[]]},
        {"properties": {"c": {"type": "string"}}, "required": ["d"]},
        {"properties": ["a"]},
        {"anyOf": [{"properties": {"a": {}}}]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"if": {}, "properties": {}},
        False,
        5,
    ],
    ids=str,
)
def test_parameters_of_a_tool_that_are_none_are_refused(libraries: Libraries, schema: Any) -> None:
    tag = {"structures": [], "triggers": []}
    content = {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}
    assert lark_of(tag, NONE, PREPARE)
    grammar = structural_tags._Grammar(NONE, PREPARE)
    with pytest.raises(InvalidRequest):
        grammar.expression(content)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/N"},
        {"allOf": [{"$ref": "#/$defs/N"}]},
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/a~1b"}}, "required": ["n"]},
    ],
    ids=str,
)
def test_parameters_of_a_tool_by_reference(libraries: Libraries, schema: dict[str, Any]) -> None:
    """A recursive pydantic model's."""
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema = {**schema, "$defs": {"N": number, "a/b": {"type": "integer"}}}
    begin, end = XML["qwen_xml"]
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}
    assert [text for text in ("1", "x") if libraries.follows(tag, f"{begin}{text}{end}")] == ["1"]
    assert not libraries.follows(tag, "")


@pytest.mark.parametrize(
    ("value", "right"),
    [
        ({"type": "string", "pattern": "^(ab|true)$"}, ["ab", "true"]),
        ({"type": "string", "format": "phone", "maxLength": 1.0}, ["1", ""]),
        ({"type": ["string", "null"], "maxLength": 2}, ["null", "1", "ab", ""]),
        ({"type": "string", "enum": [f"e{i}" for i in range(3_000)] + ["ab"]}, ["ab"]),
        ({"type": "string", "pattern": r"^\d$"}, ["1"]),
        ({"properties": {"a": {"type": "integer"}}}, ['{"a":1}']),
    ],
    ids=str,
)
def test_ordinary_parameters(libraries: Libraries, value: dict[str, Any], right: list[str]) -> None:
    begin, end = XML["qwen_xml"]
    schema = {"type": "object", "properties": {"n": value}, "required": ["n"]}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}
    assert [text for text in TEXTS if libraries.follows(tag, f"{begin}{text}{end}")] == right


def test_what_a_model_may_not_say_it_may_not_say_before_a_call(libraries: Libraries) -> None:
    """Else it would have to make a call then."""
    tag = tag_of("qwen_3_5", "auto").model_dump()
    assert libraries.follows(tag, "hi hm")
    assert not libraries.follows(tag, "hi <think> hm")


def _nested(num_levels: int) -> dict[str, Any]:
    node: dict[str, Any] = {"type": "const_string", "value": "a"}
    for _ in range(num_levels):
        tag = {"type": "tag", "begin": "<a>", "content": node, "end": "</a>"}
        node = {"type": "triggered_tags", "triggers": ["<a>"], "tags": [tag], "at_least_one": True}
    return {"format": node}


def _branching() -> dict[str, Any]:
    definitions: dict[str, Any] = {f"D{i}": {"anyOf": [{"$ref": f"#/$defs/D{i + 1}"}] * 20} for i in range(8)}
    definitions["D8"] = {"type": "integer"}
    schema = {"properties": {"a": {"$ref": "#/$defs/D0"}}, "$defs": definitions}
    return {"format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}


def _triggers() -> dict[str, Any]:
    tags = [{"begin": f"t{i}", "end": ""} for i in range(1_000)]
    return {"structures": tags, "triggers": [f"t{i}" for i in range(1_000)]}


@pytest.mark.parametrize("tag", [_nested(22), _branching(), _triggers()], ids=["nested", "branching", "triggers"])
def test_what_would_grow_without_end_is_refused_in_a_moment(tag: dict[str, Any]) -> None:
    begun_s = time.process_time()
    with pytest.raises(InvalidRequest, match=r"too large|too many"):
        lark_of(tag, NONE, PREPARE)
    assert time.process_time() - begun_s < 20.0, "minutes, and gigabytes, before"


def test_references_of_parameters_that_lead_nowhere_end(libraries: Libraries) -> None:
    definitions = {"A": {"$ref": "#/$defs/B"}, "B": {"$ref": "#/$defs/A"}, "C": {"anyOf": [{"$ref": "#/$defs/C"}] * 2}}
    for name in ("A", "C"):
        schema = {"type": "object", "properties": {"n": {"$ref": f"#/$defs/{name}"}}, "$defs": definitions}
        tag = {"type": "structural_tag", "format": {"type": "json_schema", "style": "qwen_xml", "json_schema": schema}}
        with pytest.raises(InvalidRequest):
            libraries.follows(tag, "")
