"""engine/vllm/rendering/image_features.py and engine/vllm/image_models.py"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.engine.base import EngineRequest, RequestId, Sampling
from kvferry.errors import InvalidRequest
from kvferry.pages.keys import ImageSpan

pytestmark = pytest.mark.vllm

torch = pytest.importorskip("torch")

VISION = SimpleNamespace(num_channels=3, image_size=8, patch_size=2)
MODEL = SimpleNamespace(
    architecture="Idefics3ForConditionalGeneration",
    hf_config=SimpleNamespace(vision_config=VISION, scale_factor=2, image_token_id=9),
    dtype=torch.float32,
)
TILE_TOKENS = 4


def item(num_tiles: int = 2, **changes: Any) -> Any:
    """Return features as vLLM's processor makes them, in a prompt with another image before."""
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalFieldElem, MultiModalKwargsItem

    torch.manual_seed(num_tiles)
    tensors = {
        "pixel_values": torch.rand(num_tiles, 3, 8, 8) + 0.1,
        "pixel_attention_mask": torch.ones(num_tiles, 8, 8, dtype=torch.int64),
        "num_patches": torch.tensor(num_tiles),
    } | changes
    sizes = torch.tensor([5, num_tiles])
    flat = MultiModalFieldConfig.flat_from_sizes("image", sizes).field
    batched = MultiModalFieldConfig.batched("image", keep_on_cpu=True).field
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(data=tensor, field=batched if name == "num_patches" else flat)
            for name, tensor in tensors.items()
        }
    )


def encoded(**changes: Any) -> bytes:
    from kvferry.engine.vllm.rendering.image_features import encode_features

    return encode_features(item(**changes))


def decoded(raw: bytes) -> Any:
    from kvferry.engine.vllm.rendering.image_features import decode_features

    return decode_features(raw)


def prompt(features: bytes, num_tiles: int = 2) -> Any:
    """Return vLLM's input of a prompt in which a token between two tiles is no embedding."""
    from kvferry.engine.vllm.image_models import image_prompt

    tokens = [8, *[9] * (TILE_TOKENS * (num_tiles - 1)), 7, *[9] * TILE_TOKENS, 8]
    request = EngineRequest(
        RequestId("r"),
        tokens,
        Sampling(max_tokens=1),
        cache_salt="salt",
        images=(ImageSpan("digest", 1, len(tokens) - 2),),
        features=[features] if features else [],
    )
    made = image_prompt(request, MODEL)
    assert request.features == [], "whoever holds the request holds no features any more"
    return made


def test_features_come_back_as_they_were() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        original = item(pixel_values=torch.rand(2, 3, 8, 8).to(dtype))
        back = decoded(encoded(pixel_values=original["pixel_values"].data))
        assert {name: elem.data.dtype for name, elem in back.items()} == {
            name: elem.data.dtype for name, elem in original.items()
        }
        for name, elem in original.items():
            assert torch.equal(back[name].data, elem.data), name
            assert type(back[name].field) is type(elem.field)
            assert back[name].field.keep_on_cpu == elem.field.keep_on_cpu


def test_whole_numbers_that_fit_take_a_byte_each_and_others_come_back_too() -> None:
    large = torch.full((2, 8, 8), 256, dtype=torch.int64)
    assert len(encoded(pixel_attention_mask=large)) > len(encoded()) + 7 * 2 * 8 * 8 - 64
    for values in (large, -large, large - 1, torch.zeros(2, 8, 8, dtype=torch.int64)):
        assert torch.equal(decoded(encoded(pixel_attention_mask=values))["pixel_attention_mask"].data, values)


def test_vllm_joins_decoded_images_of_several_requests() -> None:
    from vllm.multimodal.utils import group_and_batch_mm_items

    one, other = item(2), item(3)
    ((num_items, batch),) = group_and_batch_mm_items([decoded(encoded()), decoded(encoded(num_tiles=3))])
    assert num_items == 2
    assert torch.equal(batch["pixel_values"], torch.cat([each["pixel_values"].data for each in (one, other)]))
    assert batch["num_patches"].tolist() == [2, 3]


def test_an_image_too_large_is_refused_by_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine.vllm.rendering import image_features

    raw = encoded()
    monkeypatch.setattr(image_features, "MAX_FEATURES_BYTES", len(raw))
    assert encoded() == raw
    decoded(raw)
    monkeypatch.setattr(image_features, "MAX_FEATURES_BYTES", len(raw) - 1)
    with pytest.raises(InvalidRequest, match=f"have {len(raw)} bytes; {len(raw) - 1} is the limit"):
        decoded(raw)
    monkeypatch.setattr(image_features, "MAX_FEATURES_BYTES", 1000)
    with pytest.raises(InvalidRequest, match="1000 is the limit"):
        encoded()


