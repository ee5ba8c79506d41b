"""The image process: renders chats with images as vLLM does, each in a fork (`python -m`, with ForkLimits as JSON).

Its standard input is the connection to the process that asks.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import functools
import gc
import io
import json
import os
import signal
import socket
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvferry.config import ModelConfig
from kvferry.engine.forks import ForkLimits, ForkServer, is_of_memory
from kvferry.engine.image_chats import (
    AskedImage,
    ImageChat,
    ImageSettings,
    PlacedImage,
    PreparedImage,
    PromptUpdate,
    RefusedChat,
    RenderedChat,
    require_few_bytes,
)
from kvferry.engine.vllm.rendering.image_features import decode_features, encode_features
from kvferry.engine.vllm.rendering.vllm_prompts import VllmPrompts
from kvferry.errors import EngineError, InvalidRequest, KvferryError

NICENESS = 5  # its start takes seconds of CPU, which streams need; forks are nicer still

# Whatever a file is called, these decoders alone read it; of an animation the first frame.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")

_MODALITY = "image"
# Begins vLLM's text of what a model's processor raised; then come its class and the images' `repr`.
_PROCESSOR_FAILED = "Failed to apply "
_MAX_NAMED = 4  # images that an error names


class ImagePrompts:
    """vLLM's renderer and the model's processor. Renders one chat in each fork of its process."""

    def __init__(self, prompts: VllmPrompts, settings: ImageSettings) -> None:
        self._prompts = prompts
        self._settings = settings
        self._input: Mapping[str, Any] | None = None
        # vLLM would encode features as text, and without the mask of a placeholder's tokens.
        prompts.serving._extract_mm_features = self._take_input

    def render(self, payload: bytes) -> bytes:
        """Return a RenderedChat or a RefusedChat for an ImageChat."""
        try:
            answer: RenderedChat | RefusedChat = self._render(msgspec.msgpack.decode(payload, type=ImageChat))
        except KvferryError as error:
            answer = RefusedChat(error.code or "", error.message, error.param)
        return msgspec.msgpack.encode(answer)

    def _render(self, chat: ImageChat) -> RenderedChat:
        cache = self._prompts.online.renderer._mm_processor_only_cache
        for image in chat.images:
            if image.prepared is None:
                check_header(image.data, image.where, self._settings.max_pixels)
            else:
                cache.get_and_update_item(_cached(image.prepared), image.digest)
        body = json.loads(chat.body)
        _fill_parts(body["messages"], chat.images)
        try:
            rendered = asyncio.run(self._prompts.chat(body))
        except InvalidRequest as error:
            if is_of_memory(error):
                raise MemoryError from None
            # vLLM does not say which image it cannot decode.
            new = [image for image in chat.images if image.prepared is None]
            for image in new:
                check_decodes(image.data, image.where)
            if new and error.message.startswith(_PROCESSOR_FAILED):
                raise _not_taken(new) from None
            raise
        if self._input is None or self._input["type"] != "multimodal" or set(self._input["mm_kwargs"]) != {_MODALITY}:
            raise EngineError("vLLM rendered a chat with images without them")
        placed = self._placed(chat.images, rendered.token_ids)
        return RenderedChat(array("I", rendered.token_ids).tobytes(), rendered.sampling, rendered.parse, placed)

    def _take_input(self, engine_input: Mapping[str, Any], **_: Any) -> None:
        self._input = engine_input

    def _placed(self, images: Sequence[AskedImage], token_ids: Sequence[int]) -> tuple[PlacedImage, ...]:
        assert self._input is not None
        items, ranges = self._input["mm_kwargs"][_MODALITY], self._input["mm_placeholders"][_MODALITY]
        digests = self._input["mm_hashes"][_MODALITY]
        if digests != [image.digest for image in images] or not len(items) == len(ranges) == len(images):
            raise EngineError("vLLM gave other images than it was asked for")
        self._require_no_other_placeholders(token_ids, sum(place.get_num_embeds() for place in ranges))
        cache = self._prompts.online.renderer._mm_processor_only_cache
        placed = []
        num_bytes = 0
        for image, item, place in zip(images, items, ranges, strict=True):
            prepared = None
            if image.prepared is None:
                _, updates = cache.get_and_update_item(None, image.digest)
                prepared = PreparedImage(encode_features(item), tuple(map(_as_update, updates)))
            num_bytes += len((prepared or image.prepared).features)  # type: ignore[union-attr]
            require_few_bytes(num_bytes, self._settings.max_prepared_bytes)
            placed.append(PlacedImage(place.offset, place.length, prepared))
        return tuple(placed)

    def _require_no_other_placeholders(self, token_ids: Sequence[int], num_of_images: int) -> None:
        """Raises InvalidRequest where a text has placeholders: vLLM would put the first images in their place."""
        image_token_id = int(self._prompts.model_config.hf_config.image_token_id)
        if sum(token_id == image_token_id for token_id in token_ids) != num_of_images:
            token = self._prompts.online.renderer.get_tokenizer().convert_ids_to_tokens(image_token_id)
            raise InvalidRequest(
                f"messages: beside images no text may have {token!r}, which marks an image's place for the model",
                param="messages",
            )


def _not_taken(images: Sequence[AskedImage]) -> InvalidRequest:
    # Without the processor's own words, which show objects.
    sizes = [f"{image.where} of {' x '.join(map(str, _size(image.data)))} pixels" for image in images[:_MAX_NAMED]]
    others = f" and {len(images) - len(sizes)} more" if len(images) > len(sizes) else ""
    which = "this image" if len(images) == 1 else "one of these images"
    return InvalidRequest(
        f"the model's image processor does not take {which}: {', '.join(sizes)}{others}",
        param=images[0].where if len(images) == 1 else "messages",
    )


def _size(data: bytes) -> tuple[int, int]:
    from PIL import Image

    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        return image.size


def check_header(data: bytes, where: str, max_pixels: int) -> None:
    """Raises InvalidRequest for another format or too many pixels, without decoding any."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit is checked here
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
    except Exception as error:
        raise InvalidRequest(f"{where}: {_first_line(error)}", param=where) from None
    if width * height > max_pixels:
        raise InvalidRequest(
            f"{where}: {width} x {height} pixels are too many; gateway.images.max_pixels is {max_pixels}", param=where
        )


