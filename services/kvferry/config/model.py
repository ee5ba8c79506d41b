"""Sections `model` and `adapters`."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from kvferry.config.section import AbsolutePath, Section
from kvferry.util.addresses import is_url

MAX_MODEL_NAME_CHARS = 200
MAX_ALIASES = 16


def check_model_name(name: str) -> None:
    """Raises ValueError."""
    if not name or len(name) > MAX_MODEL_NAME_CHARS:
        raise ValueError(f"a model's name has 1 to {MAX_MODEL_NAME_CHARS} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise ValueError(f"{name[:80]!r}: control characters, and spaces at an end, are not for a model's name")


MAX_CONTEXT = 1 << 22  # tokens, of overrides: each engine has rotations of all positions in memory


class RopeParametersConfig(Section):
    """YaRN's rotations for contexts beyond those that a model was trained with; both keys, or none."""

    factor: float | None = Field(None, gt=1, le=64)
    # Tokens of the context that the model was trained with: Qwen3 40960 in config.json, and 32768 here.
    original_max_position_embeddings: int | None = Field(None, ge=64, le=MAX_CONTEXT)

    @model_validator(mode="after")
    def _rotations_are_whole(self) -> RopeParametersConfig:
        missing = [name for name, value in self if value is None]
        if missing and len(missing) < len(type(self).model_fields):
            raise ValueError(f"{', '.join(missing)}: missing; factor and original_max_position_embeddings go together")
        if self.num_positions > MAX_CONTEXT:
            raise ValueError(f"factor x original_max_position_embeddings: {MAX_CONTEXT} is the limit")
        return self

    @property
    def num_positions(self) -> int:
        """Longest context of the scaled rotations, in tokens; 0: as config.json says."""
        return int((self.factor or 0) * (self.original_max_position_embeddings or 0))


class HfOverridesConfig(Section):
    """Values in the place of those in config.json, for engines and gateways (docs/user/models.md)."""

    rope_parameters: RopeParametersConfig = Field(default_factory=RopeParametersConfig)

    @property
    def context(self) -> int:
        """Tokens; 0: the model's own."""
        return self.rope_parameters.num_positions

    def values(self, rope_theta: object) -> dict[str, Any]:
        """Return the overrides as vLLM's `hf_overrides`, with the base of config.json; empty without any."""
        if not self.context:
            return {}
        rotations = {"rope_type": "yarn", "rope_theta": rope_theta, **self.rope_parameters.model_dump()}
        return {"max_position_embeddings": self.context, "rope_parameters": rotations}


class ModelConfig(Section):
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
    # Version label of the weights, beside the digest of the files, which each machine computes once: gateways and
    # workers of different revisions do not work together, nor do engines and volumes.
    revision: str = ""
    # vLLM's parsers for this model's answers. Empty: no tools; reasoning stays part of the content.
    tool_parser: str = ""
    reasoning_parser: str = ""
    # A Jinja file for chats, in the place of the model's own template: an absolute path, at most 1 MiB, the same text
    # on all gateways, which read it when they start. Simulated engines take none.
    chat_template: AbsolutePath | None = None
    hf_overrides: HfOverridesConfig = Field(default_factory=HfOverridesConfig)

    @model_validator(mode="after")
    def _context_is_of_the_overrides(self) -> ModelConfig:
        if self.max_model_len is not None and 0 < self.hf_overrides.context < self.max_model_len:
            raise ValueError(
                f"max_model_len ({self.max_model_len}): expected at most {self.hf_overrides.context}, the context of "
                "hf_overrides (factor x original_max_position_embeddings)"
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


MAX_ADAPTERS = 64
MAX_ADAPTER_NAME_CHARS = 64
_MAX_ADAPTER_TENANTS = 256
_ADAPTER_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ADAPTER_NAME_CHARS - 1}}}")
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class AdapterConfig(Section):
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


class AdaptersConfig(Section):
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
