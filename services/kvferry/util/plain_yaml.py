"""Loads YAML that a running process may be given: of bounded size and depth, without aliases and merges."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

_TIMESTAMP_TAG: Final = "tag:yaml.org,2002:timestamp"
_FLOAT_TAG: Final = "tag:yaml.org,2002:float"
_FLOAT: Final = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z", re.ASCII)


class SafeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with dates as text, and floats as in YAML 1.2."""

    # lm-format-enforcer, which vLLM imports, changes PyYAML's own loaders to this for the whole process: a file would
    # mean one thing before that import and another after it.


# libyaml's reads thousands of entries ten times as fast; it is missing from some builds of PyYAML.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    pass


class _Dumper(yaml.SafeDumper):
    pass


for _each in (SafeLoader, _Loader):
    _each.add_constructor(_TIMESTAMP_TAG, yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]
# In YAML 1.1, PyYAML's, 1e-3 and 1e+06 are texts, as floats need a point, and exponents a sign.
for _user in (SafeLoader, _Loader, _Dumper):
    _user.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+.0123456789"))

MAX_DEPTH: Final = 16
MAX_SCALAR_CHARS: Final = 4096
_MERGE: Final = "<<"
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


def dump(values: Any) -> str:
    """Return YAML that is read as the same values here."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False)


def read_bounded(file: Path, max_bytes: int) -> bytes:
    """Raises ValueError for a larger file, and OSError."""
    with file.open("rb") as opened:
        content = opened.read(max_bytes + 1)
    check_size(content, max_bytes)
    return content


def check_size(content: bytes, max_bytes: int) -> None:
    """Raise ValueError for content over the limit."""
    if len(content) > max_bytes:
        raise ValueError(f"over {max_bytes} bytes, the limit")


def load(content: bytes) -> Any:
    """Raises ValueError naming the fault, which never quotes the content."""
    try:
        # libyaml builds values recursively in C, and ends the process at some depth; it finds events in a loop.
        _check_events(content)
        if doubled_key(content) is not None:
            raise _Refused("a key that is there twice")
        return yaml.load(content, Loader=_Loader)
    except _Refused as error:
        raise ValueError(str(error)) from None
    except yaml.MarkedYAMLError as error:
        # libyaml of PyYAML 6.0.4 has a limit of its own, and reads ahead of the events.
        is_deep = "nesting" in (error.problem or "")
        raise ValueError(f"nested deeper than {MAX_DEPTH}" if is_deep else "not YAML") from None
    except Exception:  # constructors raise all that int() and float() raise, with the text in it
        raise ValueError("not YAML") from None


def doubled_key(content: bytes | str) -> str | None:
    """Return a key that one mapping has twice: PyYAML would take the last. Raises YAMLError."""
    mappings: list[set[str] | None] = [None]  # around the event, and their keys; None for a list
    is_key = [False]
    for event in yaml.parse(content, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            mappings.pop(), is_key.pop()
        elif isinstance(event, yaml.NodeEvent):
            keys = mappings[-1]
            if keys is not None:
                is_key[-1] = not is_key[-1]
                if not is_key[-1] and isinstance(event, yaml.ScalarEvent):
                    if event.value in keys:
                        return str(event.value)
                    keys.add(event.value)
            if isinstance(event, yaml.CollectionStartEvent):
                is_mapping = isinstance(event, yaml.MappingStartEvent)
                mappings.append(set() if is_mapping else None)
                is_key.append(is_mapping)
    return None


class _Refused(Exception):
    pass


def _check_events(content: bytes) -> None:
    depth = 0
    for event in yaml.parse(content, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _Refused(f"nested deeper than {MAX_DEPTH}")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            raise _Refused("an alias (*name); write the value out")
        elif isinstance(event, yaml.ScalarEvent):
            if len(event.value) > MAX_SCALAR_CHARS:
                raise _Refused(f"a value of {len(event.value)} characters; {MAX_SCALAR_CHARS} is the limit")
            if event.tag == _MERGE_TAG or (event.value == _MERGE and not event.style):
                raise _Refused("a merge (<<); write the values out")
