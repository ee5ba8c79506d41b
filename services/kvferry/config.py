"""The configuration: frozen, typed, read once at start-up.

Later sources win: defaults, YAML file, environment (`KVFERRY__GATEWAY__HTTP_PORT=8001`), flags (`--set
gateway.http_port=8001`). Unknown keys and bad values are refused by name.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from kvferry.arguments import vllm_arguments
from kvferry.arguments.argument_values import why_in_conflict, why_not_expected
from kvferry.errors import ConfigError
from kvferry.util import simulator
from kvferry.util.addresses import AUTO, is_url, require_loopback
from kvferry.util.plain_yaml import SafeLoader, doubled_key

ENV_PREFIX = "KVFERRY__"
DEFAULT_NAME = "kvferry"
ROLES = ("prefill", "decode")

# Of asymmetric keys only: a gateway verifies tokens and must not be able to sign any.
JwtAlgorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
# What the CPU attention backend and NIXL were seen to get right. Others are accepted by vLLM in silence and return
# garbage (int8_per_token_head) or drift (fp8 without scales is right by design, but never exact).
_SHOWN_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
_4_BIT_FLOATS = (
    "4-bit floats are computed by NVIDIA's Blackwell GPUs, not by CPUs, and on earlier GPUs in software at most; pages "
    "with scales of their own were not shown to pass between engines, tiers and volumes"
)
_SCALED_INTEGERS = (
    "vLLM's CPU attention takes it in silence and returns garbage, and on GPUs pages with scales for each token and "
    "head were not shown to pass between engines, tiers and volumes"
)
# Beginnings of names of vLLM's, and why pages of that kind are refused.
_REFUSED_KV_CACHE_DTYPES = {"nvfp4": _4_BIT_FLOATS, "int8": _SCALED_INTEGERS, "int4": _SCALED_INTEGERS}


_ALLOWED_KV_CACHE_DTYPES = (
    "allowed are auto; float16 or bfloat16, where the model is computed in it; fp8, fp8_e4m3 or fp8_e5m2 by simulated "
    "engines alone, as vLLM's were not shown to answer the same with them"
)


def _why_no_kv_cache_dtype(value: Any) -> Any:
    if value is None or value in _SHOWN_KV_CACHE_DTYPES:
        return value
    for beginning, why in _REFUSED_KV_CACHE_DTYPES.items():
        if str(value).startswith(beginning):
            raise ValueError(f"{why}; {_ALLOWED_KV_CACHE_DTYPES}")
    raise ValueError(_ALLOWED_KV_CACHE_DTYPES)


KvCacheDtype = Annotated[
    Literal["auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"], BeforeValidator(_why_no_kv_cache_dtype)
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise ValueError("expected an absolute path: every process of a node must find the same one")
    return path


MAX_MODEL_NAME_CHARS = 200
MAX_ALIASES = 16


def check_model_name(name: str) -> None:
    """Raises ValueError."""
    if not name or len(name) > MAX_MODEL_NAME_CHARS:
        raise ValueError(f"a model's name has 1 to {MAX_MODEL_NAME_CHARS} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"{name[:80]!r}: control characters, and spaces at an end, are not for a model's name")


MAX_CONTEXT = 1 << 22  # tokens, of overrides: each engine has rotations of all positions in memory


class RopeParametersConfig(_Section):
    """Rotations for contexts beyond those that a model was trained with; all keys, or none."""

    rope_type: Literal["", "yarn"] = ""  # empty: as config.json says
    rope_theta: float | None = Field(None, ge=1, le=1e12)  # that of config.json
    factor: float | None = Field(None, gt=1, le=64)
    # Tokens of the context that the model was trained with: Qwen3 40960 in config.json, and 32768 here.
    original_max_position_embeddings: int | None = Field(None, ge=64, le=MAX_CONTEXT)

    @model_validator(mode="after")
    def _rotations_are_whole(self) -> RopeParametersConfig:
        missing = [name for name, value in self if value in (None, "")]
        if missing and len(missing) < len(type(self).model_fields):
            raise ValueError(f"{', '.join(missing)}: missing; vLLM takes nothing from config.json beside these keys")
        if self.num_positions > MAX_CONTEXT:
            raise ValueError(f"factor x original_max_position_embeddings: {MAX_CONTEXT} is the limit")
        return self

    @property
    def num_positions(self) -> int:
        """Those that have rotations; 0: as config.json says."""
        return int((self.factor or 0) * (self.original_max_position_embeddings or 0))


class HfOverridesConfig(_Section):
    """Values in the place of those in config.json, for engines and gateways (docs/user/models.md)."""

    max_position_embeddings: int | None = Field(None, ge=64)  # empty: factor x original_max_position_embeddings
    rope_parameters: RopeParametersConfig = RopeParametersConfig()

    @model_validator(mode="after")
    def _positions_have_rotations(self) -> HfOverridesConfig:
        most = self.rope_parameters.num_positions
        if self.max_position_embeddings is not None and self.max_position_embeddings > most:
            why = f"rope_parameters has rotations of {most}" if most else "give rope_parameters too"
            raise ValueError(f"max_position_embeddings ({self.max_position_embeddings}): {why}")
        return self

    @property
    def context(self) -> int:
        """Tokens; 0: the model's own."""
        return self.max_position_embeddings or self.rope_parameters.num_positions

    @property
    def values(self) -> dict[str, Any]:
        """As vLLM takes them; empty without any."""
        if not self.context:
            return {}
        return {"max_position_embeddings": self.context, "rope_parameters": self.rope_parameters.model_dump()}


class ModelConfig(_Section):
    path: str = "default"  # a folder, a hub id, or `default`: the small model that set-up prepares
    served_name: str = ""  # empty: the last part of the path; for an entry of `models`, its name
    aliases: tuple[str, ...] = ()  # further names that clients may ask for
    # Per cent of the requests for this model's names that another model answers: entries of `models` by name, or
    # `default`. The rest is this model's.
    canary: dict[str, float] = Field(default_factory=dict)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = (
        "auto"  # auto: float32 on a CPU, the model's own on a GPU
    )
    max_model_len: int | None = Field(None, ge=64)  # tokens of prompt and answer; empty: the model's own
    trust_remote_code: bool = False
    # A name for these weights, beside the digest of the weight files that is taken once per machine: gateways and
    # workers of different revisions do not work together, nor do engines and volumes.
    revision: str = ""
    # vLLM's parsers for this model's answers. Empty: no tools; reasoning stays part of the content.
    tool_parser: str = ""
    reasoning_parser: str = ""
    # A Jinja file for chats, in the place of the model's own template: an absolute path, at most 1 MiB, the same text
    # on all gateways, which read it when they start. Simulated engines take none.
    chat_template: Path | None = None
    hf_overrides: HfOverridesConfig = HfOverridesConfig()

    @model_validator(mode="after")
    def _context_is_of_the_overrides(self) -> ModelConfig:
        if self.max_model_len is not None and 0 < self.hf_overrides.context < self.max_model_len:
            raise ValueError(
                f"max_model_len ({self.max_model_len}): expected at most {self.hf_overrides.context}, the context of "
                "hf_overrides (max_position_embeddings, or factor x original_max_position_embeddings)"
            )
        return self

    @field_validator("path")
    @classmethod
    def _path_is_no_url(cls, path: str) -> str:
        if is_url(path):
            raise ValueError("expected `default`, a folder or a hub id (owner/name): models are not read from URLs")
        return path

    @field_validator("served_name")
    @classmethod
    def _name_is_printable(cls, name: str) -> str:
        if name:
            check_model_name(name)
        return name

    @field_validator("chat_template")
    @classmethod
    def _template_is_found_everywhere(cls, file: Path | None) -> Path | None:
        return None if file is None else _absolute(file)

    @field_validator("aliases")
    @classmethod
    def _aliases_are_names(cls, aliases: tuple[str, ...]) -> tuple[str, ...]:
        if len(aliases) > MAX_ALIASES:
            raise ValueError(f"{len(aliases)} aliases; {MAX_ALIASES} is the limit")
        for alias in aliases:
            check_model_name(alias)
        return aliases

    @field_validator("canary")
    @classmethod
    def _shares_leave_nothing_out(cls, canary: dict[str, float]) -> dict[str, float]:
        for name, percent in canary.items():
            if not 0 < percent <= 100:
                raise ValueError(f"{name[:80]!r}: a share is above 0 and at most 100 per cent, not {percent:g}")
        if round(sum(canary.values()), 9) > 100:  # 33.1 + 33.2 + 33.7 is a little more
            raise ValueError(f"the shares are {sum(canary.values()):g} per cent in all; 100 is the limit")
        return canary

    @property
    def computed(self) -> ModelConfig:
        """Return the settings that workers have: aliases and shares are for gateways alone."""
        return self.model_copy(update={"aliases": (), "canary": {}})


