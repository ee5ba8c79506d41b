"""Loads YAML that a running process may be given: of bounded size and depth, without aliases and merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

# libyaml's reads thousands of entries ten times as fast; it is missing from some builds of PyYAML.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MAX_DEPTH: Final = 16
MAX_SCALAR_CHARS: Final = 4096
_MERGE: Final = "<<"
_MERGE_TAG: Final = "tag:yaml.org,2002:merge"


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
        return yaml.load(content, Loader=_Loader)
    except _Refused as error:
        raise ValueError(str(error)) from None
    except Exception:  # constructors raise all that int(), float() and datetime raise, with the text in it
        raise ValueError("not YAML") from None


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
