from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from kvferry.errors import KvferryError, WorkerDraining, WorkerLost
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.proof import prover as prover_module
from kvferry.proof.certificates import Certificate, Certificates, kind_of
from kvferry.proof.prover import Prover, Subject
from kvferry.proof.verdict import Distances, Outcome, View
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import until

RIGHT = (Distances(0, 30, View.DIRECT, 0.0, 0.0, (0.5,)),)
WRONG = (Distances(0, 30, View.DIRECT, 0.5, 0.0, (0.5,)),)
VANISHED = WorkerLost("a worker was lost", has_vanished=True)


def link(kind: MemberKind, *, device: str = "cpu", digest: str = "d", adapters: Sequence[str] = ()) -> Any:
    member = Member(
        kind=kind,
        member_id=MemberId(f"{kind}-{device}"),
        address="",
        model="/models/small",
        version="1",
        device=device,
        exchange_digest=digest,
    )
    return SimpleNamespace(member=member, adapters=frozenset(adapters))


class Cluster:
    """Provers of several gateways, whose measurements are what `results` says, one after the other."""

    def __init__(self, *results: Any, cache: Path | None = None, links: Sequence[Any] = ()) -> None:
        self.registry = MemoryRegistry()
        self.links = links or (link(MemberKind.PREFILL), link(MemberKind.DECODE))
        self.proven: list[Subject] = []
        self.provers: list[Prover] = []
        self.is_wanted: Callable[[str], bool] = lambda pool: True
        self.go_on = asyncio.Event()
        self.go_on.set()
        self._results = list(results)
        self._certificates = Certificates(cache)

    def add(self) -> Prover:
        prover = Prover(
            MemoryMembership(self.registry).records,
            self._certificates,
            MemberId(f"gateway-{len(self.provers)}"),
            usable=lambda kind: [each for each in self.links if each.member.kind is kind],
            is_wanted=lambda pool: self.is_wanted(pool),
            read_tokens=mock.AsyncMock(return_value=range(100)),
            longest=lambda pool: 100,
            on_change=lambda: None,
        )
        self.provers.append(prover)
        prover._measure = self._measure  # type: ignore[method-assign]
        prover.start()
        return prover

    async def _measure(self, subject: Subject) -> AsyncIterator[Sequence[Distances]]:
        self.proven.append(subject)
        await self.go_on.wait()
        result = self._results.pop(0) if len(self._results) > 1 else self._results[0]
        if isinstance(result, Exception):
            raise result
        yield result

    def result(self, number: int = 0) -> Certificate | None:
        (found,) = (result for _, result in self.provers[number].results())
        return found

    def is_claimed(self, number: int) -> bool:
        result = self.result(number)
        return result is not None and bool(result.claimed_by)

    async def until(self, outcome: Outcome, number: int = 0) -> Certificate:
        def has_come() -> bool:
            result = self.result(number)
            return result is not None and not result.claimed_by and result.outcome is outcome and result.unix_s > 0

        await until(has_come, what=f"a transfer is {outcome}")
        result = self.result(number)
        assert result is not None
        return result

    async def close(self) -> None:
        for prover in self.provers:
            await prover.close()


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover_module, "RETRY_S", 0.01)


def is_proven(prover: Prover, cluster: Cluster) -> bool:
    prefill, decode = (kind_of(each.member) for each in cluster.links[:2])
    return prover.is_proven(prefill, decode, has_adapter=False)


async def test_a_transfer_is_proven_once_for_all_gateways() -> None:
    cluster = Cluster(RIGHT)
    first = cluster.add()
    assert not is_proven(first, cluster)
    result = await cluster.until(Outcome.PROVEN)
    assert (result.gateway, result.distances, result.model) == ("gateway-0", RIGHT, "small")
    second = cluster.add()
    await cluster.until(Outcome.PROVEN, 1)
    assert is_proven(second, cluster)
    assert len(cluster.proven) == 1
    await cluster.close()


async def test_one_of_two_gateways_proves() -> None:
    cluster = Cluster(RIGHT)
    cluster.go_on.clear()
    for _ in range(2):
        cluster.add()
    await until(lambda: all(cluster.is_claimed(number) for number in range(2)))
    cluster.go_on.set()
    await cluster.until(Outcome.PROVEN, 0)
    await cluster.until(Outcome.PROVEN, 1)
    assert len(cluster.proven) == 1
    await cluster.close()


async def test_a_gateway_that_ends_gives_its_claim_back() -> None:
    cluster = Cluster(RIGHT)
    cluster.go_on.clear()
    first = cluster.add()
    await until(lambda: bool(cluster.proven))
    await first.close()
    cluster.go_on.set()
    cluster.add()
    await cluster.until(Outcome.PROVEN, 1)
    assert len(cluster.proven) == 2
    await cluster.close()


