"""The smaller model, or EAGLE head, that makes drafts of an engine's tokens (`speculative_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvferry import model_folder
from kvferry.arguments.vllm_arguments import DRAFT_METHODS, SPECULATION, draft_model
from kvferry.config import EngineConfig
from kvferry.engine.vllm.start.argument_parser import key_of
from kvferry.engine.vllm.start.weights import check_load_format, weights_revision
from kvferry.errors import ConfigError

_NUM_TOKENS = "num_speculative_tokens"


class DraftModel(NamedTuple):
    folder: str
    digest: str  # of its weights and configuration

    def for_engine(self, config: dict[str, Any], *, producer: bool) -> dict[str, Any]:
        """Return a `speculative_config` for vLLM."""
        return {**(drafts_of_prefill(config) if producer else config), "model": self.folder}

    def for_digest(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what engines must have in common: nodes may have the model in other folders."""
        return {name: value for name, value in config.items() if name != _NUM_TOKENS} | {"model": self.digest}


def drafts_of_prefill(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `speculative_config` of an engine that drafts as little as it can."""
    # Others of vLLM's methods draft as many as they were trained for.
    return {**config, _NUM_TOKENS: 1} if config["method"] in DRAFT_METHODS else dict(config)


def find(engine: EngineConfig, cache: Path, keys: Mapping[str, str]) -> DraftModel | None:
    """Find or fetch the draft model, and read its weights (see `weights_revision`). Raises ConfigError."""
    name = draft_model(engine.args)
    if not name:
        return None
    key = f"{key_of(SPECULATION, keys)}.model"
    folder = model_folder.resolve(name, key=key)
    try:
        check_load_format(engine.args, folder, keys)
        return DraftModel(str(folder), weights_revision(folder, cache))
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ')}", param=key) from None
