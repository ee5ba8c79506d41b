"""Finds the simulated engine (`engine.kind: sim`), which is a package of its own: kvferry-sim."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any

from kvferry.errors import ConfigError


@functools.cache
def load() -> Any:
    """Return the module kvferry_sim.entry. Raises ConfigError where it is not installed."""
    for entry in entry_points(group="kvferry.engines", name="sim"):
        return entry.load()
    raise ConfigError(
        "engine.kind: sim is the package kvferry-sim, which is not installed: pip install kvferry-sim",
        param="engine.kind",
    )
