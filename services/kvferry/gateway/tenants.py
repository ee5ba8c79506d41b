"""The tenant of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine.base import TierHints
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace


@dataclass(frozen=True, slots=True)
class Tenant:
    """Identity from a key or a client certificate. Raises ValueError for an invalid name.

    `cache_salt` is part of every page hash and route key, so tenants never find each other's pages; `tier` names the
    tenant's folders on volumes. Neither ever comes from a client.
    """

    name: str
    cache_salt: str = field(init=False)
    tier: TierHints | None = field(init=False)

    def __post_init__(self) -> None:
        namespace = Namespace(self.name)
        is_default = namespace == DEFAULT_NAMESPACE
        object.__setattr__(self, "cache_salt", "" if is_default else str(namespace))
        object.__setattr__(self, "tier", None if is_default else TierHints(namespace))


# The tenant of every request where no authentication is configured.
DEFAULT_TENANT = Tenant(DEFAULT_NAMESPACE.tenant)
