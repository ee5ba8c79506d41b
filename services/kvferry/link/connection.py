"""The connection below a link, and the choice between its two kinds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvferry.config import WorkerConfig
from kvferry.link.frame_connection import FrameConnection
from kvferry.link.grpc_connection import GrpcConnection
from kvferry.membership.base import Member

# Called with each serialized Upward message, in the event loop, in order. Must not raise.
Receive = Callable[[bytes], None]


class Connection(Protocol):
    """Both kinds pass tests/contract/test_link_contract.py."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done at the end, with a reason that follows 'worker X was lost:'."""
        ...

    def send(self, payload: bytes) -> None:
        """Send a serialized Downward message. Never waits; does nothing after the end."""
        ...

    async def close(self) -> None:
        """Nothing is received after this call. Idempotent."""
        ...


async def dial(member: Member, worker: WorkerConfig, receive: Receive) -> Connection:
    """May return a connection that ends soon.

    Raises OSError without an answer or TLS handshake, ConfigError for unusable TLS files.
    """
    # Frames where the worker offers them and the configuration allows them.
    if worker.link == "frames" and member.link_address:
        return await FrameConnection.dial(member.link_address, worker.tls, receive)
    return GrpcConnection(member.address, worker.tls, receive)
