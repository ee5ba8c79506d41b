"""Transfers between two real engines while NIXL, leases and the prefill engine fail; the last line is JSON.

    make fuzz-transfer N=1000

Every answer must be that of the decode engine alone, token for token (float32, greedy), and both engines must hold no
page in the end. The first wrong answer, and the first request that the decode engine fails, end it with exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil
from rich.console import Console
from rich.progress import Progress

from bench.machine_turn import machine_turn
from bench.results import BenchFailed, Results, run_benchmark
from bench.vllm_engines import VllmPair, answer, child_processes, prefill, start_pair
from kvferry.engine.base import EngineRequest, RequestId, Sampling, TransferParams
from kvferry.engine.vllm import engine as vllm_engine
from kvferry.engine.vllm.start import arguments as engine_arguments
from kvferry.errors import EngineDead, EngineError, KvferryError

# Read by bench.faulty_transfers, in the engines' processes.
FAULTS_VARIABLE = "KVFERRY_FUZZ_TRANSFER"

ANSWER = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
NUM_PROMPTS = 60
LONGEST = 400  # tokens
AT_ONCE = 6
# Shares of transfers, by what happens to them beside NIXL's faults.
ODDS = {"lease ends": 0.05, "unknown engine": 0.01, "cancelled": 0.1}
LEASE_S = 20
QUIET_S = 90.0
MIN_WHOLE = 0.3  # of transfers


@dataclass
class Outcome:
    transfers: int = 0
    whole: int = 0  # whose prompt came through NIXL
    recomputed: int = 0
    cancelled: int = 0
    lost: int = 0  # whose prefill engine died before the prompt was computed
    deaths: int = 0
    spoilt: Counter[str] = field(default_factory=Counter)


class Fuzz:
    def __init__(self, pair: VllmPair, seed: int) -> None:
        self.outcome = Outcome()
        self.pair = pair
        self._draws = random.Random(seed)
        self._prompts = [
            [self._draws.randrange(1000, 40_000) for _ in range(self._draws.randrange(20, LONGEST))]
            for _ in range(NUM_PROMPTS)
        ]
        self._expected: list[list[int]] = []
        self._is_prefill_up = asyncio.Event()
        self._is_prefill_up.set()

    async def learn(self) -> None:
        """Compute the answers in the decode engine alone."""
        for i, prompt in enumerate(self._prompts):
            request = EngineRequest(RequestId(f"alone-{i}"), prompt, ANSWER, cache_salt="alone")
            self._expected.append((await answer(self.pair.decode, request))[0])

    async def transfer(self, number: int) -> None:
        """Raises BenchFailed for an answer that is wrong, or that the decode engine fails to give."""
        which = self._draws.randrange(NUM_PROMPTS)
        prompt, outcome = self._prompts[which], self.outcome
        await self._is_prefill_up.wait()
        try:
            params = await prefill(self.pair.prefill, f"prefill-{number}", prompt)
        except (EngineDead, EngineError):
            outcome.lost += 1
            return
        params, fault = self._spoil(params)
        outcome.spoilt[fault] += 1
        # A salt of its own: a prompt that is cached is not transferred.
        request = EngineRequest(
            RequestId(f"decode-{number}"), prompt, ANSWER, transfer_params=params, cache_salt=f"n-{number}"
        )
        answering = asyncio.create_task(answer(self.pair.decode, request))
        if fault == "cancelled":
            await asyncio.sleep(self._draws.uniform(0.0, 0.3))
            answering.cancel()
        outcome.transfers += 1
        try:
            tokens, last = await answering
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise  # another transfer failed
            outcome.cancelled += 1
            return
        except KvferryError as error:
            raise BenchFailed(f"transfer {number}, fault {fault}: {error.message}") from error
        if tokens != self._expected[which]:
            raise BenchFailed(f"transfer {number}, fault {fault}: {tokens} instead of {self._expected[which]}")
        if last.sources is not None and last.sources.external_kv_transfer >= len(prompt):
            outcome.whole += 1
        else:
            outcome.recomputed += 1

    def _spoil(self, params: TransferParams) -> tuple[TransferParams, str]:
        drawn, changed = self._draws.random(), dict(params)
        fault = "none"
        for each, odds in ODDS.items():
            if 0 <= drawn < odds:
                fault = each
            drawn -= odds
        if fault == "lease ends":
            changed["remote_blocks_expiry_time"] = time.perf_counter() + self._draws.uniform(-5.0, 6.0)
        elif fault == "unknown engine":
            changed["remote_engine_id"] = f"{self._draws.getrandbits(128):032x}"
            changed["remote_port"] = 1  # where no engine listens
        return changed, fault

    async def kill_prefill(self, children: set[int]) -> set[int]:
        """Kill the prefill engine's processes, start another one, and return its processes."""
        self._is_prefill_up.clear()
        for pid in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
        self.outcome.deaths += 1
        await self.pair.prefill.stop()
        before = child_processes()
        await self.pair.replace_prefill()
        self._is_prefill_up.set()
        return child_processes() - before

    async def held_pages(self) -> tuple[int, int]:
        """Return the pages that the prefill and the decode engine hold once they are quiet, or after `QUIET_S`."""
        ends_s = time.monotonic() + QUIET_S
        held = (-1, -1)
        while any(held) and time.monotonic() < ends_s:
            # Engines reap what has ended in their steps.
            for name, engine in (("prefill", self.pair.prefill), ("decode", self.pair.decode)):
                request = EngineRequest(RequestId(f"{name}-{time.monotonic_ns()}"), [5, 6, 7], ANSWER)
                await answer(engine, request)
            await asyncio.sleep(0.5)
            held = (self.pair.prefill.stats().num_pages_used, self.pair.decode.stats().num_pages_used)
        return held


