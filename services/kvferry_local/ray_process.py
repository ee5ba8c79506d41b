"""A local cluster's Ray head, started as a program without importing ray."""

from __future__ import annotations

import contextlib
import json
import math
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.config import ROLES, ClusterConfig, RoleConfig
from kvferry.util.addresses import free_port, join_host_port
from kvferry_local.child import Child, Pace, StartFailed, child_environment
from kvferry_local.processes import ProcessIdentity, belonging, wait_gone
from kvferry_local.run_folder import RunFolder

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 900.0  # for what hangs: a Ray that gives up is noticed at once
_END_TIMEOUT_S = 10.0
# A port that another process took meanwhile; and Ray's own limit of 30 s for its node, which a busy machine exceeds.
_TRANSIENT_FAULTS = (b"in use", b"timed out during startup")
_ATTEMPTS = 3
_OBJECT_STORE_BYTES = 128 << 20  # neither tokens nor pages ever lie there
_SPARE_CPUS = 4  # replicas of an update that overlap with those they replace
_CPUS_OF_LATER_MODELS = 32  # logical ones too: `kvferry up` adds models while Ray runs
_PILLARS = frozenset({"gcs_server", "raylet"})
_PROGRAMS_OF_RAY = (
    "/ray/core/src/ray/",
    "/ray/autoscaler/_private/monitor.py",
    "/ray/dashboard/",
    "/ray/_private/log_monitor.py",
    "ray.util.client.server",
    "ray::ServeController",
    "ray::RuntimeEnvAgent",
    "ray::DashboardAgent",
)


@dataclass(frozen=True, slots=True)
class Ray:
    address: str  # host:port of its control store
    pillars: tuple[ProcessIdentity, ...]  # without these Ray is dead


def ray_environment(folder: RunFolder) -> dict[str, str]:
    """Return the environment of Ray, its workers and clients."""
    return child_environment(folder) | {
        # Ray would run every worker, and so every engine, at nice 15.
        "RAY_worker_niceness": "0",
        # A driver that ends while a handle lives would start a second Ray behind our back.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        # Each Serve replica listens on all interfaces for other replicas, whatever address the node has: so everyone
        # needs the token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder.ray_token_file),
        # Ray replaces a loopback address by one that other nodes can reach, unless it takes itself for a system
        # without clusters.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def engine_environment(config: ClusterConfig) -> dict[str, str]:
    paths = [*([config.model.path] if config.serves_default else []), *(entry.model.path for entry in config.models)]
    return {"HF_HUB_OFFLINE": "1"} if all(Path(path).is_dir() for path in paths) else {}


def start_ray(folder: RunFolder, config: ClusterConfig, pace: Pace) -> Ray:
    """Start a head and wait until usable. Raises StartFailed with its log's end, or Interrupted."""
    environ = ray_environment(folder) | engine_environment(config)
    before = belonging(folder.marks())
    for attempt in range(1, _ATTEMPTS + 1):
        ports = _free_ports(4)
        child = Child("ray", _command(folder, config, ports), folder=folder, environ=environ)
        if not pace.until(child.has_ended, deadline=time.monotonic() + _START_TIMEOUT_S):
            raise StartFailed(f"Ray did not start within {_START_TIMEOUT_S:.0f} s; see {child.log}")
        if child.exit_code() == 0:
            return Ray(join_host_port(_HOST, ports[0]), _find_pillars(folder))
        log = child.log.read_bytes()
        if attempt == _ATTEMPTS or not any(fault in log for fault in _TRANSIENT_FAULTS):
            raise child.failure()
        _end_rest(folder, before)
    raise AssertionError("unreachable")


def is_of_ray(process: ProcessIdentity) -> bool:
    """Return whether the process is Ray's own and has nothing to finish: such processes wait for each other for 5 s."""
    with contextlib.suppress(psutil.Error):
        command = psutil.Process(process.pid).cmdline()
        return any(program in argument for argument in command for program in _PROGRAMS_OF_RAY)
    return False


def _end_rest(folder: RunFolder, before: tuple[ProcessIdentity, ...]) -> None:
    rest = [process for process in belonging(folder.marks()) if process not in before]
    for process in rest:
        process.send(signal.SIGKILL)
    wait_gone(rest, timeout_s=_END_TIMEOUT_S)


def _find_pillars(folder: RunFolder) -> tuple[ProcessIdentity, ...]:
    def program(process: ProcessIdentity) -> str:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(process.pid).name()
        return ""

    pillars = tuple(process for process in belonging(folder.marks()) if program(process) in _PILLARS)
    if len(pillars) != len(_PILLARS):
        raise StartFailed(f"Ray started and ended again; see {folder.ray}")
    return pillars


def _command(folder: RunFolder, config: ClusterConfig, ports: list[int]) -> list[str]:
    gcs, client, dashboard, agent = ports
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head"),
        f"--node-ip-address={_HOST}",
        f"--port={gcs}",
        f"--ray-client-server-port={client}",
        f"--dashboard-host={_HOST}",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        # 0 lets each process choose what is free; Ray's default is a fixed range from 10002 to 19999.
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--num-cpus={_num_cpus(config)}",
        *(("--num-gpus=0",) if config.engine.device == "cpu" else ()),
        f"--resources={json.dumps(_resources(config))}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={folder.ray}",
        "--include-dashboard=false",
        "--include-log-monitor=false",
        "--disable-usage-stats",
        *("--log-style=record", "--log-color=false"),
    ]


def _num_cpus(config: ClusterConfig) -> int:
    """Return enough logical CPUs to place every replica, however few the machine has."""
    num_cpus = sum(role.replicas * role.num_cpus for role in _worker_roles(config))
    num_cpus += config.gateway.replicas * config.gateway.num_cpus
    return math.ceil(num_cpus) + _SPARE_CPUS + _CPUS_OF_LATER_MODELS


def _worker_roles(config: ClusterConfig) -> list[RoleConfig]:
    of_pools = [config.role_of(role, pool) for pool in ("", *config.pools) for role in ROLES]
    return [*of_pools, *(role for entry in config.models for role in (entry.prefill, entry.decode))]


def _resources(config: ClusterConfig) -> dict[str, float]:
    total: Counter[str] = Counter()
    for role in _worker_roles(config):
        for name, amount in role.resources.items():
            total[name] += amount * role.replicas  # type: ignore[assignment]
    return dict(total)


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port(_HOST))
    return sorted(ports)