def test_damaged_bytes_are_refused_or_are_other_numbers() -> None:
    """No byte makes vLLM fail, or gives tensors of another shape."""
    raw, seeded, num_refused = encoded(), random.Random(1), 0
    for _ in range(3000):
        spoiled = bytearray(raw)
        for _ in range(seeded.choice((1, 1, 8))):
            spoiled[seeded.randrange(len(spoiled))] = seeded.randrange(256)
        if seeded.random() < 0.3:
            del spoiled[seeded.randrange(len(spoiled)) :]
        try:
            made = prompt(bytes(spoiled) or b"x")
        except InvalidRequest:
            num_refused += 1
        else:
            (image,) = made["mm_kwargs"]["image"]
            assert image["pixel_values"].data.shape == (2, 3, 8, 8)
    assert num_refused > 1000


def changed(**values: Any) -> bytes:
    """Return encoded features with other values in one tensor's description."""
    tree = msgspec.msgpack.decode(encoded())
    element = tree["pixel_values"]
    for name, value in values.items():
        if name in ("dtype", "shape", "data"):
            element["data"][("dtype", "shape", "data").index(name)] = value
        else:
            element["field"] = value
    return msgspec.msgpack.encode(tree)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (lambda: b"", "cannot be read"),
        (lambda: msgspec.msgpack.encode([1]), "cannot be read"),
        (lambda: b"\x91" * 100_000, "cannot be read"),
        (lambda: msgspec.msgpack.encode({}), "have 0 tensors"),
        (lambda: changed(dtype="load"), "has type 'load'"),
        (lambda: changed(dtype="complex64"), "has type 'complex64'"),
        (lambda: changed(shape=[2, 3, 8, 9]), "its shape 1728"),
        (lambda: changed(shape=[2**62, 4, 2**62]), "dimensions that no image has"),
        (lambda: changed(shape=[0, 2**40]), "dimensions that no image has"),
        (lambda: changed(shape=[1] * 9), "9 dimensions"),
        (lambda: changed(data=msgspec.msgpack.Ext(1, bytes(1536))), "has 1536 bytes"),
        (lambda: changed(data=0), "cannot be read"),
        (lambda: changed(field=["__init__", {}]), "kind '__init__'"),
        (lambda: changed(field=["shared", {"batch_size": 1, "keep_on_cpu": False}]), "kind 'shared'"),
        (lambda: changed(field=["flat", {"slices": [[0, 3, None]], "dim": 0, "keep_on_cpu": False}]), "kind 'flat'"),
    ],
)
def test_hostile_bytes_are_refused_with_their_fault(raw: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        decoded(raw())


def test_vllms_input_has_the_image_at_its_tokens() -> None:
    from kvferry.engine.vllm.image_models import image_identifier

    made = prompt(encoded())
    assert (made["type"], made["cache_salt"]) == ("multimodal", "salt")
    assert made["mm_hashes"] == {"image": [image_identifier("digest", "salt")]}
    (place,) = made["mm_placeholders"]["image"]
    assert (place.offset, place.length, place.get_num_embeds()) == (1, 9, 8)
    assert prompt(b"")["mm_kwargs"] == {"image": [None]}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pixel_values": torch.rand(2, 3, 8, 6)}, "tiles of 3 x 8 x 8"),
        ({"pixel_values": torch.ones(2, 3, 8, 8, dtype=torch.int64)}, "of int64"),
        (
            {"pixel_values": torch.ones(2, 3, 8, 8, dtype=torch.bfloat16)},
            "bfloat16 .*; this engine computes in float32",
        ),
        ({"pixel_values": torch.rand(3, 3, 8, 8)}, "3 tiles came"),
        ({"pixel_values": torch.cat([torch.rand(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)])}, "a tile of zeros"),
        ({"num_patches": torch.tensor(3)}, "2 tiles came"),
        ({"num_patches": torch.tensor([2])}, "2 tiles came"),
        ({"pixel_attention_mask": torch.ones(2, 8, 7, dtype=torch.int64)}, "one rectangle"),
        ({"pixel_attention_mask": torch.zeros(2, 8, 8, dtype=torch.int64)}, "one rectangle"),
        ({"pixel_attention_mask": torch.eye(8, dtype=torch.int64).repeat(2, 1, 1)}, "one rectangle"),
        ({"more": torch.ones(2)}, "num_patches, pixel_attention_mask, pixel_values are needed"),
        ({"num_tiles": 3}, "has 8 placeholder tokens, and features for 12"),
    ],
)
def test_features_that_would_end_an_engine_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        prompt(encoded(**changes))


def test_every_image_architecture_has_its_check_and_others_take_no_images() -> None:
    from kvferry.engine.vllm.image_models import CHECKS, image_prompt
    from kvferry.engine.vllm.model_kinds import IMAGE_ARCHITECTURES

    assert CHECKS.keys() == IMAGE_ARCHITECTURES
    request = EngineRequest(RequestId("r"), [9, 1], Sampling(max_tokens=1), images=(ImageSpan("digest", 0, 1),))
    with pytest.raises(InvalidRequest, match="takes no images"):
        image_prompt(request, SimpleNamespace(architecture="LlamaForCausalLM"))
