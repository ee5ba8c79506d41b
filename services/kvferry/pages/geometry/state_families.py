"""Models with states of fixed size (Mamba, linear attention), alone or beside attention, by `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvferry.pages.geometry.config_fields import ConfigFields
from kvferry.pages.geometry.layers import LayerGroup

STATE_FAMILIES: Mapping[str, Callable[[ConfigFields, int], tuple[LayerGroup, ...]]] = {}
