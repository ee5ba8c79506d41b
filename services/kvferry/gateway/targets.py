"""Where Prometheus finds everybody: its HTTP service discovery, answered from membership."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.errors import UnavailableError
from kvferry.membership.base import Member, Membership


class Targets:
    """Every member that answers scrapes. While the registry is away: those of the last time it was there."""

    def __init__(self, membership: Membership, *, scheme: str) -> None:
        """`scheme` is what all metrics listeners speak, http or https."""
        self._membership = membership
        self._scheme = scheme
        self._members: tuple[Member, ...] = ()

    async def read(self) -> bytes:
        """JSON as `http_sd_configs` takes it. Raises UnavailableError where nobody is known yet."""
        try:
            self._members = await self._membership.members()
        except UnavailableError:
            if not self._members:
                raise
        members = sorted(self._members, key=lambda member: (member.kind, member.member_id))
        return msgspec.json.encode([self._target(member) for member in members if member.metrics_address])

    def _target(self, member: Member) -> dict[str, Any]:
        labels = {
            "__scheme__": self._scheme,
            "member": member.member_id,
            "kind": member.kind.value,
            "node": member.node,
        }
        return {"targets": [member.metrics_address], "labels": labels}
