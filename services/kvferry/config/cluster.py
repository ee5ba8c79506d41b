"""The whole configuration, and what it means for one model or node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kvferry.arguments import vllm_arguments
from kvferry.config.engine import EngineConfig, RoleEngineConfig
from kvferry.config.gateway import GatewayConfig
from kvferry.config.membership import DEFAULT_NAME, MembershipConfig, prefix_of
from kvferry.config.model import AdaptersConfig, ModelConfig
from kvferry.config.observability import MetricsConfig, TracingConfig
from kvferry.config.section import Section
from kvferry.config.tier import TierConfig
from kvferry.config.workers import (
    MAX_POOLS,
    ROLES,
    ModelEntryConfig,
    PoolConfig,
    RoleConfig,
    WorkerConfig,
    check_new_pool_name,
)
from kvferry.util.addresses import AUTO, require_loopback

# Listeners, named by the key of their address.
Listener = Literal["gateway.host", "worker.host", "engine.side_channel_host", "tier.host", "metrics.host"]


class Keys:
    """Where settings of one model stand; with an entry of `models`, at `place`."""

    def __init__(self, entry: ModelEntryConfig | None = None, place: str = "") -> None:
        self._entry = entry
        self._place = place

    def of(self, key: str) -> str:
        """Return a key of a section, or that of the entry's own setting."""
        return f"{self._place}.{key}" if self._entry is not None and _has(self._entry, key) else key

    def of_role(self, role: str, pool: str) -> str:
        if self._entry is not None and pool == self._entry.name:
            return f"{self._place}.{role}"
        return f"pools.{pool}.{role}" if pool else role

    def of_engine(self, own: RoleEngineConfig, role: str, pool: str) -> dict[str, str]:
        names, here = own.model_dump(exclude_none=True), f"{self.of_role(role, pool)}.engine"
        return {
            name: f"{here}.{name}" if name in names else self.of(f"engine.{name}") for name in EngineConfig.model_fields
        }

    def of_arguments(self, args: Iterable[str], own: RoleEngineConfig, role: str, pool: str) -> dict[str, str]:
        here = f"{self.of_role(role, pool)}.engine.args"
        return {name: f"{here}.{name}" if name in own.args else self.of(f"engine.args.{name}") for name in args}

    def named(self, fault: str) -> str:
        # A fault that begins with a setting outside of the entry names the entry first.
        return fault if fault.startswith(self._place) else f"{self._place}: {fault}"


def _has(entry: ModelEntryConfig, key: str) -> bool:
    section, _, name = key.partition(".")
    if section == "engine":
        first, _, argument = name.partition(".")
        if first == "args" and argument:
            args = entry.engine.get("args")
            return isinstance(args, dict) and argument in args
        return not name or first.partition("[")[0] in entry.engine
    return section == "model" or (section == "tier" and name in entry.tier.model_fields_set)


