from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.residency.index import Found, Holder, ResidencyIndex, Tier

PROMPT = list(range(1000, 1040))


def gpu(owner: str) -> Holder:
    return Holder(owner, Tier.GPU)


def cpu(owner: str) -> Holder:
    return Holder(owner, Tier.CPU)


def volume(owner: str) -> Holder:
    return Holder(owner, Tier.VOLUME)


def depth_by_counting(held: frozenset[int], keys: list[int], start: int = 0) -> int:
    depth = start
    while depth < len(keys) and keys[depth] in held:
        depth += 1
    return depth


@given(st.lists(st.integers(0, len(PROMPT)), min_size=1, max_size=40))
@settings(deadline=None)
def test_depths_of_holders_of_prefixes_are_exact(depths: list[int]) -> None:
    index = ResidencyIndex()
    for i, depth in enumerate(depths):
        index.store(gpu(f"w{i}"), PROMPT[:depth])
        index.store(gpu(f"w{i}"), [i])  # and something else
    assert index.find(PROMPT).gpu == {f"w{i}": depth for i, depth in enumerate(depths) if depth}
    index.check()


@given(st.integers(0, 1 << 32))
@settings(deadline=None)
def test_a_depth_ends_at_a_page_that_is_held_before_one_that_is_not_whatever_the_holes(seed: int) -> None:
    seeded = random.Random(seed)
    index = ResidencyIndex()
    density = seeded.random()
    for i in range(8):
        index.store(gpu(f"w{i}"), [key for key in PROMPT if seeded.random() < density])
    found = index.find(PROMPT).gpu
    for i in range(8):
        held = index.keys_of(gpu(f"w{i}"))
        depth = found.get(f"w{i}", 0)
        exact = depth_by_counting(held, PROMPT)
        assert depth >= exact
        if depth:
            assert PROMPT[depth - 1] in held
            assert depth == len(PROMPT) or PROMPT[depth] not in held


@given(st.integers(0, 1 << 32))
@settings(deadline=None)
def test_the_cpu_tier_continues_what_the_gpu_holds(seed: int) -> None:
    seeded = random.Random(seed)
    index = ResidencyIndex()
    expected = Found()
    for i in range(8):
        on_gpu = seeded.randrange(len(PROMPT) + 1)
        begin = seeded.randrange(len(PROMPT) + 1)
        end = seeded.randrange(begin, len(PROMPT) + 1)
        index.store(gpu(f"w{i}"), PROMPT[:on_gpu])
        index.store(cpu(f"w{i}"), PROMPT[begin:end])
        if on_gpu:
            expected.gpu[f"w{i}"] = on_gpu
        if begin <= on_gpu < end:
            expected.cpu[f"w{i}"] = end
    assert index.find(PROMPT) == expected


@given(num_pages=st.integers(0, 40), num_held=st.integers(0, 40), blocks_per_chunk=st.integers(1, 9))
def test_a_page_of_a_volume_may_stand_for_several(num_pages: int, num_held: int, blocks_per_chunk: int) -> None:
    index = ResidencyIndex()
    prompt = list(range(1000, 1000 + num_pages))
    index.set_blocks_per_chunk("coarse", blocks_per_chunk)
    index.store(volume("coarse"), [1000 + (i + 1) * blocks_per_chunk - 1 for i in range(num_held)])
    index.store(volume("fine"), prompt[:5])
    depths = {"coarse": min(num_held, num_pages // blocks_per_chunk) * blocks_per_chunk, "fine": min(5, num_pages)}
    assert index.find(prompt).volumes == {owner: depth for owner, depth in depths.items() if depth}


def test_blocks_per_chunk_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="blocks_per_chunk is 0"):
        ResidencyIndex().set_blocks_per_chunk("v", 0)


def test_volumes_are_found_beside_workers() -> None:
    index = ResidencyIndex()
    index.store(volume("v"), PROMPT[:7])
    index.store(gpu("w"), PROMPT[:2])
    assert index.find(PROMPT) == Found({"w": 2}, {}, {"v": 7})
    assert index.find([]) == Found()
    assert index.find([1]) == Found()


@given(st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=50)
def test_any_order_of_changes_leaves_what_a_plain_dictionary_of_sets_holds(seed: int) -> None:
    seeded = random.Random(seed)
    index = ResidencyIndex()
    model: dict[Holder, set[int]] = {}
    holders = [make(name) for make in (gpu, cpu) for name in ("a", "b")] + [volume("v")]
    for _ in range(60):
        holder = seeded.choice(holders)
        keys = seeded.sample(range(30), seeded.randrange(8))
        match seeded.randrange(10):
            case 0:
                index.clear(holder)
                model.pop(holder, None)
            case 1:
                index.drop_holder(holder.owner)
                model = {other: held for other, held in model.items() if other.owner != holder.owner}
            case 2:
                index.clear(holder)
                index.store(holder, keys)
                model[holder] = set(keys)
            case 3 | 4 | 5:
                index.remove(holder, keys)
                model.get(holder, set()).difference_update(keys)
            case _:
                index.store(holder, keys)
                model.setdefault(holder, set()).update(keys)
        index.check()
        assert {holder: set(index.keys_of(holder)) for holder in index.holders()} == {
            holder: held for holder, held in model.items() if held
        }
        assert index.num_pages == sum(map(len, model.values()))


def test_a_holder_without_the_beginning_is_not_credited_with_a_page_it_lacks() -> None:
    index = ResidencyIndex()
    index.store(gpu("a"), PROMPT[:6])
    index.store(gpu("b"), PROMPT[5:7])
    assert index.find(PROMPT).gpu == {"a": 6, "b": 7}
    assert depth_by_counting(index.keys_of(gpu("b")), PROMPT) == 0


def test_storing_and_removing_may_be_repeated() -> None:
    index = ResidencyIndex()
    for _ in range(2):
        index.store(gpu("w"), PROMPT)
    assert index.num_pages == len(PROMPT)
    for _ in range(2):
        index.remove(gpu("w"), PROMPT)
    assert index.num_pages == 0
    assert index.holders() == []
    index.drop_holder("nobody")


@pytest.mark.parametrize("num_pages", [20_000, 40_000, 100_000])
def test_the_memory_of_a_page(num_pages: int) -> None:
    seeded = random.Random(1)
    index = ResidencyIndex()
    tracemalloc.start()
    index.store(gpu("w"), (seeded.getrandbits(64) for _ in range(num_pages)))
    taken, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 75 <= taken / num_pages <= 145, (
        "the figures in residency/index.py and docs/contributor/architecture/routing.md"
    )


def test_check_names_what_is_broken() -> None:
    index = ResidencyIndex()
    index.store(gpu("w"), [1 << 64])
    with pytest.raises(AssertionError, match="w holds"):
        index.check()
