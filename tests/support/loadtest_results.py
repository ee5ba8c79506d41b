"""Results as a run would write them, made up from a seed: the same every time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from kvferry_loadtest.histogram import Latencies
from kvferry_loadtest.result import (
    Counts,
    Distribution,
    Floor,
    Group,
    Harness,
    Objective,
    Result,
    Second,
    Server,
)

FLOOR_SHARE = 0.21
SOUND = Harness(ok=True, reason="", cpu_share=0.31, lateness_p99_ms=1.8, loop_stall_max_ms=6.0)


def distribution(random: np.random.Generator, median_ms: float, spread: float, count: int) -> Distribution:
    latencies = Latencies()
    for value_ms in random.lognormal(np.log(median_ms), spread, count):
        latencies.add_s(float(value_ms) / 1e3)
    return latencies.distribution()


def group(random: np.random.Generator, speed: float, planned: int, duration_s: float, refused: int = 0) -> Group:
    """`speed` 1 is quick; a slower one waits longer and keeps to the objective less often."""
    failed = int(random.integers(0, 3))
    ok = planned - refused - failed
    ttft_ms = 180 / speed * random.normal(1, 0.03)
    kept = max(0.0, min(1.0, 0.99 - 0.25 * (1 / speed - 1))) * ok / planned
    return Group(
        counts=Counts(planned=planned, ok=ok, refused=refused, failed=failed, timed_out=0, skipped=0),
        latencies={
            "ttft": distribution(random, ttft_ms * 1.1, 0.8 / speed, ok),
            "ttft_sent": distribution(random, ttft_ms, 0.5, ok),
            "tpot": distribution(random, 11 / speed, 0.1, ok),
            "itl": distribution(random, 10 / speed, 0.3, ok),
            "e2e": distribution(random, ttft_ms * 1.1 + 900, 0.5 / speed, ok),
            "e2e_sent": distribution(random, ttft_ms + 850, 0.4, ok),
            "predecessor_wait": distribution(random, 30 / speed, 1.0, ok),
            "lateness": distribution(random, 0.4, 0.5, ok),
        },
        requests_per_s=ok / duration_s,
        output_tokens_per_s=ok * 84 / duration_s,
        prompt_tokens_per_s=ok * 3900 / duration_s,
        goodput_requests_per_s=planned * kept / duration_s,
        goodput_share=kept,
    )


def seconds(random: np.random.Generator, speed: float, duration_s: int) -> tuple[Second, ...]:
    found = []
    for t_s in range(duration_s):
        load = min(1.0, t_s / 15) * (1 + 0.5 * np.sin(t_s / 9))
        p50_ms = float(180 / speed * (0.7 + load) * random.normal(1, 0.08))
        quiet = t_s < 2
        found.append(
            Second(
                t_s=t_s,
                sent=int(4 * load),
                ok=int(4 * load),
                missed=int(t_s % 37 == 30),
                in_flight=round(12 * load / speed),
                ttft_p50_ms=None if quiet else p50_ms,
                ttft_p99_ms=None if quiet else p50_ms * float(random.uniform(2, 6)),
                queue_depth=float(max(0.0, 8 * load / speed - 6)),
                kv_utilisation=min(0.98, 0.2 + 0.5 * float(load) / speed),
            )
        )
    return tuple(found)


def result(
    deployment: str = "kvferry",
    repeat: int = 0,
    speed: float = 1.0,
    recompute_share: float | None = 0.26,
    planned: int = 240,
    duration_s: int = 60,
    tenants: tuple[str, ...] = (),
    refused: int = 0,
    harness: Harness = SOUND,
    **changes: Any,
) -> Result:
    """One run against `deployment`; `changes` replace fields of it."""
    made = _result(deployment, repeat, speed, recompute_share, planned, duration_s, tenants, refused, harness)
    return Result(**{name: changes.get(name, getattr(made, name)) for name in made.__struct_fields__})


@functools.cache
def _result(
    deployment: str,
    repeat: int,
    speed: float,
    recompute_share: float | None,
    planned: int,
    duration_s: int,
    tenants: tuple[str, ...],
    refused: int,
    harness: Harness,
) -> Result:
    random = np.random.default_rng([repeat, *deployment.encode()])
    prompt_tokens = 936_000.0
    share = None if recompute_share is None else float(recompute_share * random.normal(1, 0.01))
    server = Server(dialect="")
    if share is not None:
        cached = prompt_tokens * (1 - share)
        server = Server(
            dialect="kvferry",
            prompt_tokens=prompt_tokens,
            computed_tokens=prompt_tokens * share,
            cached_tokens_by_source={"local": cached * 0.7, "ferried": cached * 0.2, "cpu": cached * 0.1},
            recompute_share=share,
            preemptions=3.0,
            kv_utilisation_mean=0.61,
            kv_utilisation_max=0.93,
            queue_depth_mean=2.4,
            ttft_queue_correlation=0.72,
        )
    return Result(
        deployment=deployment,
        scenario="multi-turn",
        parameters={"sessions": 40, "turns": 6, "rate_per_s": 4.0, "system_tokens": 1500, "seed": repeat},
        seed=repeat,
        repeat=repeat,
        loop="open",
        target={"url": "http://127.0.0.1:8080", "model": "sim"},
        machine="2 cores, 8 GiB, Linux 6.1",
        started_at=f"2026-11-21T12:0{repeat}:00Z",
        duration_s=float(duration_s),
        objective=Objective(ttft_ms=500.0, tpot_ms=25.0),
        overall=group(random, speed, planned, duration_s, refused),
        tenants={
            name: group(random, speed * (1 - 0.15 * at), planned // 3, duration_s) for at, name in enumerate(tenants)
        },
        floor=Floor(
            page_tokens=16,
            prompt_tokens=int(prompt_tokens),
            recompute_tokens=int(prompt_tokens * FLOOR_SHARE),
            recompute_share=FLOOR_SHARE,
            recompute_share_without_answers=0.24,
            recompute_share_within_sessions=0.41,
        ),
        server=server,
        harness=harness,
        seconds=seconds(random, speed, duration_s),
        errors={"503 no worker is ready": 2} if refused else {},
        versions={"kvferry-loadtest": "0.4.0", "python": "3.11.7"},
    )
