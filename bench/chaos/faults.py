"""What is done to a cluster under load. Every one waits until the cluster is complete again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from bench.chaos.fleet import Fleet
from kvferry.membership.base import MemberKind

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
        others = Fleet(fleet.etcd, [process for process in fleet.processes if process is not victim])
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
