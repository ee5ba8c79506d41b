"""Whatever happens to a fleet, what gateways learned of its workers is right again 200 requests later.

Fleets in virtual time: engines that compute in steps, links of one transfer at a time, the real policies.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import pytest

from kvferry.router.prices.rates import Rate
from support.virtual_fleet import Fleet, Truth, VirtualWorker

NUM_REQUESTS = 200  # per gateway
TOLERANCE = 0.2
# Fewer observations after a disturbance may have been wrong before it.
MIN_OBSERVED = 5


@dataclasses.dataclass(frozen=True)
class Learned:
    gateway: int
    worker: VirtualWorker
    name: str
    rate: Rate

    @property
    def key(self) -> tuple[int, str, str]:
        return self.gateway, self.worker.id, self.name

    @property
    def error(self) -> float:
        return abs(self.rate.value / getattr(self.worker.truth, self.name) - 1.0)


def learned(fleet: Fleet) -> Iterator[Learned]:
    for number, gateway in enumerate(fleet.gateways):
        pricer = gateway.placer._pricer
        for workers, pool, names in (
            (fleet.prefill, pricer.prefill.rates, ["prefill_ms_per_token"]),
            (fleet.decode, pricer.decode.rates, ["prefill_ms_per_token", "kv_transfer_page_ms", "step_scale"]),
        ):
            for worker in workers:
                rates = pool.of(worker.id)
                yield from (Learned(number, worker, name, getattr(rates, name)) for name in names)


@dataclasses.dataclass
class Workload:
    fleet: Fleet
    random: random.Random
    interval_s: float
    sizes: list[int]

    def serve(self, num_requests: int, interval_s: float | None = None) -> None:
        self.fleet.serve(num_requests, interval_s or self.interval_s, self.sizes)


def a_workload(seed: int) -> Workload:
    seeded = random.Random(seed)
    fleet = Fleet(seeded.randint(1, 4), seeded.randint(1, 4), num_gateways=seeded.choice([1, 1, 2]), seed=seed)
    # Machines of one fleet are alike; some are older.
    ms_per_token, page_ms = seeded.choice([0.05, 0.1, 0.4]), seeded.choice([0.05, 0.1])
    scale = seeded.choice([0.5, 1.0, 2.0])
    for worker in fleet.workers:
        worker.truth = Truth(
            ms_per_token * seeded.choice([1.0, 1.0, 1.0, 1.5, 2.0]),
            page_ms * seeded.uniform(0.8, 1.25),
            scale * seeded.uniform(0.8, 1.25),
        )
    sizes = seeded.choice([[1024], [2048, 4096], [1024, 2048, 8192]])
    mean_tokens = sum(sizes) / len(sizes)
    capacity = sum(1000 / (5.0 + worker.truth.prefill_ms_per_token * mean_tokens) for worker in fleet.prefill)
    return Workload(fleet, seeded, 1 / (capacity * seeded.choice([0.1, 0.3, 0.6, 0.85])), sizes)


# Each returns the workers that must get work again.


def a_slow_period(load: Workload) -> list[VirtualWorker]:
    fleet, seeded = load.fleet, load.random
    slow = seeded.sample(fleet.workers, seeded.randint(1, max(1, len(fleet.workers) // 2)))
    for worker in slow:
        worker.truth = dataclasses.replace(worker.truth, slowdown=seeded.choice([5.0, 20.0, 100.0]))
    load.serve(seeded.choice([10, 50, 200]))
    for worker in slow:
        worker.truth = dataclasses.replace(worker.truth, slowdown=1.0)
    # It is over when no slow step or transfer is left.
    fleet.clock.run_until(max(worker.busy_until_s for worker in slow))
    return slow


def a_burst_of_transfers(load: Workload) -> list[VirtualWorker]:
    for worker in load.fleet.decode:
        for _ in range(load.random.choice([20, 100])):
            worker.transfer(256, lambda times: None)
    for _ in range(20):
        load.fleet.ask(load.random.choice(load.sizes))
    return load.fleet.workers


def an_overload(load: Workload) -> list[VirtualWorker]:
    load.serve(100, load.interval_s / load.random.choice([3.0, 10.0]))
    return load.fleet.workers


def wrong_rates_of_one(load: Workload) -> list[VirtualWorker]:
    worker = load.random.choice(load.fleet.workers)
    spoil(load, [worker])
    return [worker]


def wrong_rates_of_all(load: Workload) -> list[VirtualWorker]:
    spoil(load, load.fleet.workers)
    return load.fleet.workers


def spoil(load: Workload, workers: list[VirtualWorker]) -> None:
    factor = load.random.choice([0.01, 0.1, 10.0, 100.0, 1000.0])
    for each in learned(load.fleet):
        if each.worker in workers and each.rate.num_observed:
            each.rate.value *= factor


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize(
    "disturb", [a_slow_period, a_burst_of_transfers, an_overload, wrong_rates_of_one, wrong_rates_of_all]
)
def test_rates_are_right_again(disturb: Callable[[Workload], list[VirtualWorker]], seed: int) -> None:
    load = a_workload(seed)
    fleet = load.fleet
    load.serve(NUM_REQUESTS * fleet.num_gateways)
    worked = {worker.id: worker.num_served for worker in fleet.workers}
    disturbed = disturb(load)
    before = {each.key: each.rate.num_observed for each in learned(fleet)}
    served = {worker.id: worker.num_served for worker in fleet.workers}
    load.serve(NUM_REQUESTS * fleet.num_gateways)
    for worker in disturbed:
        # One that had little to do before is not missed.
        if worked[worker.id] > NUM_REQUESTS * fleet.num_gateways / 20:
            assert worker.num_served > served[worker.id], f"{worker.id} got no work again"
    for each in learned(fleet):
        if each.rate.num_observed - before[each.key] >= MIN_OBSERVED:
            assert each.error <= TOLERANCE, f"{each.key}: {each.rate} where {each.worker.truth} is true"
    fleet.check()
