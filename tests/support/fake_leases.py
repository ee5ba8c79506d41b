"""A Lease without an API server, and a clock that stands still."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from kvferry.errors import UnavailableError
from kvferry_operator.plan import Document


@dataclass
class FakeLeases:
    """An API server with one Lease, which refuses a write to another state than the present one."""

    lease: Document | None = None
    num_writes: int = 0
    is_away: bool = False

    def read_lease(self) -> Document | None:
        return copy.deepcopy(self.lease)

    def write_lease(self, lease: Document) -> Document:
        if self.is_away:
            raise UnavailableError("the API server does not answer")
        there = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if lease.get("metadata", {}).get("resourceVersion") != there:
            raise UnavailableError("another rollout of this release has just acquired its Lease")
        self.num_writes += 1
        self.lease = copy.deepcopy(lease) | {"metadata": {"resourceVersion": str(self.num_writes)}}
        return copy.deepcopy(self.lease)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s
