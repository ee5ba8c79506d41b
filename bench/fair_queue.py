#!/usr/bin/env python3
"""The fair queue in simulations: its bound over random schedules, and scenarios of whole clusters in virtual time.

    make bench-fair-queue                                 100,000 schedules (ten minutes), all scenarios
    make bench-fair-queue ARGS="--schedules 1000 --seed 7"

Seeds begin with `held-out`; parameters were chosen with others. `worst_ratio_to_bound` is of work charged, with
estimates right and wrong; schedules in which debts acted are counted apart, as the bound is not theirs. The first
schedule that exceeds its bound ends the benchmark with exit code 1. The figures of all schedules and of each scenario
are a line of JSON on stdout when they are measured, and the last line has all.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.fair_cluster import (
    REPORT_S,
    Cluster,
    ClusterSettings,
    Load,
    Prompt,
    keep_busy,
    percentile_ms,
    send_poisson,
    shares_in_windows,
)
from bench.fair_decode import decode
from bench.fair_schedules import Schedule
from bench.results import BenchFailed, Results, run_benchmark
from kvferry.tenancy.limits import Limits, TenantLimits
from kvferry.tenancy.shares.fair_queue import FairQueue, QueueParameters
from kvferry_loadtest.machine import machine_line

Figures = dict[str, Any]
SHORT, LONG, MIXED = (200, 1500), (30_000, 32_000), (200, 32_000)
EIGHT_WEIGHTS = {f"tenant{number}": weight for number, weight in enumerate((8.0, 4.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.25))}


def bound(num_schedules: int, seed: str, results: Results) -> None:
    """Add the largest drifts beside their bounds. Raises BenchFailed for the first schedule that exceeds its bound."""
    worst = {"of_bound": 0.0, "of_first_term": 0.0, "finished_of_bound": 0.0}
    worst_right = 0.0
    num_run = num_first_exceeded = num_corrected = 0
    try:
        for number in track(range(num_schedules), "schedules", console=Console(stderr=True)):
            outcome = Schedule(f"{seed} {number}").run()
            num_run += 1
            if outcome.is_corrected:
                num_corrected += 1
                continue
            for name in worst:
                worst[name] = max(worst[name], getattr(outcome, name))
            if outcome.are_estimates_right:
                worst_right = max(worst_right, outcome.of_first_term)
            num_first_exceeded += outcome.of_first_term > 1 + 1e-9
            if (ratio := max(outcome.of_bound, outcome.finished_of_bound)) > 1 + 1e-9:
                raise BenchFailed(f"schedule {seed} {number}: a drift of {ratio:.4f} of its bound")
    finally:
        results.add(
            {
                "schedules": num_run,
                "worst_ratio_to_bound": round(worst["of_bound"], 4),
                "worst_finished_ratio": round(worst["finished_of_bound"], 4),
                "worst_ratio_to_first_term_right_estimates": round(worst_right, 4),
                "worst_ratio_to_first_term": round(worst["of_first_term"], 4),
                "first_term_exceeded": num_first_exceeded,
                "corrected_by_debts": num_corrected,
            }
        )


def skewed_shares(
    num_workers: int, num_gateways: int, seed: int, *, duration_s: float = 60.0, fair: bool = True
) -> Figures:
    """All of premium (weight 4) on one gateway, the flood on the others."""
    settings = ClusterSettings(num_workers, num_gateways, has_fair_queue=fair, seed=seed)
    cluster = Cluster(settings, {"premium": 4.0, "flood": 1.0})
    others = range(1, num_gateways) if num_gateways > 1 else (0,)
    keep_busy(cluster, Load("premium", (0,), (200, 4000)), 16 * num_workers, seed)
    keep_busy(cluster, Load("flood", others, (2000, 20_000)), 16 * num_workers, seed)
    windows = shares_in_windows(cluster, "premium", 10.0, 10.0 + duration_s, 10.0)
    share = sum(windows) / len(windows)
    return {"share": share, "lowest_10s": min(windows), "highest_10s": max(windows)}


def under_share(
    flood: tuple[int, int] | None,
    seed: int,
    *,
    step_tokens: int = 512,
    depth_ms: float = 60.0,
    speed: float = 1.0,
    duration_s: float = 120.0,
) -> float:
    """Return the p99 of a tenant at a third of its share of 0.8, on 4 workers, in ms."""
    settings = ClusterSettings(4, 2, step_tokens=step_tokens, depth_ms=depth_ms, speed=speed, seed=seed)
    cluster = Cluster(settings, {"premium": 4.0, "flood": 1.0})
    ended = send_poisson(cluster, Load("premium", (0,), (600, 3700)), 4000 * 0.8 / 3, seed)
    if flood is not None:
        keep_busy(cluster, Load("flood", (1,), flood), 64, seed)
    cluster.clock.run_until(duration_s)
    return percentile_ms(ended, 0.99, 10.0)


def under_share_ratios(seed: int, step_tokens: int, depth_ms: float, duration_s: float = 120.0) -> Figures:
    alone_ms = under_share(None, seed, step_tokens=step_tokens, depth_ms=depth_ms, speed=0.8, duration_s=duration_s)
    return {"p99_alone_at_share_ms": alone_ms} | {
        f"p99_of_alone_{name}": under_share(
            flood, seed, step_tokens=step_tokens, depth_ms=depth_ms, duration_s=duration_s
        )
        / alone_ms
        for name, flood in (("short", SHORT), ("32k", LONG), ("mixed", MIXED))
    }


def small_tenants(seed: int, *, has_whale: bool, duration_s: float = 60.0) -> float:
    """Return the p99 of 1,000 tenants at 60 % of 8 workers, in ms, beside a whale or without it."""
    cluster = Cluster(ClusterSettings(8, 4, seed=seed), {})
    small = [
        send_poisson(cluster, Load(f"small{number}", range(4), (300, 3000)), 8 * 0.6, seed) for number in range(1000)
    ]
    if has_whale:
        keep_busy(cluster, Load("whale", range(4), (500, 8000)), 512, seed)
    cluster.clock.run_until(duration_s)
    return percentile_ms([prompt for ended in small for prompt in ended], 0.99, 10.0)


def changed_weights(seed: int) -> Figures:
    """4:1 becomes 1:4 after 30 s."""
    cluster = Cluster(ClusterSettings(4, 2, seed=seed), {"a": 4.0, "b": 1.0})
    keep_busy(cluster, Load("a", (0,), (200, 8000)), 64, seed)
    keep_busy(cluster, Load("b", (1,), (200, 8000)), 64, seed)
    [before] = shares_in_windows(cluster, "a", 20.0, 30.0, 10.0)
    cluster.set_weight("a", 1.0)
    cluster.set_weight("b", 4.0)
    after = shares_in_windows(cluster, "a", 30.0, 50.0, 10.0)
    return {"before": before, "first_10s": after[0], "next_10s": after[1]}


def disjoint_workers(seed: int, num_workers: int, *, has_debts: bool) -> float:
    """Return the share of A (weight 4, on one worker only) beside B on all; at best one worker's."""
    cluster = Cluster(ClusterSettings(num_workers, 2, has_debts=has_debts, seed=seed), {"A": 4.0, "B": 1.0})
    keep_busy(cluster, Load("A", (0,), (200, 4000), (0,)), 16, seed)
    keep_busy(cluster, Load("B", (1,), (200, 8000)), 16 * num_workers, seed)
    windows = shares_in_windows(cluster, "A", 10.0, 70.0, 10.0)
    return sum(windows) / len(windows)


