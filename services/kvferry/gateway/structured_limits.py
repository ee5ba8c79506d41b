"""Limits of JSON schemas, patterns and grammars, checked before a grammar library reads them.

The libraries recurse with every nested level and every `$ref` of a chain, and unroll bounded repetitions: xgrammar
0.2.8 ends its process by SIGSEGV on a chain of 10,000 `$ref`s, and takes 7.5 s for the pattern `a{1,10000}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.errors import InvalidRequest
from kvferry.gateway.json_text import object_of

MAX_SPEC_BYTES = 128 << 10  # of one schema, structural tag or list of choices
MAX_TOOLS_BYTES = 512 << 10  # of the schemas of all tools
MAX_NESTING = 64  # objects and arrays in one another, as vLLM
MAX_REF_NESTING = 4096  # levels of the whole schema times different `$ref`s: the depth of the longest chain at most
MAX_PROPERTIES = 1000  # of one schema: a grammar of 2,500 optional ones takes 11 s to compile
MAX_ENUM_VALUES = 5000
MAX_ALL_PROPERTIES = 5000  # of all schemas
MAX_CHOICES = 1024
MAX_LENGTH_BOUND = 1_000_000  # of maxLength and the like
# Schemas with patternProperties may fall back to outlines, whose time is exponential in properties and `$ref`s.
MAX_PROPERTIES_BESIDE_PATTERNS = 32

MAX_PATTERN_CHARS = 4096
MAX_PATTERN_NESTING = 64  # groups in one another
MAX_PATTERN_SIZE = 2048  # of a schema's pattern: characters and classes, with bounded repetitions unrolled
MAX_PATTERN_COST = MAX_PATTERN_SIZE**2  # sum of the squares of all sizes: xgrammar takes 0.2 s for one pattern of 2,000
MAX_REGEX_SIZE = 4096  # of a regex, which is converted in linear time
_CLASS_CHARS = 8  # characters of a class that count as one

MAX_GRAMMAR_BYTES = 16 << 10
MAX_GRAMMAR_RULES = 512  # llguidance recurses over them
MAX_GRAMMAR_REPETITIONS = 1000
MAX_GRAMMAR_SIZE = 1_000_000  # bytes times repetitions

_STRUCTURED_NAMES = 16  # far more than there are

_BOUNDS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)
# Possessive: adjacent optional parts would take the fourth power of a text's length.
_QUANTIFIER = re.compile(r"\{\s*+(\d*+)\s*+(,?+)\s*+(\d*+)\s*+\}")
_RULE = re.compile(r"::=|^[^\S\n]*+[\w!?.-]++(?:\[[^\]\n]*+\])?+(?:\{[^}\n]*+\})?+[^\S\n]*+:", re.MULTILINE)


def check_response_format(response_format: Mapping[str, Any]) -> None:
    """Raises InvalidRequest, as all checks of this module."""
    _Counts().check_spec("response_format", response_format)


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    _Counts().check_spec("chat_template_kwargs", arguments)


def check_structured_outputs(structured_outputs: Mapping[str, Any]) -> None:
    if len(structured_outputs) > _STRUCTURED_NAMES:
        raise _refusal("structured_outputs", "the number of its parts", _STRUCTURED_NAMES)
    counts = _Counts()
    for name, spec in structured_outputs.items():
        field = f"structured_outputs.{name}"
        match name, spec:
            case "json" | "structural_tag", str():
                _check_length(field, len(spec.encode(errors="surrogatepass")), MAX_SPEC_BYTES)
                # Only an object: vLLM and xgrammar would read a text inside the text once more.
                counts.check_spec(field, object_of(field, spec))
            case "regex", str():
                _checked_size(field, spec, MAX_REGEX_SIZE)
            case "whitespace_pattern", str():
                counts.check_pattern(field, spec)
            case "grammar", str():
                _check_grammar(field, spec)
            case "choice", list():
                if len(spec) > MAX_CHOICES:
                    raise _refusal(field, f"{len(spec)} choices", MAX_CHOICES)
                _check_length(field, len(msgspec.json.encode(spec)), MAX_SPEC_BYTES)
            case _:
                counts.check_spec(field, spec)


def check_tools(schemas: Sequence[Mapping[str, Any] | None]) -> None:
    """`schemas[i]` is the parameters of `tools[i]`."""
    counts, num_bytes = _Counts(), 0
    for i, schema in enumerate(schemas):
        if schema is not None:
            field = f"tools[{i}].function.parameters"
            num_bytes += counts.check_spec(field, schema)
            _check_length("tools", num_bytes, MAX_TOOLS_BYTES)


class _Counts:
    """Counts over the schemas of one request, without recursion."""

    def __init__(self) -> None:
        self._field = ""
        self._refs: set[str] = set()
        self._num_properties = 0  # of one schema
        self._num_all_properties = 0
        self._has_pattern_properties = False
        self._num_enum_values = 0
        self._pattern_cost = 0

    def check_spec(self, field: str, spec: object) -> int:
        """Return the size of the JSON value in bytes."""
        try:
            num_bytes = len(msgspec.json.encode(spec))
        except RecursionError:
            raise _refusal(field, "its nesting", MAX_NESTING) from None
        _check_length(field, num_bytes, MAX_SPEC_BYTES)
        self._field = field
        self._refs.clear()
        self._num_properties, self._has_pattern_properties = 0, False
        num_levels = 0
        level: list[Any] = [spec]
        while level := [value for value in level if isinstance(value, dict | list)]:
            num_levels += 1
            if num_levels > MAX_NESTING:
                raise _refusal(field, "its nesting", MAX_NESTING)
            children: list[Any] = []
            for value in level:
                if isinstance(value, dict):
                    for key in value.keys() & _READ:
                        _READ[key](self, value[key])
                    children += value.values()
                else:
                    children += value
            level = children
        if num_levels * (1 + len(self._refs)) > MAX_REF_NESTING:
            raise _refusal(field, f"{len(self._refs)} different $refs times {num_levels} levels", MAX_REF_NESTING)
        if self._has_pattern_properties:
            if self._refs:
                raise InvalidRequest(
                    f"{field}: patternProperties and $ref in one schema are not supported", param=field
                )
            if self._num_properties > MAX_PROPERTIES_BESIDE_PATTERNS:
                what = "the number of properties in a schema with patternProperties"
                raise _refusal(field, what, MAX_PROPERTIES_BESIDE_PATTERNS)
        return num_bytes

    def check_pattern(self, field: str, pattern: str) -> None:
        self._pattern_cost += _checked_size(field, pattern, MAX_PATTERN_SIZE) ** 2
        if self._pattern_cost > MAX_PATTERN_COST:
            raise _refusal(field, "the sum of the squares of all sizes of patterns", MAX_PATTERN_COST)

    def _count_ref(self, target: object) -> None:
        if isinstance(target, str):
            self._refs.add(target)

    def _count_properties(self, properties: object) -> None:
        if isinstance(properties, dict):
            self._num_properties += len(properties)
            self._num_all_properties += len(properties)
            if self._num_properties > MAX_PROPERTIES:
                raise _refusal(self._field, "the number of properties", MAX_PROPERTIES)
            if self._num_all_properties > MAX_ALL_PROPERTIES:
                raise _refusal(self._field, "the number of properties of all schemas", MAX_ALL_PROPERTIES)

    def _count_enum(self, values: object) -> None:
        if isinstance(values, list):
            self._num_enum_values += len(values)
            if self._num_enum_values > MAX_ENUM_VALUES:
                raise _refusal(self._field, "the number of enum values", MAX_ENUM_VALUES)

    def _read_pattern(self, pattern: object) -> None:
        if isinstance(pattern, str):
            self.check_pattern(self._field, pattern)

    def _read_patterns(self, patterns: object) -> None:
        if isinstance(patterns, dict):
            self._has_pattern_properties = True
            for pattern in patterns:
                self.check_pattern(self._field, pattern)

    def _read_grammar(self, grammar: object) -> None:
        if isinstance(grammar, str):
            _check_grammar(self._field, grammar)

    def _read_bound(self, bound: object) -> None:
        if isinstance(bound, int | float) and bound > MAX_LENGTH_BOUND:
            raise _refusal(self._field, "a length bound", MAX_LENGTH_BOUND)


# Keys of a schema or structural tag, at any depth, whose values are counted or checked.
_READ: Mapping[str, Callable[[_Counts, object], None]] = {
    "$ref": _Counts._count_ref,
    "properties": _Counts._count_properties,
    "enum": _Counts._count_enum,
    "pattern": _Counts._read_pattern,
    "regex": _Counts._read_pattern,
    "patternProperties": _Counts._read_patterns,
    "grammar": _Counts._read_grammar,
    **dict.fromkeys(_BOUNDS, _Counts._read_bound),
}


def _checked_size(field: str, pattern: str, max_size: int) -> int:
    """Return the pattern's size. Raises InvalidRequest over `max_size`."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _refusal(field, "the length of a pattern", MAX_PATTERN_CHARS)
    size = pattern_size(pattern, max_size)
    if size > max_size:
        raise _refusal(field, "the size of a pattern, with its repetitions unrolled,", max_size)
    return size


