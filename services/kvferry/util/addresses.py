"""Hosts, ports and loopback addresses."""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import ConfigError

# A host in a configuration, which is the same on every node: the address by which other nodes reach this one.
AUTO = "auto"
# Says it where it cannot be found out, such as the address of a pod.
NODE_ADDRESS_VARIABLE = "KVFERRY_NODE_ADDRESS"
# The machine's name, where the host's name is that of a container: on shared volumes, chunks belong to machines.
NODE_NAME_VARIABLE = "KVFERRY_NODE_NAME"
# Tells a pod from the next one that has its address.
POD_UID_VARIABLE = "KVFERRY_POD_UID"

SOCKET_PATH_BYTES = 107  # sun_path of Linux, without its zero

# Above those of Ray's workers (10002 to 19999), below Kubernetes' node ports (30000 to 32767).
_FIRST_PORT = 20_000
_NUM_PORTS = 10_000
_PORT_TRIES = 100
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_MAX_ADDRESS_CHARS = 100  # an IPv6 address has 45 at most, and the name of a zone


def is_url(text: str) -> bool:
    return _SCHEME.match(text) is not None


def is_loopback(host: str) -> bool:
    """True for `localhost` and loopback addresses; other names are not trusted."""
    if host == "localhost":
        return True
    return len(host) <= _MAX_ADDRESS_CHARS and _is_loopback_address(host)


@functools.lru_cache(maxsize=64)  # parsing takes as long as choosing a worker
def _is_loopback_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def ucx_environment(host: str, pci: Path = Path("/sys/bus/pci/devices")) -> dict[str, str]:
    # UCX reads these variables in a process whose pages are in the machine's memory, and which listens at `host`. NIXL
    # refuses a list without `cuda_copy` on a machine with a GPU; UCX logs a warning for `cuda_copy` on one without.
    cuda = ",cuda_copy" if any(map(_is_nvidia_gpu, pci.glob("*"))) else ""
    return {"UCX_TLS": f"tcp,cma,sm,self{cuda}", **({"UCX_NET_DEVICES": "lo"} if is_loopback(host) else {})}


def _is_nvidia_gpu(device: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        vendor, kind = (int((device / name).read_text(), 16) for name in ("vendor", "class"))
        return vendor == 0x10DE and kind >> 8 in (0x0300, 0x0302)  # as NIXL's hw_info.cpp
    return False


def require_loopback(key: str, host: str, *, insecure: bool, remedy: str = "") -> None:
    """Refuse an unauthenticated listener off loopback.

    Raises ConfigError naming `key` unless `host` is loopback or `insecure` is set. `remedy` names other ways out.
    """
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{key}: {host!r} can be reached from other machines and this listener has no authentication; "
            f"use a loopback address such as 127.0.0.1, {f'{remedy}, ' if remedy else ''}"
            f"or say insecure: [{key}] (--insecure: for all listeners)",
            param=key,
        )


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now, outside the system's ephemeral range if possible.

    Raises OSError.
    """
    # Connections and listeners of port 0 do not take such a port before the caller binds it.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    first_ephemeral = _first_ephemeral_port()
    for tries_left in reversed(range(_PORT_TRIES)):
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS) if tries_left else 0
        if port and port >= first_ephemeral:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                # Some ports are reserved to others than their user.
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise OSError(error.errno, f"no TCP port of {host} is free: {error.strerror}") from error
                continue
            return int(probe.getsockname()[1])
    raise OSError(errno.EADDRINUSE, f"no TCP port of {host} is free")


def _first_ephemeral_port() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def join_host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def describe_client(address: tuple[str, int] | None) -> str:
    """Return `host:port` for the log; a client over a Unix socket has no address."""
    return join_host_port(*address) if address else "(unknown)"


def node_address(environ: Mapping[str, str] = os.environ) -> str:
    """Return the address by which others reach this machine: $KVFERRY_NODE_ADDRESS, else that of the default route.

    Without a default route it is loopback.
    """
    if said := environ.get(NODE_ADDRESS_VARIABLE):
        return said
    for family, elsewhere in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        # Nothing is sent: connecting a datagram socket only chooses the way, and with it our own address.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def reachable_host(host: str) -> str:
    """Return the host that others dial for a listener on `host`: this machine's address if `host` means all
    interfaces.
    """
    return node_address() if host in ("0.0.0.0", "::") else host