class ClusterConfig(Section):
    """The whole configuration, the same on every node."""

    # Name of this cluster, in etcd and between gateways and workers, which refuse members of other clusters.
    name: str = Field(DEFAULT_NAME, pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    # Allow listeners off loopback without authentication: all of them, or those that are named.
    insecure: bool | tuple[Listener, ...] = False
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    prefill: RoleConfig = Field(default_factory=RoleConfig)
    decode: RoleConfig = Field(default_factory=RoleConfig)
    pools: dict[str, PoolConfig] = Field(default_factory=dict)  # further pools by name; the default one has no name
    # Further models. A cluster with some, whose `prefill`, `decode` and `pools` have no replicas, has no default model.
    models: tuple[ModelEntryConfig, ...] = ()
    adapters: AdaptersConfig = Field(default_factory=AdaptersConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    gateway: GatewayConfig = Field(default_factory=GatewayConfig)
    membership: MembershipConfig = Field(default_factory=MembershipConfig)
    tier: TierConfig = Field(default_factory=TierConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    tracing: TracingConfig = Field(default_factory=TracingConfig)
    sim: dict[str, Any] = Field(default_factory=dict)  # of the engines of kvferry-sim (engine.kind: sim)

    @model_validator(mode="before")
    @classmethod
    def _prefix_names_the_cluster(cls, values: Any) -> Any:
        # Two clusters under one prefix would take each other's workers.
        name = values.get("name") if isinstance(values, Mapping) else None
        membership = values.get("membership", {}) if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name == DEFAULT_NAME or not isinstance(membership, Mapping):
            return values
        return {**values, "membership": {"prefix": prefix_of(name), **membership}}

    @field_validator("pools")
    @classmethod
    def _pools_have_names(cls, pools: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        if len(pools) > MAX_POOLS:
            raise ValueError(f"{len(pools)} pools; {MAX_POOLS} is the limit")
        for name in pools:
            check_new_pool_name(name)
        return pools

    @property
    def serves_default(self) -> bool:
        roles = (getattr(section, role) for section in (self, *self.pools.values()) for role in ROLES)
        return not self.models or any(role.replicas for role in roles)

    @property
    def names(self) -> list[str]:
        """Served names, the default model's first; aliases and names of pools are further ones."""
        default = [self.served_name] if self.serves_default else []
        return [*default, *(entry.served_model.served_name for entry in self.models)]

    def further_names(self) -> dict[str, str]:
        """Return names that clients may ask for beside the default model's, by key; empty ones are of pools alone."""
        names = {f"pools.{name}.served_name": pool.served_name for name, pool in self.pools.items()}
        names |= {f"model.aliases[{place}]": alias for place, alias in enumerate(self.model.aliases)}
        for place, entry in enumerate(self.models):
            names[f"models[{place}].model.served_name"] = entry.served_model.served_name
            names |= {f"models[{place}].model.aliases[{i}]": alias for i, alias in enumerate(entry.model.aliases)}
        return names

    def entry(self, name: str) -> ModelEntryConfig:
        """Raises KeyError."""
        return {entry.name: entry for entry in self.models}[name]

    def of_model(self, name: str = "") -> ClusterConfig:
        """Return the configuration of one model's workers, an entry's in the pool of its name; empty: the default's.

        It stays as it is when other models change.
        """
        no_workers = RoleConfig(replicas=0)
        if name:
            entry = self.entry(name)
            tier = self.tier.model_copy(update=entry.tier.model_dump(exclude_none=True))
            own = {name: PoolConfig(prefill=entry.prefill, decode=entry.decode)}
            update: dict[str, Any] = {
                "model": entry.served_model,
                "engine": self._engine_of_entry(entry),
                "tier": tier if tier.enabled else tier.model_copy(update={"volumes": ()}),
                "prefill": no_workers,
                "decode": no_workers,
                "adapters": AdaptersConfig(),  # of the default model
            }
        else:
            own, update = self.pools, {"model": self.model.computed, "tier": self.tier}
        # A keeper has the volumes of all models.
        others = sorted({volume.pool for volume in update["tier"].volumes} - {"", *own})
        pools = {**own, **dict.fromkeys(others, PoolConfig(prefill=no_workers, decode=no_workers))}
        return self.model_copy(update={**update, "models": (), "pools": pools})

    def _engine_of_entry(self, entry: ModelEntryConfig) -> EngineConfig:
        values = self.engine.model_dump() | entry.engine
        if isinstance(own := entry.engine.get("args"), dict):
            values["args"] = vllm_arguments.replaced(self.engine.args, own)
        return EngineConfig.model_validate(values)

    def with_models_of(self, other: ClusterConfig) -> ClusterConfig:
        """Return this configuration with another one's models, names and counts."""
        names = {"aliases": other.model.aliases, "canary": other.model.canary}
        counts = {"prefill": other.prefill, "decode": other.decode, "pools": other.pools}
        return self.model_copy(update={"models": other.models, "model": self.model.model_copy(update=names), **counts})

    @property
    def served_name(self) -> str:
        path = "SmolLM2-135M-Instruct" if self.model.path == "default" else self.model.path
        return self.model.served_name or path.rstrip("/").rpartition("/")[2]

    @property
    def model_dtype(self) -> str:
        """Type that engines compute in; "auto": the model's own."""
        return "float32" if self.engine.device == "cpu" and self.model.dtype == "auto" else self.model.dtype

    def on_node(self, address: str) -> ClusterConfig:
        """Replace every host `auto` by this node's `address`."""

        def section(name: str, key: str) -> Section:
            here: Section = getattr(self, name)
            return here.model_copy(update={key: address}) if getattr(here, key) == AUTO else here

        hosts = dict.fromkeys(("gateway", "worker", "tier", "metrics"), "host") | {"engine": "side_channel_host"}
        return self.model_copy(update={name: section(name, key) for name, key in hosts.items()})

    def role_of(self, role: str, pool: str = "") -> RoleConfig:
        found: RoleConfig = getattr(self.pools[pool] if pool else self, role)
        return found

    def engine_of(self, role: str, pool: str = "") -> EngineConfig:
        own = self.role_of(role, pool).engine.model_dump(exclude_none=True)
        own["args"] = vllm_arguments.replaced(self.engine.args, own["args"])
        return self.engine.model_copy(update=own)

    def argument_keys(self, role: str, pool: str = "") -> dict[str, str]:
        """Return the key of each argument of these engines; `pool` may be an entry's name."""
        entry = next((each for each in self.models if each.name == pool), None)
        own = self if entry is None else self.of_model(pool)
        # By its name: its place changes with other entries.
        keys = Keys(entry, f"models[{pool}]")
        return keys.of_arguments(own.engine_of(role, pool).args, own.role_of(role, pool).engine, role, pool)

    def volumes_of(self, pool: str) -> str | None:
        """Return the pool whose volumes the engines of `pool` use: its own, the default one, or None."""
        # Volumes of the default pool are shared only by pools that are not dedicated and have its ranks: route keys do
        # not name these, so gateways would price pages that the pool's engines cannot read.
        owners = {volume.pool for volume in self.tier.volumes}
        if pool in owners:
            return pool
        if pool and (self.pools[pool].dedicated or not self._has_ranks_of_default(pool)):
            return None
        return "" if "" in owners else None

    def _has_ranks_of_default(self, pool: str) -> bool:
        return len({self.engine_of(role, name).tensor_parallel_size for role in ROLES for name in (pool, "")}) == 1

    def check_listeners(self) -> None:
        """Raises ConfigError for a listener off loopback without authentication."""
        gateway, has_mutual_tls = self.gateway, self.worker.tls.enabled
        has_access = gateway.wants_bearer or gateway.tls.client_ca_file is not None
        listeners: tuple[tuple[Listener, str, bool, str], ...] = (
            (
                "gateway.host",
                gateway.host,
                has_access,
                "configure gateway.keys_file, gateway.tenants_in_etcd, gateway.jwt or gateway.tls.client_ca_file",
            ),
            ("worker.host", self.worker.host, has_mutual_tls, "configure worker.tls"),
            # vLLM answers every caller.
            ("engine.side_channel_host", self.engine.side_channel_host, False, ""),
            ("tier.host", self.tier.host, has_mutual_tls, "configure worker.tls"),
            ("metrics.host", self.metrics.host, self.metrics.tls.enabled, "configure metrics.tls"),
        )
        for key, host, authenticates, remedy in listeners:
            is_allowed = self.insecure if isinstance(self.insecure, bool) else key in self.insecure
            if not authenticates:
                require_loopback(key, host, insecure=is_allowed, remedy=remedy)
