"""What carries a link to a worker: payloads in order, both ways. There are two kinds; which one is decided here."""

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
    """An open way to one worker. Both implementations pass tests/contract/test_link_contract.py."""

    @property
    def ended(self) -> asyncio.Future[str]:
        """Done when the connection broke or was ended, with why: a phrase that follows 'worker X was lost:'."""
        ...

    def send(self, payload: bytes) -> None:
        """A serialized Downward message. Never waits; nothing happens after the end."""
        ...

    async def close(self) -> None:
        """End it. Nothing is received after this was called; may be repeated."""
        ...


async def dial(member: Member, worker: WorkerConfig, receive: Receive) -> Connection:
    """Frames where the worker offers them and `worker.link` allows them, else gRPC.

    Raises OSError when nobody answers or the TLS handshake fails, ConfigError for TLS files that cannot be used. May
    also return a connection that ends soon after.
    """
    if worker.link == "frames" and member.link_address:
        return await FrameConnection.dial(member.link_address, worker.tls, receive)
    return GrpcConnection(member.address, worker.tls, receive)
