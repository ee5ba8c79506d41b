"""An HTTP listener with only GET /metrics, apart from the process's service.

It needs no API key, can have its own network policy, and answers while a gateway refuses requests.
"""

from __future__ import annotations

import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn

from kvferry.config import MetricsConfig
from kvferry.errors import ConfigError
from kvferry.observability.exposition import CONTENT_TYPE
from kvferry.util.addresses import join_host_port, reachable_host
from kvferry.util.http_server import HttpServer

log = logging.getLogger(__name__)

Render = Callable[[], Awaitable[bytes]]

# Ports tried from a fixed port on: several processes of one kind may share a machine.
NUM_PORTS = 16
_MAX_CONNECTIONS = 64


class MetricsListener:
    """`render` runs in the event loop."""

    def __init__(self, config: MetricsConfig, first_port: int, render: Render) -> None:
        self._config = config
        self._first_port = first_port
        self._render = render
        self._server: HttpServer | None = None
        self._port = 0

    def __repr__(self) -> str:
        return f"<MetricsListener {self.address or 'not started'}>"

    @property
    def address(self) -> str:
        """Empty before `start`."""
        return join_host_port(reachable_host(self._config.host), self._port) if self._port else ""

    async def start(self) -> None:
        """Raises ConfigError where it cannot listen, or for unusable TLS files."""
        listener = self._listen()
        self._port = listener.getsockname()[1]
        tls = self._config.tls
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MAX_CONNECTIONS,
            timeout_keep_alive=75,
            ssl_certfile=tls.cert_file,
            ssl_keyfile=tls.key_file,
            ssl_ca_certs=str(tls.ca_file) if tls.ca_file is not None else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls.enabled else ssl.CERT_NONE,
        )
        server = HttpServer(config)
        try:
            server.load()
        except (OSError, ssl.SSLError) as error:
            listener.close()
            raise ConfigError(f"metrics.tls: {error}") from None
        await server.start([listener])
        self._server = server

    async def stop(self) -> None:
        """Idempotent."""
        if self._server is not None:
            await self._server.stop()

    def _listen(self) -> socket.socket:
        host, first = self._config.host, self._first_port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        ports = range(first, first + NUM_PORTS) if first else (0,)
        for port in ports:
            try:
                return socket.create_server((host, port), family=family)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"metrics.host: cannot listen on {host!r}: {error.strerror}") from None
        raise ConfigError(f"metrics: {host}: ports {first} to {first + NUM_PORTS - 1} are all in use")

    async def _answer(self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
        if scope["path"] != "/metrics":
            status, body = 404, b"only /metrics is here\n"
        elif scope["method"] != "GET":
            status, body = 405, b"use GET\n"
        else:
            status, body = 200, await self._render()
        kind = CONTENT_TYPE if status == 200 else "text/plain; charset=utf-8"
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"GET"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
