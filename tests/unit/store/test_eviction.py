"""Which chunks go next."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.terms import TierContract
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.index.eviction import EvictionPolicy, Lru, TenantRetention
from support.tier_chunks import LAYOUT, chunk

UNIT = 4096


def entry_of(number: int, tenant: str = "a") -> IndexEntry:
    return IndexEntry(LAYOUT.digest, chunk(number, Namespace(tenant)), "local", UNIT)


def anything(_: object) -> bool:
    return True


def store(policy: EvictionPolicy, entry: IndexEntry, now_s: float, room: int = 0) -> list[IndexEntry] | None:
    """Add a chunk where `room` bytes are free; return the victims."""
    victims = policy.select(entry.chunk.namespace.tenant, UNIT, UNIT - room, now_s, anything)
    if victims is None:
        return None
    policy.add(entry, now_s)
    return list(victims)  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "discard"]), st.integers(0, 9))))
def test_the_least_recently_used_goes_first(steps: list[tuple[str, int]]) -> None:
    chunks = [entry_of(number) for number in range(10)]
    lru = Lru()
    model: list[IndexEntry] = []  # first to go, first
    for now_s, (verb, number) in enumerate(steps):
        entry = chunks[number]
        was_there = entry in model
        if was_there:
            model.remove(entry)
        if verb == "add":
            lru.add(entry, now_s)
            model.append(entry)
        elif verb == "touch":
            lru.touch(entry, now_s)
            if was_there:
                model.append(entry)
        else:
            lru.discard(entry)
        assert len(lru) == len(model)
        assert all(each in lru for each in model)
    assert lru.select("a", UNIT, (len(model) + 1) * UNIT, 10.0, anything) is None
    assert lru.select("a", UNIT, len(model) * UNIT, 10.0, anything) == model
    assert not len(lru)


@pytest.mark.parametrize("policy", [Lru(), TenantRetention(4 * UNIT)], ids=["lru", "retention"])
def test_chunks_that_may_not_go_are_left_in_their_place(policy: EvictionPolicy) -> None:
    chunks = [entry_of(number) for number in range(4)]
    for now_s, entry in enumerate(chunks):
        assert store(policy, entry, now_s, room=UNIT) == []
    assert policy.select("a", UNIT, UNIT, 10.0, lambda each: each in chunks[2:]) == [chunks[2]]
    policy.release("a", UNIT)
    assert policy.select("a", UNIT, 2 * UNIT, 10.0, lambda each: each is chunks[1]) is None
    assert policy.select("a", UNIT, UNIT, 10.0, anything) == [chunks[0]]
    policy.release("a", UNIT)
    policy.check()
    assert [each in policy for each in chunks] == [False, True, False, True]


def test_a_floor_survives_a_flood_and_a_cap_holds() -> None:
    policy = TenantRetention(10 * UNIT)
    policy.configure({"a": TierContract(floor=3 * UNIT), "flood": TierContract(cap=5 * UNIT)})
    kept = [entry_of(number) for number in range(3)]
    for entry in kept:
        assert store(policy, entry, 0.0, room=UNIT) == []
    num_used = 3
    for number in range(100, 200):
        victims = store(policy, entry_of(number, "flood"), float(number), room=UNIT if num_used < 10 else 0)
        assert victims is not None
        num_used += 1 - len(victims)
    assert all(entry in policy for entry in kept)
    usages = policy.usages()
    assert (usages["a"].used, usages["flood"].used) == (3 * UNIT, 7 * UNIT)  # the cap bounds what others want
    # A tenant that comes later takes what is over the cap.
    for number in range(300, 302):
        assert [each.chunk.namespace.tenant for each in store(policy, entry_of(number, "b"), 300.0) or ()] == ["flood"]


def test_a_store_beyond_what_may_go_is_refused_and_counted() -> None:
    policy = TenantRetention(4 * UNIT)
    policy.configure({"a": TierContract(floor=4 * UNIT), "b": TierContract(borrow=False)})
    chunks = [entry_of(number) for number in range(4)]
    for entry in chunks:
        assert store(policy, entry, 0.0, room=UNIT) == []
    assert store(policy, entry_of(9, "b"), 1.0) is None
    assert sum(policy.usages()["b"].refused.values()) == 1
    assert len(policy) == 4
    policy.check()


def test_bytes_that_are_held_count_against_the_cap() -> None:
    policy = TenantRetention(4 * UNIT)
    policy.configure({"a": TierContract(cap=2 * UNIT)})
    first = entry_of(1)
    assert store(policy, first, 0.0, room=UNIT) == []
    assert policy.select("a", UNIT, 0, 1.0, anything) == []  # a write that has not ended
    assert policy.select("a", UNIT, UNIT, 2.0, anything) == [first]


def test_chunks_expire_by_their_last_use() -> None:
    policy = TenantRetention(4 * UNIT)
    policy.configure({"a": TierContract(ttl_s=10.0)})
    used, unused, other = entry_of(1), entry_of(2), entry_of(3, "b")
    for entry in (used, unused, other):
        assert store(policy, entry, 0.0, room=UNIT) == []
    policy.touch(used, 5.0)
    assert policy.expire(10.0, 8, lambda each: each is not unused) == []
    assert policy.expire(10.0, 8, anything) == [unused]
    assert policy.expire(15.0, 8, anything) == [used]
    assert other in policy
    policy.check()


def test_an_adopted_chunk_goes_first() -> None:
    policy = TenantRetention(4 * UNIT)
    for number in range(2):
        assert store(policy, entry_of(number), 100.0 + number, room=UNIT) == []
    adopted = entry_of(7)
    policy.hold("a", UNIT)
    policy.add_oldest(adopted)
    assert policy.select("a", UNIT, UNIT, 200.0, anything) == [adopted]


@pytest.mark.parametrize("seed", range(20))
def test_one_tenant_never_holds_more_than_its_chunks(seed: int) -> None:
    """Random writes, failed writes, uses and losses leave the accounts equal to the chunks."""
    chance, policy = random.Random(seed), TenantRetention(16 * UNIT)
    policy.configure({"a": TierContract(floor=4 * UNIT, ttl_s=30.0), "b": TierContract(cap=6 * UNIT)})
    living: list[IndexEntry] = []
    for step in range(400):
        now_s = step * chance.choice((0.1, 1.0))
        verb = chance.choices(("write", "fail", "touch", "lose", "expire"), (8, 2, 4, 2, 1))[0]
        if verb in ("write", "fail"):
            entry = entry_of(chance.randrange(64), chance.choice("abc"))
            missing = max(0, (len(living) + 1 - 16) * UNIT)
            victims = policy.select(entry.chunk.namespace.tenant, UNIT, missing, now_s, anything)
            if victims is None:
                continue
            living = [each for each in living if each not in victims]
            if verb == "write":
                policy.add(entry, now_s)
                living.append(entry)
            else:
                policy.release(entry.chunk.namespace.tenant, UNIT)
        elif verb == "expire":
            gone = policy.expire(now_s, 4, anything)
            living = [each for each in living if each not in gone]
        elif living and verb == "touch":
            policy.touch(chance.choice(living), now_s)
        elif living:
            policy.discard(lost := living.pop(chance.randrange(len(living))))
            policy.discard(lost)
        policy.check()
        assert len(policy) == len(living) <= 16
        assert all(entry in policy for entry in living)
