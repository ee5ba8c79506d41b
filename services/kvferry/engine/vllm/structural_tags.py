"""Grammars for llguidance from structural tags, which are xgrammar's (vLLM issue 55152)."""

# A structural tag is a tree of formats; its classes and their meaning are in `xgrammar.structural_tag`. llguidance's
# Lark syntax: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kvferry.errors import InvalidRequest

_HEADER = "%llguidance {}"
_ANY_OBJECT = {"type": "object"}
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


def lark_of(tag: Mapping[str, Any], special_tokens: Mapping[str, int], prepare: Callable[[Any], Any]) -> str:
    """Return a grammar in Lark syntax. Raises InvalidRequest, without the field's name.

    `special_tokens` of the tokenizer match no text; `prepare` is applied to each JSON schema.
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
        # Of a union's alternatives each has its errors: the last one is of the kind that the client named.
        fault = error.errors()[-1]
        raise InvalidRequest(f"no structural tag: {'.'.join(map(str, fault['loc']))}: {fault['msg']}") from None


class _Grammar:
    def __init__(self, special_tokens: Mapping[str, int], prepare: Callable[[Any], Any]) -> None:
        self.rules: list[str] = []
        self._special_tokens = special_tokens
        self._prepare = prepare
        longest_first = sorted(special_tokens, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None

    def expression(self, node: Mapping[str, Any]) -> str:
        write = _WRITERS.get(node["type"])
        if write is None:
            raise InvalidRequest(f"calls in this model's format cannot be enforced ({node['type']})", param="tools")
        if limit := next((name for name in _LIMITS_OF_FORMATS if node.get(name)), None):
            raise InvalidRequest(f"{node['type']} with {limit} cannot be enforced", param="structured_outputs")
        return write(self, node)

    def literal(self, text: str) -> str:
        """Return terminals; special tokens are tokens."""
        pieces = self._special.split(text) if self._special is not None else [text]
        ids = self._special_tokens
        return " ".join(f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece) for piece in pieces if piece) or '""'

    def _rule(self, expression: str, *, prefix: str = "r", attributes: str = "") -> str:
        name = f"{prefix}{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {expression}")
        return name

    def _text(self, excludes: Sequence[str] = ()) -> str:
        """Return a terminal."""
        without = "".join(f" & ~/(.|\\n)*{_escaped(each)}(.|\\n)*/" for each in excludes if each)
        return self._rule(f"/(.|\\n)*/{without}", prefix="TEXT")

    def _text_until(self, ends: Sequence[str]) -> str:
        """Return a rule of any text and the first of some ends."""
        text = self._text()
        if any(end in self._special_tokens for end in ends):
            return self._rule(f"{text} ({' | '.join(map(self.literal, ends))})")  # which no text contains
        return self._rule(f"{text} ({' | '.join(map(json.dumps, ends))})", prefix="until", attributes="[lazy]")

    def json_schema(self, node: Mapping[str, Any]) -> str:
        schema, style = node["json_schema"], node.get("style", "json")
        if style == "json":
            schema = _ANY_OBJECT if schema is True else schema
            return f"%json {json.dumps(self._prepare(schema))}"
        if style not in _XML_STYLES:
            raise InvalidRequest(f"parameters in this model's format cannot be enforced ({style})", param="tools")
        return self._xml(schema, _XML_STYLES[style])

    def _xml(self, schema: Any, style: _XmlStyle) -> str:
        properties = schema.get("properties") if isinstance(schema, dict) else None
        if not properties:
            return "" if isinstance(schema, dict) else self._text()
        required = set(schema.get("required", ()))
        definitions = {name: schema[name] for name in ("$defs", "definitions") if isinstance(schema.get(name), dict)}
        parts = []
        for name, value in properties.items():
            named = style._replace(
                begin_of_text=style.begin_of_text.replace("NAME", name),
                begin_of_json=style.begin_of_json.replace("NAME", name),
            )
            part = self._parameter(named, definitions, value)
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts)

    def _parameter(self, style: _XmlStyle, definitions: Mapping[str, Any], value: Any, num_levels: int = 0) -> str:
        # A text stands there as it is, and anything else as JSON.
        value = _resolved(value, definitions)
        alternatives = value.get("anyOf", value.get("oneOf"))
        if isinstance(alternatives, list) and alternatives:
            if num_levels > _MOST_LEVELS:
                raise InvalidRequest("a parameter has alternatives that nest too deeply", param="tools")
            written = [self._parameter(style, definitions, each, num_levels + 1) for each in alternatives]
            return f"({' | '.join(f'({each})' for each in written)})"
        if "enum" in value or "const" in value:
            values = value.get("enum", [value.get("const")])
            texts = [
                style.begin_of_text + each + style.end
                if isinstance(each, str)
                else style.begin_of_json + json.dumps(each) + style.end
                for each in values
            ]
            return f"({' | '.join(map(self.literal, texts))})"
        kinds = value.get("type", _ALL_TYPES)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        others = [kind for kind in kinds if kind != "string"]
        written = []
        if "string" in kinds:
            written.append(f"{self.literal(style.begin_of_text)} {self._xml_text(value, kinds, style.end)}")
        # Where both begin alike, a text may be any JSON too.
        if others and (not written or style.begin_of_json != style.begin_of_text):
            schema = json.dumps(self._prepare({**definitions, **value, "type": others}))
            written.append(f"{self.literal(style.begin_of_json)} %json {schema} {self.literal(style.end)}")
        return f"({' | '.join(f'({each})' for each in written)})"

    def _xml_text(self, value: Mapping[str, Any], kinds: Sequence[str], end: str) -> str:
        limits = value.keys() & _LIMITS_OF_TEXT if list(kinds) == ["string"] else ()
        if not limits:
            return self._text_until([end])
        if "format" in limits:
            raise InvalidRequest("parameters in this model's format cannot have a format", param="tools")
        length = f"{{{value.get('minLength', 0)},{value.get('maxLength', '')}}}"
        pattern = f" & /{_whole(value['pattern'])}/" if "pattern" in value else ""
        text = self._rule(f"/(.|\\n){length}/{pattern}", prefix="TEXT")
        return self._rule(f"{text} {json.dumps(end)}", prefix="until", attributes="[lazy]")

    def regex(self, node: Mapping[str, Any]) -> str:
        pattern = node["pattern"].replace("\n", "\\n").replace("\\d", "[0-9]")  # of ASCII, as in xgrammar
        return self._rule("/" + re.sub(r"(?<!\\)/", r"\\/", pattern) + "/", prefix="REGEX")

    def sequence(self, node: Mapping[str, Any]) -> str:
        return " ".join(f"({self.expression(each)})" for each in node["elements"])

    def alternatives(self, node: Mapping[str, Any]) -> str:
        return " | ".join(f"({self.expression(each)})" for each in node["elements"])

    def tag(self, node: Mapping[str, Any], *, begin: str | None = None) -> str:
        begin = self.literal(_text_of(node["begin"]) if begin is None else begin)
        ends = [_text_of(end) for end in (node["end"] if isinstance(node["end"], list) else [node["end"]])]
        content = node["content"]
        if content["type"] == "any_text" and any(ends):
            return f"{begin} {self._text_until(ends)}"
        return f"{begin} ({self.expression(content)}) ({' | '.join(map(self.literal, ends))})"

    def triggered_tags(self, node: Mapping[str, Any]) -> str:
        triggers = node["triggers"]
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in node["tags"]:
            trigger = next((each for each in triggers if tag["begin"].startswith(each)), None)
            if trigger is None:
                raise InvalidRequest(f"no trigger begins {tag['begin'][:100]!r}", param="structured_outputs")
            by_trigger[trigger].append(self.tag(tag, begin=tag["begin"][len(trigger) :]))
        calls = [
            f"({self._text_until([trigger])} ({' | '.join(f'({each})' for each in tags)}))"
            for trigger, tags in by_trigger.items()
            if tags
        ]
        if not calls:
            return self._text(node.get("excludes", ()))
        text = self._text([*triggers, *node.get("excludes", ())])
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
        times = _REPETITIONS.get(node["type"]) or f"{{{node['min']},{node['max']}}}"
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


def _resolved(value: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Follow references."""
    for _ in range(_MOST_REFERENCES):
        if not isinstance(value, dict):
            return {}
        rest = {name: each for name, each in value.items() if name not in ("$ref", "allOf")}
        match value:
            case {"$ref": str(target)}:
                _, kind, name, *others = [*target.split("/"), "", ""]
                if any(others) or name not in definitions.get(kind, {}):
                    return dict(value)
                value = {**definitions[kind][name], **rest} if isinstance(definitions[kind][name], dict) else rest
            case {"allOf": [one]}:
                value = {**one, **rest} if isinstance(one, dict) else rest
            case _:
                return dict(value)
    raise InvalidRequest(f"over {_MOST_REFERENCES} references lead to a parameter", param="tools")


def _whole(pattern: str) -> str:
    """Return a pattern of the whole text for one of a part."""
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    if "|" in inner and (begins or ends):
        raise InvalidRequest("parameters in this model's format cannot have a pattern with ^ or $ and |", param="tools")
    anything = r"(.|\n)*"
    inner = re.sub(r"(?<!\\)/", r"\/", inner)
    return f"{'' if begins else anything}({inner}){'' if ends else anything}"


def _text_of(end: Any) -> str:
    if not isinstance(end, str):
        raise InvalidRequest("calls in this model's format cannot be enforced (token)", param="tools")
    return end


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")
