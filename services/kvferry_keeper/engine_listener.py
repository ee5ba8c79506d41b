"""The Unix socket that engines connect to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable

from kvferry.keeper.unix_socket import PeerProcess

log = logging.getLogger(__name__)


class EngineListener:
    """Accepts processes of the same user, or of root."""

    def __init__(self, path: str, on_connection: Callable[[socket.socket, PeerProcess], None]) -> None:
        self._path = path
        self._on_connection = on_connection
        self._socket: socket.socket | None = None

    def start(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108
            listener.bind(self._path)
            os.chmod(self._path, 0o600)  # noqa: PTH101
            listener.listen(128)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Idempotent."""
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # noqa: PTH108

    def _accept(self) -> None:
        assert self._socket is not None
        try:
            connection, _ = self._socket.accept()
        except OSError:
            return  # the engine is gone already, or too many files are open
        try:
            peer = PeerProcess(connection)
        except OSError as error:
            log.warning("refused an engine whose process cannot be watched: %s", error)
            connection.close()
            return
        if peer.uid not in (0, os.geteuid()):
            log.warning("refused %r: it belongs to another user", peer)
            connection.close()
            peer.close()
            return
        self._on_connection(connection, peer)
