"""Members of a local cluster in etcd, with each worker's reported load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grpc
import msgspec

from kvferry.config import ClusterConfig, TlsConfig, entry_of, is_of_entry, parse
from kvferry.errors import LocalError, UnavailableError
from kvferry.membership.base import WORKER_KINDS, Member, MemberKind, Record
from kvferry.membership.etcd import EtcdMembership
from kvferry.mutual_tls import channel_to
from kvferry.proof.certificates import FOLDER
from kvferry.wire.v1 import worker_pb2, worker_pb2_grpc
from kvferry_local.cluster import is_alive
from kvferry_local.proofs import ProofStatus, proofs_of
from kvferry_local.run_folder import ClusterRecord, RunFolder

_DESCRIBE_TIMEOUT_S = 3.0
_MEMBERS_TIMEOUT_S = 10.0


class NotRunning(LocalError):
    pass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Report of one worker; field names are those of `kvferry status --json`."""

    num_running: int
    num_waiting: int
    num_pages_used: int
    num_pages: int
    num_generated_tokens: int  # since its engine started, as is all that follows
    ferried_bytes: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    prompt_tokens_ferried: int
    draining: bool


@dataclass(frozen=True, slots=True)
class MemberStatus:
    member_id: str
    kind: str
    address: str
    model: str
    version: str
    pid: int
    uptime_s: float
    load: WorkerLoad | None
    fault: str = ""
    metrics_address: str = ""  # host:port where it answers Prometheus
    volume_faults: tuple[str, ...] = ()  # path and cause of each volume that a keeper cannot use
    without_tiers: str = ""  # why a worker's engine has none, though tiers are configured
    pool: str = ""  # of a worker, or its entry of `models`; empty: the default one
    is_of_entry: bool = False


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    name: str
    url: str
    alive: bool
    uptime_s: float
    engine: str
    model: str
    etcd_endpoints: tuple[str, ...]
    members: tuple[MemberStatus, ...]
    fault: str = ""  # why members could not be listed
    proofs: tuple[ProofStatus, ...] = ()  # of ways between engines of these members

    @property
    def warnings(self) -> list[str]:
        unused = [f"{each.member_id} does not use {fault}" for each in self.members for fault in each.volume_faults]
        return unused + [
            f"{each.member_id} has no tiers: {each.without_tiers}" for each in self.members if each.without_tiers
        ]

    def as_json(self) -> dict[str, Any]:
        values: dict[str, Any] = msgspec.to_builtins(self)
        return values


def status(folder: RunFolder) -> ClusterStatus:
    record = folder.record()
    if record is None:
        raise NotRunning("no cluster runs here; start one with `kvferry up` (or `make up`)")
    if not is_alive(record):
        raise NotRunning(f"the cluster {record.name!r} has died; `kvferry down` (or `make down`) removes what it left")
    return asyncio.run(_look(record, parse(record.config)))


async def _look(record: ClusterRecord, config: ClusterConfig) -> ClusterStatus:
    members: tuple[Member, ...] = ()
    records: Mapping[str, Record] = {}
    fault = ""
    membership = EtcdMembership(config.membership)
    try:
        async with asyncio.timeout(_MEMBERS_TIMEOUT_S):
            members = await membership.members()
            records = await membership.records.read_all(FOLDER)
    except UnavailableError as error:
        fault = error.message
    except TimeoutError:
        fault = f"etcd did not answer within {_MEMBERS_TIMEOUT_S:.0f} s"
    finally:
        await membership.close()
    order = list(MemberKind)
    ordered = sorted(members, key=lambda member: (order.index(member.kind), member.started_unix_s, member.member_id))
    now_unix_s = time.time()
    return ClusterStatus(
        name=record.name,
        url=record.url,
        alive=True,
        uptime_s=now_unix_s - record.started_unix_s,
        engine=config.engine.kind,
        model=", ".join(config.names),
        etcd_endpoints=record.etcd_endpoints,
        members=tuple(await asyncio.gather(*(_look_at(member, config.worker.tls, now_unix_s) for member in ordered))),
        fault=fault,
        proofs=proofs_of(config, members, records),
    )


async def _look_at(member: Member, tls: TlsConfig, now_unix_s: float) -> MemberStatus:
    load, fault = None, ""
    if member.kind in WORKER_KINDS:
        try:
            load = await _describe(member.address, tls)
        except grpc.RpcError as error:
            code = error.code() if isinstance(error, grpc.Call) else None
            fault = code.name.lower().replace("_", " ") if code is not None else str(error)
    return MemberStatus(
        member_id=member.member_id,
        kind=member.kind.value,
        address=member.address,
        model=member.model,
        version=member.version,
        pid=member.pid,
        uptime_s=max(0.0, now_unix_s - member.started_unix_s) if member.started_unix_s else 0.0,
        load=load,
        fault=fault,
        metrics_address=member.metrics_address,
        volume_faults=member.volume_faults,
        without_tiers=member.without_tiers,
        pool=entry_of(member.pool),
        is_of_entry=is_of_entry(member.pool),
    )


async def _describe(address: str, tls: TlsConfig) -> WorkerLoad:
    async with channel_to(address, tls, (("grpc.enable_http_proxy", 0),)) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[no-untyped-call]
        welcome = await stub.Describe(worker_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
    load = welcome.load
    return WorkerLoad(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_pages_used=load.num_pages_used,
        num_pages=load.num_pages,
        num_generated_tokens=load.num_generated_tokens,
        ferried_bytes=load.transferred_bytes,
        prompt_tokens_computed=load.prompt_tokens.local_compute,
        prompt_tokens_cached=load.prompt_tokens.local_cache_hit,
        prompt_tokens_ferried=load.cached_tokens.kv_transfer,
        draining=load.draining,
    )
