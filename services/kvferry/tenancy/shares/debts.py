"""Corrections by work on other workers."""

from __future__ import annotations

import math
from collections.abc import Mapping

_MIN_QUANTA = 8.0  # of the dead band
_CAP = 2.0  # dead bands; without room above the band nothing is corrected
_FACTOR = 4.0  # 2 is too weak, 8 is little better
_DECAY_S = 30.0
_DECAY_EVERY_S = 1.0
_FORGOTTEN_MS = 1.0


def dead_band_ms(quantum_ms: float, num_workers: int, weight: float, num_tenants: int, all_weights: float) -> float:
    """Return the debt up to which nothing is corrected; a quantum is a turn and a slice."""
    # A worker that serves in turns is off a tenant's share by the quantum x sum over the others of (w + w_j) / W at
    # most. Debts of that from each other worker are chance, and all workers may take their turns at the same time.
    of_worker_ms = quantum_ms * (1.0 + max(0, num_tenants - 2) * weight / all_weights)
    return max(_MIN_QUANTA * quantum_ms, (num_workers - 1) * of_worker_ms)


class _Debt:
    __slots__ = ("band_ms", "ms")

    def __init__(self) -> None:
        self.ms = 0.0
        self.band_ms = 0.0


class Debts:
    """Work beyond their shares that tenants got elsewhere while they waited here."""

    __slots__ = ("_changed_s", "_debts", "quantum_ms")

    def __init__(self, quantum_ms: float) -> None:
        self.quantum_ms = quantum_ms
        self._debts: dict[str, _Debt] = {}
        self._changed_s: float | None = None

    def __repr__(self) -> str:
        return f"<Debts of {len(self._debts)} tenants, up to {self.largest_of_band:.2f} dead bands>"

    @property
    def largest_of_band(self) -> float:
        return max((abs(debt.ms) / debt.band_ms for debt in self._debts.values()), default=0.0)

    def factor(self, tenant: str) -> float:
        """Return the factor of a charge; above 1 after too much elsewhere."""
        debt = self._debts.get(tenant)
        if debt is None or abs(debt.ms) <= debt.band_ms:
            return 1.0
        return _FACTOR if debt.ms > 0 else 1.0 / _FACTOR

    def decay(self, now_s: float) -> None:
        if self._debts and self._changed_s is not None and now_s - self._changed_s >= _DECAY_EVERY_S:
            self._decay(now_s)

    def settle(self, tenant: str, ms: float) -> None:
        """Note ms charged beyond the served ones."""
        debt = self._debts.get(tenant)
        if debt is not None:
            debt.ms -= ms

    def elsewhere(
        self, got_ms: Mapping[str, float], weights: Mapping[str, float], num_workers: int, now_s: float
    ) -> None:
        """Compare what the tenants of `weights`, which wait here, got elsewhere."""
        self._decay(now_s)
        if not weights:
            return
        all_weights = sum(weights.values())
        mean_ms = sum(got_ms.get(tenant, 0.0) for tenant in weights) / all_weights
        for tenant, weight in weights.items():
            change_ms = got_ms.get(tenant, 0.0) - weight * mean_ms
            debt = self._debts.get(tenant)
            if debt is None:
                if abs(change_ms) < _FORGOTTEN_MS:
                    continue
                debt = self._debts[tenant] = _Debt()
            debt.band_ms = dead_band_ms(self.quantum_ms, num_workers, weight, len(weights), all_weights)
            cap_ms = _CAP * debt.band_ms
            debt.ms = min(max(debt.ms + change_ms, -cap_ms), cap_ms)

    def _decay(self, now_s: float) -> None:
        elapsed_s = 0.0 if self._changed_s is None else max(0.0, now_s - self._changed_s)
        self._changed_s = now_s
        kept = math.exp(-elapsed_s / _DECAY_S)
        for debt in self._debts.values():
            debt.ms *= kept
        self._debts = {tenant: debt for tenant, debt in self._debts.items() if abs(debt.ms) >= _FORGOTTEN_MS}
