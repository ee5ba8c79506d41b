"""Writes pages of docs/ that are made from data of the code, or compares them with it (`--check`)."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path


def write_or_check(pages: Mapping[Path, str], *, source: str, target: str, description: str | None) -> int:
    """Return the exit code: 1 if a committed page differs from its fresh text. `target` is the make target."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="compare with the committed pages instead of writing them")
    if not parser.parse_args().check:
        for file, text in pages.items():
            file.write_text(text, encoding="utf-8")
        return 0
    stale = [file for file, text in pages.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    for file in stale:
        print(f"{file.name} differs from {source}: run `make {target}`", file=sys.stderr)
    return 1 if stale else 0
