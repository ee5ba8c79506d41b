"""bench/real_rendering.py: bodies of bench-isolation at a gateway's real renderer, before simulated engines."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench import abuse_bodies as bodies
from bench.real_rendering import real_rendering
from kvferry import config as configuration
from kvferry.engine.base import ChatImage, RenderedPrompt, Renderer
from kvferry.errors import ContextLengthExceeded, InvalidRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("without_wall_limits"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def renderer(tmp_path_factory: pytest.TempPathFactory, without_wall_limits: None) -> AsyncIterator[Renderer]:
    folder: Path = tmp_path_factory.mktemp("rendering") / "model"
    make = await asyncio.to_thread(real_rendering, folder, bodies.CONTEXT)
    made = await asyncio.to_thread(make, configuration.parse({"engine": {"kind": "sim"}}), "")
    made.start()
    yield made
    await made.close()


async def render(renderer: Renderer, body: Mapping[str, Any]) -> RenderedPrompt:
    if "prompt" in body:
        (prompt,) = await renderer.render_completion(body)
        return prompt
    (message,) = body["messages"]
    text, image = message["content"]
    file = base64.b64decode(image["image_url"]["url"].partition(",")[2])
    parts = [text, {"type": "image_url"}]
    return await renderer.render_chat(
        {**body, "messages": [{**message, "content": parts}]}, [ChatImage(file, "messages[0].content[1]")]
    )


@pytest.mark.parametrize("body", [bodies.small_grammar, bodies.small_image, bodies.text, bodies.many_objects])
async def test_simulated_engines_take_what_is_rendered(renderer: Renderer, body: bodies.Body) -> None:
    assert renderer.max_model_len() == bodies.CONTEXT
    prompt = await render(renderer, body(1))
    assert (prompt.sampling.structured_outputs, prompt.images) == ("", ())
    assert len(prompt.token_ids) < bodies.CONTEXT


async def test_costly_grammars_and_long_texts_are_refused(renderer: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="response_format"):
        await render(renderer, bodies.many_patterns(1))
    with pytest.raises(ContextLengthExceeded):
        await render(renderer, bodies.hostile_text(1))


async def test_an_attackers_image_is_within_the_limits(renderer: Renderer) -> None:
    assert len((await render(renderer, bodies.hostile_image(1))).token_ids) < bodies.CONTEXT
    assert renderer.outcomes.images["prepared"] >= 1
