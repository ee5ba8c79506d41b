"""The smaller model, or EAGLE head, that makes drafts of an engine's tokens (`speculative_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvferry import model_folder
from kvferry.arguments import vllm_arguments
from kvferry.config import EngineConfig
from kvferry.engine.vllm.start.argument_parser import key_of
from kvferry.engine.vllm.start.weights import check_load_format, weights_revision
from kvferry.errors import ConfigError


class DraftModel(NamedTuple):
    method: str
    folder: str
    digest: str  # of its weights and configuration

    def for_engine(self, config: dict[str, Any], *, producer: bool) -> dict[str, Any]:
        """Return a `speculative_config` for vLLM."""
        return {**(drafts_of_prefill(config) if producer else config), "model": self.folder}

    def for_digest(self) -> dict[str, str]:
        """Return what engines must have in common: nodes may have the model in other folders."""
        return {"method": self.method, "model": self.digest}


def drafts_of_prefill(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `speculative_config` of an engine that drafts as little as it can."""
    return {**config, "num_speculative_tokens": 1}


def find(engine: EngineConfig, cache: Path, keys: Mapping[str, str]) -> DraftModel | None:
    """Find or fetch the draft model, and read its weights (see `weights_revision`). Raises ConfigError."""
    name = vllm_arguments.draft_model(engine.args)
    if not name:
        return None
    key = f"{key_of(vllm_arguments.SPECULATION, keys)}.model"
    folder = model_folder.resolve(name, key=key)
    try:
        check_load_format(engine.args, folder, keys)
        method = str(engine.args[vllm_arguments.SPECULATION]["method"])
        return DraftModel(method, str(folder), weights_revision(folder, cache))
    except ConfigError as error:
        raise ConfigError(f"{key}: {str(error).removeprefix('model.path: ')}", param=key) from None
