"""A gateway's real renderer, with its lines and processes, before simulated engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from bench.tiny_models import make_image_model
from kvferry.config import ClusterConfig
from kvferry.engine.base import ANYBODY, Asker, ChatImage, RenderedPrompt, Renderer, RenderOutcomes
from kvferry.gateway.lifecycle import build_renderer

IMAGE_MODEL = "idefics3"


class RealRenderer:
    """Renders as for real engines, then leaves out grammars and images, which simulated engines refuse."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    @property
    def takes_images(self) -> bool:
        return self._renderer.takes_images

    @property
    def outcomes(self) -> RenderOutcomes:
        return self._renderer.outcomes

    def max_model_len(self) -> int:
        return self._renderer.max_model_len()

    def start(self) -> None:
        self._renderer.start()

    async def close(self) -> None:
        await self._renderer.close()

    async def render_chat(
        self, body: Mapping[str, Any], images: Sequence[ChatImage] = (), *, asker: Asker = ANYBODY
    ) -> RenderedPrompt:
        return _for_simulation(await self._renderer.render_chat(body, images, asker=asker))

    async def render_completion(self, body: Mapping[str, Any], *, asker: Asker = ANYBODY) -> Sequence[RenderedPrompt]:
        return [_for_simulation(one) for one in await self._renderer.render_completion(body, asker=asker)]


def _for_simulation(prompt: RenderedPrompt) -> RenderedPrompt:
    return structs.replace(prompt, sampling=structs.replace(prompt.sampling, structured_outputs=""), images=())


def real_rendering(folder: Path, context: int) -> Callable[[ClusterConfig, str], Renderer]:
    """Write a tiny model with images into `folder` and return what makes a gateway's renderer of it.

    `context` is in tokens, at most that of the simulated engines.
    """
    make_image_model(IMAGE_MODEL, folder)
    config_file = folder / "config.json"
    values = json.loads(config_file.read_text(encoding="utf-8"))
    values["text_config"]["max_position_embeddings"] = context
    config_file.write_text(json.dumps(values), encoding="utf-8")

    def make_renderer(config: ClusterConfig, _: str) -> Renderer:
        engine = config.engine.model_copy(update={"kind": "vllm"})
        return RealRenderer(build_renderer(config.model_copy(update={"engine": engine}), str(folder)))

    return make_renderer
