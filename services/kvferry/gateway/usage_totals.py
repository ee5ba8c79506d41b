"""Sums of usage records by day and tenant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvferry.gateway.usage_log import UsageRecord, read
from kvferry.telemetry import TENANT_OUTCOMES

COLUMNS: Final = ("day", "tenant", *TENANT_OUTCOMES, "prompt_tokens", "cached_tokens", "generated_tokens")


@dataclass(slots=True)
class Total:
    requests: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TENANT_OUTCOMES, 0))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def add(self, record: UsageRecord) -> None:
        self.requests[record.outcome] = self.requests.get(record.outcome, 0) + 1
        self.prompt_tokens += record.prompt_tokens
        self.cached_tokens += record.cached_tokens
        self.generated_tokens += record.generated_tokens


@dataclass(slots=True)
class Totals:
    by_day: dict[tuple[str, str], Total] = field(default_factory=dict)  # day and tenant
    num_bad: int = 0  # lines that are no records
    first_bad: str = ""

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yield values in the order of `COLUMNS`."""
        for (day, tenant), total in sorted(self.by_day.items()):
            counts = (total.requests[outcome] for outcome in TENANT_OUTCOMES)
            yield (day, tenant, *counts, total.prompt_tokens, total.cached_tokens, total.generated_tokens)


def totals(folder: Path, begin_s: float | None, end_s: float | None, tenant: str | None) -> Totals:
    """Sum the records from `begin_s` until before `end_s`. Raises OSError for an unreadable folder or file."""
    sums = Totals()

    def note_bad(file: Path, number: int) -> None:
        sums.num_bad += 1
        sums.first_bad = sums.first_bad or f"{file}:{number}"

    for record in read(folder, note_bad):
        if (begin_s is not None and record.unix_s < begin_s) or (end_s is not None and record.unix_s >= end_s):
            continue
        if tenant is None or record.tenant == tenant:
            day = datetime.fromtimestamp(record.unix_s, UTC).date().isoformat()
            sums.by_day.setdefault((day, record.tenant), Total()).add(record)
    return sums
