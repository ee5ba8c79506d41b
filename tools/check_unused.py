"""Look for code that nothing uses, with vulture.

    python tools/check_unused.py

Code that only tests use counts as unused. A name that a framework calls, or that is needed for another reason, stands
with that reason in [tool.kvferry.unused] of pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
_MIN_CONFIDENCE = 60


def main() -> int:
    allowed: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "kvferry"
    ]["unused"]
    names = {name for listed in allowed.values() for name in listed}
    finder = Vulture(ignore_names=sorted(names))
    finder.scavenge(
        [str(ROOT / folder) for folder in ("services", "loadtest", "bench", "tools")],
        exclude=["*_pb2*", "*/peers/*"],
    )
    own = [str(ROOT / folder) for folder in ("services", "loadtest")]
    unused = [
        item
        for item in finder.get_unused_code(min_confidence=_MIN_CONFIDENCE)
        if any(str(item.filename).startswith(folder) for folder in own)
    ]
    for item in unused:
        print(f"{item.filename}:{item.first_lineno}: {item.message}")
    stale = sorted(name for name in names if "*" not in name and name not in {item.name for item in _all(finder)})
    for name in stale:
        print(f"pyproject.toml: tool.kvferry.unused: {name} does not exist")
    return 1 if unused or stale else 0


def _all(finder: Vulture) -> list[object]:
    return [
        *finder.defined_attrs, *finder.defined_classes, *finder.defined_funcs, *finder.defined_methods,
        *finder.defined_props, *finder.defined_vars,
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
