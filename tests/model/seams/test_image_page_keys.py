"""pages/keys.py and engine/vllm/events.py beside vLLM's page hashes"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from kvferry.engine.base import PagesStored
from kvferry.pages.keys import ImageSpan, page_images, route_keys, seed_of

pytestmark = pytest.mark.vllm


BLOCK_SIZE = 8


def layout(seeded: random.Random) -> tuple[list[int], list[ImageSpan], str]:
    """Return a random prompt of few different tokens, images and salts, so that many have pages in common."""
    num_tokens = seeded.randrange(BLOCK_SIZE, 6 * BLOCK_SIZE)
    token_ids = [seeded.choice((7, 7, 7, 8)) for _ in range(num_tokens)]
    images, end = [], 0
    while seeded.random() < 0.7:
        offset = end + seeded.choice((0, 0, 1, 3, BLOCK_SIZE))
        end = offset + seeded.choice((1, 2, 4, BLOCK_SIZE, 2 * BLOCK_SIZE + 3))
        if end > num_tokens:
            break
        images.append(ImageSpan(seeded.choice("ab"), offset, end - offset))
        token_ids[offset:end] = [9] * (end - offset)
    return token_ids, images, seeded.choice(("", "", "salt"))


def vllm_request(token_ids: list[int], images: list[ImageSpan], salt: str) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    from kvferry.engine.vllm.image_models import image_identifier

    init_none_hash(sha256_cbor)
    features = [
        MultiModalFeatureSpec(
            None, "image", image_identifier(image.digest, salt), PlaceholderRange(image.offset, image.num_tokens)
        )
        for image in images
    ]
    return Request(
        "r",
        token_ids,
        SamplingParams(max_tokens=1),
        None,
        mm_features=features,
        cache_salt=salt or None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256_cbor),
    )


def test_pages_have_equal_keys_exactly_where_vllm_has_equal_hashes() -> None:
    seeded = random.Random(5)
    hash_to_key: dict[bytes, int] = {}
    key_to_hash: dict[int, bytes] = {}
    num_shared = 0
    for _ in range(3000):
        token_ids, images, salt = layout(seeded)
        hashes = vllm_request(token_ids, images, salt).block_hashes
        found = page_images(images, BLOCK_SIZE, len(hashes))
        keys = route_keys(token_ids, BLOCK_SIZE, seed_of(salt), found)
        assert len(keys) == len(hashes) == len(token_ids) // BLOCK_SIZE
        for page_hash, key in zip(hashes, keys, strict=True):
            num_shared += page_hash in hash_to_key
            assert hash_to_key.setdefault(page_hash, key) == key, (token_ids, images)
            assert key_to_hash.setdefault(key, page_hash) == page_hash, (token_ids, images)
    assert num_shared > 500
    assert len(hash_to_key) > 500


@pytest.mark.parametrize("adapter", [None, "sql@00"])
def test_events_name_the_images_of_each_page(adapter: str | None) -> None:
    from vllm.distributed.kv_events import BlockStored, KVEventBatch
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, to_event_extra_keys

    from kvferry.engine.vllm.events import _batch

    seeded = random.Random(6)
    for _ in range(200):
        token_ids, images, salt = layout(seeded)
        request, num_pages, index, extra = vllm_request(token_ids, images, salt), len(token_ids) // BLOCK_SIZE, 0, []
        for page in range(num_pages):
            keys, index = generate_block_hash_extra_keys(request, page * BLOCK_SIZE, (page + 1) * BLOCK_SIZE, index)
            extra.append((("lora", adapter), *(keys or ())) if adapter else keys)
        stored = BlockStored(
            block_hashes=list(range(num_pages)),
            parent_block_hash=None,
            token_ids=token_ids[: num_pages * BLOCK_SIZE],
            block_size=BLOCK_SIZE,
            lora_id=1 if adapter else None,
            medium="GPU",
            lora_name=adapter,
            extra_keys=to_event_extra_keys(extra),
        )
        (event,) = _batch(0, msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[stored]))).events
        assert isinstance(event, PagesStored)
        assert event.images == page_images(images, BLOCK_SIZE, num_pages)
        assert event.cache_salt == (salt or None)


def test_outputs_of_the_encoder_are_kept_for_requests_of_the_same_salt() -> None:
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    def asked(salt: str) -> Any:
        return vllm_request([7, 9, 9, 7], [ImageSpan("a", 1, 2)], salt)

    manager = EncoderCacheManager(100)
    first = asked("one tenant's")
    assert not manager.check_and_update_cache(first, 0)
    manager.allocate(first, 0)
    manager.free(first)
    assert not manager.check_and_update_cache(asked("another's"), 0)
    assert not manager.check_and_update_cache(asked(""), 0)
    assert manager.check_and_update_cache(asked("one tenant's"), 0)
