"""Requests and tokens of tenants, counted at decode workers, where all gateways meet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_TENANTS: Final = 10_000  # that a meter keeps; idle ones go first


@dataclass(slots=True)
class TenantCounts:
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0


_NONE: Final = TenantCounts()


class TenantMeter:
    def __init__(self) -> None:
        self._counts: dict[str, TenantCounts] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, tenant: str) -> TenantCounts:
        return self._counts.get(tenant, _NONE)

    def totals(self) -> dict[str, tuple[int, int]]:
        """Return requests and tokens by tenant."""
        return {
            tenant: (counts.num_requests, counts.num_prompt_tokens + counts.num_generated_tokens)
            for tenant, counts in self._counts.items()
        }

    def tenants(self) -> list[str]:
        return list(self._counts)

    def begin(self, tenant: str, num_prompt_tokens: int, *, is_resumed: bool) -> None:
        """A request that is resumed was counted where it began."""
        counts = self._counts.get(tenant)
        if counts is None:
            self._make_room()
            counts = self._counts[tenant] = TenantCounts()
        counts.num_running += 1
        if not is_resumed:
            counts.num_requests += 1
            counts.num_prompt_tokens += num_prompt_tokens

    def end(self, tenant: str, num_generated_tokens: int) -> None:
        counts = self._counts[tenant]
        counts.num_running -= 1
        counts.num_generated_tokens += num_generated_tokens

    def _make_room(self) -> None:
        if len(self._counts) >= MAX_TENANTS:
            idle = next((tenant for tenant, counts in self._counts.items() if not counts.num_running), None)
            if idle is not None:
                del self._counts[idle]
