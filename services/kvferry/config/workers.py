"""Sections of roles, pools, models of their own, and `worker`."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from pydantic import Field, field_validator

from kvferry.config.engine import RoleEngineConfig
from kvferry.config.model import ModelConfig
from kvferry.config.section import Section, TlsConfig

ROLES = ("prefill", "decode")


class RoleConfig(Section):
    replicas: int = Field(1, ge=0)  # workers
    num_cpus: float = Field(0.5, ge=0)  # what Ray reserves for placement, not a limit
    num_gpus: float = Field(0, ge=0)  # of each worker, by Ray; 0 without Ray too
    resources: dict[str, float] = Field(default_factory=dict)
    engine: RoleEngineConfig = Field(default_factory=RoleEngineConfig)


MAX_POOLS = 16
DEFAULT_POOL = "default"  # name of the pool of `prefill` and `decode` in readiness and metrics
_POOL_NAME = re.compile(r"[a-z0-9-]{1,31}")


def check_pool_name(name: str) -> None:
    """Raises ValueError."""
    if not _POOL_NAME.fullmatch(name):
        raise ValueError(f"pool {name[:80]!r}: lower-case letters, digits and dashes, at most 31")


def check_new_pool_name(name: str) -> None:
    """As `check_pool_name`, for names that are not stored yet: earlier releases had pools called `default`."""
    check_pool_name(name)
    if name == DEFAULT_POOL:
        raise ValueError(
            f"pool {name!r}: this is the name of the workers of `prefill` and `decode`; choose another one"
        )


class PoolConfig(Section):
    """Workers of their own beside those of `prefill` and `decode`, the default pool, for some requests."""

    prefill: RoleConfig = Field(default_factory=RoleConfig)
    decode: RoleConfig = Field(default_factory=RoleConfig)
    served_name: str = Field("", max_length=200)  # requests for this name go to this pool; empty: only by contract
    # Takes only tenants whose contract names it, whatever name they ask for, and uses no volume but its own.
    dedicated: bool = False


# Settings of `engine` that processes of all models share.
ENGINE_OF_THE_CLUSTER = ("kind", "device", "side_channel_host")


class ModelTierConfig(Section):
    """Absent settings are those of `tier`, which has the volumes of all models."""

    enabled: bool | None = None
    cpu_gib: float | None = Field(None, gt=0, allow_inf_nan=False)


class ModelEntryConfig(Section):
    """A model with workers of its own, beside the default one of `model`, `prefill` and `decode`."""

    name: str  # of its workers, deployments and metrics, and of its volumes' `pool`; lower-case letters, digits, dashes
    model: ModelConfig = Field(default_factory=ModelConfig)
    # As `engine`, whose values it replaces; `args` one by one, of which null removes one.
    engine: dict[str, Any] = Field(default_factory=dict)
    prefill: RoleConfig = Field(default_factory=RoleConfig)
    decode: RoleConfig = Field(default_factory=RoleConfig)
    tier: ModelTierConfig = Field(default_factory=ModelTierConfig)

    @field_validator("name")
    @classmethod
    def _name_is_a_pools(cls, name: str) -> str:
        check_new_pool_name(name)
        if name == "other":
            raise ValueError(f"{name!r}: metrics have it for the sum of many models")
        return name

    @field_validator("engine")
    @classmethod
    def _engine_is_the_models(cls, engine: dict[str, Any]) -> dict[str, Any]:
        for key in ENGINE_OF_THE_CLUSTER:
            if key in engine:
                raise ValueError(f"{key}: all models of a cluster have that of the section `engine`")
        return engine

    @property
    def served_model(self) -> ModelConfig:
        return self.model.computed.model_copy(update={"served_name": self.model.served_name or self.name})

    @property
    def pool(self) -> str:
        # Pool of the entry's workers, as members and requests name it. It changes with the model, so that no request
        # begins with one model and goes on with another of the same name.
        settings = json.dumps(self.served_model.model_dump(mode="json"), sort_keys=True)
        return f"{self.name}{_OF_SETTINGS}{hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()}"


# Between an entry's name and the digest of its model's settings, in the name of its pool. No configured pool has it.
_OF_SETTINGS = "@"


def is_of_entry(pool: str) -> bool:
    return _OF_SETTINGS in pool


def entry_of(pool: str) -> str:
    """Return the configured name of a pool or entry."""
    return pool.partition(_OF_SETTINGS)[0]


class WorkerConfig(Section):
    """Settings of all workers and of gateways that dial them; keepers use `tls` too."""

    host: str = "127.0.0.1"  # address its listeners bind to and register; auto: this node's
    tls: TlsConfig = Field(default_factory=TlsConfig)
    max_requests: int = Field(512, ge=1)  # accepted at once; more are refused
    # Requests wait and no engine step finishes for this long: the engine is hung, and the worker is replaced. More than
    # the longest step, which on a CPU is one chunk of a prefill: 30 s were seen.
    hang_timeout_s: float = Field(60, gt=0)
    drain_timeout_s: float = Field(120, ge=0)
