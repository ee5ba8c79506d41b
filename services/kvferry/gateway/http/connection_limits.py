"""Limits on a gateway's HTTP connections, in all and of one peer."""

from __future__ import annotations

import logging
import resource
from collections import Counter

from kvferry.errors import Overloaded

log = logging.getLogger(__name__)

# A gateway accepts as many over HTTP, and as many again over gRPC; the process's limit of open files is raised for it.
MAX_CONNECTIONS = 8192
# Descriptors that a gateway needs beside its clients' connections: links, etcd, logs, listeners.
_OTHER_DESCRIPTORS = 512
MAX_LINGERING = 128  # refused connections whose clients may still read why


class ConnectionLimits:
    """`max_per_peer` counts connections of one address; 0 is no limit, as behind a load balancer."""

    def __init__(self, max_connections: int, max_per_peer: int) -> None:
        self._max_connections = max_connections
        self._max_per_peer = max_per_peer
        self._peers: Counter[str] = Counter()
        self.num_open = 0

    def __repr__(self) -> str:
        return f"<ConnectionLimits {self.num_open}/{self._max_connections} of {len(self._peers)} peers>"

    @property
    def max_with_refused(self) -> int:
        """Connections at once, with refused ones that have not ended yet."""
        return self._max_connections + MAX_LINGERING

    def open(self, peer: str) -> Overloaded | None:
        """Count a connection, to be ended with `close`; or return why it is one too many."""
        if self.num_open >= self._max_connections:
            return Overloaded(f"{self._max_connections} connections are open, the limit of this gateway")
        if self._max_per_peer and self._peers[peer] >= self._max_per_peer:
            return Overloaded(f"{self._max_per_peer} connections of this address are open, the limit of this gateway")
        self.num_open += 1
        self._peers[peer] += 1
        return None

    def close(self, peer: str) -> None:
        self.num_open -= 1
        self._peers[peer] -= 1
        if not self._peers[peer]:
            del self._peers[peer]


def raise_descriptor_limit(max_connections: int) -> int:
    """Raise this process's soft limit of descriptors as far as allowed; return the connections that fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_connections + _OTHER_DESCRIPTORS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max_connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        fits = max(1, soft - _OTHER_DESCRIPTORS)
        log.warning(
            "this process may open %d files (ulimit -n): at most %d of %d connections are accepted",
            soft, fits, max_connections,
        )  # fmt: skip
        return fits
    return max_connections
