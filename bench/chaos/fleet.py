"""Processes of a cluster: started, killed by their id, and started again as a supervisor would."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.chaos.load import BURSTY, BURSTY_SHARE, TENANTS, UNDISTURBED_AT_ONCE
from bench.chaos.receipts import Receipt
from bench.etcd_server import EtcdServer
from bench.results import BenchFailed
from kvferry.config import MembershipConfig
from kvferry.membership.base import WORKER_KINDS, MemberKind
from kvferry.membership.etcd import EtcdMembership
from kvferry.util.addresses import free_port
from kvferry_tenants.admin import TenantAdmin

START_TIMEOUT_S = 300.0  # for what hangs
LOG_CHARS = 2000  # of a process that has ended
NUM_DECODE = 3  # decode workers, unless a fleet is told otherwise
SIM_ENGINE = {"kind": "sim", "block_size": 16}


@dataclass
class Process:
    """One member; after a kill, another process takes its place under a new member id."""

    kind: MemberKind
    port: int
    config: dict[str, Any]
    log: Path
    member_id: str = ""
    process: asyncio.subprocess.Process | None = None
    ready: bool = False
    num_kills: int = 0
    kills_s: list[float] = field(default_factory=list)  # when it was killed, since the epoch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bench.chaos.member",
                self.kind.value,
                str(self.port),
                json.dumps(self.config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        assert self.process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = await self.process.stdout.readline()
        if not line:
            raise BenchFailed(f"a {self.kind.value} process did not start: {self.log.read_text()[-LOG_CHARS:].strip()}")
        self.member_id = json.loads(line)["member_id"]

    async def kill(self) -> None:
        """As a crash: at once, and nothing is told."""
        assert self.process is not None
        self.ready = False
        self.num_kills += 1
        self.kills_s.append(time.time())
        self.process.kill()
        await self.process.wait()

    def hang(self) -> None:
        """Alive for the kernel, dead for everybody else."""
        assert self.process is not None
        self.num_kills += 1
        self.process.send_signal(signal.SIGSTOP)

    async def stop(self) -> None:
        """Leave orderly."""
        assert self.process is not None
        self.ready = False
        self.process.terminate()
        await self.process.wait()

    async def fail_at_its_end(self) -> None:
        """Wait until the process ends, for whatever reason. Raises BenchFailed with the end of its log."""
        assert self.process is not None
        status = await self.process.wait()
        raise BenchFailed(f"{self.member_id} ended with {status}: {self.log.read_text()[-LOG_CHARS:].strip()}")

    async def end(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


@dataclass
class Fleet:
    """Every process of one cluster, and its etcd."""

    etcd: EtcdServer
    processes: list[Process] = field(default_factory=list)
    models: dict[str, Any] = field(
        default_factory=dict
    )  # by member id, of gateways by URL; also of processes that left
    departed: list[Process] = field(default_factory=list)  # that are not to come back
    tenant_to_headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of requests with operator keys
    receipts: list[Receipt] = field(default_factory=list)  # of every client of this cluster

    def headers_of(self, tenant: str) -> Mapping[str, str]:
        """Empty in a cluster without tenants."""
        return self.tenant_to_headers.get(tenant, {})

    @asynccontextmanager
    async def tenants(self) -> AsyncIterator[TenantAdmin]:
        async with _tenant_admin(self.etcd) as admin:
            yield admin

    def is_foreign(self, url: str, worker: str) -> bool:
        """Whether the worker has another model than the gateway at `url`."""
        return bool(self.models[worker] != self.models[url])

    def of(self, kind: MemberKind) -> list[Process]:
        return [process for process in self.processes if process.kind is kind]

    def workers(self) -> list[Process]:
        return [process for process in self.processes if process.kind in WORKER_KINDS]

    def urls(self) -> list[str]:
        """Gateways that take requests, as a load balancer knows them."""
        return [process.url for process in self.of(MemberKind.GATEWAY) if process.ready]

    async def start(self) -> None:
        await asyncio.gather(*(process.start() for process in self.processes))
        await self.complete()

    async def complete(self, within_s: float = START_TIMEOUT_S) -> None:
        """Wait until every gateway has a link to every worker of its model, and to no other."""
        deadline_s = time.monotonic() + within_s
        headers = next(iter(self.tenant_to_headers.values()), {})
        async with httpx.AsyncClient(timeout=5, headers=headers) as http:
            for process in self.of(MemberKind.GATEWAY):
                members: set[str] = set()
                while members != (wanted := self._workers_of(process)):
                    if time.monotonic() > deadline_s:
                        raise BenchFailed(f"{process.url} has links to {members}, not to {wanted}, for {within_s:g} s")
                    with contextlib.suppress(httpx.TransportError):
                        answer = await http.get(f"{process.url}/readyz")
                        # One that does not know its tenants yet refuses their keys.
                        members = set(answer.json().get("members", ()))
                    await asyncio.sleep(0.02)
                process.ready = True
        for process in self.processes:
            name = process.url if process.kind is MemberKind.GATEWAY else process.member_id
            self.models[name] = process.config["model"]

    def _workers_of(self, gateway: Process) -> set[str]:
        return {each.member_id for each in self.workers() if each.config["model"] == gateway.config["model"]}

    async def stop_gateways(self) -> None:
        """Let them leave, so that all their usage records are written."""
        await asyncio.gather(*(process.stop() for process in self.of(MemberKind.GATEWAY)))

    async def replace(self, process: Process) -> None:
        """Start the member again, as a supervisor does."""
        await process.start()
        await self.complete()

    def add(self, like: Process, **sections: Any) -> Process:
        """Add a process with sections of the configuration of its own; the caller starts it."""
        port = free_port("127.0.0.1") if like.kind is MemberKind.GATEWAY else 0
        log = like.log.with_name(f"{like.kind.value}-added-{len(self.processes)}.log")
        process = Process(like.kind, port, {**like.config, **sections}, log)
        self.processes.append(process)
        return process


def billed(folder: Path, num_streams: int) -> dict[str, Any]:
    """Return values of a fleet with the tenants of `bench.chaos.load`, and folders for what `bench.chaos.bills` reads.

    The steady tenant's part of `num_streams` fills the slots of NUM_DECODE workers, so that bursts preempt. Raises
    OSError for a folder that has these already.
    """
    work_folder(folder).mkdir(parents=True)
    num_steady = num_streams - int(num_streams * BURSTY_SHARE)
    return {
        "tenants": TENANTS,
        "work": str(work_folder(folder)),
        "gateway": {
            "tenants_in_etcd": True,
            "usage_dir": str(usage_folder(folder)),
            "max_queued_requests": num_streams,
        },
        # The prompts that are asked undisturbed are of one tenant, which gets no more than half of the places.
        "worker": {"max_requests": max(num_streams, UNDISTURBED_AT_ONCE)},
        "engine": {**SIM_ENGINE, "max_num_seqs": math.ceil(num_steady / NUM_DECODE)},
    }


def usage_folder(folder: Path) -> Path:
    """Usage records of all gateways of a billed fleet."""
    return folder / "usage"


def work_folder(folder: Path) -> Path:
    """Records of work of all workers of a billed fleet."""
    return folder / "work"


@asynccontextmanager
async def _tenant_admin(etcd: EtcdServer) -> AsyncIterator[TenantAdmin]:
    membership = EtcdMembership(MembershipConfig(endpoints=[etcd.endpoint]))
    try:
        yield TenantAdmin(membership)
    finally:
        await membership.close()


async def _make_tenants(etcd: EtcdServer, names: Sequence[str]) -> dict[str, dict[str, str]]:
    tenant_to_headers = {}
    async with _tenant_admin(etcd) as admin:
        for name in names:
            await admin.create(name)
            # Operators see which workers answered.
            key = await admin.add_key(name, "chaos", operator=True)
            if name == BURSTY:
                await admin.set_contract(name, class_name="premium")
            tenant_to_headers[name] = {"authorization": f"Bearer {key}"}
    return tenant_to_headers


@asynccontextmanager
async def fleet(
    folder: Path,
    *,
    prefill: int = 2,
    decode: int = NUM_DECODE,
    gateways: int = 2,
    tenants: Sequence[str] = (),
    overrides: Callable[[MemberKind, int], dict[str, Any]] = lambda kind, i: {},
    **values: Any,
) -> AsyncIterator[Fleet]:
    """A running cluster of sim engines.

    `tenants` are made before gateways start; `values` have to turn `tenants_in_etcd` on then.

    `values` are sections of its configuration, and options of `bench.chaos.member`; `overrides` gives those of one
    member, by kind and number.
    """
    (folder / "etcd").mkdir(parents=True)
    with EtcdServer(folder / "etcd") as etcd:
        config = {
            "model": {"path": "sim-model", "revision": "r1"},
            "engine": SIM_ENGINE,
            "membership": {"endpoints": [etcd.endpoint], "lease_ttl_s": 5},
            "prefill": {"replicas": prefill},
            "decode": {"replicas": decode},
            "sim": {"step_ms": 10.0, "prefill_tokens_per_s": 2_000.0, "num_pages": 1024},
            **values,
        }
        counts = ((MemberKind.PREFILL, prefill), (MemberKind.DECODE, decode), (MemberKind.GATEWAY, gateways))
        running = Fleet(etcd, tenant_to_headers=await _make_tenants(etcd, tenants))
        for kind, count in counts:
            for i in range(count):
                port = free_port("127.0.0.1") if kind is MemberKind.GATEWAY else 0
                running.processes.append(
                    Process(kind, port, {**config, **overrides(kind, i)}, folder / f"{kind.value}-{i}.log")
                )
        try:
            await running.start()
            yield running
        finally:
            await asyncio.gather(*(process.end() for process in running.processes))
