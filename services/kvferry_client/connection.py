"""Address, TLS and key of an endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.util.addresses import is_loopback

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
        _require_printable("server_name", self.server_name)

    def credentials(self) -> grpc.ChannelCredentials:
        ca, cert, key = (
            Path(file).read_bytes() if file is not None else None
            for file in (self.ca_file, self.cert_file, self.key_file)
        )
        return grpc.ssl_channel_credentials(ca, key, cert)


def options_of(tls: Tls | None) -> tuple[tuple[str, object], ...]:
    if tls is None:
        # A proxy of the environment would read keys that travel in clear.
        return (*_OPTIONS, ("grpc.enable_http_proxy", 0))
    if not tls.server_name:
        return _OPTIONS
    return (*_OPTIONS, ("grpc.ssl_target_name_override", tls.server_name))


def tls_of(tls: Tls | bool) -> Tls | None:
    if isinstance(tls, Tls):
        return tls
    return Tls() if tls else None


def metadata_of(api_key: str | None, target: str, tls: Tls | None, *, key_in_clear: bool) -> Metadata:
    """Raises ValueError for a key that would leave this machine in clear, unless `key_in_clear`."""
    _require_printable("target", target)
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: expected printable ASCII characters, without a line's end")
    if tls is None and not key_in_clear and not _is_local(target):
        raise ValueError(
            f"api_key would travel in clear to {target}: use tls, or say key_in_clear=True on a network you trust"
        )
    return (("authorization", f"Bearer {api_key}"),)


def _require_printable(name: str, text: str) -> None:
    if not text.isprintable():
        raise ValueError(f"{name}: {text!r} has characters that no address has")


def _is_local(target: str) -> bool:
    """Whether a target of gRPC (`host:port`, `dns:host:port`, `ipv4:...`, `unix:...`) stays on this machine."""
    scheme, colon, rest = target.partition(":")
    if colon and scheme in ("unix", "unix-abstract"):
        return True
    if colon and scheme in ("dns", "ipv4", "ipv6"):
        target = rest.rpartition("/")[2]
    return all(is_loopback(_host_of(address)) for address in target.split(","))


def _host_of(address: str) -> str:
    if address.startswith("["):
        return address[1:].partition("]")[0]
    host, colon, _ = address.rpartition(":")
    return host if colon else address
