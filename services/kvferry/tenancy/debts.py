"""Corrections by the work that tenants got from other workers."""

from __future__ import annotations

import math
from collections.abc import Mapping

# Tenants that are served in turns are ahead and behind at every moment; debts of that size are chance.
_DEAD_TURNS = 10.0
_NUM_WORKERS = 8
_CAP = 2.0  # dead bands; without room above the band nothing is corrected
_FACTOR = 4.0  # 2 is too weak, 8 is little better
_DECAY_S = 30.0
_FORGOTTEN_MS = 1.0


def dead_band_ms(turn_ms: float, num_workers: int) -> float:
    return _DEAD_TURNS * turn_ms * max(_NUM_WORKERS, num_workers) / _NUM_WORKERS


class Debts:
    """Work in ms that tenants got beyond their shares on the other workers while they waited on this one."""

    __slots__ = ("_changed_s", "_debts_ms", "dead_band_ms", "turn_ms")

    def __init__(self, turn_ms: float) -> None:
        self.turn_ms = turn_ms
        self.dead_band_ms = dead_band_ms(turn_ms, 1)
        self._debts_ms: dict[str, float] = {}
        self._changed_s: float | None = None

    def __repr__(self) -> str:
        return f"<Debts of {len(self._debts_ms)} tenants, up to {self.largest_ms:.0f} of {self.dead_band_ms:.0f} ms>"

    @property
    def largest_ms(self) -> float:
        return max(map(abs, self._debts_ms.values()), default=0.0)

    def factor(self, tenant: str) -> float:
        """Return the factor of what the tenant is charged: above 1 for one that got too much elsewhere."""
        debt_ms = self._debts_ms.get(tenant, 0.0)
        if debt_ms > self.dead_band_ms:
            return _FACTOR
        return 1.0 / _FACTOR if debt_ms < -self.dead_band_ms else 1.0

    def settle(self, tenant: str, ms: float) -> None:
        if tenant in self._debts_ms:
            self._debts_ms[tenant] -= ms

    def elsewhere(
        self, got_ms: Mapping[str, float], weights: Mapping[str, float], num_workers: int, now_s: float
    ) -> None:
        """Compare shares among `weights`, the tenants waiting here, of what they got from the other workers."""
        self.dead_band_ms = dead_band_ms(self.turn_ms, num_workers)
        self._decay(now_s)
        if not weights:
            return
        mean_ms = sum(got_ms.get(tenant, 0.0) for tenant in weights) / sum(weights.values())
        cap_ms = _CAP * self.dead_band_ms
        for tenant, weight in weights.items():
            debt_ms = self._debts_ms.get(tenant, 0.0) + got_ms.get(tenant, 0.0) - weight * mean_ms
            if abs(debt_ms) >= _FORGOTTEN_MS:
                self._debts_ms[tenant] = min(max(debt_ms, -cap_ms), cap_ms)

    def _decay(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._changed_s is None else max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        kept = math.exp(-elapsed_s / _DECAY_S)
        self._debts_ms = {
            tenant: debt_ms * kept for tenant, debt_ms in self._debts_ms.items() if abs(debt_ms * kept) >= _FORGOTTEN_MS
        }
