"""Retries with another port if another process has the one for NIXL handshakes."""

# `VllmEngine` chooses the port before vLLM loads the model, up to a minute before the listener binds it. In vLLM 0.32
# the thread of a listener that cannot bind ends, and the engine core waits for it without limit.

from __future__ import annotations

import errno
import logging
from threading import Event
from typing import Any

from zmq.error import ZMQError

from kvferry.util.addresses import free_port

log = logging.getLogger(__name__)

MAX_TRIES = 20


def retry_taken_handshake_ports(scheduler: Any) -> None:
    """Make `set_xfer_handshake_metadata` try other ports, and raise RuntimeError if none can be bound."""
    announce, listen = scheduler.set_xfer_handshake_metadata, scheduler._nixl_handshake_listener
    failure: list[Exception] = []

    def listen_on_free_port(encoded: Any, ready: Event, stop: Event, host: str, port: int) -> None:
        for tries_left in reversed(range(MAX_TRIES)):
            try:
                listen(encoded, ready, stop, host, port)
                return
            except ZMQError as error:
                if ready.is_set():
                    raise
                if error.errno != errno.EADDRINUSE or not tries_left:
                    failure.append(error)
                    ready.set()
                    return
            log.warning("port %d for NIXL handshakes belongs to another process", port)
            try:
                # Tickets carry this attribute; the caller waits for `ready`, so that none was made yet.
                scheduler.side_channel_port = port = free_port(host)
            except OSError as error:
                failure.append(error)
                ready.set()
                return

    def announce_or_fail(metadata: Any) -> None:
        announce(metadata)
        if failure:
            raise RuntimeError(
                f"cannot listen for NIXL handshakes on {scheduler.side_channel_host} "
                f"(engine.side_channel_host): {failure[0]}"
            ) from failure[0]

    scheduler._nixl_handshake_listener = listen_on_free_port
    scheduler.set_xfer_handshake_metadata = announce_or_fail