class EngineConfig(_Section):
    """Engine settings that prefill and decode workers share, because they determine the bytes of pages."""

    kind: Literal["vllm", "sim"] = "vllm"
    device: Literal["cpu", "gpu"] = "cpu"
    block_size: int = Field(32, ge=1, le=1024)  # tokens per KV page
    # Type of KV pages. auto: what the checkpoint declares, or the type that the model is computed in. Engines start
    # with pages of the model's own type alone (docs/user/models.md); `kvferry quality` measures what another one costs.
    kv_cache_dtype: KvCacheDtype = "auto"
    # Result file of `kvferry quality`. An engine starts only if it passes up to the engine's longest context, against
    # pages that are not quantized, and is of the engine's model, revision, types, device and vLLM.
    quality_report: Path | None = None
    kv_cache_gib: int = Field(1, ge=1)  # CPU device: memory for KV pages per engine, whole GiB (vLLM takes no less)
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1)
    max_num_seqs: int = Field(64, ge=1)  # requests that an engine computes at once
    # Tokens of one step, prompts and answers together. Empty: vLLM's own number, which depends on the device and on the
    # engine's use; a prompt that is longer takes several steps.
    max_num_batched_tokens: int | None = Field(None, ge=64)
    tensor_parallel_size: int = Field(1, ge=1)
    enforce_eager: bool | None = None  # empty: yes on a CPU, no on a GPU
    threads: int | None = Field(None, ge=1)  # CPU device: compute threads per engine; empty: the machine's share
    transfer_lease_s: int = Field(120, ge=10)  # how long a prefill engine keeps pages that are not pulled
    side_channel_host: str = "127.0.0.1"  # where an engine answers NIXL handshakes; auto: this node's address
    start_timeout_s: float = Field(900, gt=0)
    # Arguments and variables of vLLM that were not shown to give right answers, which are taken at your own risk.
    unproven: tuple[str, ...] = ()
    # Further arguments of vLLM's engine, by vLLM's names: docs/operator/engine-arguments.md has those that are taken.
    args: dict[str, Any] = Field(default_factory=dict)
    env: dict[str, str] = Field(default_factory=dict)  # variables of vLLM, as VLLM_LOGGING_LEVEL

    @model_validator(mode="after")
    def _block_size_fits_cpu_attention(self) -> EngineConfig:
        if self.kind == "vllm" and self.device == "cpu" and self.block_size % 32:
            raise ValueError(f"block_size {self.block_size} must be a multiple of 32 on the CPU device")
        return self

    @field_validator("unproven")
    @classmethod
    def _unproven_names_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if reason := vllm_arguments.why_not_unproven(name):
                raise ValueError(f"{name[:80]!r}: {reason}")
        return names

    @field_validator("args")
    @classmethod
    def _arguments_are_taken(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        check_arguments(args, role="", unproven=info.data.get("unproven", ()), device=info.data.get("device", "cpu"))
        return args

    @field_validator("env")
    @classmethod
    def _variables_are_taken(cls, env: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        if len(env) > vllm_arguments.MAX_ARGUMENTS:
            raise ValueError(f"{len(env)} variables; {vllm_arguments.MAX_ARGUMENTS} is the limit")
        for name, value in env.items():
            if reason := vllm_arguments.why_no_variable(name, value, unproven=info.data.get("unproven", ())):
                raise ValueError(f"{name[:80]}: {reason}")
        return env

    @field_validator("quality_report")
    @classmethod
    def _report_is_found_everywhere(cls, file: Path | None) -> Path | None:
        return None if file is None else _absolute(file)


class RoleEngineConfig(_Section):
    """Engine settings of one role that leave pages alike; absent ones are those of `engine`."""

    kv_cache_gib: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    max_num_seqs: int | None = Field(None, ge=1)
    max_num_batched_tokens: int | None = Field(None, ge=64)
    enforce_eager: bool | None = None
    threads: int | None = Field(None, ge=1)
    # One role's a multiple of the other's; without `tier.volumes`, whose chunks are those of one size.
    tensor_parallel_size: int | None = Field(None, ge=1)
    # As `engine.args`, for this role: those that engines need not have in common. They replace those of `engine`; null
    # removes one.
    args: dict[str, Any] = Field(default_factory=dict)


def check_arguments(args: Mapping[str, Any], *, role: str, unproven: Collection[str], device: str) -> None:
    """Raises ValueError for the first argument of vLLM that is not taken. `role` as for `why_refused`."""
    if len(args) > vllm_arguments.MAX_ARGUMENTS:
        raise ValueError(f"{len(args)} arguments; {vllm_arguments.MAX_ARGUMENTS} is the limit")
    for name, value in args.items():
        reason = vllm_arguments.why_not_removed(name)
        if value is not None:
            reason = vllm_arguments.why_refused(name, value, role=role, unproven=unproven)
        if device == "cpu" and name == "kv_cache_memory_bytes":
            reason = "without effect on the CPU device: use engine.kv_cache_gib"
        if reason := reason or vllm_arguments.why_no_value(value) or why_not_expected(name, value):
            raise ValueError(f"{name[:80]}: {reason}")


def check_removed(args: Mapping[str, Any], of_both: Mapping[str, Any]) -> dict[str, Any]:
    """Return those that are not None. Raises ValueError for one of `of_both` that a role cannot remove."""
    for name, value in args.items():
        if value is None and (reason := vllm_arguments.why_not_removed(name, of_both.get(name))):
            raise ValueError(f"{name[:80]}: {reason}")
    return vllm_arguments.replaced({}, args)


class RoleConfig(_Section):
    replicas: int = Field(1, ge=0)
    num_cpus: float = Field(0.5, ge=0)  # what Ray reserves for placement, not a limit
    num_gpus: float = Field(0, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    engine: RoleEngineConfig = RoleEngineConfig()


MAX_POOLS = 16
DEFAULT_POOL = "default"  # as which the workers of `prefill` and `decode` are shown
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


class PoolConfig(_Section):
    """Workers of their own beside those of `prefill` and `decode`, the default pool, for some requests."""

    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    kv_cache_dtype: KvCacheDtype | None = None  # empty: that of `engine`
    served_name: str = Field("", max_length=200)  # requests for this name go to this pool; empty: only by contract
    # Takes only tenants whose contract names it, whatever name they ask for, and uses no volume but its own.
    dedicated: bool = False


# Settings of `engine` that processes of all models share.
ENGINE_OF_THE_CLUSTER = ("kind", "device", "side_channel_host")


class ModelTierConfig(_Section):
    """Absent settings are those of `tier`, which has the volumes of all models."""

    enabled: bool | None = None
    cpu_gib: float | None = Field(None, gt=0, allow_inf_nan=False)


class ModelEntryConfig(_Section):
    """A model with workers of its own, beside the default one of `model`, `prefill` and `decode`."""

    name: str  # of its workers, deployments and metrics, and of its volumes' `pool`; lower-case letters, digits, dashes
    model: ModelConfig = ModelConfig()
    # As `engine`, whose values it replaces; `args` one by one, of which null removes one.
    engine: dict[str, Any] = Field(default_factory=dict)
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    tier: ModelTierConfig = ModelTierConfig()

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
        args = engine.get("args")
        for name, value in args.items() if isinstance(args, dict) else ():
            if value is None and (reason := vllm_arguments.why_not_removed(name)):
                raise ValueError(f"args: {name[:80]}: {reason}")
        return engine

    @property
    def served_model(self) -> ModelConfig:
        return self.model.computed.model_copy(update={"served_name": self.model.served_name or self.name})

    @property
    def pool(self) -> str:
        # Of its workers, as members and requests name it. It changes with the model: no request that was begun with one
        # goes on with another of the same name.
        settings = json.dumps(self.served_model.model_dump(mode="json"), sort_keys=True)
        return f"{self.name}{_OF_SETTINGS}{hashlib.blake2b(settings.encode(), digest_size=4).hexdigest()}"


# Between an entry's name and the digest of its model's settings, in the name of its pool. No configured pool has it.
_OF_SETTINGS = "@"


def is_of_entry(pool: str) -> bool:
    return _OF_SETTINGS in pool


def entry_of(pool: str) -> str:
    """Return the configured name of a pool or entry."""
    return pool.partition(_OF_SETTINGS)[0]


class TlsConfig(_Section):
    """Mutual TLS: each side shows `cert_file` and accepts certificates of `ca_file`. Set all three files or none."""

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None
    server_name: str = ""  # the name every worker's certificate carries; empty: the address that is dialled

    @property
    def enabled(self) -> bool:
        return self.cert_file is not None

    @model_validator(mode="after")
    def _all_or_none(self) -> TlsConfig:
        files = {"cert_file": self.cert_file, "key_file": self.key_file, "ca_file": self.ca_file}
        missing = [name for name, file in files.items() if file is None]
        if missing and len(missing) < len(files):
            raise ValueError(f"cert_file, key_file and ca_file go together; missing: {', '.join(missing)}")
        if missing and self.server_name:
            raise ValueError("server_name needs cert_file, key_file and ca_file")
        return self


class ServerTlsConfig(_Section):
    """TLS of client-facing listeners. With `client_ca_file`, clients must show a certificate that it signed."""

    cert_file: Path | None = None
    key_file: Path | None = None
    client_ca_file: Path | None = None

    @property
    def enabled(self) -> bool:
        return self.cert_file is not None

    @model_validator(mode="after")
    def _pairs(self) -> ServerTlsConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if self.client_ca_file is not None and self.cert_file is None:
            raise ValueError("client_ca_file needs cert_file and key_file: clients show certificates over TLS only")
        return self


MAX_ADAPTERS = 64
MAX_ADAPTER_NAME_CHARS = 64
_MAX_ADAPTER_TENANTS = 256
_ADAPTER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ADAPTER_NAME_CHARS - 1}}}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class AdapterConfig(_Section):
    """A LoRA adapter of the default model."""

    path: str = Field(min_length=1, max_length=1024)  # a folder, the same on every node, or a hub id
    revision: str = Field("", max_length=200)  # of a hub id: branch, tag or commit
    # Those that may use it, and see that it is there; empty: all.
    tenants: tuple[str, ...] = Field((), max_length=_MAX_ADAPTER_TENANTS)

    @field_validator("path")
    @classmethod
    def _is_folder_or_hub_id(cls, path: str) -> str:
        if not (path.startswith("/") or _HUB_ID.fullmatch(path)) or "\0" in path:
            raise ValueError("expected the absolute path of a folder, which every node has, or a hub id (owner/name)")
        return path

    @model_validator(mode="after")
    def _revisions_are_of_the_hub(self) -> AdapterConfig:
        if self.revision and self.path.startswith("/"):
            raise ValueError("revision is of hub ids; a folder has none")
        return self


