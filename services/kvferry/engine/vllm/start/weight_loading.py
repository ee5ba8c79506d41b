"""Load formats that read other files than those whose digest is taken, or need a package, are refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvferry.arguments.vllm_arguments import LOAD_FORMAT, SAFETENSORS, STREAMED
from kvferry.engine.vllm.start.argument_parser import key_of
from kvferry.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_PACKAGE, _MODULE = "runai-model-streamer", "runai_model_streamer"


def check_load_format(args: Mapping[str, Any], folder: Path, keys: Mapping[str, str]) -> None:
    """Raises ConfigError unless a load format that was shown reads the files that `auto` reads. `keys`: `key_of`."""
    chosen, key = args.get(LOAD_FORMAT, "auto"), key_of(LOAD_FORMAT, keys)
    if chosen == STREAMED and importlib.util.find_spec(_MODULE) is None:
        raise ConfigError(f"{key}: {chosen} needs the package {_PACKAGE}, which is not installed")
    # Others are at the operator's risk, and part of the exchange digest.
    if chosen in (SAFETENSORS, STREAMED) and (reason := _why_other_files(chosen, folder)):
        raise ConfigError(f"{key}: {chosen} {reason}; use auto")


def _why_other_files(chosen: str, folder: Path) -> str:
    files = {file.name for file in folder.glob("*.safetensors")}
    if not files:
        return "reads files *.safetensors alone, and the model's folder has none"
    if beside := sorted(name for name in files if name.startswith("consolidated")):
        return f"may read other files than auto, which takes {beside[0][:80]}"
    index = folder / _INDEX
    if chosen != STREAMED or not index.is_file():
        return ""
    # vLLM reads the index too, but not for this format.
    try:
        listed = set(json.loads(index.read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{index}: no index of weights") from None
    return f"reads all files, also {min(files - listed)[:80]}, which {_INDEX} leaves out" if files - listed else ""
