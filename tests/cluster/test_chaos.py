"""A few of every fault that `make chaos` inflicts twenty times, on real processes with sim engines and a real etcd."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.__main__ import LEAVING, ask_undisturbed, client_of, long_streams, run_fault
from bench.chaos.bills import compare_bills
from bench.chaos.faults import Fault, etcd_away, hanging, killing, leaving, poisoning, refusing, upgrading
from bench.chaos.fleet import billed, fleet
from bench.chaos.load import BURSTY, STEADY, Load, make_prompts
from bench.etcd_server import find_binary
from kvferry.membership.base import MemberKind

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(find_binary() is None, reason="no etcd on this machine"),
]

SEED = 7
NUM_PROMPTS = 48
NUM_STREAMS = 16
MAX_TOKENS = 80
MOST_TRIES = 6

FAULTS: dict[str, tuple[Fault, int]] = {
    "prefill": (killing(MemberKind.PREFILL), 4),
    "decode": (killing(MemberKind.DECODE), 2),
    "gateway": (killing(MemberKind.GATEWAY), 1),
    "refuse": (refusing, 1),
    "etcd": (etcd_away(8.0), 1),  # longer than the leases of 5 s
    "drain": (leaving, 2),
    "hang": (hanging, 1),
    "poison": (poisoning, 1),
    "upgrade": (upgrading, 1),  # the last one: the cluster has another model afterwards
}

# What shows that a fault met requests.
MET = {"prefill": "recomputed", "decode": "continued", "hang": "continued", "gateway": "retried", "refuse": "refused"}


async def test_no_fault_costs_an_answer_or_changes_one_and_bills_are_what_clients_got(tmp_path: Path) -> None:
    prompts = make_prompts(NUM_PROMPTS, SEED)
    async with fleet(tmp_path, mortal=True, **billed(tmp_path, NUM_STREAMS)) as running:
        expected = await ask_undisturbed(running, prompts, MAX_TOKENS)
        rows: dict[str, dict[str, Any]] = {}

        async def inflict(name: str, seed: int) -> None:
            fault, times = FAULTS[name]
            client = client_of(running, prompts, MAX_TOKENS)
            load = Load(client, len(prompts), NUM_STREAMS)

            def add(row: dict[str, Any]) -> None:
                rows[name] = row if name not in rows else _added(rows[name], row)

            try:
                # Raises for a request that failed and for an answer that differs.
                await run_fault(running, fault, times, load, expected, random.Random(seed), lambda what: None, add)
            finally:
                await client.close()

        async with long_streams(running, prompts) as leave:
            for name in FAULTS:
                if name in LEAVING:
                    await leave()
                # A prefill takes milliseconds, and a decode worker may be between two requests: whether a fault meets
                # one is chance.
                for seed in range(SEED, SEED + MOST_TRIES):
                    await inflict(name, seed)
                    if name not in MET or rows[name][MET[name]]:
                        break
        bills: dict[str, Any] = {}
        await compare_bills(running, tmp_path, bills.update)  # raises where they differ
    for name, row in rows.items():
        assert row["requests"] >= NUM_STREAMS
        if name not in ("gateway", "upgrade"):
            assert row["retried"] == 0, (name, row)
    for name, count in MET.items():
        assert rows[name][count] > 0, (name, rows[name])
    assert sum(row["preempted"] for row in rows.values()) > 0
    _check_bills(bills)


def _check_bills(bills: dict[str, Any]) -> None:
    """That there was something to bill, and that it adds up without what a killed gateway did not write."""
    assert bills["disagreements"] == 0
    assert bills["requests"]["refused"] > 0
    for tenant in (STEADY, BURSTY):
        sums = bills["tenants"][tenant]
        assert sums["answers"] > NUM_STREAMS
        for kind, got in (("prompt_tokens_of_answers", "asked"), ("tokens_of_answers", "delivered")):
            assert 0 < sums[kind]["billed"] == sums[kind][got] - sums[kind]["records_lost_with_gateway"]
        for kind in ("prompt_tokens_of_engines", "tokens_of_engines"):
            assert sums[kind]["computed"] == sums[kind]["billed"] + sum(sums[kind]["not_billed"].values())
    assert bills["tenants"][STEADY]["prompt_tokens_of_engines"]["not_billed"]["preempted"] > 0


def _added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The counts of both."""
    counts = ("requests", "continued", "recomputed", "retried", "preempted", "refused")
    return {key: one[key] + other[key] for key in counts}
