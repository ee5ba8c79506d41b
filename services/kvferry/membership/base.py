"""Members under leases: who serves, where, and what they are.

Membership says where to dial. It does not say who is alive this second: while the registry is away, for
minutes or hours, the last known members stay, and liveness comes from the streams between processes. Nobody
dies with the registry.
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


# Those that have an engine and take requests.
WORKER_KINDS = (MemberKind.PREFILL, MemberKind.DECODE)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process that registered. JSON in the registry; fields that a newer version added are ignored."""

    kind: MemberKind
    member_id: MemberId  # fresh on every start of the process
    address: str  # host:port of its gRPC server (workers, keepers) or HTTP listener (gateways)
    link_address: str = ""  # host:port where a worker takes links as frames; empty: only over gRPC
    model: str
    version: str
    node: str = ""
    pid: int = 0
    engine_id: str = ""
    block_size: int = 0  # tokens per KV page
    page_bytes: int = 0
    kv_cache_dtype: str = ""
    volumes: tuple[str, ...] = ()  # ids of those that a keeper serves
    socket_path: str = ""  # where a keeper takes the engines of its node
    metrics_address: str = ""  # host:port where it answers Prometheus
    started_unix_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All members there are: replaces what the watcher knew."""

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """A member registered, or registered again with other facts."""

    member: Member


@dataclass(frozen=True, slots=True)
class Left:
    """A member deregistered or its lease ran out."""

    kind: MemberKind
    member_id: MemberId


MemberChange = Snapshot | Joined | Left


class Registration(Protocol):
    """A member kept alive under a lease until `revoke`.

    Renewal happens by itself, and so does registering again when the lease ran out or somebody deleted the
    record.
    """

    @property
    def fenced(self) -> bool:
        """True while the lease may have run out unseen: no renewal succeeded for its whole time to live.

        Also True once the lease is known to be gone, until registered again, and after `revoke`.
        """
        ...

    async def update(self, member: Member) -> None:
        """Replace the record. While the registry is away this returns; the newest one is written later.

        Nothing happens after `revoke`, or once the membership is closed. Raises ValueError when kind or id
        differ.
        """
        ...

    async def revoke(self) -> None:
        """Deregister now; may be repeated. Raises nothing: when the registry is away, the lease ends it."""
        ...


class Membership(Protocol):
    """Both implementations pass tests/contract/test_membership_contract.py."""

    async def register(self, member: Member) -> Registration:
        """Register under a lease. Raises UnavailableError when the registry cannot be reached now.

        If it raises or is cancelled, a record that was written nevertheless ends with its lease.
        """
        ...

    async def members(self) -> tuple[Member, ...]:
        """A linearised read. Raises UnavailableError when the registry cannot be reached."""
        ...

    def watch(self) -> AsyncIterator[MemberChange]:
        """First a Snapshot, then changes in order, from the first `__anext__` on; `close` ends it.

        It never ends by itself and raises nothing: it is silent during outages, and lists again (a new
        Snapshot) whenever changes may have been missed. After an outage that Snapshot is the truth of the
        moment: members that live, but have not registered again yet, are not in it, and Joined follows. A
        record that cannot be read is logged and passed over. Cancelling a wait for the next change loses
        nothing.
        """
        ...

    async def close(self) -> None:
        """End watches and renewals without revoking; may be repeated."""
        ...
