"""The names that a tenant may ask for, and the pool of workers behind each."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.config import ClusterConfig
from kvferry.engine.base import RenderedPrompt
from kvferry.errors import InvalidRequest, ModelNotFound, NoDecodeWorker
from kvferry.gateway.tenants import Tenant
from kvferry.vllm_arguments import SPECULATION, speculates

_MIN_MIN_P = 1e-5  # vLLM takes less for none


class ModelNames:
    # A tenant whose contract names a pool is served there and nowhere else, under every name that it may use. Others
    # are served by the default pool, and by those that are not dedicated under their own names.

    def __init__(self, config: ClusterConfig) -> None:
        self.default = config.served_name
        self.pools = tuple(config.pools)
        self._speculating = frozenset(
            pool for pool in ("", *config.pools) if speculates(config.engine_of("decode", pool).args)
        )
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

    def pool_of(self, name: str, tenant: Tenant, *, param: str | None = "model") -> str:
        """Raises as `of`, and ModelNotFound for a name that the tenant may not use; `param` is the request's field."""
        names = self.of(tenant)
        if name not in names:
            raise ModelNotFound(f"the model {name!r} does not exist; served here: {', '.join(names)}", param=param)
        return names[name]

    def require_supported(self, prompts: Iterable[RenderedPrompt], pool: str) -> None:
        """Raises InvalidRequest for sampling parameters that the pool's decode engines would refuse."""
        if pool not in self._speculating:
            return
        for prompt in prompts:
            for param, is_set in (
                ("min_p", prompt.sampling.min_p > _MIN_MIN_P),
                ("logit_bias", bool(prompt.sampling.logit_bias)),
            ):
                if is_set:
                    raise InvalidRequest(
                        f"{param}, of the request or of the model's generation_config.json, is not supported where "
                        f"decode workers speculate (decode.engine.args.{SPECULATION})",
                        param=param,
                    )
