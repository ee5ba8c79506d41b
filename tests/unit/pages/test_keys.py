from __future__ import annotations

import random
import struct
from array import array

import pytest
import xxhash

from kvferry.pages.keys import (
    ImageSpan,
    pack_keys,
    pack_tokens,
    page_images,
    page_salt,
    route_keys,
    seed_of,
    unpack_keys,
)


def test_keys_are_the_chain_the_module_describes() -> None:
    token_ids = list(range(1, 13))
    expected, parent = [], seed_of("tenant")
    for page in (token_ids[0:4], token_ids[4:8], token_ids[8:12]):
        parent = xxhash.xxh3_64_intdigest(struct.pack("<4I", *page), parent)
        expected.append(parent)
    assert route_keys(token_ids, 4, seed_of("tenant")) == expected


def test_keys_stay_what_they_are() -> None:
    """Gateways and workers of different releases must not name one page twice, nor two pages alike."""
    assert route_keys([1, 2, 3, 4], 2, seed_of("salt")) == [0x891C5EA068B669BC, 0x652BAD70586566E4]


def test_a_key_depends_on_everything_before_it_and_on_the_salt() -> None:
    keys = route_keys([1, 2, 3, 4], 2, seed_of(""))
    assert route_keys([9, 2, 3, 4], 2, seed_of(""))[1] != keys[1]
    assert route_keys([1, 2, 3, 9], 2, seed_of(""))[0] == keys[0]
    assert not set(route_keys([1, 2, 3, 4], 2, seed_of("salt"))) & set(keys)


def test_an_adapter_parts_pages_by_its_name_and_files() -> None:
    salts = [page_salt(salt, adapter) for salt in ("", "s") for adapter in ("", "sql@00", "sql@11", "s@00")]
    assert len(set(salts)) == len(salts)
    assert (page_salt("", ""), page_salt("s", "")) == ("", "s"), "pages of earlier releases are found again"


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 31, 32, 160])
def test_only_full_pages_have_keys(num_tokens: int) -> None:
    assert len(route_keys(list(range(num_tokens)), 16, 0)) == num_tokens // 16


def test_a_chain_can_be_continued_from_any_page() -> None:
    seeded = random.Random(1)
    token_ids = [seeded.randrange(1 << 32) for _ in range(160)]
    keys = route_keys(token_ids, 16, seed_of("s"))
    for cut in range(1, 10):
        assert keys[cut:] == route_keys(token_ids[16 * cut :], 16, keys[cut - 1])


def test_lists_arrays_and_tuples_of_the_same_tokens_have_the_same_keys() -> None:
    token_ids = list(range(64))
    keys = route_keys(token_ids, 16, 7)
    assert route_keys(array("I", token_ids), 16, 7) == keys
    assert route_keys(tuple(token_ids), 16, 7) == keys
    assert route_keys(array("Q", token_ids), 16, 7) == keys
    assert pack_tokens(token_ids) == struct.pack("<64I", *token_ids)


def test_what_is_no_token_id_is_refused() -> None:
    with pytest.raises(OverflowError):
        route_keys([1 << 32] * 16, 16, 0)
    with pytest.raises(OverflowError):
        route_keys([-1] * 16, 16, 0)
    with pytest.raises(ValueError, match="0 tokens"):
        route_keys([1], 0, 0)


def test_keys_travel_as_little_endian_bytes() -> None:
    keys = [0, 1, (1 << 64) - 1]
    assert pack_keys(keys) == struct.pack("<3Q", *keys)
    assert list(unpack_keys(pack_keys(keys))) == keys
    with pytest.raises(ValueError):
        unpack_keys(b"1234567")


def with_images(*images: tuple[str, int, int], num_tokens: int = 40) -> list[int]:
    found = page_images([ImageSpan(*image) for image in images], 8, num_tokens // 8)
    return route_keys(list(range(num_tokens)), 8, seed_of("s"), found)


def test_pages_are_an_images_from_its_first_token_on() -> None:
    plain, one, other = with_images(), with_images(("a", 12, 10)), with_images(("b", 12, 10))
    assert plain[:1] == one[:1] == other[:1], "pages before it are shared"
    assert not set(plain[1:]) & set(one[1:])
    assert not set(one[1:]) & set(other[1:]), "also pages after its last token"
    assert with_images(("a", 12, 10), ("b", 39, 1))[:4] == one[:4]
    assert len({tuple(keys) for keys in (one, with_images(("a", 11, 10)), with_images(("a", 12, 13)))}) == 3


def test_two_images_of_one_page_are_told_apart_by_order_and_place() -> None:
    layouts = [
        (("a", 1, 2), ("b", 4, 2)),
        (("b", 1, 2), ("a", 4, 2)),
        (("a", 1, 2), ("b", 5, 2)),
        (("ab", 1, 2),),
        (("a", 1, 2), ("a", 4, 2)),
    ]
    assert len({with_images(*layout)[0] for layout in layouts}) == len(layouts)


def test_pages_with_images_keep_their_keys() -> None:
    """As test_keys_stay_what_they_are."""
    images = page_images([ImageSpan("digest", 1, 2)], 2, 2)
    assert images == {0: [("digest", 1)], 1: [("digest", -1)]}
    assert route_keys([1, 2, 3, 4], 2, seed_of("salt"), images) == [0x9570C3D07C499214, 0xDEDFA1D6E8FCE723]


def test_an_image_past_the_last_full_page_is_in_no_key() -> None:
    assert with_images(("a", 33, 5), num_tokens=39) == with_images(num_tokens=39)
    assert page_images([ImageSpan("a", 30, 100)], 8, 4) == {3: [("a", 6)]}
