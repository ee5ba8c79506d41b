"""Writes the report of `kvferry quality`; kvferry.engine.quality_report reads it."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from kvferry.engine.quality_report import IntervalRecord, LengthRecord, QualityReport
from kvferry.errors import ConfigError
from kvferry_plan.quality.verdict import LengthResult

_MODE = 0o644


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
