"""For whom a request is computed: an identity that keeps its pages apart from everybody else's."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.engine.base import TierHints
from kvferry.tenancy.namespace import DEFAULT_NAMESPACE, Namespace


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever a key or a client certificate names. Raises ValueError for a name that is none (store/layout.py).

    `cache_salt` goes into every page key and route key, so that engines, residency and routers never find one tenant's
    pages for another; `tier` names the folders of its pages on volumes. Neither is ever taken from a client.
    """

    name: str
    cache_salt: str = field(init=False)
    tier: TierHints | None = field(init=False)

    def __post_init__(self) -> None:
        namespace = Namespace(self.name)
        is_default = namespace == DEFAULT_NAMESPACE
        object.__setattr__(self, "cache_salt", "" if is_default else str(namespace))
        object.__setattr__(self, "tier", None if is_default else TierHints(namespace))


# Of every request where nobody has to say who they are.
DEFAULT_TENANT = Tenant(DEFAULT_NAMESPACE.tenant)
