"""Functions that kvferry calls where `engine.kind` is sim; the entry point `kvferry.engines` names this module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.base import Engine, Renderer
from kvferry_sim.engine import SimEngine
from kvferry_sim.renderer import SimRenderer
from kvferry_sim.settings import read_settings


def max_model_len(values: Mapping[str, Any]) -> int:
    """`values` are the section `sim`. Raises ValueError, which names each setting that is wrong."""
    return read_settings(values).max_model_len


def build_engine(
    config: ClusterConfig, engine: EngineConfig, model: str, *, keeper_socket: str, volume_pool: str
) -> Engine:
    return SimEngine(
        model,
        read_settings(config.sim),
        block_size=engine.block_size,
        max_num_seqs=engine.max_num_seqs,
        host=engine.side_channel_host,
        tier=config.tier,
        keeper_socket=keeper_socket,
        volume_pool=volume_pool,
        revision=config.model.revision,
        adapters=config.adapters,
    )


def build_renderer(config: ClusterConfig) -> Renderer:
    model = config.model
    return SimRenderer(
        max_model_len(config.sim), tool_parser=model.tool_parser, reasoning_parser=model.reasoning_parser
    )
