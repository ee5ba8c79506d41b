"""Says what is wrong with plain values that are to become a msgspec struct: the key, the value, what is allowed.

msgspec itself refuses the same values, but names neither the bad value nor what there is to choose from.
"""

from __future__ import annotations

import difflib
import json
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T", bound=msgspec.Struct)

MAX_NUMBER = 2**63  # exclusive; nothing that is counted or timed comes near, and all below fits where it is stored


class Fault(Exception):
    """One thing that is wrong. `key` is dotted; `missing` when there is no value to show."""

    def __init__(self, key: str, why: str, value: Any = None, *, missing: bool = False) -> None:
        super().__init__(f"{key} is missing: {why}" if missing else f"{key} = {shown(value)}: {why}")


def shown(value: Any) -> str:
    """A value on one line, as short as it may be without hiding what it is."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def convert(value: dict[str, Any], into: type[T]) -> T:
    """A value that `check` found right. Raises Fault where it breaks a struct's own rule."""
    try:
        return msgspec.convert(value, into)
    except msgspec.ValidationError as error:  # from a __post_init__
        why, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`").replace("[", ".").replace("]", "")
        raise Fault(key, why, at(value, key)) from None


def check(value: Any, type_: inspect.Type, key: str = "") -> None:
    """Raises Fault where `value`, made of dicts, lists, strings, numbers and booleans, is not of `type_`."""
    type_ = without_none(type_)
    if isinstance(type_, inspect.StructType):
        if not isinstance(value, dict):
            raise Fault(key, f"must be {allowed(type_)}", value)
        fields = {field.name: field for field in type_.fields}
        for name, inner in value.items():
            if name not in fields:
                raise Fault(join(key, name), f"unknown key; {_choice(name, list(fields))}", inner)
            check(inner, fields[name].type, join(key, name))
        for field in type_.fields:
            if field.required and field.name not in value:
                raise Fault(join(key, field.name), f"must be {allowed(field.type)}", missing=True)
    elif isinstance(type_, inspect.VarTupleType):
        if not isinstance(value, list):
            raise Fault(key, f"must be {allowed(type_)}", value)
        for index, inner in enumerate(value):
            check(inner, type_.item_type, join(key, str(index)))
    elif not _fits(value, type_):
        raise Fault(key, f"must be {allowed(type_)}", value)


def allowed(type_: inspect.Type) -> str:
    """Describe the values of this type in words."""
    match without_none(type_):
        case inspect.StructType(fields=fields):
            return f"a table of {', '.join(field.name for field in fields)}"
        case inspect.VarTupleType(item_type=item_type):
            return f"an array, each item {allowed(item_type)}"
        case inspect.LiteralType(values=values):
            return " or ".join(json.dumps(value) for value in values)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(min_length=min_length):
            return "text that is not empty" if min_length else "text"
        case inspect.IntType() | inspect.FloatType() as number:
            words = "a whole number" if isinstance(number, inspect.IntType) else "a number"
            bounds = {"above": number.gt, "of at least": number.ge, "below": number.lt, "at most": number.le}
            limits = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
            return f"{words} {limits}".rstrip()
        case other:
            raise TypeError(f"scenarios have no values of {other}")


def _fits(value: Any, type_: inspect.Type) -> bool:
    match type_:
        case inspect.LiteralType(values=values):
            return isinstance(value, str) and value in values
        case inspect.BoolType():
            return isinstance(value, bool)
        case inspect.StrType(min_length=min_length):
            return isinstance(value, str) and len(value) >= (min_length or 0)
        case inspect.IntType() | inspect.FloatType() as number:
            kinds = int if isinstance(number, inspect.IntType) else (int, float)
            return (
                isinstance(value, kinds)
                and not isinstance(value, bool)
                and abs(value) < MAX_NUMBER
                and (number.gt is None or value > number.gt)
                and (number.ge is None or value >= number.ge)
                and (number.lt is None or value < number.lt)
                and (number.le is None or value <= number.le)
            )
        case other:
            raise TypeError(f"scenarios have no values of {other}")


def without_none(type_: inspect.Type) -> inspect.Type:
    """The type of an optional value where there is one."""
    if isinstance(type_, inspect.UnionType):
        (type_,) = (each for each in type_.types if not isinstance(each, inspect.NoneType))
    return type_


def type_at(type_: inspect.Type, parts: list[str]) -> inspect.Type | None:
    """The type of what a dotted key names; None where there is no such key."""
    type_ = without_none(type_)
    if not parts:
        return type_
    if isinstance(type_, inspect.StructType):
        found = [field.type for field in type_.fields if field.name == parts[0]]
        return type_at(found[0], parts[1:]) if found else None
    if isinstance(type_, inspect.VarTupleType) and parts[0].isdecimal():
        return type_at(type_.item_type, parts[1:])
    return None


def at(value: Any, key: str) -> Any:
    """Return the value that a dotted key names in dicts and lists."""
    for part in filter(None, key.split(".")):
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _choice(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
