"""Loads packages that the core does not import, by their entry points."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any

from kvferry.errors import ConfigError


def simulator() -> Any:
    """Return kvferry_sim.entry. Raises ConfigError where it is not installed."""
    return _load("kvferry.engines", "sim", "engine.kind", "engine.kind: sim is the package kvferry-sim")


def keeper() -> Any:
    """Return kvferry_keeper.entry. Raises ConfigError likewise."""
    return _load("kvferry.keepers", "keeper", "tier.volumes", "tier.volumes: keepers are the package kvferry-keeper")


def named_folder() -> Any:
    # kvferry_local's function, or None where that package is not installed.
    return next((entry.load() for entry in entry_points(group="kvferry.local", name="named_folder")), None)


@functools.cache
def _load(group: str, name: str, key: str, what: str) -> Any:
    for entry in entry_points(group=group, name=name):
        return entry.load()
    raise ConfigError(f"{what}, which is not installed: pip install {what.rsplit(' ', 1)[1]}", param=key)