def dead_band(seed: int, num_workers: int, *, duration_s: float = 60.0) -> Figures:
    """Eight tenants wait everywhere: every debt is chance, and none may act."""
    cluster = Cluster(ClusterSettings(num_workers, 4, seed=seed), EIGHT_WEIGHTS)
    for number, tenant in enumerate(EIGHT_WEIGHTS):
        keep_busy(cluster, Load(tenant, (number % 4,), (200, 8000)), 16 * num_workers, seed)
    windows = shares_in_windows(cluster, "tenant0", 10.0, 10.0 + duration_s, 10.0)
    target = 8.0 / sum(EIGHT_WEIGHTS.values())
    return {
        "largest_debt_of_band": max(worker.largest_debt for worker in cluster.workers),
        "corrected_slices": sum(worker.num_corrected for worker in cluster.workers),
        "share_error": max(abs(share / target - 1) for share in windows),
    }


def refusals(seed: int, num_gateways: int, *, duration_s: float = 60.0) -> Figures:
    """A tenant limited to the tokens of 2 of 8 workers, whose 200 clients come back when they are told to."""
    cluster = Cluster(ClusterSettings(8, num_gateways, seed=seed), {})
    chance = random.Random(f"{seed} refusals")
    per_s = 20_000.0
    limits = [TenantLimits(Limits(tokens_per_minute=60 * per_s), 0.0) for _ in range(num_gateways)]
    sent = [(0, 0)] * num_gateways  # requests and tokens since the last report
    counts = {"answers": 0, "refusals": 0, "tokens": 0}

    def report() -> None:
        for number, limit in enumerate(limits):
            others = [each for other, each in enumerate(sent) if other != number]
            limit.used(sum(each[0] for each in others), sum(each[1] for each in others), cluster.clock.now_s)
        sent[:] = [(0, 0)] * num_gateways

    def send() -> None:
        gateway, num_tokens = chance.randrange(num_gateways), chance.randint(300, 3000)
        refusal = limits[gateway].admit(1, num_tokens, cluster.clock.now_s)
        if refusal is not None:
            counts["refusals"] += 1
            # Clients of HTTP spread their retries within the second.
            cluster.clock.at(cluster.clock.now_s + refusal.retry_after_s + chance.random(), send)
            return
        sent[gateway] = sent[gateway][0] + 1, sent[gateway][1] + num_tokens
        counts["tokens"] += num_tokens
        cluster.submit(gateway, "limited", num_tokens, end)

    def end(_: Prompt) -> None:
        counts["answers"] += 1
        send()

    cluster.clock.every(REPORT_S, report)
    for _ in range(200):
        cluster.clock.at(chance.random(), send)
    cluster.clock.run_until(10.0)
    first = before = counts["tokens"]
    most = 0.0
    for _ in range(round((duration_s - 10.0) / 10.0)):
        cluster.clock.run_until(cluster.clock.now_s + 10.0)
        now = counts["tokens"]
        most, before = max(most, (now - before) / 10.0 / per_s), now
    return {
        "of_limit": (before - first) / (duration_s - 10.0) / per_s,
        "most_in_10s": most,
        "refusals_per_answer": counts["refusals"] / max(1, counts["answers"]),
    }


