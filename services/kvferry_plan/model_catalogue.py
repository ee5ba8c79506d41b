"""Finds the geometry of a model: of a folder, of the shipped catalogue (model_catalogue.json), or of the hub."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvferry import model_folder
from kvferry.errors import ConfigError
from kvferry.pages.geometry.config_json import from_config
from kvferry.pages.geometry.model import ModelGeometry

_FILE = "model_catalogue.json"
_NUM_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str  # as a command takes it, in any case of letters
    hub_id: str
    num_parameters: int
    num_active_parameters: int | None  # None: all of them
    source: str  # where config.json and the count of parameters were read
    date: str  # when they were read, YYYY-MM-DD
    config: Mapping[str, Any]  # the fields of config.json that sizes depend on

    def geometry(self) -> ModelGeometry:
        geometry = from_config(self.config, name=self.name)
        active = self.num_active_parameters or self.num_parameters
        return dataclasses.replace(geometry, num_parameters=self.num_parameters, num_active_parameters=active)


@functools.cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    text = resources.files("kvferry_plan").joinpath(_FILE).read_text(encoding="utf-8")
    return tuple(CatalogueEntry(**entry) for entry in json.loads(text))


def geometry_of(name: str) -> ModelGeometry:
    """Take a folder, a catalogue name, or a hub id. Only the catalogue has parameter counts.

    Raises ConfigError if the model is not found, or its pages are not known.
    """
    if model_folder.is_folder(name):
        return from_config(model_folder.read_config(name), name=name)
    if entry := find(name):
        return entry.geometry()
    if not name.strip("./~"):
        raise ConfigError(f"model {name[:200]!r}: expected a folder, a catalogue name or a hub id", param="model")
    if "/" not in name:
        raise ConfigError(
            f"model {name[:200]!r} is no folder with a config.json, no catalogue name and no hub id (owner/name)"
            f"{_suggestion(name)}",
            param="model",
        )
    try:
        config = model_folder.read_config(name)
    except ConfigError as error:
        raise ConfigError(f"model {name[:200]!r}: {error.message}{_suggestion(name)}", param="model") from None
    return from_config(config, name=name)


def find(name: str) -> CatalogueEntry | None:
    wanted = name.lower()
    if wanted == model_folder.DEFAULT_NAME:
        wanted = model_folder.DEFAULT_SERVED_NAME.lower()
    return next((entry for entry in catalogue() if wanted in (entry.name.lower(), entry.hub_id.lower())), None)


def _suggestion(name: str) -> str:
    names = {entry.name.lower(): entry.name for entry in catalogue()}
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], names, n=_NUM_SUGGESTIONS)
    like = f"; names like it: {', '.join(names[each] for each in near)}" if near else ""
    return f"; the catalogue has {len(names)} models{like}"
