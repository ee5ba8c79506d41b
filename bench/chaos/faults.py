"""Faults of a cluster under load. Each one waits until the cluster is complete again."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable

import httpx

from bench.chaos.fleet import Fleet, Process
from bench.chaos.load import BURSTY, STEADY, Client, raise_failure
from bench.chaos.member import POISON
from bench.chaos.receipts import Ending, Receipt
from bench.results import BenchFailed
from kvferry.membership.base import MemberKind
from kvferry.router.engine_losses import MAX_LOSSES

REQUESTS_PER_MINUTE = 6.0  # one at each gateway, and one more each 10 s: fewer than the bursty tenant sends
REFUSED_WITHIN_S = 20.0
NUM_IN_CROWD = 128  # more at once than the cluster takes of a tenant
TOKENS_OF_CROWD = (4, 32, 256)  # tokens of an answer, tried in turn: a fast cluster refuses no crowd of short answers

Progress = Callable[[str], None]
Fault = Callable[[Fleet, random.Random, int, Progress], Awaitable[None]]


def killing(kind: MemberKind) -> Fault:
    """SIGKILL members of a kind, one at a time, each replaced before the next."""

    async def inflict(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
        for i in range(times):
            await asyncio.sleep(seeded.uniform(0.2, 1.2))  # anywhere in the life of the requests
            victim = seeded.choice(fleet.of(kind))
            await victim.kill()
            await fleet.replace(victim)
            progress(f"{kind.value} {i + 1}/{times}")

    return inflict


async def hanging(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
    """SIGSTOP decode workers: their sockets stay open and say nothing. A supervisor replaces them in the end."""
    for i in range(times):
        await asyncio.sleep(seeded.uniform(0.2, 1.2))
        victim = seeded.choice(fleet.of(MemberKind.DECODE))
        victim.hang()
        others = dataclasses.replace(fleet, processes=[each for each in fleet.processes if each is not victim])
        await others.complete()  # the gateways noticed
        await victim.end()
        await fleet.replace(victim)
        progress(f"hang {i + 1}/{times}")


async def leaving(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
    """Scale down and up again: a worker drains and goes, another one joins."""
    for i in range(times):
        await asyncio.sleep(seeded.uniform(0.2, 1.2))
        kind = seeded.choice((MemberKind.PREFILL, MemberKind.DECODE))
        leaver = seeded.choice(fleet.of(kind))
        await leaver.stop()
        await fleet.replace(leaver)
        progress(f"drain {i + 1}/{times}")


async def poisoning(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
    """Requests that end the engines that get them; workers are replaced. Each must be refused after two engines."""
    async with httpx.AsyncClient(timeout=60) as http:
        for i in range(times):
            await asyncio.sleep(seeded.uniform(0.2, 1.2))
            before = sum(process.num_kills for process in fleet.processes)
            ending = [asyncio.create_task(_replaced_when_dead(worker)) for worker in fleet.workers()]
            body = {"model": "sim-model", "prompt": f"{POISON} {i} {seeded.random()}", "max_tokens": 8}
            try:
                for url in fleet.urls():
                    # The second gateway knows from the first one.
                    receipt = Receipt(STEADY, url)
                    fleet.receipts.append(receipt)
                    answer = await http.post(f"{url}/v1/completions", json=body, headers=fleet.headers_of(STEADY))
                    receipt.end(Ending.FAILED)
                    receipt.answer_id = answer.headers.get("x-request-id", "")
                    if answer.status_code != 500 or answer.json()["error"]["code"] != "request_quarantined":
                        raise BenchFailed(f"poison {i} at {url}: {answer.status_code}: {answer.text}")
                # An engine's process ends a moment after its requests.
                while sum(process.num_kills for process in fleet.processes) - before < MAX_LOSSES:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await fleet.complete()
                dead = sum(process.num_kills for process in fleet.processes) - before
            finally:
                for task in ending:
                    task.cancel()
                await asyncio.gather(*ending, return_exceptions=True)
            if dead != MAX_LOSSES:
                raise BenchFailed(f"poison {i} ended {dead} engines")
            progress(f"poison {i + 1}/{times}")


async def _replaced_when_dead(worker: Process) -> None:
    while True:
        assert worker.process is not None
        await worker.process.wait()
        worker.num_kills += 1
        await worker.start()


async def upgrading(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
    """Change the model's revision by a rolling upgrade: new workers and a new gateway join, then the old ones leave."""
    for i in range(times):
        old = list(fleet.processes)
        model = {**old[0].config["model"], "revision": f"r{i + 2}"}
        for process in old:
            await fleet.add(process, model=model).start()
            await fleet.complete()
        # Clients first: a gateway leaves before the workers that it needs.
        for process in sorted(old, key=lambda process: process.kind is not MemberKind.GATEWAY):
            await process.stop()
            fleet.processes.remove(process)
            fleet.departed.append(process)
        await fleet.complete()
        progress(f"upgrade {i + 1}/{times}")


async def refusing(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
    """Limit the bursty tenant until it is refused, then send a crowd of its requests, more than the cluster takes.

    Clients of refused requests ask again until they have an answer. Raises BenchFailed where none is refused.
    """
    for i in range(times):
        await asyncio.sleep(seeded.uniform(0.2, 1.2))
        async with fleet.tenants() as admin:
            await admin.set_limits(BURSTY, {"requests_per_minute": REQUESTS_PER_MINUTE})
            await _until_refused(fleet)
            await admin.set_limits(BURSTY, {"requests_per_minute": None})
        for num_tokens in TOKENS_OF_CROWD:
            prompts = [f"crowd {seeded.random()}" for _ in range(NUM_IN_CROWD)]
            crowd = Client(fleet.urls, prompts, num_tokens, fleet.tenant_to_headers, fleet.receipts)
            try:
                outcomes = await asyncio.gather(*(crowd.ask(prompt, BURSTY) for prompt in range(len(prompts))))
            finally:
                await crowd.close()
            for outcome in outcomes:
                raise_failure(outcome)
            if any(outcome.num_refusals for outcome in outcomes):
                break
        else:
            raise BenchFailed(f"none of {NUM_IN_CROWD} requests at once was refused")
        progress(f"refuse {i + 1}/{times}")


async def _until_refused(fleet: Fleet) -> None:
    """Wait for a request that is refused from now on. Raises BenchFailed after REFUSED_WITHIN_S."""
    num_before, ends_s = len(fleet.receipts), time.monotonic() + REFUSED_WITHIN_S
    while not any(receipt.ending is Ending.REFUSED for receipt in fleet.receipts[num_before:]):
        if time.monotonic() > ends_s:
            raise BenchFailed(f"no request over its tenant's limit was refused for {REFUSED_WITHIN_S:g} s")
        await asyncio.sleep(0.05)


def etcd_away(seconds: float) -> Fault:
    """etcd is killed and comes back after a while."""

    async def inflict(fleet: Fleet, seeded: random.Random, times: int, progress: Progress) -> None:
        for i in range(times):
            fleet.etcd.kill()
            await asyncio.sleep(seconds)  # the length of the outage
            await fleet.etcd.start()
            await fleet.complete()
            progress(f"etcd {i + 1}/{times}")

    return inflict
