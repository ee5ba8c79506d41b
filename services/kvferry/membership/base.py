"""Members of a cluster, registered under leases: their addresses and facts.

During an outage of the registry the last known members stay. Liveness comes from the streams between processes.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import NewType, Protocol

import msgspec

MemberId = NewType("MemberId", str)


class MemberKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"
    KEEPER = "keeper"


# Members with an engine, which take requests.
WORKER_KINDS = (MemberKind.PREFILL, MemberKind.DECODE)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One registered process. JSON in the registry; unknown fields are ignored."""

    kind: MemberKind
    member_id: MemberId  # fresh on every start of the process
    address: str  # host:port of its gRPC server (workers, keepers) or HTTP listener (gateways)
    link_address: str = ""  # host:port where a worker accepts links as frames; empty: only over gRPC
    model: str
    version: str
    node: str = ""
    pid: int = 0
    engine_id: str = ""
    block_size: int = 0  # tokens per KV page
    page_bytes: int = 0
    kv_cache_dtype: str = ""
    volumes: tuple[str, ...] = ()  # ids of the volumes that a keeper serves
    socket_path: str = ""  # where engines connect to the keeper of their node
    metrics_address: str = ""  # host:port where it answers Prometheus
    started_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All members. Replaces what the watcher knew."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """A member registered, or changed its record."""

    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    kind: MemberKind
    member_id: MemberId


MemberChange = Snapshot | Joined | Left


class Registration(Protocol):
    """Keeps a member registered until `revoke`: renews its lease, and registers again after the lease or the record is
    lost.
    """

    @property
    def fenced(self) -> bool:
        """True if no renewal has succeeded for the lease's time to live, so that the lease may have expired.

        Also True from the known loss of a lease until registered again, and after `revoke`.
        """
        ...

    async def update(self, member: Member) -> None:
        """Replace the record. During an outage this returns, and the newest record is written later.

        Does nothing after `revoke` or `close`. Raises ValueError for another kind or id.
        """
        ...

    async def revoke(self) -> None:
        """Deregister. Idempotent, never raises: during an outage the lease expires."""
        ...


class Membership(Protocol):
    """Implementations pass tests/contract/test_membership_contract.py."""

    async def register(self, member: Member) -> Registration:
        """Register under a lease. Raises UnavailableError during an outage.

        If this raises or is cancelled, a record that was written nevertheless expires with its lease.
        """
        ...

    async def members(self) -> tuple[Member, ...]:
        """A linearised read. Raises UnavailableError during an outage."""
        ...

    def watch(self) -> AsyncIterator[MemberChange]:
        """Yield a Snapshot, then changes in order, until `close`. Starts at the first `__anext__`; never raises.

        It yields nothing during outages, and a new Snapshot whenever changes may have been missed. After an outage,
        living members that have not registered again yet are missing from it, and Joined follows. An unreadable record
        is logged and skipped. A cancelled wait loses no change.
        """
        ...

    async def close(self) -> None:
        """End watches and renewals without revoking. Idempotent."""
        ...
