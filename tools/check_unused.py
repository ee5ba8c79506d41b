"""Look for code that nothing uses, with vulture.

    python tools/check_unused.py

Code that only tests use counts as unused. A name that a framework calls, or that is needed for another reason, stands
with that reason in [tool.kvferry.unused] of pyproject.toml. vulture compares names: a method counts as used where any
other object has a used attribute of that name, and a function where it calls itself.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
_MIN_CONFIDENCE = 60
# Fields of data classes are read by serializers, which vulture does not see.
_KINDS = ("class", "function", "method", "property")


def main() -> int:
    allowed: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "kvferry"
    ]["unused"]
    names = {name for listed in allowed.values() for name in listed}
    finder = Vulture()
    finder.scavenge(
        [str(ROOT / folder) for folder in ("services", "loadtest", "bench", "tools")],
        exclude=["*_pb2*", "*/peers/*"],
    )
    own = tuple(str(ROOT / folder) for folder in ("services", "loadtest"))
    unused = [
        item
        for item in finder.get_unused_code(min_confidence=_MIN_CONFIDENCE)
        if item.typ in _KINDS and str(item.filename).startswith(own)
    ]
    faults = [f"{item.filename}:{item.first_lineno}: {item.message}" for item in unused if item.name not in names]
    used = sorted(names - {item.name for item in unused})
    faults += [f"pyproject.toml: tool.kvferry.unused: {name} is used, or does not exist any more" for name in used]
    print("\n".join(faults) or "no unused code")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
