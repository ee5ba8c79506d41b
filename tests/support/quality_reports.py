"""Reports of `kvferry quality` that pass, changed where a test says."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.engine.quality_report import QualityReport


def passing_report(**changes: Any) -> QualityReport:
    """A report of 1,024 tokens of context and 64 scored ones, of weights `w` at revision `r` on a CPU."""
    interval = {"mean": 0.001, "low": 0.0, "high": 0.002}
    length = {
        "num_tokens": 1024, "num_samples": 4, "num_positions": 256, "divergence_nats": interval,
        "baseline_perplexity": 9.0, "perplexity_ratio": {"mean": 1.0, "low": 0.999, "high": 1.001}, "agreement": 1.0,
        "verdict": "pass",
    }  # fmt: skip
    values = {
        "format": 1, "verdict": "pass", "budget": 0.005, "mode": "engine", "kv_cache_dtype": "bfloat16",
        "compute_dtype": "bfloat16", "baseline_kv_cache_dtype": "float32", "baseline_compute_dtype": "float32",
        "model": "m", "weights": "w", "revision": "r", "vllm": "0.32.0", "device": "cpu", "hardware": "a CPU",
        "lengths": [length], "exact_match": interval, "num_tasks": 4, "dataset": "shipped", "dataset_digest": "d",
        "warnings": [], "date": "2026-11-25", "took_s": 1.0,
    }  # fmt: skip
    return msgspec.convert(values | changes, QualityReport)
