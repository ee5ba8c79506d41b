"""Ends connections of gRPC clients."""

# gRPC for Python has no way to reset a call of a server. A call that ends while its client does not read keeps what it
# wrote in memory, and a status behind it, as long as the connection lives.

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
import stat
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote

_FDS = "/proc/self/fd"


class ConnectionEnder:
    """Ends connections to `local_port`. Requests during a pass over the descriptors share the next pass."""

    # A pass takes milliseconds with thousands of connections, and clients decide how many calls it is asked for: one
    # at a time, in a thread of its own.

    def __init__(self, local_port: int) -> None:
        self._local_port = local_port
        self._wanted: set[str] = set()
        self._passing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="end-connections")
        self.num_passes = 0

    def __repr__(self) -> str:
        return f"<ConnectionEnder of port {self._local_port}, {len(self._wanted)} wait>"

    def end(self, peer: str) -> None:
        """`peer` is named as in `ServicerContext.peer`. All its calls end soon."""
        self._wanted.add(peer)
        if self._passing is None:
            self._passing = asyncio.create_task(self._pass())

    async def _pass(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._wanted:
                wanted, self._wanted = self._wanted, set()
                self.num_passes += 1
                await loop.run_in_executor(self._thread, end_connections, wanted, self._local_port)
        finally:
            self._passing = None

    async def close(self) -> None:
        if self._passing is not None:
            await self._passing
        self._thread.shutdown()


def end_connections(peers: Collection[str], local_port: int) -> int:
    """Shut down connections between `local_port` and `peers`. Return their number."""
    wanted = {address for peer in peers if (address := _address(peer)) is not None}
    num_ended = 0
    for fd in _descriptors():
        if not wanted:
            break
        try:
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            connection = socket.socket(fileno=fd)
        except OSError:
            continue  # closed meanwhile
        try:
            if (
                connection.type == socket.SOCK_STREAM
                and connection.family in (socket.AF_INET, socket.AF_INET6)
                and connection.getsockname()[1] == local_port
                and (peer := _normal(*connection.getpeername()[:2])) in wanted
            ):
                connection.shutdown(socket.SHUT_RDWR)
                wanted.discard(peer)
                num_ended += 1
        except OSError:
            continue  # it listens, or was closed meanwhile
        finally:
            connection.detach()
    return num_ended


def _descriptors() -> Iterable[int]:
    try:
        return [int(name) for name in os.listdir(_FDS)]  # noqa: PTH208
    except OSError:  # none is left for the folder
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return range(limit)


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
