"""Grammars for llguidance from structural tags, which are xgrammar's (vLLM issue 55152)."""

# A structural tag is a tree of formats; its classes and their meaning are in `xgrammar.structural_tag`. llguidance's
# Lark syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from kvferry.engine.vllm.rendering.lark_patterns import ANYTHING, escaped, lark_pattern, whole_pattern
from kvferry.errors import InvalidRequest

# llguidance 1.7 knows these. The standard calls formats annotations, so others restrict nothing.
FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
_HEADER = "%llguidance {}"
MAX_LARK_CHARS = 4 << 20  # written in all, where parts are written into others; GrammarChecks takes 1 MiB
_NODE_CHARS = 16  # that each format and parameter counts at least
_MAX_TRIGGER_CHECKS = 100_000
_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "deprecated", "nullable", "$defs", "definitions", "type"}
)
_NOT_ENFORCED = ("not", "if", "allOf", "$ref")
_LIMITS_OF_TEXT = frozenset({"pattern", "format", "minLength", "maxLength"})
_LIMITS_OF_FORMATS = ("any_order", "max_tokens", "max_chars")
_MOST_REFERENCES = 64  # from one to the next
_MOST_LEVELS = 8
_ALL_TYPES = ["string", "number", "boolean", "null", "array", "object"]


class _XmlStyle(NamedTuple):
    """How a parameter NAME begins and ends."""

    begin_of_text: str
    begin_of_json: str
    end: str


_XML_STYLES: Mapping[str, _XmlStyle] = {
    "qwen_xml": _XmlStyle("<parameter=NAME>\n", "<parameter=NAME>\n", "\n</parameter>\n"),
    "minimax_xml": _XmlStyle('<parameter name="NAME">', '<parameter name="NAME">', "</parameter>\n"),
    "glm_xml": _XmlStyle(
        "<arg_key>NAME</arg_key>\n<arg_value>", "<arg_key>NAME</arg_key>\n<arg_value>", "</arg_value>\n"
    ),
    "deepseek_xml": _XmlStyle(
        '<｜DSML｜parameter name="NAME" string="true">',
        '<｜DSML｜parameter name="NAME" string="false">',
        "</｜DSML｜parameter>\n",
    ),
    "deepseek_v4_1_xml": _XmlStyle(
        '<｜DSML｜ parameter name="NAME" string="true">',
        '<｜DSML｜ parameter name="NAME" string="false">',
        "</｜DSML｜ parameter>\n",
    ),
}


class SpecialTokens:
    """A tokenizer's special tokens, which match no text of a grammar."""

    def __init__(self, text_to_id: Mapping[str, int]) -> None:
        self.text_to_id = text_to_id
        longest_first = sorted(text_to_id, key=len, reverse=True)
        # In a group, so that `split` returns them too. Nothing matches where there are none.
        self.pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")" if longest_first else r"(?!)()")


def lark_of(tag: Mapping[str, Any], special_tokens: SpecialTokens, prepare: Callable[[Any], Any]) -> str:
    """Return a grammar in Lark syntax. Raises InvalidRequest, without the field's name.

    `prepare` is applied to each JSON schema.
    """
    root = _of_older_form(tag) if "structures" in tag else _format_of(tag)
    grammar = _Grammar(special_tokens, prepare)
    start = grammar.expression(root)
    return "\n".join([_HEADER, f"start: {start}", *grammar.rules, ""])


class _Structure(msgspec.Struct):
    begin: str
    end: str
    schema: Any = None


class _OlderTag(msgspec.Struct):
    structures: list[_Structure]
    triggers: list[str]


def _of_older_form(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        older = msgspec.convert(tag, _OlderTag)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"no structural tag: {error}") from None
    tags = [
        {
            "type": "tag",
            "begin": each.begin,
            "content": {"type": "json_schema", "json_schema": True if each.schema is None else each.schema},
            "end": each.end,
        }
        for each in older.structures
    ]
    return {"type": "triggered_tags", "triggers": older.triggers, "tags": tags}


