"""A failed request of bench/fairness.py ends what is measured, at once and by name."""

from __future__ import annotations

import asyncio

import pytest

from bench.fairness import Client, during
from bench.live_cluster import MODEL, config_of, running
from bench.results import BenchFailed


async def test_a_request_that_fails_ends_the_measurement() -> None:
    async def measure_for_ever() -> None:
        await asyncio.Event().wait()

    async with running(config_of(), 1) as cluster:
        client = Client(cluster.gateways[0], MODEL, "gold", "no key of a tenant", 0)
        with pytest.raises(ExceptionGroup) as caught:
            await during([client.flood(1)], measure_for_ever)
        await client.close()
    # flood() and during() have a group of tasks each.
    (flood,) = caught.value.exceptions
    assert isinstance(flood, ExceptionGroup)
    (failure,) = flood.exceptions
    assert isinstance(failure, BenchFailed)
    assert str(failure).startswith("tenant gold, request 1: 401: ")
