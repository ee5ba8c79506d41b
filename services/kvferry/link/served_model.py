"""Served model, as links compare it: a worker computes with it, a gateway renders its tokens."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import xxhash

from kvferry.config import ClusterConfig
from kvferry.engine.vllm.start.weights import has_weights, weights_named, weights_revision
from kvferry.link.identity import Identity, ServedModel
from kvferry.model_folder import TOKENIZER_FILES, cache_folder


def identity(config: ClusterConfig, model_folder: str) -> Identity:
    """Return what this process says of itself. Raises ConfigError for a folder that cannot be read.

    Reads files, without `model.revision` all weights the first time: call it off the event loop.
    """
    return Identity(config.name, _served_model(config, model_folder))


def _served_model(config: ClusterConfig, model_folder: str) -> ServedModel:
    revision = config.model.revision
    if config.engine.kind == "sim":
        return ServedModel(config.served_name, "sim", revision)
    folder = Path(model_folder)
    if not revision and has_weights(folder):
        revision = weights_revision(folder, cache_folder() / "weights")
    elif not revision and folder.is_dir():
        revision = weights_named(folder)  # of a gateway
    values = config.model.hf_overrides
    overrides = json.dumps(values.model_dump(), sort_keys=True, separators=(",", ":")) if values.context else ""
    return ServedModel(config.served_name, _tokenizer_digest(folder), revision, overrides)


def _tokenizer_digest(folder: Path) -> str:
    """Return 32 hexadecimal digits, and a kind that is Mistral's; empty without files."""
    digest = xxhash.xxh3_128()
    names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for name in names:
        digest.update(f"{name}\0{xxhash.xxh3_128_hexdigest((folder / name).read_bytes())}\0".encode())
    kind = " of mistral_common" if has_mistral_tokenizer(folder) else ""
    return digest.hexdigest() + kind if names or kind else ""


def has_mistral_tokenizer(folder: Path) -> bool:
    """Return whether vLLM takes Mistral's own tokenizer."""
    # It depends on names of weights, which gateways may lack.
    names = [file.name for file in folder.rglob("*") if file.is_file()]
    has_weights, has_tokenizer = (
        any(fnmatch.fnmatch(name, pattern) for name in names for pattern in patterns)
        for patterns in (("consolidated*.safetensors",), ("tekken.json", "tokenizer.model.v*"))
    )
    return has_weights and has_tokenizer
