"""Sums of usage records by day, tenant and outcome."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvferry.gateway.usage.usage_log import UNFINISHED, UsageRecord, read

COLUMNS: Final = ("day", "tenant", "outcome", "requests", "prompt_tokens", "cached_tokens", "generated_tokens")


@dataclass(slots=True)
class Total:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, record: UsageRecord) -> None:
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.generated_tokens += record.generated_tokens


@dataclass(slots=True)
class Totals:
    by_day: dict[tuple[str, str, str], Total] = field(default_factory=dict)  # day, tenant and outcome
    num_bad: int = 0  # lines that are no records
    first_bad: str = ""

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yield values in the order of `COLUMNS`."""
        for key, total in sorted(self.by_day.items()):
            yield (*key, total.requests, total.prompt_tokens, total.cached_tokens, total.generated_tokens)

    def add(self, record: UsageRecord) -> None:
        day = datetime.fromtimestamp(record.unix_s, UTC).date().isoformat()
        self.by_day.setdefault((day, record.tenant, record.outcome), Total()).add(record)


def totals(folder: Path, begin_s: float | None, end_s: float | None, tenant: str | None) -> Totals:
    """Sum the records from `begin_s` until before `end_s`. Raises OSError for an unreadable folder or file."""
    # A request without a last record, which goes on or whose gateway was killed, counts once, as it was seen last.
    sums = Totals()

    def note_bad(file: Path, number: int) -> None:
        sums.num_bad += 1
        sums.first_bad = sums.first_bad or f"{file}:{number}"

    def is_asked(record: UsageRecord) -> bool:
        is_early = begin_s is not None and record.unix_s < begin_s
        is_late = end_s is not None and record.unix_s >= end_s
        return not (is_early or is_late) and (tenant is None or record.tenant == tenant)

    unfinished: dict[tuple[str, str], UsageRecord] = {}
    for record in read(folder, note_bad):
        request = record.tenant, record.request_id
        if record.outcome == UNFINISHED:
            unfinished[request] = record
            continue
        unfinished.pop(request, None)
        if is_asked(record):
            sums.add(record)
    for record in filter(is_asked, unfinished.values()):
        sums.add(record)
    return sums
