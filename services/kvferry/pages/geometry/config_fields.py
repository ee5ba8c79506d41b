"""Typed reading of a model's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.errors import ConfigError

# Larger values are no model's, and lists of layers are made of these.
MAX_LAYERS = 4096
_MAX_SIZE = 1 << 32
_MAX_SHOWN = 80  # characters of a value in an error


class ConfigFields:
    """The fields of one model, and its type's defaults for absent ones."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], model_type: str) -> None:
        self._values = values
        self._defaults = defaults
        self.model_type = model_type

    def get(self, *names: str) -> Any:
        """Return the first value that is not null. A field that is null has no default: it stays null in vLLM, too."""
        values = self._values if any(name in self._values for name in names) else self._defaults
        return next((values[name] for name in names if values.get(name) is not None), None)

    def size(self, *names: str, most: int = _MAX_SIZE) -> int:
        """Raises ConfigError unless it is a whole number from 1."""
        value = self.optional_size(*names, most=most)
        if value is None:
            raise ConfigError(f"config.json of model_type {self.model_type!r} lacks {' or '.join(names)}")
        return value

    def optional_size(self, *names: str, most: int = _MAX_SIZE) -> int | None:
        value = self.get(*names)
        if value is None:
            return None
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(whole, bool) or not isinstance(whole, int) or not 1 <= whole <= most:
            named = next(name for name in names if self.get(name) is not None)
            raise self._unusable(named, value, f"a whole number from 1 to {most}")
        return whole

    def count(self, *names: str, most: int = _MAX_SIZE) -> int:
        """Return a size; 0 if absent."""
        return 0 if self.get(*names) == 0 else self.optional_size(*names, most=most) or 0

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._unusable(name, value, "true or false")
        return bool(value)

    def text(self, name: str) -> str:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self._unusable(name, value, "a text")
        return value or ""

    def layer_list(self, name: str, num_layers: int) -> list[Any] | None:
        """Return an entry for each layer, or None."""
        value = self.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) < num_layers
            or not all(isinstance(each, str | int) for each in value)
        ):
            raise self._unusable(name, value, f"a list of {num_layers} entries, a text or number for each layer")
        return value[:num_layers]

    def _unusable(self, name: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(
            f"config.json of model_type {self.model_type!r}: {name} is {str(value)[:_MAX_SHOWN]!r}; expected {expected}"
        )
