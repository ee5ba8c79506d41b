"""The rules in CEL of custom resources (`x-kubernetes-validations`), over objects as an API server would look at them.

Part of tools/helm_check.py. How the API server does it:
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#validation-rules
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import cel

Document = dict[str, Any]

RULES = "x-kubernetes-validations"

# Names of CEL's own, which rules write with two underscores on both sides.
_RESERVED = frozenset(
    {
        "true",
        "false",
        "null",
        "in",
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
    }
    | {"loop", "package", "namespace", "return", "var", "void", "while"}
)
_ESCAPES = {"__": "__underscores__", ".": "__dot__", "-": "__dash__", "/": "__slash__"}


def faults(schema: Document, value: Any, old: Any = None, path: str = "") -> Iterator[str]:
    """Yield a sentence for each rule that `value` breaks.

    `old` is the value before an update; rules about the change from it (`oldSelf`) are left out where there is none, as
    at an install. A rule that cannot be evaluated is broken.
    """
    value = with_defaults(schema, value)
    here = path or "(root)"
    for rule in schema.get(RULES, ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue
        variables = {"self": _named(schema, value)}
        if old is not None:
            variables["oldSelf"] = _named(schema, old)
        try:
            holds = _compiled(rule["rule"]).execute(variables)
        except Exception as error:
            yield f"{here}: {rule['rule']} cannot be evaluated: {error}"
            continue
        if holds is not True:
            yield f"{here}: {rule.get('message') or rule['rule']}"
    if isinstance(value, dict):
        for key, each in value.items():
            below = schema.get("properties", {}).get(key, schema.get("additionalProperties"))
            if isinstance(below, dict):
                yield from faults(
                    below, each, old.get(key) if isinstance(old, dict) else None, f"{path}.{key}".lstrip(".")
                )
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, each in enumerate(value):
            # Which element was which is not known of every list.
            yield from faults(schema["items"], each, None, f"{path}[{number}]")


def rules(schema: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, rule) for each rule of a schema."""
    if not isinstance(schema, dict):
        return
    for rule in schema.get(RULES, ()):
        yield path or "(root)", rule["rule"]
    for key, below in schema.get("properties", {}).items():
        yield from rules(below, f"{path}.{key}".lstrip("."))
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        yield from rules(schema.get(key), path + mark)


def with_defaults(schema: Document, value: Any) -> Any:
    """Return an object with the defaults of its schema, one level deep: rules see them."""
    if not isinstance(value, dict):
        return value
    defaults = {
        key: below["default"]
        for key, below in schema.get("properties", {}).items()
        if isinstance(below, dict) and "default" in below and key not in value
    }
    return {**value, **defaults}


@functools.cache
def _compiled(rule: str) -> Any:
    return cel.compile(rule)


def _named(schema: Document, value: Any) -> Any:
    """Return a value with the names of properties as rules write them, and with all defaults."""
    value = with_defaults(schema, value)
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [_named(schema["items"], each) for each in value]
    if not isinstance(value, dict):
        return value
    named = {}
    for key, each in value.items():
        properties = schema.get("properties", {})
        below = properties.get(key, schema.get("additionalProperties"))
        named[_escaped(key) if key in properties else key] = _named(below, each) if isinstance(below, dict) else each
    return named


def _escaped(name: str) -> str:
    if name in _RESERVED:
        return f"__{name}__"
    return re.sub(r"__|[./-]", lambda found: _ESCAPES[found[0]], name)