class AdaptersConfig(_Section):
    """LoRA adapters of the default model, which clients ask for by name."""

    served: dict[str, AdapterConfig] = Field(default_factory=dict)  # by name
    max_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = 16  # vLLM's max_lora_rank
    max_active: int = Field(4, ge=1, le=MAX_ADAPTERS)  # vLLM's max_loras: that an engine computes with in one step
    # vLLM's max_cpu_loras: in an engine's memory; the least recently used makes room. Empty: max_active.
    max_loaded: int | None = Field(None, ge=1, le=MAX_ADAPTERS)
    max_gib: float = Field(8.0, gt=0, allow_inf_nan=False)  # of all files; each engine has a copy on its disk

    @property
    def num_loaded(self) -> int:
        return self.max_active if self.max_loaded is None else self.max_loaded

    @field_validator("served")
    @classmethod
    def _adapters_have_names(cls, served: dict[str, AdapterConfig]) -> dict[str, AdapterConfig]:
        if len(served) > MAX_ADAPTERS:
            raise ValueError(f"{len(served)} adapters; {MAX_ADAPTERS} is the limit")
        for name in served:
            if not _ADAPTER_NAME.fullmatch(name):
                raise ValueError(
                    f"adapter {name[:80]!r}: letters, digits, dots, dashes and underscores, at most "
                    f"{MAX_ADAPTER_NAME_CHARS}, a letter or digit first"
                )
        return served

    @model_validator(mode="after")
    def _active_ones_are_loaded(self) -> AdaptersConfig:
        if self.max_loaded is not None and self.max_loaded < self.max_active:
            raise ValueError(f"max_loaded ({self.max_loaded}) must be at least max_active ({self.max_active})")
        return self


class WorkerConfig(_Section):
    """Settings of all workers and of gateways that dial them; keepers use `tls` too."""

    host: str = "127.0.0.1"  # address its listeners bind to and register; auto: this node's
    tls: TlsConfig = TlsConfig()
    max_requests: int = Field(512, ge=1)  # accepted at once; more are refused
    # Requests wait and no engine step finishes for this long: the engine is hung, and the worker is replaced. More than
    # the longest step, which on a CPU is one chunk of a prefill: 30 s were seen.
    hang_timeout_s: float = Field(60, gt=0)
    drain_timeout_s: float = Field(120, ge=0)


