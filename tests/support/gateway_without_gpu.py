"""A gateway's renderer with the packages of the GPU image, on a node without a GPU: `python -m`, for some folders.

vLLM's wheel for GPUs is imitated by what its platforms read of it: a version without `cpu`. Its real wheel gave the
same answers to BODIES (`docs/operator/gpu.md`).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from kvferry import config as configuration
from kvferry.engine import fork_process
from kvferry.engine.vllm.rendering.text_model import use_cpu_platform
from kvferry.gateway.lifecycle import build_renderer
from support.child_imports import import_environment
from support.waiting import PATIENCE_S

VERSION = "0.32.0"

_TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}
_MESSAGES = [{"role": "user", "content": "When is high tide?"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": _MESSAGES, "max_tokens": 3},
    "tools": {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "auto"},
    "required tool": {"messages": _MESSAGES, "tools": [_TOOL], "tool_choice": "required"},
    "completion": {"prompt": "High tide is at", "max_tokens": 3},
    "grammar": {"prompt": "High tide is at", "structured_outputs": {"regex": "[0-9]{2}:[0-9]{2}"}},
    "wrong grammar": {"prompt": "High tide is at", "structured_outputs": {"grammar": "root ::= nothing"}},
}


def environment(packages: Path) -> dict[str, str]:
    """Return an environment in which vLLM is a wheel for GPUs; its metadata are written to the folder `packages`."""
    metadata = packages / f"vllm-{VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n", encoding="ascii")
    values = import_environment()
    values.pop("VLLM_TARGET_DEVICE", None)
    return values | {"PYTHONPATH": os.pathsep.join([str(packages), values["PYTHONPATH"]])}


async def _answer(renderer: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    rendered = [await renderer.render_chat(body)] if "messages" in body else await renderer.render_completion(body)
    return [
        {"tokens": list(one.token_ids), "grammar": one.sampling.structured_outputs, "parsed": one.parse is not None}
        for one in rendered
    ]


async def _answers(folder: str) -> dict[str, Any]:
    values = {"model": {"path": folder, "tool_parser": "hermes", "reasoning_parser": "qwen3"}}
    renderer = await asyncio.to_thread(build_renderer, configuration.parse(values), folder)
    renderer.start()
    answers: dict[str, Any] = {}
    for name, body in BODIES.items():
        try:
            answers[name] = await _answer(renderer, body)
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    await renderer.close()
    return answers


def main() -> None:
    """Print the answers of each folder's renderer, as JSON on one line."""
    way, *folders = sys.argv[1:]
    fork_process._SLOW_START_S = float(PATIENCE_S)
    if way == "gateway":
        use_cpu_platform()
    for folder in folders:
        print(json.dumps(asyncio.run(_answers(folder))), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # vLLM's renderer leaves threads
