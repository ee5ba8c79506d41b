"""A few of every fault that `make chaos` inflicts twenty times, on real processes with sim engines and a real etcd."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.__main__ import ask_undisturbed, run_fault
from bench.chaos.faults import Fault, etcd_away, hanging, killing, leaving, poisoning, upgrading
from bench.chaos.fleet import fleet
from bench.chaos.load import Client, Load, make_prompts
from bench.etcd_server import find_binary
from kvferry.membership.base import MemberKind

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(find_binary() is None, reason="no etcd on this machine"),
]

SEED = 7
NUM_STREAMS = 16
MAX_TOKENS = 80
MOST_TRIES = 6

FAULTS: dict[str, tuple[Fault, int]] = {
    "prefill": (killing(MemberKind.PREFILL), 4),
    "decode": (killing(MemberKind.DECODE), 2),
    "gateway": (killing(MemberKind.GATEWAY), 1),
    "etcd": (etcd_away(8.0), 1),  # longer than the leases of 5 s
    "drain": (leaving, 2),
    "hang": (hanging, 1),
    "poison": (poisoning, 1),
    "upgrade": (upgrading, 1),  # the last one: the cluster has another model afterwards
}

# What shows that a fault met requests.
MET = {"prefill": "recomputed", "decode": "continued", "hang": "continued", "gateway": "retried"}


async def test_no_fault_costs_an_answer_or_changes_one(tmp_path: Path) -> None:
    prompts = make_prompts(64, SEED)
    async with fleet(tmp_path, mortal=True) as running:
        expected = await ask_undisturbed(running, prompts, MAX_TOKENS)
        rows: dict[str, dict[str, Any]] = {}

        async def inflict(name: str, seed: int) -> None:
            fault, times = FAULTS[name]
            client = Client(running.urls, prompts, MAX_TOKENS)
            load = Load(client, len(prompts), NUM_STREAMS)

            def add(row: dict[str, Any]) -> None:
                rows[name] = row if name not in rows else _added(rows[name], row)

            try:
                # Raises for a request that failed and for an answer that differs.
                await run_fault(running, fault, times, load, expected, random.Random(seed), lambda what: None, add)
            finally:
                await client.close()

        for name in FAULTS:
            # A prefill takes milliseconds, and a decode worker may be between two requests: whether a fault meets one
            # is chance.
            for seed in range(SEED, SEED + MOST_TRIES):
                await inflict(name, seed)
                if name not in MET or rows[name][MET[name]]:
                    break
    for name, row in rows.items():
        assert row["requests"] >= NUM_STREAMS
        if name not in ("gateway", "upgrade"):
            assert row["retried"] == 0, (name, row)
    for name, count in MET.items():
        assert rows[name][count] > 0, (name, rows[name])


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The counts of both."""
    return {key: one[key] + other[key] for key in ("requests", "continued", "recomputed", "retried")}
