"""Mutual TLS among gateways, workers and keepers, with one authority.

Functions raise ConfigError naming an unusable file.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from kvferry.config import TlsConfig
from kvferry.errors import ConfigError
from kvferry.util.addresses import join_host_port
from kvferry.util.grpc_options import CHANNEL_OPTIONS

log = logging.getLogger(__name__)


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """For a worker's frame listener."""
    context = _context(tls, ssl.Purpose.CLIENT_AUTH)
    context.sslobject_class = AlertingSslObject
    return context


def client_context(tls: TlsConfig) -> ssl.SSLContext:
    """For a gateway that dials."""
    return _context(tls, ssl.Purpose.SERVER_AUTH)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    cert_file, key_file, ca_file = _files(tls)
    return grpc.ssl_server_credentials(
        [(_read("key_file", key_file), _read("cert_file", cert_file))],
        root_certificates=_read("ca_file", ca_file),
        require_client_auth=True,
    )


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    cert_file, key_file, ca_file = _files(tls)
    return grpc.ssl_channel_credentials(
        _read("ca_file", ca_file), _read("key_file", key_file), _read("cert_file", cert_file)
    )


def channel_to(address: str, tls: TlsConfig, options: Sequence[tuple[str, object]] = ()) -> grpc.aio.Channel:
    if not tls.enabled:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options = (*options, ("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


async def start_server(
    service: str, handlers: dict[str, Any], host: str, tls: TlsConfig | None
) -> tuple[grpc.aio.Server, int]:
    """Serve one service on a free port of `host`; return the server and the port. Without `tls`, anybody may call."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    address = join_host_port(host, 0)
    if tls is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, server_credentials(tls))
    await server.start()
    return server, port


# Refusals that a TLS client can understand.
_BAD_CERTIFICATE = ("CERTIFICATE_VERIFY_FAILED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")


class AlertingSslObject(ssl.SSLObject):
    """Reports a refused certificate, in the TLS alert and in the log.

    Event loops close a failed connection before the alert is sent. Asking for more input makes them send it; the client
    closes, or the handshake times out.
    """

    _has_failed = False

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLSyscallError):
            raise
        except ssl.SSLError as error:
            if self._has_failed or error.reason not in _BAD_CERTIFICATE:
                raise
            self._has_failed = True
            log.info("a client was refused: %s", getattr(error, "verify_message", "") or error.reason)
            raise ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "refused") from error


def _context(tls: TlsConfig, purpose: ssl.Purpose) -> ssl.SSLContext:
    cert_file, key_file, ca_file = _files(tls)
    for name, file in (("cert_file", cert_file), ("key_file", key_file), ("ca_file", ca_file)):
        _read(name, file)
    try:
        context = ssl.create_default_context(purpose, cafile=ca_file)
        context.load_cert_chain(cert_file, key_file)
    except ssl.SSLError as error:
        raise ConfigError(f"worker.tls: {cert_file}, {key_file} and {ca_file} cannot be used: {error.reason}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    # Both ends are kvferry's.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _files(tls: TlsConfig) -> tuple[Path, Path, Path]:
    assert tls.cert_file is not None
    assert tls.key_file is not None
    assert tls.ca_file is not None
    return tls.cert_file, tls.key_file, tls.ca_file


def _read(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"worker.tls.{name}: {file}: {error.strerror}", param=f"worker.tls.{name}") from None
