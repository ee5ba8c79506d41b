"""The result file of `kvferry quality`, and whether it shows what a configuration asks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import ConfigError
from kvferry.quality.verdict import LengthResult, Verdict

FORMAT = 1
ENGINE_MODE = "engine"  # measured on the engine that serves, with its own pages
MAX_FILE_BYTES = 1 << 20


class IntervalRecord(msgspec.Struct, frozen=True):
    """95 %; null where a value is not finite."""

    mean: float | None
    low: float | None
    high: float | None


class LengthRecord(msgspec.Struct, frozen=True):
    num_tokens: int
    num_samples: int
    num_positions: int
    divergence_nats: IntervalRecord
    baseline_perplexity: float | None
    perplexity_ratio: IntervalRecord
    agreement: float
    verdict: str


class QualityReport(msgspec.Struct, frozen=True):
    format: int
    verdict: str
    budget: float
    mode: str
    kv_cache_dtype: str
    compute_dtype: str
    baseline_kv_cache_dtype: str
    baseline_compute_dtype: str
    model: str  # name of its folder
    weights: str  # digest of its files
    revision: str
    vllm: str
    device: str  # cpu or gpu
    hardware: str
    lengths: tuple[LengthRecord, ...]
    exact_match: IntervalRecord
    num_tasks: int
    dataset: str
    dataset_digest: str
    warnings: tuple[str, ...]
    date: str
    took_s: float


def record(interval: tuple[float, float, float]) -> IntervalRecord:
    return IntervalRecord(*map(finite, interval))


def length_record(result: LengthResult) -> LengthRecord:
    return LengthRecord(
        num_tokens=result.num_tokens,
        num_samples=result.num_samples,
        num_positions=result.num_positions,
        divergence_nats=record(result.divergence),
        baseline_perplexity=finite(result.baseline_perplexity),
        perplexity_ratio=record(result.perplexity_ratio),
        agreement=result.agreement,
        verdict=result.verdict,
    )


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_report(report: QualityReport, file: Path) -> None:
    """Raises ConfigError if the file cannot be written."""
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def read_report(file: Path) -> QualityReport:
    """Raises ConfigError for an unusable file."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"engine.quality_report: {file} has more than {MAX_FILE_BYTES} bytes")
        report = msgspec.json.decode(content, type=QualityReport)
    except OSError as error:
        raise ConfigError(f"engine.quality_report: {file} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"engine.quality_report: {file} is no report of `kvferry quality`: {error}") from None
    if report.format != FORMAT:
        raise ConfigError(f"engine.quality_report: {file} has format {report.format}; {FORMAT} is expected")
    return report


def why_not_shown(report: QualityReport, **asked: str) -> str:
    """Return why the report does not show what is asked, by field; empty if it does."""
    reasons = []
    if report.mode != ENGINE_MODE:
        reasons.append(f"its mode is {report.mode!r}; {ENGINE_MODE!r} is needed")
    for name, value in asked.items():
        measured: Any = getattr(report, name)
        if measured != value:
            reasons.append(f"it is of {name} {measured!r}; {value!r} is configured")
    if report.verdict != Verdict.PASS:
        reasons.append(f"its verdict is {str(report.verdict)!r} against a budget of {report.budget:.2%}")
    if not report.lengths or any(length.verdict != Verdict.PASS for length in report.lengths):
        reasons.append("not every context length in it passes")
    return "; ".join(reasons)
