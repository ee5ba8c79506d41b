"""The names of one model that a tenant may ask for, and the pool of workers behind each."""

from __future__ import annotations

from kvferry.config import ClusterConfig
from kvferry.errors import NoDecodeWorker
from kvferry.gateway.identity.tenants import Tenant


class ModelNames:
    # A tenant whose contract names a pool is served there and nowhere else, under every name that it may use. Others
    # are served by the default pool, and by those that are not dedicated under their own names.

    def __init__(self, config: ClusterConfig) -> None:
        self.default = config.served_name
        self._name_of = {name: pool.served_name for name, pool in config.pools.items()}
        self._open_name_to_pool = {
            pool.served_name: name for name, pool in config.pools.items() if pool.served_name and not pool.dedicated
        }

    def of(self, tenant: Tenant) -> dict[str, str]:
        """Return pools by name. Raises NoDecodeWorker for a tenant of a pool that is not configured here."""
        if not tenant.pool:
            return {self.default: "", **self._open_name_to_pool}
        if tenant.pool not in self._name_of:
            raise NoDecodeWorker(
                f"this tenant is served by pool {tenant.pool[:64]!r}, and this gateway's configuration has no such pool"
            )
        names = filter(None, (self.default, self._name_of[tenant.pool]))
        return dict.fromkeys(names, tenant.pool)