def pattern_size(pattern: str, max_size: int = MAX_PATTERN_SIZE) -> int:
    """Return the number of characters, classes and groups, with bounded repetitions unrolled.

    A quantifier counts too, and a class by its characters. Over `max_size`, any larger number is returned.
    """
    size = last = i = 0  # of the group, of its last item; position
    outer: list[int] = []
    while i < len(pattern) and size <= max_size:
        times = _times(pattern, i, max_size) if pattern[i] == "{" else None
        if times is not None:
            size += max(1, last * (times[0] - 1))
            last = max(1, last * times[0])
            i = times[1]
            continue
        match pattern[i]:
            case "(":
                outer.append(size)
                if len(outer) > MAX_PATTERN_NESTING:
                    return max_size + 1
                size, last = 1, 0
                i += 1
                continue
            case ")" if outer:
                last = size
                size += outer.pop()
                i += 1
                continue
            case "[":
                end = _end_of_class(pattern, i)
                last = 1 + (end - i) // _CLASS_CHARS
                i = end
            case "\\":
                last = 1
                i += 2
            case _:
                last = 1
                i += 1
        size += last
    return size + sum(outer)


def _times(text: str, position: int, most: int) -> tuple[int, int] | None:
    """Return how often the quantifier at `position` repeats at most, and its end; None for a literal brace."""
    found = _QUANTIFIER.match(text, position)
    if found is None or not (found[1] or found[3]):
        return None
    digits = (found[3] or found[1]).lstrip("0")
    # int() refuses thousands of digits.
    return (max(1, int(digits or 0)) if len(digits) < 8 else most + 1), found.end()


