"""Members of a cluster, registered under leases."""

from __future__ import annotations

import enum
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

import msgspec

from kvferry.pages.exchange import ExchangeFields

MemberId = NewType("MemberId", str)


class MemberKind(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"
    KEEPER = "keeper"


# Members with an engine, which take requests.
WORKER_KINDS = (MemberKind.PREFILL, MemberKind.DECODE)


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One registered process. Unknown JSON fields are ignored."""

    kind: MemberKind
    member_id: MemberId  # fresh on every start of the process
    address: str  # host:port of its gRPC server (workers, keepers) or HTTP listener (gateways)
    link_address: str = ""  # host:port where a worker accepts links; empty for other members
    model: str
    version: str
    node: str = ""
    pod_uid: str = ""  # of a worker's pod, on Kubernetes
    pid: int = 0
    engine_id: str = ""
    block_size: int = 0  # tokens per KV page
    page_bytes: int = 0
    kv_cache_dtype: str = ""
    device: str = ""  # that its engine computes on, with driver and number of ranks
    without_tiers: str = ""  # why its engine has none, though tiers are configured
    pool: str = ""  # of workers; empty: the default one
    pools: tuple[str, ...] | None = None  # that a gateway is configured with; None: it is of a release without pools
    exchange: ExchangeFields = ()  # what decides the meaning of its pages' bytes; empty: not known
    exchange_digest: str = ""
    volumes: tuple[str, ...] = ()  # ids of the volumes that a keeper serves
    volume_faults: tuple[str, ...] = ()  # path and cause of each volume that it cannot use
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
    """Keeps a member registered until `revoke`."""

    @property
    def fenced(self) -> bool:
        """True while the lease may have expired, and after `revoke`."""
        ...

    async def update(self, member: Member) -> None:
        """Replace the record. During an outage, return; it is written later.

        Does nothing after `revoke` or `close`. Raises ValueError for another kind or id.
        """
        ...

    async def revoke(self) -> None:
        """Deregister, or let the lease expire. Idempotent; never raises."""
        ...


class Membership(Protocol):
    """Contract: tests/contract/test_membership_contract.py."""

    async def register(self, member: Member) -> Registration:
        """Register under a lease, which ends any record written before an error. Raises UnavailableError during an
        outage.
        """
        ...

    async def members(self) -> tuple[Member, ...]:
        """A linearised read. Raises UnavailableError during an outage."""
        ...

    def watch(self) -> AsyncIterator[MemberChange]:
        """Yield a Snapshot, then changes in order, until `close`. Never raises.

        A new Snapshot follows whenever changes may be missing. After an outage it may lack members, which get a Joined
        later. A cancelled wait loses no change.
        """
        ...

    @property
    def records(self) -> RecordStore: ...

    async def close(self) -> None:
        """End watches and renewals without revoking. Idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    value: bytes
    revision: int  # of its last change


@dataclass(frozen=True, slots=True)
class Records:
    """All records of a folder, by the rest of their names. Replaces what the watcher knew."""

    by_name: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class RecordChanged:
    name: str  # inside the folder
    value: bytes | None  # None: deleted


RecordChange = Records | RecordChanged


class RecordStore(Protocol):
    """Values that outlive their writers. Names have folders: `tenants/acme`.

    Contract: tests/contract/test_record_contract.py. Calls raise UnavailableError during an outage.
    """

    async def read(self, name: str) -> Record | None: ...

    async def read_all(self, folder: str) -> Mapping[str, Record]:
        """Return the folder's records by the rest of their names."""
        ...

    async def write(self, name: str, value: bytes | None, revision: int) -> bool:
        """Write, or delete for None, if the record is still of `revision`, 0 for one that is not there.

        Return False, and write nothing, where it has changed.
        """
        ...

    def watch(self, folder: str) -> AsyncIterator[RecordChange]:
        """Yield Records, then changes in order, until the membership closes. As `Membership.watch` otherwise."""
        ...


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Doubling, random pauses, so that clients spread over time."""

    first_s: float = 0.1
    max_s: float = 5.0

    def pause_s(self, num_failures: int, rng: random.Random) -> float:
        ceiling_s: float = min(self.max_s, self.first_s * 2 ** min(num_failures - 1, 30))
        return ceiling_s * rng.uniform(0.5, 1.0)


DEFAULT_RETRY = RetryPolicy()
