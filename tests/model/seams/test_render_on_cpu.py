"""engine/vllm/renderer.py: a gateway with the wheel for GPUs, on a node without one"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import model_folder

pytestmark = pytest.mark.model

pytest.importorskip("vllm")

# vLLM's wheel for GPUs differs in what its platforms read of its version.
_GATEWAY = """
import asyncio, os, sys
import vllm.platforms
from kvferry.config import ModelConfig
from kvferry.engine.vllm.renderer import VllmRenderer, render_on_cpu

vllm.platforms.vllm_version_matches_substr = lambda text: False
if sys.argv[1] == "mended":
    render_on_cpu()
renderer = VllmRenderer(sys.argv[2], "m", ModelConfig(path=sys.argv[2]))
body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
print("rendered", len(asyncio.run(renderer.render_chat(body)).token_ids), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("way", "quantization"), [("bare", None), ("mended", {"quant_method": "fp8"})])
def test_a_gateway_of_the_gpu_image_starts_on_a_node_without_a_gpu(
    tmp_path: Path, way: str, quantization: dict[str, str] | None
) -> None:
    for file in Path(model_folder.resolve("default")).iterdir():
        if file.name != "config.json":
            (tmp_path / file.name).symlink_to(file)
        else:
            values = json.loads(file.read_text())
            more = {} if quantization is None else {"quantization_config": quantization}
            (tmp_path / file.name).write_text(json.dumps({**values, **more}))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_TARGET_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-c", _GATEWAY, way, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if way == "bare":
        assert done.returncode
        assert "Failed to infer device type" in done.stderr
    else:
        assert "rendered" in done.stdout, done.stderr[-2000:]
