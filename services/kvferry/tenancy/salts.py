"""Salts that part tenants' pages: HMAC-SHA256 of a cluster's secret, so that no client can guess one."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

from kvferry.tenancy.namespace import Namespace

MIN_SECRET_BYTES: Final = 32
_DOMAIN: Final = b"kvferry cache salt 1"


def salt(secret: bytes, namespace: Namespace, group: str = "", client_salt: str | None = None) -> str:
    """Return a salt of 64 hexadecimal digits. Raises ValueError for a secret under `MIN_SECRET_BYTES`.

    Tenant, epoch, group of the key, and what the client asks for decide it, each with its length.
    """
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"the secret of salts has {len(secret)} bytes; at least {MIN_SECRET_BYTES} are needed")
    parts = [_DOMAIN, namespace.tenant.encode(), str(namespace.epoch).encode(), group.encode()]
    if client_salt is not None:  # an empty one is another than none
        parts.append(client_salt.encode("utf-8", "surrogatepass"))
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(secret, message, hashlib.sha256).hexdigest()
