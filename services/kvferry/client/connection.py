"""Address, TLS and key of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    # An endpoint that vanished is noticed while a long answer is waited for.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    # A broken connection is tried again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Tls:
    """TLS settings; files are PEM.

    `ca_file` signed the endpoint's certificate (default: this machine's authorities). `cert_file` and `key_file` are
    this client's own. `server_name` is the name in the endpoint's certificate, if not the dialled one.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str = ""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")

    def credentials(self) -> grpc.ChannelCredentials:
        ca, cert, key = (
            Path(file).read_bytes() if file is not None else None
            for file in (self.ca_file, self.cert_file, self.key_file)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def options_of(tls: Tls | None) -> tuple[tuple[str, object], ...]:
    if tls is None or not tls.server_name:
        return _OPTIONS
    return (*_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))


def tls_of(tls: Tls | bool) -> Tls | None:
    if isinstance(tls, Tls):
        return tls
    return Tls() if tls else None


def metadata_of(api_key: str | None) -> Metadata:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()