class JwtConfig(_Section):
    """JSON Web Tokens that clients may show as bearer tokens instead of keys."""

    issuer: str = ""  # claim `iss`; empty: no tokens are taken
    audience: str = ""  # claim `aud`
    # The issuer's public keys: a file, looked at once a second, or a URL, read every 5 minutes.
    jwks_file: Path | None = None
    jwks_url: str = Field("", pattern=r"^(https://\S+|http://(127\.0\.0\.1|localhost|\[::1\])([:/]\S*)?)?$")
    tenant_claim: str = Field("sub", min_length=1)  # whose text is the tenant's name
    algorithms: tuple[JwtAlgorithm, ...] = Field(("RS256", "ES256", "EdDSA"), min_length=1)

    @property
    def enabled(self) -> bool:
        return bool(self.issuer)

    @model_validator(mode="after")
    def _issuer_and_keys(self) -> JwtConfig:
        if "@" in urlsplit(self.jwks_url).netloc:
            raise ValueError("jwks_url: no user or password in it: it is logged")
        num_sources = (self.jwks_file is not None) + bool(self.jwks_url)
        if self.issuer and not (self.audience and num_sources == 1):
            raise ValueError("issuer needs audience, and either jwks_file or jwks_url")
        if not self.issuer and (self.audience or num_sources):
            raise ValueError("audience, jwks_file and jwks_url need issuer")
        return self


MAX_PROMPT_IMAGES = 64
_IMAGE_HOST = re.compile(r"(\*\.)?([a-z0-9_-]+\.)*[a-z0-9_-]+(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")


class ImagesConfig(_Section):
    """Images in chats, for models that take them. More than a limit gets 400, more than may be in flight 429."""

    max_per_request: int = Field(8, ge=0, le=MAX_PROMPT_IMAGES)  # 0: none are taken
    max_bytes: int = Field(8 << 20, ge=1024, le=32 << 20)  # of an image's file; those in a body fit the body's limit
    # Width times height of one. More takes more of memory_mib: with a tiny model 1,024 MiB were enough for 32,000,000
    # and not for 67,000,000.
    max_pixels: int = Field(16 << 20, ge=1, le=128 << 20)
    # Files and prepared images of all requests in flight, those of a request once for each of its choices.
    max_pending_mib: int = Field(512, ge=1)
    cache_mib: int = Field(128, ge=0)  # prepared images that are kept, each for requests of the same tenant and salt
    # Images are decoded and prepared in processes of their own; what exceeds this memory gets 400.
    processes: int = Field(2, ge=1, le=64)
    memory_mib: int = Field(1024, ge=64)
    # Hosts of images that http and https URLs may name: NAME, *.DOMAIN for all below it, or either with :PORT where
    # that is not the scheme's. Empty: data URLs alone.
    allowed_hosts: tuple[str, ...] = ()
    # Whether addresses of these hosts may be private, loopback or link-local ones.
    allow_private_addresses: bool = False

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts_are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _IMAGE_HOST.fullmatch(host):
                raise ValueError(f"{host[:80]!r}: expected NAME, *.DOMAIN, or either with :PORT, in lower-case ASCII")
        return hosts


class GatewayConfig(_Section):
    replicas: int = Field(1, ge=0)  # as Serve replicas; 0: gateways run elsewhere (python -m kvferry.gateway)
    num_cpus: float = Field(0.5, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)
    host: str = "127.0.0.1"
    http_port: int = Field(8000, ge=0, le=65535)
    grpc_port: int | None = Field(9000, ge=0, le=65535)  # 0: any that is free; empty: no gRPC
    keys_file: Path | None = None  # API keys, hashed (`kvferry key new`); read again when it changes
    # Tenants and their keys are records in etcd (`kvferry tenant`); a keys_file may name more keys.
    tenants_in_etcd: bool = False
    jwt: JwtConfig = JwtConfig()
    # At least 32 bytes, the same on all gateways: salts of tenants' pages are made of it. Absent: the first gateway
    # makes one and keeps it in etcd.
    salt_secret_file: Path | None = None
    # Usage records, a line of JSON per request (`kvferry tenant usage`). A folder that exists keeps its mode, and is
    # refused if every user may write to it.
    usage_dir: Path | None = None
    tls: ServerTlsConfig = ServerTlsConfig()  # of HTTP and gRPC; files may be replaced while it serves
    # At most a fifth of what a message to a worker may have: a byte of text may become a token id, which takes five.
    max_body_bytes: int = Field(8 << 20, ge=1024, le=12 << 20)
    # Choices in flight, of HTTP and gRPC: each is a request of its own on the workers. More than these three get 429.
    max_requests: int = Field(1024, ge=1)
    max_prompt_tokens: int = Field(16 << 20, ge=1)  # in flight, those of a prompt once for each of its choices
    # Of bodies that are read, and of requests in flight. As many again of answers that HTTP clients have not read.
    max_pending_body_bytes: int = Field(256 << 20, ge=1024)
    # Of HTTP, and of gRPC as many again; the process's limit of open files is raised for them.
    max_connections: int = Field(8192, ge=1)
    max_connections_per_peer: int = Field(0, ge=0)  # of one address, over HTTP; 0: no limit, as behind a load balancer
    # Names in `Host` beside loopback ones that a gateway without keys on loopback answers to, such as a proxy's.
    allowed_hosts: tuple[str, ...] = ()
    images: ImagesConfig = ImagesConfig()
    # From a complete body to the end of the answer. A prefill may take a fifth of it; then the decode worker computes
    # the prompt itself.
    request_timeout_s: float = Field(600, gt=0)
    first_token_timeout_s: float = Field(300, gt=0)  # of each choice
    # Of each choice. Longer than `worker.hang_timeout_s`, or answers end before another worker continues them.
    inter_token_timeout_s: float = Field(180, gt=0)
    placement: Literal["priced", "round_robin"] = "priced"
    # While all workers are full, requests wait in line, first come first served, before anything of them is computed.
    # More than these, of each pool, get 429.
    max_queued_requests: int = Field(256, ge=0)
    queue_timeout_s: float = Field(10, ge=0)  # a request that would wait longer gets 429
    # A leaving gateway is not ready, but accepts requests for so long: load balancers need time to notice.
    linger_s: float = Field(0, ge=0)
    drain_timeout_s: float = Field(30, ge=0)

    @property
    def wants_bearer(self) -> bool:
        """Whether clients show keys or tokens."""
        return self.keys_file is not None or self.tenants_in_etcd or self.jwt.enabled

    @model_validator(mode="after")
    def _two_ports(self) -> GatewayConfig:
        if self.http_port and self.http_port == self.grpc_port:
            raise ValueError(f"http_port and grpc_port are both {self.http_port}; each needs its own")
        return self

    @model_validator(mode="after")
    def _largest_body_fits(self) -> GatewayConfig:
        if self.max_pending_body_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_pending_body_bytes ({self.max_pending_body_bytes}) must be at least max_body_bytes "
                f"({self.max_body_bytes}), or the largest body could never be read"
            )
        return self


def _prefix_of(name: str) -> str:
    return f"/kvferry/clusters/{name}"


