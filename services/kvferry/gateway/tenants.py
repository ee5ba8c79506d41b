"""The tenant of a request."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from kvferry.engine.base import TierHints
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace


@dataclass(frozen=True, slots=True)
class Tenant:
    """An authenticated identity. Raises ValueError for an invalid name.

    `cache_salt` enters every page hash and route key, so tenants never share pages; `tier` names the folders on
    volumes. Clients can set neither, only part their own pages with `salt_of`.
    """

    name: str
    cache_salt: str = field(init=False)
    tier: TierHints | None = field(init=False)

    def __post_init__(self) -> None:
        namespace = Namespace(self.name)
        is_default = namespace == DEFAULT_NAMESPACE
        object.__setattr__(self, "cache_salt", "" if is_default else str(namespace))
        object.__setattr__(self, "tier", None if is_default else TierHints(namespace))

    def salt_of(self, client_salt: str) -> str:
        """Return the salt of requests for which a client names one."""
        # Each part with its length: no client's salt makes another tenant's. Names of tenants have dots, not slashes.
        parts = (self.cache_salt.encode(), client_salt.encode("utf-8", "surrogatepass"))
        digest = hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).hexdigest()
        return f"client/{digest}"


# The tenant of every request where no authentication is configured.
DEFAULT_TENANT = Tenant(DEFAULT_NAMESPACE.tenant)