def _end_of_class(pattern: str, start: int) -> int:
    i = start + 1
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1


def _check_grammar(field: str, grammar: str) -> None:
    num_bytes = len(grammar.encode(errors="surrogatepass"))
    _check_length(field, num_bytes, MAX_GRAMMAR_BYTES)
    if sum(1 for _ in _RULE.finditer(grammar)) > MAX_GRAMMAR_RULES:
        raise _refusal(field, "the number of its rules", MAX_GRAMMAR_RULES)
    num_repetitions = 0
    for found in _QUANTIFIER.finditer(grammar):
        times = _times(grammar, found.start(), MAX_GRAMMAR_REPETITIONS)
        num_repetitions += times[0] if times is not None else 0
        if num_repetitions > MAX_GRAMMAR_REPETITIONS:
            raise _refusal(field, "the sum of its bounded repetitions", MAX_GRAMMAR_REPETITIONS)
    if num_repetitions * num_bytes > MAX_GRAMMAR_SIZE:
        raise _refusal(field, f"{num_bytes} bytes times {num_repetitions} bounded repetitions", MAX_GRAMMAR_SIZE)


def _check_length(field: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidRequest(f"{field}: {num_bytes} bytes are too many; at most {most} are allowed", param=field)


def _refusal(field: str, count: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"{field}: {count} may be at most {most}", param=field)
