"""Prompts with images, and their answers by vLLM alone.

    python -m support.image_prompts MODEL_FOLDER FILE

writes them to FILE as JSON: the reference engine processes the images and computes the answers.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvferry.engine.base import PromptImage
from support import image_reference

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
    values = image_reference.ask(__name__, model_folder, scratch)
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


def _values(engine: Any) -> dict[str, Any]:
    from vllm import SamplingParams

    from bench.tiny_models import IMAGE_TOKEN
    from kvferry.engine.vllm.rendering.image_features import encode_features

    images, values = _images(), {}
    for name, parts in PROMPTS.items():
        of_prompt = [images[part] for part in parts if part in images]
        text = "".join(IMAGE_TOKEN if part in images else part for part in parts)
        prompt: dict[str, Any] = {"prompt": text}
        if of_prompt:
            prompt["multi_modal_data"] = {"image": of_prompt}
        (rendered,) = engine.renderer.render_cmpl([prompt])
        (output,) = engine.generate(
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
    return values


if __name__ == "__main__":
    image_reference.answer(_values, block_size=BLOCK_SIZE)