async def test_the_claim_of_a_gateway_that_vanished_counts_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(RIGHT)
    cluster.go_on.clear()
    first = cluster.add()
    await until(lambda: bool(cluster.proven))
    first.close = mock.AsyncMock()  # type: ignore[method-assign]
    second = cluster.add()
    await until(lambda: cluster.is_claimed(1))
    assert second._next() is None
    monkeypatch.setattr(prover_module, "CLAIM_S", 0.0)
    assert second._next() is not None
    for task in first._tasks:
        task.cancel()
    await cluster.close()


async def test_wrong_pages_are_refuted_with_the_reason() -> None:
    cluster = Cluster(WRONG)
    prover = cluster.add()
    result = await cluster.until(Outcome.REFUTED)
    assert "0.5" in result.reason
    assert not is_proven(prover, cluster)
    assert prover._next() is None, "not again before its time"
    await cluster.close()


async def test_an_engine_that_is_lost_twice_in_the_proof_refutes_the_way_for_good() -> None:
    cluster = Cluster(VANISHED)
    prover = cluster.add()
    once = await cluster.until(Outcome.UNDECIDED)
    assert (once.num_lost, once.is_final) == (1, False)
    with mock.patch.object(Certificate, "is_due", lambda result, now_unix_s: not result.is_final):
        prover.workers_changed()
        twice = await cluster.until(Outcome.REFUTED)
        assert (twice.num_lost, twice.is_final, len(cluster.proven)) == (2, True, 2)
        assert prover._next() is None
    await cluster.close()


@pytest.mark.parametrize("error", [WorkerDraining("a worker is draining"), WorkerLost("this gateway closed the link")])
async def test_what_passes_is_no_result(error: KvferryError) -> None:
    cluster = Cluster(error, RIGHT)
    cluster.add()
    result = await cluster.until(Outcome.PROVEN)
    assert (result.num_lost, len(cluster.proven)) == (0, 2)
    await cluster.close()


async def test_a_registry_that_is_away_is_asked_again() -> None:
    cluster = Cluster(RIGHT)
    with cluster.registry.outage():
        cluster.add()
    await cluster.until(Outcome.PROVEN)
    await cluster.close()


async def test_a_deleted_record_is_proven_again_and_its_file_is_dropped(tmp_path: Path) -> None:
    cluster = Cluster(RIGHT, WRONG, cache=tmp_path)
    prover = cluster.add()
    key = (await cluster.until(Outcome.PROVEN)).key
    await until(lambda: (tmp_path / f"{key}.json").exists())
    records = MemoryMembership(cluster.registry).records
    record = await records.read(f"proofs/{key}")
    assert record is not None
    assert await records.write(f"proofs/{key}", None, record.revision)
    await cluster.until(Outcome.REFUTED)
    assert not is_proven(prover, cluster)
    await cluster.close()


async def test_what_an_earlier_cluster_proved_holds(tmp_path: Path) -> None:
    earlier = Cluster(RIGHT, cache=tmp_path)
    earlier.add()
    await earlier.until(Outcome.PROVEN)
    await until(lambda: any(tmp_path.iterdir()))
    await earlier.close()
    later = Cluster(WRONG, cache=tmp_path)
    later.add()
    await later.until(Outcome.PROVEN)
    assert not later.proven
    await later.close()


async def test_each_way_between_kinds_of_engines_is_proven() -> None:
    links = (
        link(MemberKind.PREFILL, adapters=["a@1", "b@2"]),
        link(MemberKind.DECODE, adapters=["b@2"]),
        link(MemberKind.DECODE, device="gpu"),
        link(MemberKind.DECODE, device="other", digest="other"),
    )
    cluster = Cluster(RIGHT, links=links)
    prover = cluster.add()
    await until(lambda: all(result is not None and result.unix_s > 0 for _, result in prover.results()))
    proven = {(subject.decode.member.device, subject.way.value, subject.adapter) for subject in cluster.proven}
    assert proven == {
        ("cpu", "transfer", ""),
        ("cpu", "transfer-with-adapter", "b@2"),
        ("gpu", "transfer", ""),
    }
    await cluster.close()


async def test_where_no_proof_is_wanted_none_is_made() -> None:
    cluster = Cluster(RIGHT)
    cluster.is_wanted = lambda pool: False
    prover = cluster.add()
    assert (list(prover.results()), prover._next()) == ([], None)
    await cluster.close()
