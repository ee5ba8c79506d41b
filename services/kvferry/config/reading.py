"""Reads and checks a configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvferry.config import rules
from kvferry.config.cluster import ClusterConfig
from kvferry.config.section import explain, key_of
from kvferry.errors import ConfigError
from kvferry.util.plain_yaml import SafeLoader, doubled_key

ENV_PREFIX = "KVFERRY__"


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
        faults = (explain(each, key_of(each["loc"]) or "configuration", ClusterConfig) for each in error.errors())
        raise ConfigError("\n".join(faults)) from None
    rules.check(config)
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
