"""Shares of tenants on a live cluster: simulated engines, real gateways, workers, links and HTTP, in one process.

Premium comes through one gateway, all others through the rest. Shares are counted in ms that the engines measured.
Each figure is a line of JSON on stdout when it is measured, and the last line has all; everything else goes to stderr.
The first request that fails ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.fair_hits import measure_hits
from bench.fair_slots import CASES, slot_share
from bench.live_cluster import TOKENS_PER_S, Cluster, config_of, real_config, running
from bench.results import BenchFailed, Results, run_benchmark
from kvferry.gateway.lifecycle import GatewayHost
from kvferry_loadtest.machine import machine_line

PROMPT_TOKENS = 500
PROMPT_S = PROMPT_TOKENS / TOKENS_PER_S
LONG_PROMPT_TOKENS = 600, 3700
REAL_PROMPT_WORDS = 20, 100
WARM_UP_S = 3.0
KNOWN_WITHIN_S = 60.0  # 1,000 tenants


class Client:
    """Requests of one tenant through one gateway: prompts that nobody sent before, one token each."""

    def __init__(self, gateway: GatewayHost, model: str, tenant: str, key: str, seed: int) -> None:
        self.latencies_s: list[float] = []
        self.prompt_tokens = PROMPT_TOKENS, PROMPT_TOKENS  # from and to
        self._model = model
        self._tenant = tenant
        self._num_sent = 0
        self._rng = random.Random(seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=300,
            limits=limits,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def wait_until_known(self) -> None:
        """Wait until the gateway has read the tenant's key."""
        while (await self._http.get("/v1/models")).status_code == 401:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def send(self) -> None:
        num_tokens = self._rng.randint(*self.prompt_tokens)
        prompt = f"{self._tenant}-{self._rng.getrandbits(48)} " + " ".join(f"w{i}" for i in range(num_tokens - 1))
        body = {"model": self._model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        self._num_sent += 1
        name = f"tenant {self._tenant}, request {self._num_sent}"
        begun_s = time.perf_counter()
        try:
            answer = await self._http.post("/v1/completions", json=body)
        except httpx.TransportError as error:
            raise BenchFailed(f"{name}: {type(error).__name__}: {error}") from error
        if answer.status_code != 200:
            raise BenchFailed(f"{name}: {answer.status_code}: {answer.text[:200]}")
        self.latencies_s.append(time.perf_counter() - begun_s)

    async def flood(self, num_at_once: int) -> None:
        async def one() -> None:
            while True:
                await self.send()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_at_once):
                tasks.create_task(one())

    async def at_rate(self, per_s: float) -> None:
        """Send at random times, whatever is answered."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                tasks.create_task(self.send())
                await asyncio.sleep(self._rng.expovariate(per_s))


async def clients_of(cluster: Cluster, tenants: Sequence[tuple[str, float, int]]) -> list[Client]:
    """Create tenants of (name, share, gateway), and a client of each."""
    clients = []
    for number, (name, share, gateway) in enumerate(tenants):
        await cluster.admin.create(name)
        await cluster.admin.set_contract(name, share=share)
        key = await cluster.admin.add_key(name, "bench")
        clients.append(Client(cluster.gateways[gateway], cluster.model, name, key, number))
    async with asyncio.timeout(KNOWN_WITHIN_S):
        for client in clients:
            await client.wait_until_known()
    return clients


async def during(loads: Sequence[Coroutine[Any, Any, None]], body: Callable[[], Awaitable[Any]]) -> Any:
    """Return what `body` does under load. Raises an ExceptionGroup at the first request that fails."""
    async with asyncio.TaskGroup() as tasks:
        loading = [tasks.create_task(load) for load in loads]
        await asyncio.sleep(WARM_UP_S)
        result = await body()
        for task in loading:
            task.cancel()
    return result


async def share_of_gold(cluster: Cluster, seconds: float) -> float:
    before = cluster.served_ms()
    await asyncio.sleep(seconds)
    after = cluster.served_ms()
    got = {tenant: ms - before.get(tenant, 0.0) for tenant, ms in after.items()}
    return got["gold"] / sum(got.values())


async def measure_shares(num_gateways: int, seconds: float) -> dict[str, float]:
    """Two tenants of 4:1 that always wait; the shares are turned round at the end."""
    async with running(config_of(), num_gateways) as cluster:
        others = range(1, num_gateways) if num_gateways > 1 else [0]
        clients = await clients_of(cluster, [("gold", 4.0, 0), *((f"noise{i}", 1.0 / len(others), i) for i in others)])
        stop = asyncio.Event()

        async def body() -> dict[str, float]:
            watching = asyncio.create_task(cluster.idle_with_backlog(stop))
            windows = [await share_of_gold(cluster, seconds / 3) for _ in range(3)]
            await cluster.admin.set_contract("gold", share=0.25)
            await asyncio.sleep(2.0)
            turned = await share_of_gold(cluster, 10.0)
            stop.set()
            return {
                "share": statistics.mean(windows),
                "lowest": min(windows),
                "highest": max(windows),
                "after_change": turned,
                "idle_with_backlog": await watching,
            }

        found: dict[str, float] = await during([client.flood(48) for client in clients], body)
        for client in clients:
            await client.close()
        return found


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


async def measure_real_shares(seconds: float) -> float:
    """Return the share of gold of one prefill and one decode engine of vLLM, through two gateways."""
    async with running(real_config(), 2) as cluster:
        clients = await clients_of(cluster, [("gold", 4.0, 0), ("noise", 1.0, 1)])
        for client in clients:
            client.prompt_tokens = REAL_PROMPT_WORDS
        share: float = await during([client.flood(12) for client in clients], lambda: share_of_gold(cluster, seconds))
        for client in clients:
            await client.close()
        return share


async def measure_under_share(seconds: float, prompt_tokens: tuple[int, int]) -> tuple[float, float]:
    """Return p99 of a tenant that asks for a third of its share: beside a flood, and alone on its share's speed.

    The flood has prompts of PROMPT_TOKENS. What is before a prompt that comes, a prompt inside the engine and a step of
    the decode engine, takes the same time for long ones.
    """
    mean_s = sum(prompt_tokens) / 2 / TOKENS_PER_S
    found = []
    for is_flooded in (True, False):
        async with running(config_of(speed=1.0 if is_flooded else 0.8), 2) as cluster:
            gold, noise = await clients_of(cluster, [("gold", 4.0, 0), ("noise", 1.0, 1)])
            gold.prompt_tokens = prompt_tokens
            loads = [gold.at_rate(4 / mean_s * 0.8 / 3)] + ([noise.flood(96)] if is_flooded else [])
            await during(loads, lambda: asyncio.sleep(seconds))
            found.append(p99(gold.latencies_s[len(gold.latencies_s) // 10 :]))
            for client in (gold, noise):
                await client.close()
    return found[0], found[1]


async def measure_small_tenants(num_tenants: int, seconds: float) -> tuple[float, float]:
    """Return p99 of many small tenants at half of the capacity together, with and without a flood of another one."""
    found = []
    for is_flooded in (True, False):
        async with running(config_of(), 2) as cluster:
            tenants = [(f"small{i}", 1.0, i % 2) for i in range(num_tenants)]
            *small, whale = await clients_of(cluster, [*tenants, ("whale", 1.0, 1)])
            rate = 4 / PROMPT_S * 0.5

            async def trickle(small: Sequence[Client] = small, rate: float = rate) -> None:
                rng = random.Random(7)
                async with asyncio.TaskGroup() as tasks:
                    while True:
                        tasks.create_task(rng.choice(small).send())
                        await asyncio.sleep(rng.expovariate(rate))

            await during([trickle()] + ([whale.flood(96)] if is_flooded else []), lambda: asyncio.sleep(seconds))
            found.append(p99([each for client in small for each in client.latencies_s]))
            for client in (*small, whale):
                await client.close()
    return found[0], found[1]


async def measure(arguments: argparse.Namespace, results: Results, console: Console) -> None:
    if arguments.real:
        share = await measure_real_shares(arguments.seconds)
        results.add({"share": round(share, 4), "share_error": round(abs(share / 0.8 - 1), 4)})
        return
    table = Table("gateways", "share of 0.800", "10 s windows", "0.25:1 asked (0.200)", "idle with backlog")
    shares = []
    for num_gateways in (1, 2, 4):
        found = await measure_shares(num_gateways, arguments.seconds)
        shares.append(found)
        results.add({"shares": {str(num_gateways): {name: round(value, 4) for name, value in found.items()}}})
        table.add_row(
            str(num_gateways),
            f"{found['share']:.3f}",
            f"{found['lowest']:.3f}-{found['highest']:.3f}",
            f"{found['after_change']:.3f}",
            f"{found['idle_with_backlog']:.4f}",
        )
    console.print(table)
    results.add(
        {
            "share_error_max": round(max(abs(each["share"] / 0.8 - 1) for each in shares), 4),
            "share_after_change_error_max": round(max(abs(each["after_change"] / 0.2 - 1) for each in shares), 4),
            "idle_with_backlog": round(max(each["idle_with_backlog"] for each in shares), 4),
        }
    )
    for name, fields in CASES.items():
        share = await slot_share(fields, arguments.seconds)
        results.add({"slot_shares": {name: round(share, 4)}})
        console.print(f"decode slots, the other tenant's long streams {name}: {share:.3f} of 0.800")
    for name, prompt_tokens in (
        ("ttft_p99_vs_alone", (PROMPT_TOKENS, PROMPT_TOKENS)),
        ("ttft_p99_vs_alone_long_prompts", LONG_PROMPT_TOKENS),
    ):
        beside_s, alone_s = await measure_under_share(arguments.seconds, prompt_tokens)
        results.add({name: round(beside_s / alone_s, 2)})
        console.print(
            f"a tenant at a third of its share, prompts of {prompt_tokens[0]} to {prompt_tokens[1]} tokens:"
            f" p99 {beside_s * 1e3:.0f} ms, alone {alone_s * 1e3:.0f} ms"
        )
    flooded_s, calm_s = await measure_small_tenants(arguments.tenants, arguments.seconds)
    results.add({"small_tenants_p99_vs_calm": round(flooded_s / calm_s, 2)})
    console.print(f"{arguments.tenants} small tenants: p99 {flooded_s * 1e3:.0f} ms, without {calm_s * 1e3:.0f} ms")
    hits, plain_hits = await measure_hits(arguments.trace, arguments.requests)
    results.add({"hits_vs_locality_points": round(100 * (hits - plain_hits), 2)})
    console.print(f"hits of prompt tokens: {hits:.1%}, without tenants {plain_hits:.1%}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description="Measure shares of tenants.")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement")
    parser.add_argument("--real", action="store_true", help="shares of two real engines, and nothing else")
    parser.add_argument("--tenants", type=int, default=1000, help="small ones beside a flood")
    parser.add_argument("--trace", type=Path, help="of hits, as Mooncake's; else conversations made from a seed")
    parser.add_argument("--requests", type=int, default=2000, help="of it")
    arguments = parser.parse_args()
    console = Console(stderr=True, width=140)
    logging.disable(logging.WARNING)  # links that end with each cluster

    def run(results: Results) -> None:
        results.add({"machine": machine_line()})
        asyncio.run(measure(arguments, results, console))

    return run_benchmark("bench-fairness", run)


if __name__ == "__main__":
    sys.exit(main())
