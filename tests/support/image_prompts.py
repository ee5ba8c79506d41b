"""Prompts with images, and their answers by vLLM alone.

    python -m support.image_prompts MODEL_FOLDER FILE

writes them to FILE as JSON: vLLM's own offline engine, without kvferry and without a prefix cache, processes the images
and computes the answers. It runs in a process of its own, because its settings are not those of kvferry's engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvferry.engine.base import PromptImage

MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
NUM_TOKENS = 24  # of an answer

# By name: texts and images in their order; an image is a name of `_images`.
PROMPTS: dict[str, list[str]] = {
    "one": ["hello " * 45, "<noise>", " What is this?"],
    "other": ["hello " * 45, "<grey>", " What is this?"],
    "first": ["", "<noise>", " Say more."],
    "late": ["word " * 300, "<wide>", " and then the end of it."],
    "two": ["Compare ", "<noise>", " with ", "<wide>", " please."],
    "swapped": ["Compare ", "<wide>", " with ", "<noise>", " please."],
    "twice": ["See ", "<grey>", " and ", "<grey>", " again, side by side."],
    "together": ["Two: ", "<noise>", "", "<grey>", " done."],
    "text": ["no image in this one, only words " * 9],
}


@dataclass(frozen=True)
class ImagePrompt:
    token_ids: list[int]
    images: tuple[PromptImage, ...]
    answer: list[int]


def image_prompts(model_folder: Path, scratch: Path) -> dict[str, ImagePrompt]:
    """Return PROMPTS as vLLM renders and answers them."""
    file = scratch / "image_prompts.json"
    command = [sys.executable, "-m", "support.image_prompts", str(model_folder), str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"the reference engine failed: {done.stderr[-4000:]}")
    values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {
        name: ImagePrompt(
            value["token_ids"],
            tuple(PromptImage(digest, offset, num, b64decode(raw)) for digest, offset, num, raw in value["images"]),
            value["answer"],
        )
        for name, value in values.items()
    }


def _images() -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    seeded = np.random.default_rng(3)

    def noise(height: int, width: int) -> Any:
        return Image.fromarray(seeded.integers(0, 255, (height, width, 3), dtype=np.uint8))

    return {
        "<noise>": noise(90, 100),
        "<grey>": Image.fromarray(np.full((90, 100, 3), 60, dtype=np.uint8)),
        "<wide>": noise(30, 120),
    }


def _write(model_folder: str, file: Path) -> None:
    from vllm import LLM, SamplingParams

    from bench.tiny_models import IMAGE_TOKEN
    from kvferry.engine.vllm.image_features import encode_features

    llm = LLM(
        model_folder,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        disable_log_stats=True,
    )
    images, values = _images(), {}
    for name, parts in PROMPTS.items():
        of_prompt = [images[part] for part in parts if part in images]
        text = "".join(IMAGE_TOKEN if part in images else part for part in parts)
        prompt: dict[str, Any] = {"prompt": text}
        if of_prompt:
            prompt["multi_modal_data"] = {"image": of_prompt}
        (rendered,) = llm.renderer.render_cmpl([prompt])
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False
        )
        values[name] = {
            "token_ids": list(rendered["prompt_token_ids"]),
            "images": [
                (sha256(features).hexdigest(), place.offset, place.length, b64encode(features).decode())
                for place, features in zip(
                    rendered["mm_placeholders"]["image"],
                    map(encode_features, rendered["mm_kwargs"]["image"]),
                    strict=True,
                )
            ]
            if of_prompt
            else [],
            "answer": list(output.outputs[0].token_ids),
        }
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
