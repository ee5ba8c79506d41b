"""The result file of `kvferry quality`, and whether it shows what a configuration asks."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Annotated, Any

import msgspec

from kvferry.errors import ConfigError
from kvferry.quality.statistics import Interval
from kvferry.quality.verdict import LengthResult, Verdict, judge

FORMAT = 1
ENGINE_MODE = "engine"  # measured on the engine that serves, with its own pages
MAX_FILE_BYTES = 1 << 20
MAX_BUDGET = 1.0
_MODE = 0o644
UNQUANTIZED = ("float32", "bfloat16", "float16")

_Count = Annotated[int, msgspec.Meta(ge=1)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


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
    """Write the whole file, or leave it as it was. Raises ConfigError if it cannot be written."""
    content = msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
    try:
        if file.exists() and not file.is_file():
            file.write_bytes(content)
            return
        target = file.resolve()
        with _beside(target) as written:
            written.write(content)
            written.flush()
            os.fsync(written.fileno())
            os.fchmod(written.fileno(), stat.S_IMODE(target.stat().st_mode) if target.exists() else _MODE)
            Path(written.name).replace(target)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


def check_writable(file: Path) -> None:
    """Raises ConfigError if a report cannot be written there: what it says takes hours to measure."""
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not file.exists() or file.is_file():
            with _beside(file.resolve()):
                pass
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[IO[bytes]]:
    with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", dir=target.parent, delete=False) as written:
        try:
            yield written
        finally:
            Path(written.name).unlink(missing_ok=True)


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


def why_not_shown(report: QualityReport, *, max_model_len: int, **asked: str) -> str:
    """Return why the report does not show what is asked, by field; empty if it does.

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