def _format_of(tag: Mapping[str, Any]) -> Mapping[str, Any]:
    import pydantic
    from xgrammar import StructuralTag

    try:
        return StructuralTag.model_validate(tag).format.model_dump()
    except pydantic.ValidationError as error:
        # Each alternative of a union has its errors. The client named the kind of the last one.
        fault = error.errors()[-1]
        raise InvalidRequest(f"no structural tag: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


class _Grammar:
    def __init__(self, special_tokens: SpecialTokens, prepare: Callable[[Any], Any]) -> None:
        self.rules: list[str] = []
        self._num_chars = 0
        self._special_tokens = special_tokens
        self._prepare = prepare

    def expression(self, node: Mapping[str, Any]) -> str:
        write = _WRITERS.get(node["type"])
        if write is None:
            raise InvalidRequest(f"calls in this model's format cannot be enforced ({node['type']})")
        self._count(_NODE_CHARS)
        _require_no_limits(node)
        return write(self, node)

    def _count(self, num_chars: int) -> None:
        # While it is written: alternatives in alternatives grow exponentially.
        self._num_chars += num_chars
        if self._num_chars > MAX_LARK_CHARS:
            raise InvalidRequest(f"its grammar is too large: over {MAX_LARK_CHARS} characters")

    def literal(self, text: str) -> str:
        """Return terminals; special tokens are tokens."""
        self._count(len(text) + _NODE_CHARS)
        pieces = self._special_tokens.pattern.split(text)
        ids = self._special_tokens.text_to_id
        return " ".join(f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece) for piece in pieces if piece) or '""'

    def _rule(self, expression: str, *, prefix: str = "r", attributes: str = "") -> str:
        self._count(len(expression))
        name = f"{prefix}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def _text(self, excludes: Sequence[str] = ()) -> str:
        """Return a terminal that matches texts without `excludes`."""
        without = "".join(f" & ~/{ANYTHING}{escaped(each)}{ANYTHING}/" for each in excludes if each)
        return self._rule(f"/{ANYTHING}/{without}", prefix="TEXT")

    def _text_until(self, ends: Sequence[str], excludes: Sequence[str] = ()) -> str:
        text = self._text(excludes)
        if any(end in self._special_tokens.text_to_id for end in ends):
            return self._rule(f"{text} ({' | '.join(map(self.literal, ends))})")  # which no text contains
        return self._rule(f"{text} ({' | '.join(map(json.dumps, ends))})", prefix="until", attributes="[lazy]")

    def json_schema(self, node: Mapping[str, Any]) -> str:
        schema, style = node["json_schema"], node.get("style", "json")
        if style == "json":
            return self._json({} if schema is True else schema)
        if style not in _XML_STYLES:
            raise InvalidRequest(f"parameters in this model's format cannot be enforced ({style})")
        return self._xml(schema, _XML_STYLES[style])

    def _json(self, schema: Any) -> str:
        text = json.dumps(self._prepare(schema))
        self._count(len(text))
        return f"%json {text}"

    def _xml(self, schema: Any, style: _XmlStyle) -> str:
        if schema is True:
            return self._text()
        schema = _object(schema, "the parameters of a tool")
        definitions = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)}
        schema = _resolved(schema, definitions)
        _refuse_keywords(schema, "the parameters of a tool", ("anyOf", "oneOf", "patternProperties"))
        properties = _object(schema.get("properties", {}), "properties")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidRequest("required: expected a list of names")
        if missing := next((name for name in required if name not in properties), None):
            raise InvalidRequest(f"required: there is no property {missing[:100]!r}")
        if not properties and isinstance(schema.get("additionalProperties"), dict):
            raise InvalidRequest("parameters without names cannot be enforced in this model's format")
        parts = []
        for name, value in properties.items():
            named = style._replace(
                begin_of_text=style.begin_of_text.replace("NAME", name),
                begin_of_json=style.begin_of_json.replace("NAME", name),
            )
            part = self._parameter(named, definitions, value)
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts) or '""'

    def _parameter(self, style: _XmlStyle, definitions: Mapping[str, Any], value: Any, num_levels: int = 0) -> str:
        # A text stands there as it is, and anything else as JSON.
        self._count(_NODE_CHARS)
        value = _resolved(value, definitions)
        _refuse_keywords(value, "a parameter", ())
        alternatives = value.get("anyOf", value.get("oneOf"))
        if isinstance(alternatives, list) and alternatives:
            if num_levels > _MOST_LEVELS:
                raise InvalidRequest("a parameter has alternatives that nest too deeply")
            if beside := sorted(value.keys() - _ANNOTATIONS - {"anyOf", "oneOf"}):
                raise InvalidRequest(f"{beside[0]!r} beside alternatives cannot be enforced in this model's format")
            written = [self._parameter(style, definitions, each, num_levels + 1) for each in alternatives]
            return f"({' | '.join(f'({each})' for each in written)})"
        if "enum" in value or "const" in value:
            return self._one_of(value.get("enum", [value.get("const")]), style)
        kinds = _kinds_of(value)
        others = [kind for kind in kinds if kind != "string"]
        written = []
        if "string" in kinds:
            written.append(f"{self.literal(style.begin_of_text)} {self._xml_text(value, style.end)}")
            if value.keys() & _LIMITS_OF_TEXT and others:
                if others != ["null"]:
                    raise InvalidRequest(
                        "limits of a text beside other types cannot be enforced in this model's format"
                    )
                written.append(self.literal(f"{style.begin_of_json}null{style.end}"))
                others = []
        # Where both begin alike, a text may be any JSON too.
        if others and (not written or style.begin_of_json != style.begin_of_text):
            schema = {**value, "type": others}
            _refuse_outer_references(schema)
            if '"$ref"' in json.dumps(schema):
                schema = {**definitions, **schema}
            written.append(f"{self.literal(style.begin_of_json)} {self._json(schema)} {self.literal(style.end)}")
        return f"({' | '.join(f'({each})' for each in written)})"

    def _one_of(self, values: Any, style: _XmlStyle) -> str:
        if not isinstance(values, list) or not values:
            raise InvalidRequest("enum: expected a list of values")
        texts = [
            style.begin_of_text + each + style.end
            if isinstance(each, str)
            else style.begin_of_json + json.dumps(each) + style.end
            for each in values
        ]
        if any(map(self._special_tokens.pattern.search, texts)):
            return f"({' | '.join(map(self.literal, texts))})"
        return self._rule(" | ".join(map(json.dumps, texts)), prefix="ENUM")  # one item of llguidance's 2,000 in a row

    def _xml_text(self, value: Mapping[str, Any], end: str) -> str:
        if value.get("format") in FORMATS:
            raise InvalidRequest(f"format {value['format']!r} cannot be enforced in this model's format")
        if not value.keys() & (_LIMITS_OF_TEXT - {"format"}):
            return self._text_until([end])
        least, most = (_length(value, name) for name in ("minLength", "maxLength"))
        pattern = ""
        if "pattern" in value:
            if not isinstance(value["pattern"], str):
                raise InvalidRequest("pattern: expected a text")
            pattern = f" & /{whole_pattern(value['pattern'])}/"
        text = self._rule(f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/{pattern}", prefix="TEXT")
        return self._rule(f"{text} {json.dumps(end)}", prefix="until", attributes="[lazy]")

    def regex(self, node: Mapping[str, Any]) -> str:
        return self._rule(f"/{lark_pattern(node['pattern'])}/", prefix="REGEX")

    def sequence(self, node: Mapping[str, Any]) -> str:
        return " ".join(f"({self.expression(each)})" for each in node["elements"])

    def alternatives(self, node: Mapping[str, Any]) -> str:
        return " | ".join(f"({self.expression(each)})" for each in node["elements"])

    def tag(self, node: Mapping[str, Any], *, begin: str | None = None) -> str:
        begin = self.literal(_required_text(node["begin"]) if begin is None else begin)
        ends = [_required_text(end) for end in (node["end"] if isinstance(node["end"], list) else [node["end"]])]
        content = node["content"]
        if content["type"] == "any_text" and any(ends):
            _require_no_limits(content)
            if not all(ends):
                raise InvalidRequest("a tag of any text that may end without its end cannot be enforced")
            return f"{begin} {self._text_until(ends, content.get('excludes', ()))}"
        return f"{begin} ({self.expression(content)}) ({' | '.join(map(self.literal, ends))})"

    def triggered_tags(self, node: Mapping[str, Any]) -> str:
        triggers = node["triggers"]
        excludes = node.get("excludes", ())
        if len(triggers) * len(node["tags"]) > _MAX_TRIGGER_CHECKS:
            raise InvalidRequest(f"{len(triggers)} triggers of {len(node['tags'])} tags are too many")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in node["tags"]:
            trigger = next((each for each in triggers if tag["begin"].startswith(each)), None)
            if trigger is None:
                raise InvalidRequest(f"no trigger begins {tag['begin'][:100]!r}")
            by_trigger[trigger].append(self.tag(tag, begin=tag["begin"][len(trigger) :]))
        calls = [
            f"({self._text_until([trigger], excludes)} ({' | '.join(f'({each})' for each in tags)}))"
            for trigger, tags in by_trigger.items()
            if tags
        ]
        if not calls:
            return self._text(excludes)
        text = self._text([*triggers, *excludes])
        call = f"({' | '.join(calls)})"
        if not node.get("at_least_one"):
            return f"({call} | {text})" if node.get("stop_after_first") else f"{call}* {text}"
        first = f"({' | '.join(f'({self.tag(tag)})' for tag in node['tags'])})"
        return first if node.get("stop_after_first") else f"{first} {call}* {text}"

    def tags_with_separator(self, node: Mapping[str, Any]) -> str:
        tag = self._rule(" | ".join(f"({self.tag(each)})" for each in node["tags"]), prefix="tag")
        separator = self.literal(node["separator"])
        more = "" if node.get("stop_after_first") else f" ({separator} {tag})*"
        return f"{tag}{more}" if node.get("at_least_one") else f"({tag}{more})?"

    def repeated(self, node: Mapping[str, Any]) -> str:
        times = _REPETITIONS.get(node["type"])
        if times is None:
            least, most = node["min"], node["max"]
            if most == 0:
                return '""'
            times = f"{{{least},{'' if most < 0 else most}}}"
        return f"({self.expression(node['content'])}){times}"


_REPETITIONS = {"optional": "?", "plus": "+", "star": "*"}
_WRITERS: Mapping[str, Callable[[_Grammar, Mapping[str, Any]], str]] = {
    "const_string": lambda grammar, node: grammar.literal(node["value"]),
    "json_schema": _Grammar.json_schema,
    "any_text": lambda grammar, node: grammar._text(node.get("excludes", ())),
    "regex": _Grammar.regex,
    "sequence": _Grammar.sequence,
    "or": _Grammar.alternatives,
    "tag": _Grammar.tag,
    "triggered_tags": _Grammar.triggered_tags,
    "tags_with_separator": _Grammar.tags_with_separator,
    **dict.fromkeys([*_REPETITIONS, "repeat"], _Grammar.repeated),
}


def _require_no_limits(node: Mapping[str, Any]) -> None:
    if limit := next((name for name in _LIMITS_OF_FORMATS if node.get(name)), None):
        raise InvalidRequest(f"{node['type']} with {limit} cannot be enforced")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what}: expected an object, not {json.dumps(value)[:100]}")
    return value