async def run(
    num_transfers: int, num_deaths: int, seed: int, odds: float, results: Results, progress: Progress
) -> None:
    engine_arguments.CONNECTOR_MODULE = vllm_engine.CONNECTOR_MODULE = "bench.faulty_transfers"
    engine_arguments.CONNECTOR_CLASS = vllm_engine.CONNECTOR_CLASS = "FaultyConnector"
    engine_arguments.TRANSFER_LEASE_S = LEASE_S
    os.environ[FAULTS_VARIABLE] = json.dumps({"seed": seed, "odds": odds})
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    results.add({"machine": machine, "seed": seed, "odds": odds})
    task = progress.add_task("engines start", total=num_transfers)
    children: set[int] = set()

    def note_prefill() -> None:
        children.update(child_processes())

    pair = await start_pair(on_prefill=note_prefill)
    begun_s = time.monotonic()
    fuzz = Fuzz(pair, seed)
    try:
        await fuzz.learn()
        numbers = iter(range(num_transfers))
        dies_at = {num_transfers * (i + 1) // (num_deaths + 1) for i in range(num_deaths)}

        async def work() -> None:
            nonlocal children
            for number in numbers:
                if number in dies_at:
                    children = await fuzz.kill_prefill(children)
                await fuzz.transfer(number)
                progress.update(task, advance=1, description="transfers")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())
        held = await fuzz.held_pages()
    finally:
        results.add({**vars(fuzz.outcome), "seconds": round(time.monotonic() - begun_s, 1)})
        await pair.stop()
    if any(held):
        raise BenchFailed(f"the prefill and the decode engine hold {held[0]} and {held[1]} pages in the end")
    if fuzz.outcome.whole < MIN_WHOLE * fuzz.outcome.transfers:
        raise BenchFailed(f"only {fuzz.outcome.whole} transfers were whole: wrong bytes would not show")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--transfers", type=int, default=1000, help="(default: %(default)s)")
    parser.add_argument("--deaths", type=int, default=2, help="of the prefill engine (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--odds", type=float, default=0.04, help="of a fault, for each call (default: %(default)s)")
    given = parser.parse_args()
    console = Console(stderr=True)

    def measure(results: Results) -> None:
        with machine_turn(console), Progress(console=console) as progress:
            asyncio.run(run(given.transfers, given.deaths, given.seed, given.odds, results, progress))

    return run_benchmark("fuzz-transfer", measure)


if __name__ == "__main__":
    sys.exit(main())
