"""vLLM's resolved configuration of an engine, without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.config import EngineConfig, ModelConfig


def vllm_config_of(folder: Path, model: ModelConfig | None = None, engine: EngineConfig | None = None) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kvferry.engine.vllm.rendering.text_model import hf_overrides, inspect_models_in_this_process
    from kvferry.engine.vllm.start.arguments import engine_arguments

    inspect_models_in_this_process()
    model = model or ModelConfig()
    arguments = engine_arguments(
        str(folder),
        model,
        engine or EngineConfig(),
        kv_transfer={"kv_role": "kv_consumer"},
        events_endpoint="ipc:///tmp/a",
        replay_endpoint="ipc:///tmp/b",
        hf_overrides=hf_overrides(str(folder), model),
    )
    for name in ("kv_transfer_config", "kv_events_config", "worker_extension_cls"):
        arguments.pop(name)
    return AsyncEngineArgs(**arguments).create_engine_config()
