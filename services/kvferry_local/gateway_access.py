"""TLS and keys of commands that call the gateway of a local cluster."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping

from kvferry.config import GatewayConfig
from kvferry.util.addresses import join_host_port

# A key that `kvferry up` and `kvferry explain` show; it is never written anywhere.
KEY_VARIABLE = "KVFERRY_API_KEY"


def url_of(gateway: GatewayConfig, address: str = "") -> str:
    """Return the URL of the gateway, or the one at `address` (host:port)."""
    scheme = "https" if gateway.tls.enabled else "http"
    return f"{scheme}://{address or join_host_port(gateway.host, gateway.http_port)}"


def context_of(gateway: GatewayConfig) -> ssl.SSLContext | bool:
    """Return httpx's `verify`; the configured certificate itself is trusted, whatever its names."""
    if gateway.tls.cert_file is None:
        return True
    context = ssl.create_default_context(cafile=gateway.tls.cert_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def headers_of(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    key = environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}


def why_not_to_ask(gateway: GatewayConfig, environ: Mapping[str, str] = os.environ) -> str:
    """Return why a command cannot call the gateway; empty if it can."""
    if gateway.tls.client_ca_file is not None:
        return "the gateway asks for a client certificate, and this command has none"
    if gateway.wants_bearer and not environ.get(KEY_VARIABLE):
        return f"the gateway asks for a key; {KEY_VARIABLE} can give this command one"
    return ""
