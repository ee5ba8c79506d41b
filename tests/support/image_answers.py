"""Chats with images, and their answers by vLLM alone.

    python -m support.image_answers MODEL_FOLDER FILE

writes them to FILE as JSON: the reference engine gets the chats as clients send them.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import image_reference

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
    return {name: ImageAnswer(*value) for name, value in image_reference.ask(__name__, model_folder, scratch).items()}


def _values(engine: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    values = {}
    for name, messages in chats().items():
        (output,) = engine.chat(messages, greedy, use_tqdm=False)
        values[name] = (len(output.prompt_token_ids), output.outputs[0].text)
    return values


if __name__ == "__main__":
    image_reference.answer(_values)
