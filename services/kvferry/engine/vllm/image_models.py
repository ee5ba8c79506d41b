"""Images of prompts for vLLM, and which features the models can compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItem, PlaceholderRange

from kvferry.engine.base import EngineRequest
from kvferry.engine.vllm.rendering.image_features import decode_features
from kvferry.errors import InvalidRequest
from kvferry.pages.keys import ImageSpan

MODALITY = "image"
_SALT_MARK = "@"

# An engine ends, with all its requests, if its vision model gets tensors of other shapes than it was made for.


def check_idefics3(item: MultiModalKwargsItem, config: Any) -> int:
    """Return the number of embeddings. Raises InvalidRequest."""
    data = _tensors(item, {"pixel_values", "pixel_attention_mask", "num_patches"})
    pixels, mask, num_tiles = data["pixel_values"], data["pixel_attention_mask"], data["num_patches"]
    vision = config.vision_config
    size = vision.image_size
    if not pixels.is_floating_point() or tuple(pixels.shape[1:]) != (vision.num_channels, size, size):
        raise _unusable(f"pixel_values {_shown(pixels)}; tiles of {vision.num_channels} x {size} x {size} are needed")
    if num_tiles.is_floating_point() or num_tiles.dim() or int(num_tiles) != len(pixels):
        raise _unusable(f"num_patches {_shown(num_tiles)}; {len(pixels)} tiles came")
    if mask.is_floating_point() or tuple(mask.shape) != (len(pixels), size, size) or not _are_rectangles(mask):
        raise _unusable(
            f"pixel_attention_mask {_shown(mask)}; one rectangle of ones from the corner of each tile is needed"
        )
    if (pixels == 0).flatten(1).all(1).any():
        # vLLM leaves such tiles out.
        raise _unusable("pixel_values with a tile of zeros")
    side = int(size // vision.patch_size // config.scale_factor)
    return len(pixels) * side * side


def check_dtype(item: MultiModalKwargsItem, dtype: torch.dtype) -> None:
    """Raises InvalidRequest for numbers of another type than the model is computed in: they were rounded before."""
    for name, elem in item.items():
        if elem.data.is_floating_point() and elem.data.dtype != dtype:
            raise _unusable(f"{name} {_shown(elem.data)}; this engine computes in {str(dtype).removeprefix('torch.')}")


def _are_rectangles(mask: torch.Tensor) -> bool:
    rows, columns = mask[:, :, 0], mask[:, 0, :]
    return bool(
        (mask == rows[:, :, None] * columns[:, None, :]).all()
        and all(_begins_with_ones(side) for side in (rows, columns))
    )


def _begins_with_ones(side: torch.Tensor) -> bool:
    return bool((side[:, 0] == 1).all() and (side[:, 1:] >= 0).all() and (side[:, 1:] <= side[:, :-1]).all())


def _tensors(item: MultiModalKwargsItem, names: set[str]) -> Mapping[str, torch.Tensor]:
    if set(item) != names:
        raise _unusable(f"{', '.join(sorted(item))[:200]}; {', '.join(sorted(names))} are needed")
    return {name: elem.data for name, elem in item.items()}


def _shown(tensor: torch.Tensor) -> str:
    return f"of {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _unusable(what: str) -> InvalidRequest:
    return InvalidRequest(f"features of an image cannot be used: {what}")


# By the architectures of model_kinds.py.
CHECKS: Mapping[str, Callable[[MultiModalKwargsItem, Any], int]] = {"Idefics3ForConditionalGeneration": check_idefics3}


def image_prompt(request: EngineRequest, model_config: Any) -> dict[str, Any]:
    """Return vLLM's input, and remove the request's features. Raises InvalidRequest."""
    # An image without features has no data: its pages come from another engine (plugins/absent_images.py).
    check = CHECKS.get(model_config.architecture)
    if check is None:
        raise InvalidRequest("this model takes no images", param="messages")
    config = model_config.hf_config
    items: list[MultiModalKwargsItem | None] = []
    places = []
    features = request.features.copy() if request.transfer_params is None else []
    request.features.clear()
    for number, image in enumerate(request.images):
        place = placeholder_range(request.prompt_token_ids, image, config.image_token_id)
        item = decode_features(features[number]) if features else None
        if item is not None:
            num_embeds = check(item, config)
            check_dtype(item, model_config.dtype)
            if num_embeds != place.get_num_embeds():
                raise InvalidRequest(
                    f"image {number} has {place.get_num_embeds()} placeholder tokens, and features for {num_embeds}"
                )
        items.append(item)
        places.append(place)
    prompt: dict[str, Any] = mm_input(
        list(request.prompt_token_ids),
        {MODALITY: items},
        {MODALITY: [image_identifier(image.digest, request.page_salt) for image in request.images]},
        {MODALITY: places},
        cache_salt=request.page_salt or None,
    )
    return prompt


def image_identifier(digest: str, salt: str) -> str:
    """Return vLLM's name for an image: its encoder's output is kept under that name, for requests of the same salt."""
    # vLLM keeps these outputs without regard to salts: time would tell a tenant which images others sent.
    return f"{digest}{_SALT_MARK}{sha256(salt.encode()).hexdigest()[:32]}"


def digest_in(identifier: str) -> str:
    return identifier.rpartition(_SALT_MARK)[0] or identifier


def placeholder_range(token_ids: Sequence[int], image: ImageSpan, image_token_id: int) -> PlaceholderRange:
    # Tokens beside the embeddings separate tiles.
    is_embed = torch.tensor([token_id == image_token_id for token_id in token_ids[image.offset : image.end]])
    return PlaceholderRange(image.offset, image.num_tokens, None if is_embed.all() else is_embed)
