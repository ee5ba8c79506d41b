"""The names of adapters that a tenant may ask for."""

from __future__ import annotations

from collections.abc import Collection

from kvferry.config import DEFAULT_POOL, AdaptersConfig
from kvferry.errors import ModelNotFound
from kvferry.gateway.identity.tenants import Tenant
from kvferry.gateway.models import Models

_MAX_NAMED = 16  # names in an error


class AdapterNames:
    # An adapter is asked for as NAME, of the default model, or as MODEL:NAME. One that another tenant owns is refused
    # in the same words as one that does not exist.

    def __init__(self, models: Models, config: AdaptersConfig) -> None:
        self._models = models
        self._name_to_tenants = {name: frozenset(adapter.tenants) for name, adapter in config.served.items()}

    def of(self, tenant: Tenant) -> dict[str, str]:
        """Return adapters, each with the model that it changes. Raises as `Models.route`."""
        # A tenant whose pool is an entry of `models` has no adapter: they are of the default model.
        if not self._name_to_tenants or self._models.labels_of(tenant).get(self._default) != DEFAULT_POOL:
            return {}
        return dict.fromkeys((name for name in self._name_to_tenants if self._is_open(name, tenant)), self._default)

    def resolve(self, name: str, tenant: Tenant, *, param: str | None = "model") -> tuple[str, str]:
        """Return the model's name and the adapter's, or an empty one. Raises as `Models.route`."""
        if not self._name_to_tenants:
            return name, ""
        models = self._models.labels_of(tenant)
        if name in models:
            return name, ""
        model, colon, adapter = name.rpartition(":")
        if not colon:
            model = self._default
        if models.get(model) == DEFAULT_POOL and self._is_open(adapter, tenant):
            return model, adapter
        raise ModelNotFound(
            f"the model {name!r} does not exist; served here: {_named([*models, *self.of(tenant)])}", param=param
        )

    @property
    def _default(self) -> str:
        return self._models.default

    def _is_open(self, name: str, tenant: Tenant) -> bool:
        tenants = self._name_to_tenants.get(name)
        return tenants is not None and (not tenants or tenant.name in tenants)


def _named(names: Collection[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(list(names)[:_MAX_NAMED]) + more