class MembershipConfig(_Section):
    endpoints: tuple[str, ...] = ()  # host:port of etcd; empty: `kvferry up` starts one
    # Of this cluster's keys; it ends with /clusters/NAME. Absent: /kvferry/clusters/NAME.
    prefix: str = Field(_prefix_of(DEFAULT_NAME), pattern=r"^/[A-Za-z0-9._/-]+$")
    lease_ttl_s: int = Field(10, ge=2)
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    user: str = ""
    password_file: Path | None = None  # a file, so that no configuration dump shows the secret

    @model_validator(mode="after")
    def _pairs(self) -> MembershipConfig:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file go together")
        if bool(self.user) != (self.password_file is not None):
            raise ValueError("user and password_file go together")
        return self


class VolumeConfig(_Section):
    """A directory on NVMe that stores chunks: local to one node, or a mount that nodes share."""

    path: Path  # absolute; made at the first start
    capacity_gib: float = Field(gt=0, allow_inf_nan=False)
    shared: bool = False  # mounted by other nodes too, whose keepers read and write it
    write_gib_per_day: float | None = Field(None, gt=0, allow_inf_nan=False)  # empty: as much as comes
    pool: str = ""  # whose engines alone use it; empty: the default pool's, and those of pools that may use its volumes

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: Path) -> Path:
        return _absolute(path)


# What the system takes for the address of a Unix socket, less the name that keepers give theirs.
_MAX_SOCKET_DIR_BYTES = 107 - len("/keeper.sock")


class TierConfig(_Section):
    """Tiers beyond an engine's own memory: a CPU tier per engine, and volumes behind one keeper per node."""

    enabled: bool = False  # the CPU tier, and a keeper where there are volumes
    cpu_gib: float = Field(1.0, gt=0, allow_inf_nan=False)  # CPU tier per engine, in /dev/shm
    # KV pages (vLLM: blocks) in one chunk. Empty: as many as give 1 MiB, but no more than 256 tokens; 1 for sim.
    blocks_per_chunk: int | None = Field(None, ge=1)
    volumes: tuple[VolumeConfig, ...] = ()
    socket_dir: Path | None = None  # of keepers; empty: the run folder, or a private folder under /run or /tmp
    host: str = "127.0.0.1"  # where keepers answer gateways and each other; auto: this node's address
    io_threads: int = Field(4, ge=1, le=64)
    # For an operation on a drive; one that takes longer hangs. An operation may wait as long for its turn, and a
    # request twice as long for its pages from tiers: then it computes them.
    io_timeout_s: float = Field(10.0, gt=0)
    # Chunks that wait to be written, of an engine and of all volumes of a keeper; beyond it they are skipped.
    queue_mib: int = Field(512, ge=1)
    encryption_keys_file: Path | None = None

    @property
    def load_timeout_s(self) -> float:
        return 2 * self.io_timeout_s  # pages wait for their turn in a queue, and are read

    @field_validator("socket_dir")
    @classmethod
    def _socket_dir_fits(cls, path: Path | None) -> Path | None:
        if path is None:
            return None
        if len(os.fsencode(path)) > _MAX_SOCKET_DIR_BYTES:
            raise ValueError(f"at most {_MAX_SOCKET_DIR_BYTES} bytes, or no socket in it could be addressed")
        return _absolute(path)

    @model_validator(mode="after")
    def _volumes_make_sense(self) -> TierConfig:
        if self.volumes and not self.enabled:
            raise ValueError("volumes are read through the CPU tier: say enabled: true, or leave them out")
        paths = [Path(os.path.normpath(volume.path)) for volume in self.volumes]
        for i, path in enumerate(paths):
            for j, other in enumerate(paths):
                if i < j and path == other:
                    raise ValueError(f"volumes {i} and {j} are the same directory, {path}")
                if i != j and other in path.parents:
                    raise ValueError(f"volume {i} ({path}) lies inside volume {j} ({other})")
        return self


class MetricsConfig(_Section):
    """Prometheus listeners of gateways, workers and keepers.

    A port other than 0 is the first of 16 to try, because several processes of one kind may share a machine.
    """

    host: str = "127.0.0.1"  # auto: this node's address
    gateway_port: int = Field(0, ge=0, le=65520)
    worker_port: int = Field(0, ge=0, le=65520)
    keeper_port: int = Field(0, ge=0, le=65520)
    tls: TlsConfig = TlsConfig()  # mutual: Prometheus shows a certificate of ca_file, not always worker.tls's


class TracingConfig(_Section):
    # OTLP over gRPC: host:port, or http://host:port or https://host:port. Empty: no traces.
    endpoint: str = Field("", pattern=r"^((https?://)?[^/\s:]+:[0-9]{1,5}|(https?://)?\[[0-9A-Fa-f:.]+\]:[0-9]{1,5})?$")
    sample_ratio: float = Field(1.0, ge=0, le=1)  # of requests whose client did not decide
    prompts: bool = False  # record prompts and answers in spans
    ca_file: Path | None = None  # CA of the collector's certificate; empty, with https: the system's CAs

    @property
    def uses_tls(self) -> bool:
        return self.endpoint.startswith("https://") or self.ca_file is not None

    @model_validator(mode="after")
    def _makes_sense(self) -> TracingConfig:
        if not self.endpoint and (self.prompts or self.ca_file is not None):
            raise ValueError("prompts and ca_file need an endpoint")
        if self.ca_file is not None and self.endpoint.startswith("http://"):
            raise ValueError("ca_file needs an endpoint with https://")
        return self


_NO_WORKERS: Mapping[str, Any] = {"replicas": 0}

# Listeners, named by the key of their address.
Listener = Literal["gateway.host", "worker.host", "engine.side_channel_host", "tier.host", "metrics.host"]