def costs(num_tenants: int, num_slices: int = 20_000) -> Figures:
    """Time a slice from its pick to its measurement, and a usage report, while all tenants wait."""
    queue: FairQueue[Prompt] = FairQueue(QueueParameters(max_requests=10_000_000))
    for number in range(10 * num_tenants):
        queue.add(Prompt(f"tenant{number % num_tenants}", 1e6, 0.0, lambda _: None), 0.0)
    begin_s = time.perf_counter()
    for _ in range(num_slices):
        piece = queue.next_slice()
        assert piece is not None
        queue.measured(piece, 50.0, 0.0)
    slice_us = (time.perf_counter() - begin_s) / num_slices * 1e6
    got_ms = {f"tenant{number}": float(number) for number in range(num_tenants)}
    begin_s = time.perf_counter()
    queue.elsewhere(got_ms, 8, 1.0)
    return {"slice_us": slice_us, "usage_report_ms": (time.perf_counter() - begin_s) * 1e3}


def scenarios(seed: int) -> Iterator[tuple[str, Figures]]:
    """Yield each scenario's name and figures."""
    for num_workers, num_gateways in ((2, 1), (2, 2), (2, 4), (8, 4)):
        yield f"4:1, {num_workers} workers, {num_gateways} gateways", skewed_shares(num_workers, num_gateways, seed)
    yield "the same first come first served, 2 and 2", skewed_shares(2, 2, seed, fair=False)
    for step_tokens, depth_ms in ((512, 60.0), (1024, 110.0), (2048, 410.0)):
        yield f"under its share, steps of {step_tokens}", under_share_ratios(seed, step_tokens, depth_ms)
    calm_ms, beside_ms = small_tenants(seed, has_whale=False), small_tenants(seed, has_whale=True)
    yield (
        "1,000 small tenants",
        {"p99_without_whale_ms": calm_ms, "p99_beside_whale_ms": beside_ms, "p99_ratio": beside_ms / calm_ms},
    )
    yield "weights 4:1 become 1:4", changed_weights(seed)
    for num_workers in (2, 4, 16):
        yield (
            f"disjoint, {num_workers} workers",
            {
                "best": 1 / num_workers,
                "without_debts": disjoint_workers(seed, num_workers, has_debts=False),
                "with_debts": disjoint_workers(seed, num_workers, has_debts=True),
            },
        )
    for num_workers in (2, 8, 16, 32):
        yield f"dead band, {num_workers} workers", dead_band(seed, num_workers)
    for num_gateways in (1, 4):
        yield f"limit of 2 workers, {num_gateways} gateways", refusals(seed, num_gateways)
    for num_tenants in (10, 10_000):
        yield f"cost, {num_tenants} tenants", costs(num_tenants)
    busy = decode(noise_tokens=3000, num_light=200, num_reserved=0, preempts=False, seed=seed)
    yield "decode, both wait", {"share": busy.share}
    for num_reserved, preempts in ((0, False), (4, False), (0, True), (4, True)):
        result = decode(noise_tokens=3000, num_light=None, num_reserved=num_reserved, preempts=preempts, seed=seed)
        name = f"decode, {num_reserved} of 64 in reserve{', preemption' if preempts else ''}"
        yield name, {"p99_wait_ms": result.p99_ms, "preempted": result.num_preempted}


