"""The configuration: frozen, typed, read once at start-up.

Later sources win: defaults, YAML file, environment (`KVFERRY__GATEWAY__HTTP_PORT=8001`), flags (`--set
gateway.http_port=8001`). Unknown keys and bad values are refused by name.
"""

from kvferry.config.cluster import ClusterConfig
from kvferry.config.engine import EngineConfig, RoleEngineConfig
from kvferry.config.gateway import GatewayConfig, ImagesConfig, JwtConfig
from kvferry.config.membership import MembershipConfig
from kvferry.config.model import MAX_ADAPTERS, MAX_CONTEXT, AdapterConfig, AdaptersConfig, ModelConfig
from kvferry.config.observability import MetricsConfig, TracingConfig
from kvferry.config.reading import load, parse, put_flags
from kvferry.config.section import MutualTlsConfig, ServerTlsConfig, TlsConfig
from kvferry.config.tier import TierConfig, VolumeConfig
from kvferry.config.workers import (
    DEFAULT_POOL,
    ENGINE_OF_THE_CLUSTER,
    MAX_POOLS,
    ROLES,
    ModelEntryConfig,
    PoolConfig,
    RoleConfig,
    WorkerConfig,
    check_new_pool_name,
    check_pool_name,
    entry_of,
    is_of_entry,
)

# fmt: off
__all__ = [
    "DEFAULT_POOL", "ENGINE_OF_THE_CLUSTER", "MAX_ADAPTERS", "MAX_CONTEXT", "MAX_POOLS", "ROLES", "AdapterConfig",
    "AdaptersConfig", "ClusterConfig", "EngineConfig", "GatewayConfig", "ImagesConfig", "JwtConfig",
    "MembershipConfig", "MetricsConfig", "ModelConfig", "ModelEntryConfig", "MutualTlsConfig", "PoolConfig",
    "RoleConfig", "RoleEngineConfig", "ServerTlsConfig", "TierConfig", "TlsConfig", "TracingConfig", "VolumeConfig",
    "WorkerConfig", "check_new_pool_name", "check_pool_name", "entry_of", "is_of_entry", "load", "parse", "put_flags",
]
# fmt: on
