"""Slots of a batch, and the wait that a gateway expects."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.tenancy.fair_wait import BacklogCurve
from kvferry.tenancy.slots import DecodeSlots


def test_free_slots_go_by_streams_and_weight_and_some_are_kept() -> None:
    slots: DecodeSlots[int] = DecodeSlots(16, 2)
    slots.set_weight("gold", 4.0)
    numbers = iter(range(1000))

    def fill() -> None:
        while (tenant := slots.next_tenant(0.0)) is not None:
            slots.begin(tenant, next(numbers), 0.0)
            slots.check()

    for _ in range(40):
        slots.wait("noise", 0.0)
    fill()
    assert slots.num_streams == 16, "a tenant alone has all"
    for _ in range(40):
        slots.wait("gold", 0.0)
    streams = {name: list(known.streams) for name, known in slots._tenants.items()}
    for _ in range(12):
        slots.end("noise", streams["noise"].pop(), 0.0)
        fill()
    counts = {name: len(known.streams) for name, known in slots._tenants.items()}
    assert counts["gold"] == 12
    assert counts["noise"] == 4


def test_the_longest_stream_of_the_tenant_furthest_above_its_share_is_preempted() -> None:
    slots: DecodeSlots[int] = DecodeSlots(8, 0)
    for number in range(8):
        slots.wait("noise", 0.0)
        slots.begin("noise", number, 0.0)
    assert slots.victim(0.0) is None, "nobody waits"
    slots.wait("gold", 0.0)
    assert slots.victim(0.0) == ("noise", 0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0.0, 20.0)), max_size=150))
def test_any_order_of_operations_keeps_the_slots_whole(operations: list[tuple[str, int, float]]) -> None:
    slots: DecodeSlots[int] = DecodeSlots(6, 1)
    now_s, number = 0.0, 0
    running: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    waiting = dict.fromkeys("abc", 0)
    for tenant, operation, elapsed_s in operations:
        now_s += elapsed_s
        if operation == 0:
            slots.wait(tenant, now_s)
            waiting[tenant] += 1
        elif operation == 1 and waiting[tenant]:
            slots.leave(tenant)
            waiting[tenant] -= 1
        elif operation == 2 and running[tenant]:
            slots.end(tenant, running[tenant].pop(0), now_s)
        elif (chosen := slots.next_tenant(now_s)) is not None:
            number += 1
            slots.begin(chosen, number, now_s)
            running[chosen].append(number)
            waiting[chosen] -= 1
        slots.check()
        assert slots.num_streams == sum(map(len, running.values())) <= 6


def exact_wait_ms(own_ms: float, prompt_ms: float, weight: float, others: list[tuple[float, float]]) -> float:
    finish = (own_ms + prompt_ms) / weight
    return own_ms + sum(min(backlog, other * finish) for backlog, other in others)


@given(
    others=st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(0.1, 16.0)), max_size=40),
    own_ms=st.floats(0.0, 1e5),
    prompt_ms=st.floats(1.0, 1e4),
    weight=st.floats(0.1, 16.0),
)
def test_the_curve_is_the_exact_wait_or_a_fifth_more(
    others: list[tuple[float, float]], own_ms: float, prompt_ms: float, weight: float
) -> None:
    curve = BacklogCurve.of([*others, (own_ms, weight)])
    exact = exact_wait_ms(own_ms, prompt_ms, weight, others)
    assert exact * (1 - 1e-6) - 1e-3 <= curve.wait_ms(own_ms, prompt_ms, weight) <= exact * 1.22 + 1e-3
    assert len(curve.buckets) <= 37


def test_a_small_tenant_does_not_wait_for_what_stands_before_it() -> None:
    rng = random.Random(1)
    flood = [(rng.uniform(5_000, 50_000), 1.0) for _ in range(3)]
    curve = BacklogCurve.of(flood)
    assert curve.wait_ms(0.0, 50.0, 4.0) < 50.0
    assert curve.wait_ms(0.0, 50.0, 1.0) <= 3 * 50.0
