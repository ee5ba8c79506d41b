"""Checks `engine.quality_report` before anything starts: what of it is known without an engine."""

from __future__ import annotations

from kvferry.config import ClusterConfig, EngineConfig
from kvferry.errors import ConfigError
from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry.quality.report import read_report, why_not_shown

_AUTO = "auto"


def check_quality_report(
    config: ClusterConfig, *, engine: EngineConfig | None = None, context_length: int = 0, weights: str = ""
) -> None:
    """Raises ConfigError for a report that is missing, no report, or does not show what is configured.

    `engine` is that of a role or a pool, by default that of all. `context_length` is the model's, in tokens, and
    `weights` the digest of its files; 0 and empty: not known here.
    """
    # The engine compares all of it again, and vLLM's version and types that only it knows.
    engine, model = engine or config.engine, config.model
    file = engine.quality_report
    if file is None or engine.kind != "vllm":
        return
    asked = {"device": engine.device, "revision": model.revision}
    if engine.kv_cache_dtype != _AUTO:
        asked["kv_cache_dtype"] = kv_dtype(engine.kv_cache_dtype).name
    if model.dtype != _AUTO:
        asked["compute_dtype"] = model.dtype
    elif engine.device == "cpu":
        asked["compute_dtype"] = "float32"
    if weights:
        asked["weights"] = weights
    longest = model.max_model_len or context_length
    if reason := why_not_shown(read_report(file), max_model_len=longest, **asked):
        raise ConfigError(f"engine.quality_report {file}: {reason}")
