"""Imports of test helpers in child processes."""

from __future__ import annotations

import os
import sys


def import_environment() -> dict[str, str]:
    """Return this process's environment with its import path, for `python -m support.NAME` in a child."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
