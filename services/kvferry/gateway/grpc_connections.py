"""Ends connections of gRPC clients."""

# gRPC for Python has no way to reset a call of a server. A call that ends while its client does not read keeps what it
# wrote in memory, and a status behind it, as long as the connection lives.

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from urllib.parse import unquote

_FDS = Path("/proc/self/fd")


def end_connection(peer: str, local_port: int) -> bool:
    """Shut down the connection between `local_port` and a peer, named as in `ServicerContext.peer`, if there is one."""
    wanted = _address(peer)
    if wanted is None:
        return False
    for entry in list(_FDS.iterdir()):
        try:
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if (
                    connection.type == socket.SOCK_STREAM
                    and connection.family in (socket.AF_INET, socket.AF_INET6)
                    and connection.getsockname()[1] == local_port
                    and _normal(*connection.getpeername()[:2]) == wanted
                ):
                    connection.shutdown(socket.SHUT_RDWR)
                    return True
        except OSError:
            continue  # closed meanwhile, or listening
    return False


def _address(peer: str) -> tuple[str, int] | None:
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return _normal(host.strip("[]"), int(port))


def _normal(host: str, port: int) -> tuple[str, int]:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host, port
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), port