def summary(found: dict[str, Figures]) -> Figures:
    def largest(prefix: str, value: Callable[[Figures], float]) -> float:
        return round(max(value(figures) for name, figures in found.items() if name.startswith(prefix)), 4)

    return {
        "share_error_max": largest("4:1", lambda figures: abs(figures["share"] / 0.8 - 1)),
        "ttft_p99_vs_alone": largest(
            "under its share, steps of 512",
            lambda figures: max(ratio for name, ratio in figures.items() if name.startswith("p99_of_alone")),
        ),
        "small_tenants_p99_ratio": largest("1,000", lambda figures: figures["p99_ratio"]),
        "disjoint_of_best": round(
            1 - largest("disjoint", lambda figures: 1 - figures["with_debts"] / figures["best"]), 4
        ),
        "largest_chance_debt_of_band": largest("dead band", lambda figures: figures["largest_debt_of_band"]),
        "refusals_per_answer": largest("limit", lambda figures: figures["refusals_per_answer"]),
    }


def measure(arguments: argparse.Namespace, results: Results) -> None:
    console = Console(stderr=True)
    console.print(machine_line())
    results.add({"machine": machine_line()})
    bound(arguments.schedules, f"held-out {arguments.seed}", results)
    if arguments.no_scenarios:
        return
    found: dict[str, Figures] = {}
    table = Table("scenario", "figures", show_lines=True)
    for name, figures in scenarios(10_000 + arguments.seed):
        found[name] = figures
        results.add({"scenarios": {name: figures}})
        table.add_row(name, ", ".join(f"{key} {_shown(value)}" for key, value in figures.items()))
    console.print(table)
    results.add(summary(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-scenarios", action="store_true")
    arguments = parser.parse_args()
    return run_benchmark("bench-fair-queue", lambda results: measure(arguments, results))


def _shown(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


if __name__ == "__main__":
    sys.exit(main())
