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

MAX_SPEC_BYTES = 128 << 10  # of one schema, structural tag, grammar, or list of choices
MAX_TOOLS_BYTES = 512 << 10  # of the schemas of all tools
MAX_NESTING = 64  # objects and arrays in one another, as vLLM
MAX_REF_NESTING = 4096  # levels of the whole schema times different `$ref`s: the depth of the longest chain at most
MAX_PROPERTIES = 5000  # OpenAI takes as many
MAX_ENUM_VALUES = 5000
MAX_CHOICES = 1024
MAX_REPETITIONS = 1000  # of a grammar's quantifier, or of maxLength and the like
MAX_PATTERN_SIZE = 1000  # characters and classes of a regular expression, with bounded repetitions unrolled
MAX_PATTERN_COST = 4_000_000  # sum of the squares of all sizes: xgrammar takes 47 ms for one pattern of 1,000

_BOUNDS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)
_QUANTIFIER = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")


def check_response_format(response_format: Mapping[str, Any]) -> None:
    """Raises InvalidRequest, as all checks of this module."""
    _Counts().check_spec("response_format", response_format)


def check_structured_outputs(structured_outputs: Mapping[str, Any]) -> None:
    counts = _Counts()
    for name, spec in structured_outputs.items():
        field = f"structured_outputs.{name}"
        match name, spec:
            case "json" | "structural_tag", str():
                _check_length(field, len(spec.encode(errors="surrogatepass")), MAX_SPEC_BYTES)
                counts.check_spec(field, _from_json(field, spec))
            case "regex", str():
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
        self._num_properties = 0
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
        return num_bytes

    def check_pattern(self, field: str, pattern: str) -> None:
        size = pattern_size(pattern)
        if size > MAX_PATTERN_SIZE:
            raise _refusal(field, "the size of a pattern, with its repetitions unrolled,", MAX_PATTERN_SIZE)
        self._pattern_cost += size * size
        if self._pattern_cost > MAX_PATTERN_COST:
            raise _refusal(field, "the sum of the squares of all sizes of patterns", MAX_PATTERN_COST)

    def _count_ref(self, target: object) -> None:
        if isinstance(target, str):
            self._refs.add(target)

    def _count_properties(self, properties: object) -> None:
        if isinstance(properties, dict):
            self._num_properties += len(properties)
            if self._num_properties > MAX_PROPERTIES:
                raise _refusal(self._field, "the number of properties", MAX_PROPERTIES)

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
            for pattern in patterns:
                self.check_pattern(self._field, pattern)

    def _read_grammar(self, grammar: object) -> None:
        if isinstance(grammar, str):
            _check_grammar(self._field, grammar)

    def _read_bound(self, bound: object) -> None:
        if isinstance(bound, int | float) and bound > MAX_REPETITIONS:
            raise _refusal(self._field, "a length bound", MAX_REPETITIONS)


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


def pattern_size(pattern: str) -> int:
    """Return the number of characters and classes, with bounded repetitions unrolled; any number over the limit."""
    size = last = i = 0  # of the group, of its last item; position
    outer: list[int] = []
    while i < len(pattern) and size <= MAX_PATTERN_SIZE:
        times = _times(pattern, i) if pattern[i] == "{" else None
        if times is not None:
            size += last * (times[0] - 1)
            last *= times[0]
            i = times[1]
            continue
        match pattern[i]:
            case "(":
                outer.append(size)
                size = last = 0
                i += 1
                continue
            case ")" if outer:
                last = size
                size += outer.pop()
                i += 1
                continue
            case "[":
                i = _end_of_class(pattern, i)
            case "\\":
                i += 2
            case _:
                i += 1
        last = 1
        size += 1
    return size + sum(outer)


def _times(text: str, position: int) -> tuple[int, int] | None:
    """Return how often the quantifier at `position` repeats at most, and its end; None for a literal brace."""
    found = _QUANTIFIER.match(text, position)
    if found is None or not (found[1] or found[3]):
        return None
    digits = (found[3] or found[1]).lstrip("0")
    # int() refuses thousands of digits.
    return (max(1, int(digits or 0)) if len(digits) < 8 else MAX_PATTERN_SIZE + 1), found.end()


def _end_of_class(pattern: str, start: int) -> int:
    i = start + 1
    if pattern[i : i + 1] == "^":
        i += 1
    if pattern[i : i + 1] == "]":
        i += 1
    while i < len(pattern) and pattern[i] != "]":
        i += 2 if pattern[i] == "\\" else 1
    return i + 1


def _check_grammar(field: str, grammar: str) -> None:
    _check_length(field, len(grammar.encode(errors="surrogatepass")), MAX_SPEC_BYTES)
    num_repetitions = 0
    for found in _QUANTIFIER.finditer(grammar):
        times = _times(grammar, found.start())
        num_repetitions += times[0] if times is not None else 0
        if num_repetitions > MAX_REPETITIONS:
            raise _refusal(field, "the sum of its bounded repetitions", MAX_REPETITIONS)


def _from_json(field: str, text: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{field}: not valid JSON: {error}", param=field) from None
    except RecursionError:
        raise _refusal(field, "its nesting", MAX_NESTING) from None


def _check_length(field: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidRequest(f"{field}: {num_bytes} bytes are too many; at most {most} are allowed", param=field)


def _refusal(field: str, count: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"{field}: {count} may be at most {most}", param=field)