class ClusterConfig(_Section):
    """The whole configuration, the same on every node."""

    # Of this cluster, in etcd and between gateways and workers, which refuse those of other clusters.
    name: str = Field(DEFAULT_NAME, pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    # Allow listeners off loopback without authentication: all of them, or those that are named.
    insecure: bool | tuple[Listener, ...] = False
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    prefill: RoleConfig = RoleConfig()
    decode: RoleConfig = RoleConfig()
    pools: dict[str, PoolConfig] = Field(default_factory=dict)  # further pools by name; the default one has no name
    # Further models. A cluster with some, whose `prefill`, `decode` and `pools` have no replicas, has no default model.
    models: tuple[ModelEntryConfig, ...] = ()
    adapters: AdaptersConfig = AdaptersConfig()
    worker: WorkerConfig = WorkerConfig()
    gateway: GatewayConfig = GatewayConfig()
    membership: MembershipConfig = MembershipConfig()
    tier: TierConfig = TierConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    sim: dict[str, Any] = {}  # settings of simulated engines (engine.kind: sim), which the package kvferry-sim has

    @model_validator(mode="before")
    @classmethod
    def _prefix_names_the_cluster(cls, values: Any) -> Any:
        # Two clusters under one prefix would take each other's workers.
        name = values.get("name") if isinstance(values, Mapping) else None
        membership = values.get("membership", {}) if isinstance(values, Mapping) else None
        if not isinstance(name, str) or name == DEFAULT_NAME or not isinstance(membership, Mapping):
            return values
        return {**values, "membership": {"prefix": _prefix_of(name), **membership}}

    @model_validator(mode="after")
    def _prefix_lies_in_no_other(self) -> ClusterConfig:
        # A user that may read one cluster's keys must not read another's. Two prefixes of this form are equal or apart:
        # `clusters` is in each once, and only the name follows it.
        prefix = self.membership.prefix.rstrip("/")
        root = prefix.removesuffix(f"/clusters/{self.name}")
        if root == prefix or "clusters" in root.split("/"):
            raise ValueError(
                f"membership.prefix: {prefix!r} must end with /clusters/{self.name}, the cluster's name, and have no "
                "other part `clusters`: then no cluster's keys lie among those of another"
            )
        return self

    @field_validator("pools")
    @classmethod
    def _pools_have_names(cls, pools: dict[str, PoolConfig]) -> dict[str, PoolConfig]:
        if len(pools) > MAX_POOLS:
            raise ValueError(f"{len(pools)} pools; {MAX_POOLS} is the limit")
        for name in pools:
            check_new_pool_name(name)
        return pools

    @model_validator(mode="after")
    def _models_have_names(self) -> ClusterConfig:
        if len(self.models) + len(self.pools) > MAX_POOLS:
            raise ValueError(f"models: {len(self.models)} and {len(self.pools)} pools; {MAX_POOLS} in all is the limit")
        places: dict[str, str] = {name: f"pools.{name}" for name in self.pools}
        for place, entry in enumerate(self.models):
            if (other := places.setdefault(entry.name, f"models[{place}]")) != f"models[{place}]":
                raise ValueError(f"models[{place}].name: {entry.name!r} is the name of {other}")
        return self

    @model_validator(mode="after")
    def _pools_make_sense(self) -> ClusterConfig:
        owner_of = {self.served_name: "the default pool"} if self.serves_default else {}
        for key, name in self._further_names().items():
            if name and (owner := owner_of.setdefault(name, key)) != key:
                raise ValueError(f"{key}: {name!r} is the name of {_owner_in_words(owner)}")
        pools = {*self.pools, *(entry.name for entry in self.models)}
        for place, volume in enumerate(self.tier.volumes):
            if volume.pool and volume.pool not in pools:
                raise ValueError(f"tier.volumes[{place}].pool: there is no pool {volume.pool[:80]!r}")
        return self

    @model_validator(mode="after")
    def _models_make_sense(self) -> ClusterConfig:
        known = {*(entry.name for entry in self.models), *([DEFAULT_POOL] if self.serves_default else [])}
        for key, own, canary in (
            ("model", DEFAULT_POOL, self.model.canary),
            *((f"models[{place}].model", each.name, each.model.canary) for place, each in enumerate(self.models)),
        ):
            for name in canary:
                if name == own or name not in known:
                    others = ", ".join(sorted(known - {own})) or "none"
                    why = "is the model itself" if name == own else "is no model of this cluster"
                    why += f"; others that can take a share: {others}"
                    raise ValueError(f"{key}.canary: {name[:80]!r} {why}")
        return self

    @model_validator(mode="after")
    def _simulated_engines_have_no_templates(self) -> ClusterConfig:
        # A gateway alone would find this out, while `kvferry up` waits for it.
        if self.engine.kind == "sim":
            entries = ((f"models[{place}].model", each.model) for place, each in enumerate(self.models))
            for key, model in (("model", self.model), *entries):
                if model.chat_template is not None:
                    raise ValueError(f"{key}.chat_template: simulated engines (engine.kind: sim) have no templates")
        elif self.sim:
            raise ValueError("sim: settings of simulated engines, and engine.kind is vllm")
        return self

    @model_validator(mode="after")
    def _adapters_make_sense(self) -> ClusterConfig:
        if not self.adapters.served:
            return self
        if not self.serves_default:
            raise ValueError(
                "adapters.served: only the default model can have adapters, and this cluster has none: all its models "
                "are entries of `models`. Describe the base model in `model`, and give `prefill` and `decode` replicas"
            )
        names = {self.served_name, *self._further_names().values(), *(entry.name for entry in self.models)}
        if clash := sorted(names & self.adapters.served.keys()):
            raise ValueError(f"adapters.served.{clash[0]}: {clash[0]!r} is the name of a model")
        # An adapter may be asked for as MODEL:NAME, by each name of the default model.
        of_default = {self.served_name, *self.model.aliases, *(pool.served_name for pool in self.pools.values())}
        for name in sorted(names):
            model, colon, adapter = name.rpartition(":")
            if colon and adapter in self.adapters.served and model in of_default:
                raise ValueError(f"adapters.served.{adapter}: {name!r}, as it may be asked for, is the name of a model")
        engines = [self.engine_of(role, pool) for pool in ("", *self.pools) for role in ROLES]
        ranks = max(engine.tensor_parallel_size for engine in engines)
        if self.engine.kind == "vllm" and ranks > 1:
            raise ValueError(
                "adapters.served: adapters were not shown to give right answers with engine.tensor_parallel_size "
                f"{ranks}, only with 1"
            )
        if any(vllm_arguments.speculates(engine.args) for engine in engines):
            raise ValueError(
                f"adapters.served: adapters were not shown to give right answers beside {vllm_arguments.SPECULATION} "
                "(engine.args, decode.engine.args): remove one of the two"
            )
        return self

    @model_validator(mode="after")
    def _arguments_of_roles_are_taken(self) -> ClusterConfig:
        for pool, name in itertools.product(("", *self.pools), ROLES):
            try:
                args = check_removed(self.role_of(name, pool).engine.args, self.engine.args)
                if vllm_arguments.SPECULATION in args and vllm_arguments.draft_model(self.engine.args):
                    raise ValueError(f"{vllm_arguments.SPECULATION}: engine.args has a draft model, for both roles")
                check_arguments(args, role=name, unproven=self.engine.unproven, device=self.engine.device)
            except ValueError as error:
                raise ValueError(f"{f'pools.{pool}.' if pool else ''}{name}.engine.args: {error}") from None
            engine = self.engine_of(name, pool)
            settings = {**dict(engine), "max_model_len": self.model.max_model_len}
            keys = self._keys_of_settings(name, pool) | self.argument_keys(name, pool)
            if reason := why_in_conflict(engine.args, settings, keys, unproven=engine.unproven):
                raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _ranks_have_gpus(self) -> ClusterConfig:
        if self.engine.kind != "vllm" or self.engine.device != "gpu":
            return self
        for pool, name in itertools.product(("", *self.pools), ROLES):
            num_gpus, ranks = self.role_of(name, pool).num_gpus, self.engine_of(name, pool).tensor_parallel_size
            # 0: Ray gives none, or by `resources`, or there is no Ray.
            if 0 < num_gpus < ranks and ranks > 1:
                raise ValueError(
                    f"{f'pools.{pool}.' if pool else ''}{name}.num_gpus: {num_gpus:g} are too few for "
                    f"tensor_parallel_size {ranks}: each rank has a GPU of its own"
                )
        return self

    @model_validator(mode="after")
    def _ranks_of_roles_fit(self) -> ClusterConfig:
        for pool in ("", *self.pools):
            prefill, decode = (self.engine_of(role, pool).tensor_parallel_size for role in ROLES)
            if prefill == decode:
                continue
            keys = f"{f'pools.{pool}.' if pool else ''}prefill.engine.tensor_parallel_size ({prefill}) and decode's"
            if max(prefill, decode) % min(prefill, decode):
                raise ValueError(f"{keys} ({decode}): one must be a multiple of the other")
            if self.volumes_of(pool) is not None:
                raise ValueError(
                    f"{keys} ({decode}) must be equal with tier.volumes: a chunk has the pages of all ranks of one "
                    "size, and the other role's engines could not read it"
                )
        return self

    @property
    def model_dtype(self) -> str:
        """Of engines; "auto": the model's own."""
        return "float32" if self.engine.device == "cpu" and self.model.dtype == "auto" else self.model.dtype

    @model_validator(mode="after")
    def _pages_have_the_models_dtype(self) -> ClusterConfig:
        dtype = self.model_dtype
        pools = {f"pools.{name}": pool.kv_cache_dtype for name, pool in self.pools.items()}
        for section, of_pages in {"engine": self.engine.kv_cache_dtype, **pools}.items():
            if self.engine.kind != "vllm" or dtype == "auto" or of_pages not in ("float16", "bfloat16"):
                continue
            if of_pages != dtype:
                on_cpu = " (model.dtype: auto, on a CPU)" if self.model.dtype == "auto" else ""
                raise ValueError(
                    f"{section}.kv_cache_dtype: allowed are auto, and {of_pages} with model.dtype: {of_pages}. The "
                    f"model is computed in {dtype}{on_cpu}, and pages of another type gave garbage on a CPU and were "
                    f"not shown right on a GPU, so not {of_pages!r}"
                )
        return self

    @model_validator(mode="after")
    def _overrides_make_sense(self) -> ClusterConfig:
        if self.model.hf_overrides.values:
            if "hf_overrides" in self.engine.args:
                raise ValueError("model.hf_overrides, engine.args.hf_overrides: vLLM takes one of the two")
            if self.engine.quality_report is not None:
                raise ValueError("engine.quality_report: with model.hf_overrides nothing was measured")
        return self

    @model_validator(mode="after")
    def _hangs_are_noticed_first(self) -> ClusterConfig:
        inter_token_s, hang_s = self.gateway.inter_token_timeout_s, self.worker.hang_timeout_s
        if self.engine.kind == "vllm" and inter_token_s <= hang_s:
            raise ValueError(
                f"gateway.inter_token_timeout_s ({inter_token_s:g}) must be above worker.hang_timeout_s ({hang_s:g}), "
                "or answers end before another worker continues them"
            )
        return self

    @model_validator(mode="after")
    def _longest_prompt_fits(self) -> ClusterConfig:
        max_model_len = self.model.max_model_len or self.model.hf_overrides.context
        if self.engine.kind == "sim":
            max_model_len = simulator.load().max_model_len(self.sim)
        if self.gateway.max_prompt_tokens < max_model_len:
            raise ValueError(
                f"gateway.max_prompt_tokens ({self.gateway.max_prompt_tokens}) must be at least the model's context "
                f"({max_model_len}), or the longest prompt could never be admitted"
            )
        return self

    @model_validator(mode="after")
    def _models_of_their_own_make_sense(self) -> ClusterConfig:
        # After all that the default model's settings have in common with these.
        for place, entry in enumerate(self.models):
            try:
                self.of_model(entry.name)
            except ValidationError as error:
                faults = (_explain_derived(fault, entry, f"models[{place}]") for fault in error.errors())
                raise ValueError("; ".join(faults)) from None
        return self

    @model_validator(mode="after")
    def _models_share_volumes_of_one_layout(self) -> ClusterConfig:
        if self.engine.kind != "vllm" or self.tier.blocks_per_chunk is not None:
            return self
        users = [entry.name for entry in self.models if self.of_model(entry.name).volumes_of(entry.name) == ""]
        users += [DEFAULT_POOL] if self.serves_default and self.volumes_of("") == "" else []
        if len(users) > 1:
            raise ValueError(
                f"tier.blocks_per_chunk: must be set where models share volumes ({', '.join(sorted(users))}): by "
                "default each would have its own, and gateways know one per volume. Or give them volumes of their own "
                "(tier.volumes[N].pool)"
            )
        return self

    @property
    def serves_default(self) -> bool:
        roles = (getattr(section, role) for section in (self, *self.pools.values()) for role in ROLES)
        return not self.models or any(role.replicas for role in roles)

    @property
    def names(self) -> list[str]:
        """Served names, the default model's first; aliases and names of pools are further ones."""
        default = [self.served_name] if self.serves_default else []
        return [*default, *(entry.served_model.served_name for entry in self.models)]

    def _further_names(self) -> dict[str, str]:
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
        values = self.model_dump(exclude={"models"})
        own: dict[str, Any] = {}
        if name:
            values["adapters"] = {}  # of the default model
            entry = self.entry(name)
            values["model"] = entry.served_model.model_dump()
            values["engine"] |= entry.engine
            if isinstance(own_args := entry.engine.get("args"), dict):
                values["engine"]["args"] = vllm_arguments.replaced(self.engine.args, own_args)
            values["tier"] |= entry.tier.model_dump(exclude_none=True)
            if not values["tier"]["enabled"]:
                values["tier"]["volumes"] = ()
            values |= {"prefill": _NO_WORKERS, "decode": _NO_WORKERS}
            own = {name: {"prefill": entry.prefill.model_dump(), "decode": entry.decode.model_dump()}}
        else:
            values["model"] = self.model.computed.model_dump()
            own = values["pools"]
        # A keeper has the volumes of all models.
        others = {volume["pool"] for volume in values["tier"]["volumes"]} - {"", *own}
        values["pools"] = {**own, **{pool: {"prefill": _NO_WORKERS, "decode": _NO_WORKERS} for pool in sorted(others)}}
        return ClusterConfig.model_validate(values)

    def with_models_of(self, other: ClusterConfig) -> ClusterConfig:
        """Return this configuration with another one's models, names and counts."""
        names = {"aliases": other.model.aliases, "canary": other.model.canary}
        counts = {"prefill": other.prefill, "decode": other.decode, "pools": other.pools}
        return self.model_copy(update={"models": other.models, "model": self.model.model_copy(update=names), **counts})

    @property
    def served_name(self) -> str:
        path = "SmolLM2-135M-Instruct" if self.model.path == "default" else self.model.path
        return self.model.served_name or path.rstrip("/").rpartition("/")[2]

    def on_node(self, address: str) -> ClusterConfig:
        """Replace every host `auto` by this node's `address`."""

        def section(name: str, key: str) -> _Section:
            here: _Section = getattr(self, name)
            return here.model_copy(update={key: address}) if getattr(here, key) == AUTO else here

        hosts = dict.fromkeys(("gateway", "worker", "tier", "metrics"), "host") | {"engine": "side_channel_host"}
        return self.model_copy(update={name: section(name, key) for name, key in hosts.items()})

    def role_of(self, role: str, pool: str = "") -> RoleConfig:
        found: RoleConfig = getattr(self.pools[pool] if pool else self, role)
        return found

    def engine_of(self, role: str, pool: str = "") -> EngineConfig:
        own = self.role_of(role, pool).engine.model_dump(exclude_none=True)
        own["args"] = vllm_arguments.replaced(self.engine.args, own["args"])
        if pool and (kv_cache_dtype := self.pools[pool].kv_cache_dtype) is not None:
            own["kv_cache_dtype"] = kv_cache_dtype
        return self.engine.model_copy(update=own)

    def _keys_of_settings(self, role: str, pool: str) -> dict[str, str]:
        prefix = f"pools.{pool}.{role}." if pool else f"{role}."
        own = self.role_of(role, pool).engine.model_dump(exclude_none=True)
        return {name: f"{prefix if name in own else ''}engine.{name}" for name in EngineConfig.model_fields}

    def argument_keys(self, role: str, pool: str = "") -> dict[str, str]:
        """Return the key of each argument of these engines; `pool` may be an entry's name."""
        entry = next((each for each in self.models if each.name == pool), None)
        if entry is None:
            prefix, of_model, of_role = f"pools.{pool}." if pool else "", {}, self.role_of(role, pool).engine.args
        else:
            # By its name: its place changes with other entries.
            prefix, of_model = f"models[{pool}].", entry.engine.get("args", {})
            of_role = getattr(entry, role).engine.args
        values = {**self.engine.args, **of_model, **of_role}
        keys = {name: f"engine.args.{name}" for name in values}
        keys |= {name: f"{prefix}engine.args.{name}" for name in of_model}
        keys |= {name: f"{prefix}{role}.engine.args.{name}" for name in of_role}
        return {name: key for name, key in keys.items() if values[name] is not None}

    def volumes_of(self, pool: str) -> str | None:
        """Return the pool whose volumes the engines of `pool` use: its own, the default one, or None."""
        # Volumes of the default pool are shared only by pools that are not dedicated and have its dtype of pages and
        # its ranks: route keys do not name these, so gateways would price pages that the pool's engines cannot read.
        owners = {volume.pool for volume in self.tier.volumes}
        if pool in owners:
            return pool
        if pool and (self.pools[pool].dedicated or not self._has_pages_of_default(pool)):
            return None
        return "" if "" in owners else None

    def _has_pages_of_default(self, pool: str) -> bool:
        ranks = {self.engine_of(role, name).tensor_parallel_size for role in ROLES for name in (pool, "")}
        return len(ranks) == 1 and self.pools[pool].kv_cache_dtype in (None, self.engine.kv_cache_dtype)

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


def load(
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Sequence[str] = (),
) -> ClusterConfig:
    """Read a configuration. `flags` are `section.key=value`, values in YAML.

    Raises ConfigError naming key, value and what is allowed.
    """
    merged: dict[str, Any] = {}
    if file is not None:
        try:
            _merge(merged, _read_yaml(file), source=str(file))
        except RecursionError:
            raise ConfigError(f"{file}: a section contains itself") from None
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split("__")
            _put(merged, path, environ[name], source=name)
    put_flags(merged, flags)
    return parse(merged)


def put_flags(values: dict[str, Any], flags: Sequence[str]) -> None:
    """Put `section.key=value`, values in YAML, over `values`. Raises ConfigError for a flag of another form."""
    for flag in flags:
        key, equals, value = flag.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {flag!r}: expected section.key=value")
        _put(values, key.split("."), value, source=f"--set {key}")


def parse(values: Mapping[str, Any]) -> ClusterConfig:
    """Validate a plain mapping. Raises ConfigError listing every fault."""
    try:
        config = ClusterConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, values) for fault in error.errors())) from None
    config.check_listeners()
    return config


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        content = yaml.load(text, Loader=SafeLoader)
        if (key := doubled_key(text)) is not None:
            raise ConfigError(f"{file}: the key {key[:64]!r} is there twice in one section")
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:  # bytes that are no UTF-8, a number that int() refuses
        raise ConfigError(f"{file}: not YAML: {str(error)[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{file}: it is nested too deeply") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a mapping of sections, found {type(content).__name__}")
    return content


