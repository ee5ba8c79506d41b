"""Chats with images, and their answers by vLLM alone.

    python -m support.image_answers MODEL_FOLDER FILE

writes them to FILE as JSON: vLLM's own offline engine, without kvferry and without a prefix cache, gets the chats as
clients send them.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 2048
NUM_TOKENS = 16  # of an answer
LONG = "What do you see? Describe it with all that is in it. " * 8


@dataclass(frozen=True)
class ImageAnswer:
    num_prompt_tokens: int
    text: str


def images() -> dict[str, bytes]:
    """Return files by name, always the same ones."""
    import numpy as np
    from PIL import Image

    seeded = np.random.default_rng(5)
    found = {}
    for name, (kind, height, width) in {"a": ("PNG", 90, 100), "b": ("PNG", 90, 100), "c": ("JPEG", 30, 120)}.items():
        file = io.BytesIO()
        Image.fromarray(seeded.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file, kind)
        found[name] = file.getvalue()
    return found


def chats() -> dict[str, list[dict[str, Any]]]:
    """Return messages by name. "a" and "b" differ in their image alone."""
    urls = {
        name: {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}
        for name, file in images().items()
    }
    text = {"type": "text", "text": LONG}
    return {
        "a": [{"role": "user", "content": [text, urls["a"], {"type": "text", "text": "Say more."}]}],
        "b": [{"role": "user", "content": [text, urls["b"], {"type": "text", "text": "Say more."}]}],
        "c": [{"role": "user", "content": [urls["c"], text]}],
        "two": [{"role": "user", "content": [urls["a"], {"type": "text", "text": " or "}, urls["c"], text]}],
        "turns": [
            {"role": "user", "content": [urls["b"], text]},
            {"role": "assistant", "content": "A picture."},
            {"role": "user", "content": [{"type": "text", "text": "And this?"}, urls["a"], text]},
        ],
        "text": [{"role": "user", "content": LONG}],
    }


def answers_of_vllm(model_folder: Path, scratch: Path) -> dict[str, ImageAnswer]:
    file = scratch / "image_answers.json"
    command = [sys.executable, "-m", "support.image_answers", str(model_folder), str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the reference engine failed: {done.stderr[-4000:]}")
    return {name: ImageAnswer(*value) for name, value in json.loads(file.read_text(encoding="utf-8")).items()}


def _write(model_folder: str, file: Path) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model_folder,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        disable_log_stats=True,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    values = {}
    for name, messages in chats().items():
        (output,) = llm.chat(messages, greedy, use_tqdm=False)
        values[name] = (len(output.prompt_token_ids), output.outputs[0].text)
    file.write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    _write(sys.argv[1], Path(sys.argv[2]))
