"""Retention of tenants' pages: what an operation costs by number of pages, what a page costs, and random operations.

    make bench-retention ARGS="--operations 1000000 --seeds 1,2,3"

The times are of tiers that are full, 64 tenants with floors, every store with a victim. Then random operations on
small tiers, with pages of one and of several units; each is audited against counts of its own: which pages went,
whether their tenants were above their floors, what a store left of caps, and what `room` promised. The first operation
that broke a contract ends the benchmark with exit code 1. The figures of each size and of each seed are a line of JSON
on stdout, and the last line has all.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import time
from collections import Counter

import psutil
from rich.console import Console
from rich.table import Table

from bench.results import BenchFailed, Results, run_benchmark
from kvferry.tenancy.pages.outcome import Cause, Refusal, Stored, Victim
from kvferry.tenancy.pages.page import Page
from kvferry.tenancy.pages.retention import Retention
from kvferry.tenancy.terms import TierContract, TierSettings
from kvferry_loadtest.machine import machine_line

NUM_TENANTS = 64
NUM_TIMED = 200_000


class AuditedTier:
    """A tier that makes random operations and asserts that each kept the contracts."""

    def __init__(self, seed: int, max_size: int) -> None:
        self.random = random.Random(seed)
        self.capacity = self.random.randint(8, 60) * max_size
        self.max_size = max_size
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        self.policy = Retention(TierSettings(self.capacity, high_water=0.95, low_water=0.8))
        self.names = [f"t{number}" for number in range(self.random.randint(1, 6))]
        self.contracts: dict[str, TierContract] = {}
        self.pages: list[Page] = []
        self.used: Counter[str] = Counter()
        self._next_key = 0
        self._pause_s = self.random.choice((0.01, 0.1, 1.0))
        self._pins = self.random.choice((2, 10, 30))

    def step(self) -> None:
        self.now_s += self._pause_s * self.random.choice((0.0, 0.0, 0.1, 1.0, 30.0))
        verb = self.random.choices(
            ("store", "touch", "pin", "unpin", "discard", "want", "end", "reclaim", "configure"),
            (50, 20, self._pins, 10, 2, 5, 3, 4, 0.3),
        )[0]
        self.counts[verb] += 1
        getattr(self, f"_{verb}")()
        assert self.policy.used == sum(self.used.values()) <= self.capacity, "units"

    def contract_of(self, name: str) -> TierContract:
        return self.contracts.get(name, TierContract())

    def _page(self) -> Page | None:
        return self.random.choice(self.pages) if self.pages else None

    def _configure(self) -> None:
        contracts = {}
        for name in self.names:
            if self.random.random() < 0.8:
                floor = self.random.randint(0, self.capacity // 3)
                contracts[name] = TierContract(
                    floor=floor,
                    cap=self.random.choice((None, self.random.randint(floor, self.capacity))),
                    weight=self.random.choice((0.5, 1, 1, 4)),
                    borrow=self.random.random() < 0.8,
                    ttl_s=self.random.choice((None, 20.0, 300.0)),
                )
        try:
            self.policy.configure(contracts)
        except ValueError:
            assert sum(contract.floor for contract in contracts.values()) > self.capacity
        else:
            self.contracts = contracts
            assert sum(contract.floor for contract in contracts.values()) <= self.capacity, "floors"

    def _store(self) -> None:
        name = self.random.choice(self.names)
        contract = self.contract_of(name)
        size = self.random.randint(1, self.max_size)
        self.policy.reclaim(self.now_s, 0)  # ends what was wanted until now
        before, free, room = self.used[name], self.capacity - self.policy.used, self.policy.room(name)
        result = self.policy.store(name, self._key(), size, self.now_s)
        if isinstance(result, Refusal):
            self.counts[f"refused {result.name}"] += 1
            assert self.max_size > 1 or room < size, "a store was refused in spite of room"
            assert all(page.is_resident for page in self.pages), "a refused store evicted a page"
            is_claim = before + size <= contract.floor and self.max_size == 1
            assert not is_claim or any(page.num_pins for page in self.pages), "a store within the floor was refused"
            return
        assert isinstance(result, Stored)
        is_expiry = any(victim.cause is Cause.EXPIRED for victim in result.victims)
        assert self.max_size > 1 or is_expiry or room >= size, "a store found more than its room"
        self.used[name] += size  # lifts the tenant before its own pages go
        for victim in result.victims:
            self._audit(victim, name)
        self.pages.append(result.page)
        limit = contract.cap_in(self.capacity) if contract.borrow else contract.floor
        borrowable = before + min(size, free) if contract.borrow else before
        assert self.used[name] <= max(limit, borrowable), "over the cap without free room"

    def _audit(self, victim: Victim, demander: str | None) -> None:
        page, contract = victim.page, self.contract_of(victim.page.tenant)
        self.counts[f"evicted {victim.cause.name}"] += 1
        self.pages.remove(page)
        assert not page.num_pins, "a pinned page went"
        assert not page.is_resident, "a victim is in the tier"
        if victim.cause is Cause.EXPIRED:
            assert contract.ttl_s is not None, "a page without a time to live expired"
            assert page.used_s + contract.ttl_s <= self.now_s, "a page expired early"
        elif page.tenant != demander:
            assert self.used[page.tenant] > contract.floor, "a tenant at or under its floor lost a page"
            assert self.used[page.tenant] - page.size >= contract.floor, "a tenant fell under its floor"
        self.used[page.tenant] -= page.size

    def _touch(self) -> None:
        if (page := self._page()) is not None:
            ttl_s = self.contract_of(page.tenant).ttl_s
            is_expired = ttl_s is not None and not page.num_pins and page.used_s + ttl_s <= self.now_s
            assert self.policy.touch(page, self.now_s) is not is_expired, "a hit on an expired page, or a miss"

    def _pin(self) -> None:
        if (page := self._page()) is not None:
            self.policy.pin(page, self.now_s)

    def _unpin(self) -> None:
        for page in self.random.sample(self.pages, len(self.pages)):
            if page.num_pins:
                self.policy.unpin(page, self.now_s)
                return

    def _discard(self) -> None:
        if (page := self._page()) is not None:
            self.policy.discard(page)
            self.pages.remove(page)
            self.used[page.tenant] -= page.size

    def _want(self) -> None:
        if (page := self._page()) is not None:
            self.policy.want(page, self.random.choice((5.0, 60.0, 1000.0)), self.now_s)

    def _end(self) -> None:
        if (page := self._page()) is not None:
            self.policy.end(page)

    def _reclaim(self) -> None:
        max_pages = self.random.randint(0, 8)
        victims = self.policy.reclaim(self.now_s, max_pages)
        assert len(victims) <= max_pages
        for victim in victims:
            self._audit(victim, None)

    def _key(self) -> int:
        # Half of the keys return, so that ghosts are found.
        if self.random.random() < 0.5 and self._next_key > 100:
            return self.random.randrange(self._next_key - 100, self._next_key) * 1000
        self._next_key += 1
        return self._next_key * 1000


def audit(num_operations: int, seed: int, per_tier: int = 2500) -> Counter[str]:
    """Return counts of operations and their outcomes. Raises BenchFailed if an operation breaks a contract."""
    counts: Counter[str] = Counter()
    for number in range(math.ceil(num_operations / per_tier)):
        tier = AuditedTier(seed * 1_000_003 + number, max_size=1 if number % 2 else 5)
        tier._configure()
        for step in range(min(per_tier, num_operations - number * per_tier)):
            try:
                tier.step()
                if step % 100 == 0:
                    tier.policy.check()
                    assert all(tier.policy.usage_of(name).used == tier.used[name] for name in tier.names), "usage"
            except AssertionError as error:
                raise BenchFailed(f"seed {seed}, tier {number}, operation {step}: {error}") from error
        counts.update(tier.counts)
    return counts


def time_tier(num_pages: int) -> dict[str, float]:
    """Microseconds per operation of a full tier, and bytes per page and ghost of keys that are integers."""
    gc.collect()
    rss = psutil.Process().memory_info().rss
    policy = Retention(TierSettings(num_pages))
    floor = num_pages // NUM_TENANTS // 2
    policy.configure({f"t{number}": TierContract(floor=floor, cap=num_pages) for number in range(NUM_TENANTS)})
    seeded = random.Random(num_pages)
    pages: list[Page] = []
    for number in range(num_pages):
        stored = policy.store(f"t{seeded.randrange(NUM_TENANTS)}", number, 1, number * 1e-3)
        assert isinstance(stored, Stored)
        pages.append(stored.page)
    figures: dict[str, float] = {"bytes_per_page": round((psutil.Process().memory_info().rss - rss) / num_pages)}
    now_s = num_pages * 1e-3
    names = [f"t{seeded.randrange(NUM_TENANTS)}" for _ in range(NUM_TIMED)]
    chosen = [seeded.randrange(num_pages) for _ in range(NUM_TIMED)]
    gc.disable()
    elapsed_s = []
    for index in chosen:
        now_s += 1e-3
        begin_s = time.perf_counter()
        policy.touch(pages[index], now_s)
        elapsed_s.append(time.perf_counter() - begin_s)
    figures |= _spread("touch", elapsed_s)
    pages.clear()  # evicted pages are freed
    elapsed_s = [0.0] * NUM_TIMED
    rss = psutil.Process().memory_info().rss
    for number, name in enumerate(names):
        now_s += 1e-3
        begin_s = time.perf_counter()
        stored = policy.store(name, num_pages + number, 1, now_s)
        elapsed_s[number] = time.perf_counter() - begin_s
        assert isinstance(stored, Stored)
        assert len(stored.victims) == 1
    figures |= _spread("store", elapsed_s)
    gc.enable()
    ghosts = sum(policy.usage_of(f"t{number}").num_ghosts for number in range(NUM_TENANTS))
    assert 0 < ghosts <= 8 * num_pages
    figures["bytes_per_ghost"] = round((psutil.Process().memory_info().rss - rss) / ghosts)
    policy.check()
    return figures


def _spread(name: str, elapsed_s: list[float]) -> dict[str, float]:
    ordered = sorted(elapsed_s)
    points = {"p50": len(ordered) // 2, "p99": len(ordered) * 99 // 100, "max": len(ordered) - 1}
    return {f"{name}_us_{point}": round(ordered[index] * 1e6, 2) for point, index in points.items()}


def measure(arguments: argparse.Namespace, results: Results) -> None:
    console = Console(stderr=True)
    results.add({"machine": machine_line()})
    for num_pages in map(int, arguments.pages.split(",")):
        with console.status(f"{num_pages} pages"):
            results.add({"times": {str(num_pages): time_tier(num_pages)}})
    times = results.figures["times"]
    table = Table("pages", *(name.replace("_", " ") for name in next(iter(times.values()))))
    for pages, figures in times.items():
        table.add_row(pages, *map(str, figures.values()))
    console.print(table)
    counts: Counter[str] = Counter()
    begin_s = time.perf_counter()
    for number, seed in enumerate(map(int, arguments.seeds.split(",")), 1):
        with console.status(f"random operations, seed {seed}"):
            counts.update(audit(arguments.operations, seed))
        results.add(
            {
                "operations": arguments.operations * number,
                "operations_s": round(time.perf_counter() - begin_s, 1),
                "counts": dict(sorted(counts.items())),
            }
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="10000,100000,1000000", help="sizes of tiers, with commas")
    parser.add_argument("--operations", type=int, default=1_000_000, help="random operations per seed")
    parser.add_argument("--seeds", default="1", help="seeds of the random operations, with commas")
    arguments = parser.parse_args()
    return run_benchmark("bench-retention", lambda results: measure(arguments, results))


if __name__ == "__main__":
    sys.exit(main())