def check_decodes(data: bytes, where: str) -> None:
    """Raises InvalidRequest."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
    except MemoryError:
        raise
    except Exception as error:
        raise InvalidRequest(f"{where}: the image cannot be decoded: {_first_line(error)}", param=where) from None


def _first_line(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if isinstance(error, UnidentifiedImageError):
        return "not an image that can be read; expected PNG, JPEG, WebP or GIF"
    if "could not create decoder object" in str(error):  # of Pillow's WebP, for both
        return "a damaged WebP file, or one that takes more memory than gateway.images.memory_mib"
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _fill_parts(messages: Sequence[Mapping[str, Any]], images: Sequence[AskedImage]) -> None:
    parts = list(_image_parts(messages))
    if len(parts) != len(images):
        raise EngineError(f"{len(parts)} parts of a chat are images, and {len(images)} were given")
    for part, image in zip(parts, images, strict=True):
        url = None
        if image.prepared is None:
            url = "data:image/unknown;base64," + base64.b64encode(image.data).decode()
        # vLLM takes the identifier for the image's hash, and none for an image that its cache has.
        part.clear()
        part.update(type="image_url", image_url={"url": url} if url else None, uuid=image.digest)


def _image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            yield from (part for part in content if part["type"] == "image_url")


def _as_update(update: Any) -> PromptUpdate:
    content = update.content
    if not isinstance(update.target, list):
        raise EngineError("this model's placeholders depend on their place in the prompt, which is untested")
    mask = None if content.is_embed is None else bytes(content.is_embed(content.full).tolist())
    return PromptUpdate(update.mode.value, tuple(update.target), tuple(content.full), mask)


def _cached(prepared: PreparedImage) -> tuple[Any, list[Any]]:
    from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode

    updates = []
    for update in prepared.updates:
        is_embed = None if update.has_features is None else functools.partial(_mask, update.has_features)
        content = PromptUpdateDetails(list(update.content), is_embed)
        updates.append(ResolvedPromptUpdate(_MODALITY, 0, UpdateMode(update.mode), list(update.target), content))
    return decode_features(prepared.features), updates


def _mask(has_features: bytes, _: Sequence[int]) -> Any:
    import torch

    return torch.tensor(list(has_features), dtype=torch.bool)


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare images for a gateway.")
    parser.add_argument("--model-folder", required=True)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--model", required=True, help="the section `model`, as JSON")
    parser.add_argument("--settings", required=True, help="ImageSettings as JSON")
    parser.add_argument("limits")
    arguments = parser.parse_args()
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches it too; it ends with the gateway
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    prompts = VllmPrompts(
        arguments.model_folder, arguments.served_name, ModelConfig.model_validate_json(arguments.model)
    )
    images = ImagePrompts(prompts, msgspec.json.decode(arguments.settings, type=ImageSettings))
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page that it marks
    with socket.socket(fileno=os.dup(0)) as connection:
        limits = msgspec.json.decode(arguments.limits, type=ForkLimits)
        ForkServer(connection, images.render, limits).run()


if __name__ == "__main__":
    main()
