"""The report of `kvferry quality` that `engine.quality_report` names: its file, and whether it shows what is asked."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from kvferry.config import ClusterConfig, EngineConfig
from kvferry.errors import ConfigError
from kvferry.pages.geometry.kv_dtypes import kv_dtype

FORMAT = 1
ENGINE_MODE = "engine"  # measured on the engine that serves, with its own pages
MAX_FILE_BYTES = 1 << 20
MAX_BUDGET = 1.0
UNQUANTIZED = ("float32", "bfloat16", "float16")
_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_AUTO = "auto"


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"  # an interval has the budget in it: more samples are needed


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def judge(excess: Interval, budget: float) -> Verdict:
    """A budget of 0.005 allows log(1.005) nats."""
    limit = math.log1p(budget)
    if excess.high <= limit:
        return Verdict.PASS
    return Verdict.FAIL if excess.low > limit else Verdict.UNDECIDED


class IntervalRecord(msgspec.Struct, frozen=True):
    """95 %; null where a value is not finite."""

    mean: float | None
    low: float | None
    high: float | None


class LengthRecord(msgspec.Struct, frozen=True):
    num_tokens: _Count
    num_samples: _Count
    num_positions: _Count  # of all samples
    divergence_nats: IntervalRecord
    baseline_perplexity: float | None
    perplexity_ratio: IntervalRecord
    agreement: _Share
    verdict: str


class QualityReport(msgspec.Struct, frozen=True):
    format: int
    verdict: str
    budget: Annotated[float, msgspec.Meta(gt=0, le=MAX_BUDGET)]
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


def read_report(file: Path) -> QualityReport:
    """Raises ConfigError for an unusable file."""
    try:
        if file.exists() and not file.is_file():
            raise ConfigError(f"engine.quality_report: {file} is no regular file")
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


def why_untested(report: QualityReport, *, max_model_len: int, **asked: str) -> str:
    """Return why the report does not cover what is asked, by field; empty if it does.

    `max_model_len` is the engine's longest context, in tokens.
    """
    reasons = []
    if report.mode != ENGINE_MODE:
        reasons.append(f"its mode is {report.mode!r}; {ENGINE_MODE!r} is needed")
    for name, value in asked.items():
        measured: Any = getattr(report, name)
        if measured != value:
            reasons.append(f"it is of {name} {measured!r}; {value!r} is configured")
    if report.baseline_kv_cache_dtype not in UNQUANTIZED:
        needed = f"{', '.join(UNQUANTIZED[:-1])} or {UNQUANTIZED[-1]}"
        reasons.append(f"its baseline has pages of type {report.baseline_kv_cache_dtype!r}; {needed} is needed")
    if report.verdict != Verdict.PASS:
        reasons.append(f"its verdict is {str(report.verdict)!r} against a budget of {report.budget:.2%}")
    if not report.lengths or not all(_passes(length, report.budget) for length in report.lengths):
        reasons.append("not every context length in it passes")
    longest = max(
        (length.num_tokens + length.num_positions // length.num_samples for length in report.lengths), default=0
    )
    if longest < max_model_len:
        reasons.append(
            f"its longest context has {longest:,} tokens; the engine's has {max_model_len:,} (model.max_model_len)"
        )
    return "; ".join(reasons)


def _passes(length: LengthRecord, budget: float) -> bool:
    """Whether the verdict says so and the numbers do: files are edited, and made by other versions."""
    divergence, ratio = length.divergence_nats, length.perplexity_ratio
    if divergence.mean is None or divergence.high is None or ratio.low is None:
        return False
    shown = judge(Interval(divergence.mean, -math.inf, divergence.high), budget)
    return length.verdict == shown == Verdict.PASS and ratio.low <= 1 + budget


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
    if reason := why_untested(read_report(file), max_model_len=longest, **asked):
        raise ConfigError(f"engine.quality_report {file}: {reason}")