def _length(value: Mapping[str, Any], name: str) -> int | None:
    length = value.get(name)
    if length is None or (
        isinstance(length, int | float) and not isinstance(length, bool) and length == int(length) >= 0
    ):
        return None if length is None else int(length)
    raise InvalidRequest(f"{name}: expected a whole number, not {json.dumps(length)[:100]}")


def _refuse_keywords(value: Mapping[str, Any], what: str, others: Sequence[str]) -> None:
    if keyword := next((name for name in (*_NOT_ENFORCED, *others) if name in value), None):
        raise InvalidRequest(f"{keyword!r} of {what} cannot be enforced in this model's format")


def _refuse_outer_references(schema: Any) -> None:
    """Raises InvalidRequest for a reference that leads outside of the definitions."""
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            target = each.get("$ref")
            if isinstance(target, str) and not target.startswith(("#/$defs/", "#/definitions/")):
                raise InvalidRequest(f"$ref {target[:100]!r} cannot be followed in this model's format")
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def _kinds_of(value: Mapping[str, Any]) -> list[str]:
    if "type" not in value:
        implied = {"properties": "object", "items": "array", "prefixItems": "array", "additionalProperties": "object"}
        return [kind for name, kind in implied.items() if name in value][:1] or _ALL_TYPES
    kinds = value["type"] if isinstance(value["type"], list) else [value["type"]]
    if not kinds or not all(isinstance(kind, str) for kind in kinds):
        raise InvalidRequest("type: expected names of types")
    return kinds


def _resolved(value: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that references and a single `allOf` lead to. Raises InvalidRequest."""
    for _ in range(_MOST_REFERENCES):
        if value is True:
            return {}
        value = _object(value, "a schema")
        rest = {name: each for name, each in value.items() if name not in ("$ref", "allOf")}
        match value:
            case {"$ref": str(target)}:
                root, kind, name, *others = [*target.split("/"), "", ""]
                name = name.replace("~1", "/").replace("~0", "~")
                if root != "#" or any(others) or name not in definitions.get(kind, {}):
                    raise InvalidRequest(f"$ref {target[:100]!r} cannot be followed in this model's format")
                value = {**_object(definitions[kind][name], "a schema"), **rest}
            case {"allOf": [one]}:
                value = {**_object(one, "a schema"), **rest}
            case _:
                return dict(value)
    raise InvalidRequest(f"over {_MOST_REFERENCES} references lead to a parameter")


def _required_text(end: Any) -> str:
    if not isinstance(end, str):
        raise InvalidRequest("calls in this model's format cannot be enforced (token)")
    return end
