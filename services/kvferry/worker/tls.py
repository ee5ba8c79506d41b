"""Mutual TLS between gateways and workers: each shows a certificate of one authority and accepts no other."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from kvferry.config import TlsConfig
from kvferry.errors import ConfigError


def server_context(tls: TlsConfig) -> ssl.SSLContext:
    """For a worker's listener. Raises ConfigError naming the file that cannot be used."""
    return _context(tls, ssl.Purpose.CLIENT_AUTH)


def client_context(tls: TlsConfig) -> ssl.SSLContext:
    """For a gateway that dials. Raises ConfigError naming the file that cannot be used."""
    return _context(tls, ssl.Purpose.SERVER_AUTH)


def server_credentials(tls: TlsConfig) -> grpc.ServerCredentials:
    """For a worker's gRPC server. Raises ConfigError naming the file that cannot be used."""
    cert_file, key_file, ca_file = _files(tls)
    return grpc.ssl_server_credentials(
        [(_read("key_file", key_file), _read("cert_file", cert_file))],
        root_certificates=_read("ca_file", ca_file),
        require_client_auth=True,
    )


def channel_credentials(tls: TlsConfig) -> grpc.ChannelCredentials:
    """For a gateway's gRPC channel. Raises ConfigError naming the file that cannot be used."""
    cert_file, key_file, ca_file = _files(tls)
    return grpc.ssl_channel_credentials(
        _read("ca_file", ca_file), _read("key_file", key_file), _read("cert_file", cert_file)
    )


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
    # Both ends are ours.
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
