"""Pages of tenants in an engine's memory and CPU tier, in the statistics that its core sends to the worker."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

from kvferry.engine.vllm.plugins.core_fields import HOLDINGS_TAG
from kvferry.tenancy.pages.usage_report import Holding, Row, TenantCounts, UsageReport

PERIOD_S: Final = 1.0  # while requests run


class TierOfTenants(Protocol):
    """The policy of a tier."""

    counts: TenantCounts

    def changed_holdings(self) -> Iterable[tuple[str, Holding]]: ...


class HoldingsReport:
    """Reports once a second, and when an engine has no more to do: nothing is sent while it is idle."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._tiers: list[tuple[str, TierOfTenants, UsageReport]] = []
        self._now_s = now_s
        self._sent_s = -math.inf

    def add(self, tier: str, policy: TierOfTenants, pages_per_unit: int = 1) -> None:
        self._tiers.append((tier, policy, UsageReport(policy.counts, pages_per_unit)))

    def attach_to(self, stats: Any) -> None:
        """Add what has changed to vLLM's SchedulerStats, if a report is due."""
        now_s = self._now_s()
        num_requests = stats.num_running_reqs + stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        if num_requests and now_s < self._sent_s + PERIOD_S:
            return
        self._sent_s = now_s
        changed = {
            tier: rows for tier, policy, report in self._tiers if (rows := report.rows(policy.changed_holdings()))
        }
        if changed:
            stats.ec_connector_stats = {**(stats.ec_connector_stats or {}), HOLDINGS_TAG: changed}


def detach_from(stats: Any) -> dict[str, list[Row]]:
    """Take a report out of SchedulerStats: vLLM's own loggers would look for a connector with its name."""
    if not stats.ec_connector_stats or HOLDINGS_TAG not in stats.ec_connector_stats:
        return {}
    report: dict[str, list[Row]] = stats.ec_connector_stats.pop(HOLDINGS_TAG)
    stats.ec_connector_stats = stats.ec_connector_stats or None
    return report
