"""Trial of a part without a device: its programs, its configuration as vLLM reads it, its command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.engine_device import OF_ROLE, Role, engine_config, model_config
from bench.gpu_check.parts import Part
from bench.gpu_check.runner import ROOT, import_path
from kvferry.engine.base import EngineId
from kvferry.engine.vllm.start.arguments import engine_arguments, kv_transfer_config

LIMIT_S = 120.0
_MAX_OUTPUT_CHARS = 800


def faults_of(part: Part, folder: Path) -> list[str]:
    """Return what would keep a part from running on a machine with its GPUs; `folder` is for what it writes."""
    return [f"{part.name}: {fault}" for fault in (*_configuration(part), *_command(part, folder))]


def _configuration(part: Part) -> Iterator[str]:
    for role in OF_ROLE:
        try:
            with _environment(part):
                arguments = vllm_arguments(role)
        except Exception as error:  # of pydantic, of kvferry's lists, or of vLLM's parser
            yield f"the configuration of its {role} engine: {type(error).__name__}: {str(error)[:_MAX_OUTPUT_CHARS]}"
            continue
        device = arguments["kv_transfer_config"].get("kv_buffer_device")
        if device != "cuda":
            yield f"NIXL of its {role} engine registers memory of {device!r}"


def vllm_arguments(role: Role) -> dict[str, Any]:
    """Return an engine's arguments, of which vLLM has made its own. Raises what it raises."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    engine = engine_config(role)
    transfer = kv_transfer_config(engine, EngineId("0" * 32), producer=role == "prefill", weights="w" * 32, tiers=None)
    arguments = engine_arguments(
        "model",
        model_config(path="model", max_model_len=2048),
        engine,
        kv_transfer=transfer,
        events_endpoint="tcp://127.0.0.1:1",
        replay_endpoint="tcp://127.0.0.1:2",
        has_tenants=True,
    )
    made = AsyncEngineArgs(**arguments)
    assert made.tensor_parallel_size == engine.tensor_parallel_size
    return arguments


@contextmanager
def _environment(part: Part) -> Iterator[None]:
    before = dict(os.environ)
    # vLLM's wheel for GPUs reads no arguments where it finds no device.
    os.environ.update({**part.environment(), "VLLM_TARGET_DEVICE": "cpu"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _command(part: Part, folder: Path) -> Iterator[str]:
    try:
        done = subprocess.run(
            [sys.executable, *part.dry_arguments(str(folder))],
            cwd=ROOT,
            env=os.environ | part.environment() | {"PYTHONPATH": import_path()},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield f"its command does nothing for {LIMIT_S:g} s"
        return
    if done.returncode:
        said = " | ".join((done.stdout + done.stderr).split("\n"))[-_MAX_OUTPUT_CHARS:]
        yield f"its command ends with {done.returncode} before it needs a device: {said}"
