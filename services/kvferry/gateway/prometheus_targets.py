"""Prometheus HTTP service discovery, answered from membership."""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.errors import UnavailableError
from kvferry.membership.base import Member, Membership


class Targets:
    """Members that expose metrics. While etcd is away, the last known ones."""

    def __init__(self, membership: Membership, *, scheme: str) -> None:
        self._membership = membership
        self._scheme = scheme
        self._members: tuple[Member, ...] = ()

    async def read(self) -> bytes:
        """Return JSON for `http_sd_configs`. Raises UnavailableError while no member was ever known."""
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
