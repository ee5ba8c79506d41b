"""Decode slots of one worker in virtual time: streams of equal steps, requests that wait for a slot."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass

from kvferry.tenancy.shares.slots import DecodeSlots

STEP_MS = 10.0
STREAM_MS = 0.1


@dataclass(eq=False, slots=True)
class Answer:
    tenant: str
    arrived_s: float
    left_tokens: int
    num_tokens: int = 0  # since it took its slot
    began_s: float | None = None


@dataclass(frozen=True, slots=True)
class DecodeResult:
    share: float  # of `light`'s streams, over time
    p99_ms: float  # until an answer of `light` has a slot
    num_preempted: int


def decode(
    *,
    noise_tokens: int,
    num_light: int | None,
    num_reserved: int,
    preempts: bool,
    num_slots: int = 64,
    duration_s: float = 200.0,
    seed: int = 0,
) -> DecodeResult:
    """Run `light` (weight 4) against noise (weight 1) that keeps 4 times the slots busy.

    `light` keeps `num_light` answers of 300 tokens in flight; None: it asks for a third of its share at random times.
    """
    chance = random.Random(f"{seed} decode")
    slots: DecodeSlots[Answer] = DecodeSlots(num_slots, num_reserved)
    slots.set_weight("light", 4.0)
    waiting: dict[str, deque[Answer]] = defaultdict(deque)
    running: dict[Answer, None] = {}
    waits_ms: list[float] = []
    slot_s: dict[str, float] = defaultdict(float)
    now_s, next_s, num_preempted = 0.0, 0.0, 0
    interval_s = 300 * (STEP_MS + STREAM_MS * num_slots) / 1e3 / (num_slots * 0.8 / 3)

    def arrive(tenant: str, num_tokens: int) -> None:
        waiting[tenant].append(Answer(tenant, now_s, round(num_tokens * chance.uniform(0.5, 1.5))))
        slots.wait(tenant, now_s)

    for _ in range(4 * num_slots):
        arrive("noise", noise_tokens)
    for _ in range(num_light or 0):
        arrive("light", 300)
    while now_s < duration_s:
        while num_light is None and next_s <= now_s:
            arrive("light", 300)
            next_s += chance.expovariate(1 / interval_s)
        if preempts and (chosen := slots.victim(now_s)) is not None:
            tenant, answer = chosen
            slots.end(tenant, answer, now_s)
            del running[answer]
            slots.wait(tenant, now_s)
            waiting[tenant].appendleft(answer)
            num_preempted += 1
        while (free := slots.next_tenant(now_s)) is not None:
            answer = waiting[free].popleft()
            slots.begin(free, answer, now_s)
            running[answer] = None
            if answer.began_s is None:
                answer.began_s = now_s
                if free == "light":
                    waits_ms.append((now_s - answer.arrived_s) * 1e3)
        step_s = (STEP_MS + STREAM_MS * len(running)) / 1e3
        now_s += step_s
        for answer in list(running):
            slot_s[answer.tenant] += step_s
            answer.left_tokens -= 1
            if answer.left_tokens <= 0:
                slots.end(answer.tenant, answer, now_s)
                del running[answer]
                if answer.tenant == "noise":
                    arrive("noise", noise_tokens)
                elif num_light is not None:
                    arrive("light", 300)
    slots.check()
    waits_ms.sort()
    return DecodeResult(
        slot_s["light"] / sum(slot_s.values()), waits_ms[int(0.99 * len(waits_ms))] if waits_ms else 0.0, num_preempted
    )
