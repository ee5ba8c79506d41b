"""Limits of size and nesting of schemas, patterns and grammars, checked before any library reads them.

What a grammar costs is measured in the grammar process (engine/grammar_process.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.errors import InvalidRequest
from kvferry.gateway.bodies.json_text import object_of

MAX_SPEC_BYTES = 128 << 10  # of one schema, pattern, grammar, structural tag or list of choices
MAX_TOOLS_BYTES = 512 << 10  # of the schemas of all tools
MAX_NESTING = 64  # objects and arrays in one another, as vLLM
_STRUCTURED_NAMES = 16  # far more than there are


def check_response_format(response_format: Mapping[str, Any]) -> None:
    """Raises InvalidRequest, as all checks of this module."""
    _check_spec("response_format", response_format)


def check_template_arguments(arguments: Mapping[str, Any]) -> None:
    _check_spec("chat_template_kwargs", arguments)


def check_structured_outputs(structured_outputs: Mapping[str, Any]) -> None:
    if len(structured_outputs) > _STRUCTURED_NAMES:
        raise InvalidRequest(
            f"structured_outputs: the number of its parts may be at most {_STRUCTURED_NAMES}",
            param="structured_outputs",
        )
    for name, spec in structured_outputs.items():
        field = f"structured_outputs.{name}"
        if name in ("json", "structural_tag") and isinstance(spec, str):
            _check_length(field, len(spec.encode(errors="surrogatepass")), MAX_SPEC_BYTES)
            # Only an object: vLLM would read a text inside the text once more.
            spec = object_of(field, spec)
        if spec == [] or (isinstance(spec, str) and "\0" in spec):
            raise InvalidRequest(f"{field}: {'it is empty' if spec == [] else 'it has a NUL character'}", param=field)
        _check_spec(field, spec)


def check_tools(schemas: Sequence[Mapping[str, Any] | None]) -> None:
    """`schemas[i]` is the parameters of `tools[i]`."""
    num_bytes = 0
    for i, schema in enumerate(schemas):
        if schema is not None:
            num_bytes += _check_spec(f"tools[{i}].function.parameters", schema)
            _check_length("tools", num_bytes, MAX_TOOLS_BYTES)


def _check_spec(field: str, spec: object) -> int:
    """Return the size of a JSON value in bytes."""
    try:
        num_bytes = len(msgspec.json.encode(spec))
    except RecursionError:
        raise _nested_too_deeply(field) from None
    _check_length(field, num_bytes, MAX_SPEC_BYTES)
    num_levels = 0
    level: list[Any] = [spec]
    while level := [value for value in level if isinstance(value, dict | list)]:
        num_levels += 1
        if num_levels > MAX_NESTING:
            raise _nested_too_deeply(field)
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
    return num_bytes


def _check_length(field: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise InvalidRequest(f"{field}: {num_bytes} bytes are too many; at most {most} are allowed", param=field)


def _nested_too_deeply(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: its nesting may be at most {MAX_NESTING}", param=field)