def _merge(into: dict[str, Any], new: Mapping[str, Any], *, source: str) -> None:
    for key, value in new.items():
        if isinstance(value, Mapping) and isinstance(into.get(key, {}), dict):
            _merge(into.setdefault(str(key), {}), value, source=source)
        else:
            into[str(key)] = value


def _put(into: dict[str, Any], path: Sequence[str], text: str, *, source: str) -> None:
    try:
        value = yaml.load(text, Loader=SafeLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        value = text
    here = into
    for part in path[:-1]:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{source}: {part!r} is a value, not a section")
    here[path[-1]] = value


_TYPE_TO_WORDS = {
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping of settings",
}


def _explain(fault: Any, values: Mapping[str, Any]) -> str:
    """Describe one fault in one line: key, value, what is allowed."""
    path = fault["loc"]
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    key = "".join(parts).removeprefix(".") or "configuration"
    if fault["type"] == "extra_forbidden":
        allowed = _keys_beside(path)
        close = difflib.get_close_matches(str(path[-1]), allowed, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        return f"{key}: unknown key (value {fault['input']!r}){hint} Allowed here: {', '.join(allowed)}"
    message = fault["msg"].removeprefix("Value error, ")
    if not path and fault["type"] == "value_error":
        return str(message)  # it has the keys that are compared
    if fault["type"] in _TYPE_TO_WORDS:
        message = f"expected {_TYPE_TO_WORDS[fault['type']]}"
    if fault["type"] == "string_type" and isinstance(fault["input"], bool | int | float):
        # Floats are not written as they were: 12e4 is 120000.0.
        sample = "" if isinstance(fault["input"], float) else f", as in {key}='\"{fault['input']}\"'"
        message = f"expected a text: quote it{sample}"
    # A validator of a list or a mapping names the entry that is wrong; the whole value would only repeat it.
    is_named = isinstance(fault["input"], dict) or (fault["type"] == "value_error" and isinstance(fault["input"], list))
    return f"{key}: {message}" if is_named else f"{key}: {message}, not {fault['input']!r}"


_KEY_OF_ENTRIES = re.compile(r"(?<![\w.\[\]-])(?:model|tier|engine(?:\.args)?)\.\w+")


def _explain_derived(fault: Any, entry: ModelEntryConfig, here: str) -> str:
    """Describe a fault of `of_model` with keys as the values stand, in the entry `here` or outside of it."""
    args = entry.engine.get("args")
    own = {f"engine.{name}" for name in entry.engine} | {f"tier.{name}" for name in entry.tier.model_fields_set}
    own |= {f"engine.args.{name}" for name in args} if isinstance(args, dict) else set()

    def placed(found: re.Match[str]) -> str:
        return f"{here}.{found[0]}" if found[0] in own or found[0].startswith("model.") else found[0]

    text = _KEY_OF_ENTRIES.sub(placed, _explain(fault, {}).replace(f"pools.{entry.name}.", f"{here}."))
    return text if text.startswith(f"{here}.") else f"{here}: {text}"


def _owner_in_words(key: str) -> str:
    return f"pool {key.split('.')[1]!r}" if key.startswith("pools.") else key


def _keys_beside(path: Sequence[str | int]) -> list[str]:
    section: type[BaseModel] = ClusterConfig
    is_in_mapping = False
    for part in path[:-1]:
        if is_in_mapping or isinstance(part, int):
            is_in_mapping = False
            continue  # an entry of the list or mapping before it
        annotation = section.model_fields[part].annotation
        if get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            is_in_mapping, annotation = True, get_args(annotation)[1]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        section = annotation
    return sorted(section.model_fields)
