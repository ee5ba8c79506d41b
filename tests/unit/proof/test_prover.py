"""Which transfers a gateway proves, when, and what becomes of the results."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kvferry.engine.base import EngineOutput, EngineRequest, EngineStats, TokenLogprob
from kvferry.errors import EngineDead, EngineError, KvferryError, NotReady, Overloaded, WorkerDraining, WorkerLost
from kvferry.membership.base import Member, MemberId, MemberKind, Record
from kvferry.proof import certificates as certificates_module
from kvferry.proof import prover as prover_module
from kvferry.proof.certificates import AGAIN_S, FOLDER, Certificate, Certificates, Way, key_of, kind_of
from kvferry.proof.prover import CLAIM_S, Prover, Subject
from kvferry.proof.verdict import Outcome
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.waiting import SOON_S, until

from .test_measure import TOKENS, FakeEngine, FakePair, zeroed

Failure = Callable[[EngineRequest], Exception | None]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover_module, "RETRY_S", 0.002)
    monkeypatch.setattr(prover_module, "RECHECK_S", 0.01)
    monkeypatch.setattr(prover_module, "LOOK_S", 0.001)


class FakeRemote:
    def __init__(self, link: FakeLink, request: EngineRequest, on_output: Callable[[EngineOutput], None]) -> None:
        self._link, self._request, self._on_output = link, request, on_output
        self.is_cancelled = False

    async def wait(self) -> EngineOutput:
        link, request = self._link, self._request
        await asyncio.sleep(0)
        if link.gate is not None:
            await link.gate.wait()
        if (error := link.failure(request)) is not None:
            raise error
        outputs = link.answer(request)
        for output in outputs:
            self._on_output(output)
        return outputs[-1]

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(eq=False)
class FakeLink:
    """What a prover uses of a WorkerLink."""

    member: Member
    answer: Callable[[EngineRequest], Sequence[EngineOutput]]
    failure: Failure = lambda request: None
    gate: asyncio.Event | None = None  # before each answer
    is_full: bool = False
    stats: EngineStats = field(default_factory=EngineStats)
    adapters: frozenset[str] = frozenset()
    remotes: list[FakeRemote] = field(default_factory=list)
    requests: list[EngineRequest] = field(default_factory=list)

    def submit(self, request: EngineRequest, on_output: Callable[[EngineOutput], None]) -> FakeRemote:
        self.requests.append(request)
        self.remotes.append(FakeRemote(self, request, on_output))
        return self.remotes[-1]


def a_member(kind: MemberKind, device: str = "a device", pool: str = "", **values: Any) -> Member:
    known = {"address": "a:1", "model": "/models/m", "version": "1.0", "block_size": 16, "exchange_digest": "e"}
    return Member(
        kind=kind, member_id=MemberId(f"{kind}-{device}-{pool}"), device=device, pool=pool, **{**known, **values}
    )


class Workers:
    """A prefill and a decode worker, which several gateways may see."""

    def __init__(self, *, pool: str = "", devices: Sequence[str] = ("a device",), **values: Any) -> None:
        self.pair = FakePair(**values)
        self.prefill = FakeLink(a_member(MemberKind.PREFILL, pool=pool), self.pair.prefill_outputs)
        self.decode = [
            FakeLink(a_member(MemberKind.DECODE, device, pool), self.pair.decode_outputs) for device in devices
        ]

    @property
    def links(self) -> list[FakeLink]:
        return [self.prefill, *self.decode]

    @property
    def requests(self) -> list[EngineRequest]:
        return [request for link in self.links for request in link.requests]

    @property
    def key(self) -> str:
        return Subject(self.prefill, self.decode[0], Way.TRANSFER).key  # type: ignore[arg-type]

    def fail(self, error: Callable[[], Exception], times: int = 1) -> None:
        """The decode worker fails at its next requests."""
        left = iter(range(times))
        self.decode[0].failure = lambda request: error() if next(left, None) is not None else None


@dataclass
class Cluster:
    workers: list[Workers]
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    wanted: Callable[[str], bool] = lambda pool: True
    unready: set[str] = field(default_factory=set)  # pools
    tokens: Sequence[int] = tuple(TOKENS)
    num_changes: Counter[str] = field(default_factory=Counter)  # by gateway

    @asynccontextmanager
    async def gateway(self, name: str = "g", cache: Path | None = None, secret: bytes = b"") -> AsyncIterator[Prover]:
        async def read_tokens(pool: str) -> Sequence[int]:
            if pool in self.unready:
                raise NotReady("loading")
            return self.tokens

        def usable(kind: MemberKind) -> Sequence[Any]:
            return [link for each in self.workers for link in each.links if link.member.kind is kind]

        prover = Prover(
            MemoryMembership(self.registry).records,
            Certificates(cache, secret),
            MemberId(name),
            usable=usable,
            is_wanted=self.wanted,
            read_tokens=read_tokens,
            longest=lambda pool, block_size: 161,
            on_change=lambda: self.num_changes.update((name,)),
        )
        prover.start()
        try:
            yield prover
        finally:
            await asyncio.wait_for(prover.close(), SOON_S)
            await prover.close()

    def read(self) -> Certificate | None:
        name = self.workers[0].key
        record = self.registry._records.get(f"{FOLDER}/{name}")
        return None if record is None else Certificates(None).decode(name, record.value)

    @property
    def record(self) -> Certificate:
        found = self.read()
        assert found is not None
        return found

    def write(self, certificate: Certificate | None) -> None:
        name = f"{FOLDER}/{self.workers[0].key}"
        before = self.registry._records.get(name)
        value = None if certificate is None else Certificates(None).encode(certificate)
        assert self.registry._write_record(name, value, 0 if before is None else before.revision)

    async def ends(self, outcome: Outcome) -> None:
        """Wait for a result, which is neither a claim nor what became of a proof that is tried again."""

        def is_there() -> bool:
            found = self.read()
            return found is not None and not found.claimed_by and found.unix_s > 0 and found.outcome is outcome

        await until(is_there, within_s=SOON_S, what=str(outcome))


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def cluster(workers: Workers) -> Cluster:
    return Cluster([workers])


def is_proven(prover: Prover, workers: Workers, number: int = 0, *, has_adapter: bool = False) -> bool:
    prefill, decode = kind_of(workers.prefill.member), kind_of(workers.decode[number].member)
    return prover.is_proven(prefill, decode, has_adapter=has_adapter)


def a_certificate(workers: Workers, **values: Any) -> Certificate:
    known: dict[str, Any] = {"outcome": Outcome.PROVEN, "unix_s": time.time(), "gateway": "other"}
    return Certificate(
        prefill=kind_of(workers.prefill.member),
        decode=kind_of(workers.decode[0].member),
        way=Way.TRANSFER,
        **{**known, **values},
    )


def files_in(folder: Path) -> list[str]:
    return [file.stem for file in folder.iterdir()]


async def quiet() -> None:
    """Give every prover the time to do what it should not."""
    await asyncio.sleep(0.05)


async def test_a_transfer_is_proven_once(cluster: Cluster, workers: Workers, tmp_path: Path) -> None:
    async with cluster.gateway(cache=tmp_path) as prover:
        assert not is_proven(prover, workers)
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await cluster.ends(Outcome.PROVEN)
        ((subject, result),) = prover.results()
        assert subject.key == workers.key
        assert (result.outcome, result.gateway, result.model) == (Outcome.PROVEN, "g", "m")
        assert abs(time.time() - result.unix_s) < SOON_S
        assert result.distances
        assert cluster.num_changes["g"]
        num_requests = len(workers.requests)
        prover.workers_changed()
        await quiet()
        assert len(workers.requests) == num_requests
        assert not is_proven(prover, workers, has_adapter=True), "another way"
    assert all(remote.is_cancelled for link in workers.links for remote in link.remotes)
    assert files_in(tmp_path) == [workers.key]
    assert {(each.turn, each.tier) for each in workers.requests} == {(None, None)}
    assert all(each.cache_salt.startswith("proof-") for each in workers.requests)
    assert len({each.request_id for each in workers.requests}) == len(workers.requests)


async def test_damaged_pages_are_refuted_and_not_proven_again_at_once(tmp_path: Path) -> None:
    workers = Workers(damage=zeroed)
    cluster = Cluster([workers])
    async with cluster.gateway(cache=tmp_path) as prover:
        await cluster.ends(Outcome.REFUTED)
        num_requests = len(workers.requests)
        await quiet()
        assert not is_proven(prover, workers)
        assert len(workers.requests) == num_requests
        assert cluster.record.reason
    assert files_in(tmp_path) == [workers.key]


async def test_pages_that_make_no_numbers_are_refuted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeEngine.likely

    def likely(engine: FakeEngine, salt: str, entries: list[Any]) -> list[TokenLogprob]:
        found = real(engine, salt, entries)
        return [structs.replace(each, logprob=math.nan) for each in found] if None in entries else found

    monkeypatch.setattr(FakeEngine, "likely", likely)
    workers = Workers(damage=zeroed)
    cluster = Cluster([workers])
    async with cluster.gateway():
        await cluster.ends(Outcome.REFUTED)
        num_requests = len(workers.requests)
        await quiet()
        assert len(workers.requests) == num_requests


async def test_another_gateway_takes_the_record(cluster: Cluster, workers: Workers) -> None:
    async with cluster.gateway("one"):
        await cluster.ends(Outcome.PROVEN)
    num_requests = len(workers.requests)
    async with cluster.gateway("two") as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await quiet()
    assert len(workers.requests) == num_requests
    assert cluster.record.gateway == "one"


async def test_of_gateways_that_start_together_one_proves(cluster: Cluster, workers: Workers) -> None:
    async with cluster.gateway("one") as one, cluster.gateway("two") as two, cluster.gateway("three") as three:
        for prover in (one, two, three):
            await until(lambda prover=prover: is_proven(prover, workers), within_s=SOON_S)
        await quiet()
    assert len({each.cache_salt[: len("proof-00000000")] for each in workers.requests}) == 1


async def test_a_gateway_whose_clock_is_late_does_not_prove_again(cluster: Cluster, workers: Workers) -> None:
    cluster.write(a_certificate(workers, unix_s=time.time() + 2))
    async with cluster.gateway() as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await quiet()
    assert not workers.requests


async def test_gateways_whose_clocks_differ_widely_do_not_prove_in_turn_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late_s = ContextVar("late_s", default=0.0)
    clocks = SimpleNamespace(time=lambda: time.time() - late_s.get(), monotonic=time.monotonic)
    monkeypatch.setattr(prover_module, "time", clocks)
    workers = Workers(pulls=False)
    cluster = Cluster([workers])
    async with cluster.gateway("one"):
        late_s.set(2 * AGAIN_S[Outcome.UNDECIDED])
        async with cluster.gateway("two"):
            await cluster.ends(Outcome.UNDECIDED)
            await quiet()
            await quiet()
    assert len({each.cache_salt[: len("proof-00000000")] for each in workers.requests}) <= 2, "one of each gateway"


async def test_a_kept_result_is_used_without_any_request(cluster: Cluster, workers: Workers, tmp_path: Path) -> None:
    Certificates(tmp_path).keep(a_certificate(workers))
    async with cluster.gateway(cache=tmp_path) as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await quiet()
    assert not workers.requests
    assert cluster.record.outcome is Outcome.PROVEN, "other gateways have it too"


@pytest.mark.parametrize("values", [{"unix_s": 1.0}, {"unix_s": 2e10}])
async def test_a_kept_result_that_is_due_is_not_used(
    cluster: Cluster, workers: Workers, tmp_path: Path, values: dict[str, Any]
) -> None:
    Certificates(tmp_path).keep(a_certificate(workers, **values))
    gate = workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway(cache=tmp_path) as prover:
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        assert not is_proven(prover, workers)
        gate.set()
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
    assert cluster.record.gateway == "g"


async def test_a_kept_result_of_another_secret_is_not_used(cluster: Cluster, workers: Workers, tmp_path: Path) -> None:
    Certificates(tmp_path, b"x" * 32).keep(a_certificate(workers))
    async with cluster.gateway(cache=tmp_path, secret=b"y" * 32) as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
    assert workers.requests


async def test_a_proven_way_is_used_while_it_is_proven_again(cluster: Cluster, workers: Workers) -> None:
    cluster.write(a_certificate(workers, unix_s=1.0))
    gate = workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway() as prover:
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        assert cluster.record.claimed_by == "g"
        assert is_proven(prover, workers)
        gate.set()
        await until(lambda: cluster.record.unix_s > 1.0, within_s=SOON_S)
        assert is_proven(prover, workers)


async def test_a_deleted_record_is_proven_anew_and_its_file_is_dropped(
    cluster: Cluster, workers: Workers, tmp_path: Path
) -> None:
    Certificates(tmp_path).keep(a_certificate(workers))
    async with cluster.gateway(cache=tmp_path) as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        workers.decode[0].gate = asyncio.Event()
        cluster.write(None)
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        assert not is_proven(prover, workers)
        assert not files_in(tmp_path)
        workers.decode[0].gate.set()
        await cluster.ends(Outcome.PROVEN)
        assert cluster.record.gateway == "g"


async def test_a_record_that_was_deleted_during_an_outage_is_proven_anew(
    cluster: Cluster, workers: Workers, tmp_path: Path
) -> None:
    Certificates(tmp_path).keep(a_certificate(workers))
    async with cluster.gateway(cache=tmp_path) as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        with cluster.registry.outage():
            await quiet()
            assert is_proven(prover, workers), "what is proven stays so"
            del cluster.registry._records[f"{FOLDER}/{workers.key}"]
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        await cluster.ends(Outcome.PROVEN)


# Claims


async def test_a_claim_of_a_gateway_that_is_gone_is_taken_over(
    cluster: Cluster, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    late_s = 0.0
    clocks = SimpleNamespace(time=time.time, monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr(prover_module, "time", clocks)
    cluster.write(a_certificate(workers, outcome=Outcome.UNDECIDED, unix_s=0.0, claimed_by="gone"))
    async with cluster.gateway():
        await quiet()
        late_s = CLAIM_S - 30
        await quiet()
        assert not workers.requests
        late_s = CLAIM_S + 1
        await cluster.ends(Outcome.PROVEN)
    assert cluster.record.gateway == "g"


@pytest.mark.parametrize("unix_s", [0.0, None])
async def test_an_own_claim_is_gone_on_with_at_once(cluster: Cluster, workers: Workers, unix_s: float | None) -> None:
    # The result of the proof before could not be written.
    unix_s = time.time() if unix_s is None else unix_s
    cluster.write(a_certificate(workers, outcome=Outcome.UNDECIDED, unix_s=unix_s, claimed_by="g"))
    async with cluster.gateway():
        await cluster.ends(Outcome.PROVEN)


async def test_a_gateway_that_ends_gives_its_claim_back(cluster: Cluster, workers: Workers) -> None:
    workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway("one"):
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        assert cluster.record.claimed_by == "one"
    assert cluster.record.claimed_by == ""
    assert all(link.remotes[-1].is_cancelled for link in workers.links if link.remotes)
    workers.decode[0].gate = None
    async with cluster.gateway("two"):
        await cluster.ends(Outcome.PROVEN)


async def test_a_claim_that_is_heard_of_while_the_record_is_read_is_left_to_its_gateway(workers: Workers) -> None:
    cluster = Cluster([])
    async with cluster.gateway() as prover:
        await quiet()
        read = prover._store.read

        async def late(name: str) -> Record | None:
            if cluster.read() is None:
                cluster.write(a_certificate(workers, outcome=Outcome.UNDECIDED, unix_s=0.0, claimed_by="other"))
            await until(lambda: workers.key in prover._known, within_s=SOON_S)
            return await read(name)

        prover._store.read = late  # type: ignore[method-assign]
        cluster.workers.append(workers)
        prover.workers_changed()
        await quiet()
    assert cluster.record.claimed_by == "other"
    assert not workers.requests


async def test_a_gateway_ends_while_the_registry_is_away(cluster: Cluster, workers: Workers) -> None:
    workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway():
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        cluster.registry.begin_outage()


@pytest.mark.parametrize("ends", ["cancelled", "with a result"])
async def test_a_claim_that_was_taken_over_is_left_to_the_other_gateway(
    cluster: Cluster, workers: Workers, ends: str
) -> None:
    workers.decode[0].gate = asyncio.Event()
    other = a_certificate(workers, outcome=Outcome.REFUTED, reason="as another gateway found")
    async with cluster.gateway() as prover:
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        cluster.write(other)
        if ends == "with a result":
            workers.decode[0].gate.set()
            await quiet()
            assert not is_proven(prover, workers)
    assert cluster.record == other


# Failures


async def test_an_engine_that_is_lost_once_may_be_lost_by_chance_and_twice_refutes(
    cluster: Cluster, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover_module, "REPEAT_S", 0.0)
    workers.fail(lambda: WorkerLost("a worker was lost", has_vanished=True), times=2)
    async with cluster.gateway(cache=tmp_path) as prover:
        await cluster.ends(Outcome.UNDECIDED)
        num_requests = len(workers.requests)
        await quiet()
        assert len(workers.requests) == num_requests, "not at once"
        assert cluster.record.num_lost == 1
        assert not files_in(tmp_path)
        monkeypatch.setattr(certificates_module, "AGAIN_S", {**AGAIN_S, Outcome.UNDECIDED: 0.0})
        await cluster.ends(Outcome.REFUTED)
        assert cluster.record.is_final
        num_requests = len(workers.requests)
        await quiet()
        assert len(workers.requests) == num_requests, "never again by itself"
        assert not is_proven(prover, workers)
    async with cluster.gateway("two"):
        await quiet()
        assert len(workers.requests) == num_requests
        cluster.write(None)
        await cluster.ends(Outcome.PROVEN)
        assert cluster.record.num_lost == 0


async def test_an_engine_that_is_lost_takes_an_earlier_result_with_it(
    cluster: Cluster, workers: Workers, tmp_path: Path
) -> None:
    earlier = a_certificate(workers, unix_s=time.time() - AGAIN_S[Outcome.PROVEN] + 2)
    Certificates(tmp_path).keep(earlier)
    cluster.write(structs.replace(earlier, unix_s=1.0))
    workers.fail(lambda: WorkerLost("a worker was lost", has_vanished=True))
    async with cluster.gateway(cache=tmp_path) as prover:
        await cluster.ends(Outcome.UNDECIDED)
        await until(lambda: not files_in(tmp_path), within_s=SOON_S)
        assert not is_proven(prover, workers)


async def test_a_dead_engine_counts_unless_another_request_is_suspect(cluster: Cluster, workers: Workers) -> None:
    workers.fail(lambda: EngineDead("it died", is_blameless=True))
    async with cluster.gateway():
        await cluster.ends(Outcome.PROVEN)
        assert cluster.record.num_lost == 0
        workers.fail(lambda: EngineDead("it died"))
        cluster.write(None)
        await cluster.ends(Outcome.UNDECIDED)
        assert cluster.record.num_lost == 1


@pytest.mark.parametrize(
    "error", [WorkerDraining("it drains"), WorkerLost("it was drained"), Overloaded("full"), NotReady("loading")]
)
async def test_what_passes_is_no_result_and_is_tried_again(
    cluster: Cluster, workers: Workers, error: KvferryError
) -> None:
    workers.fail(lambda: error, times=2)
    cluster.write(a_certificate(workers, outcome=Outcome.UNDECIDED, unix_s=1.0, num_lost=1))
    seen: list[Certificate] = []
    async with cluster.gateway():
        while (record := cluster.record).outcome is not Outcome.PROVEN:
            seen.append(record)
            await asyncio.sleep(0)
    assert {each.outcome for each in seen} == {Outcome.UNDECIDED}
    assert {each.num_lost for each in seen} == {1}, "neither more nor forgotten"
    assert any(error.message in each.reason for each in seen)


async def test_a_full_worker_is_not_asked_and_tenants_go_first(cluster: Cluster, workers: Workers) -> None:
    workers.decode[0].is_full = True
    async with cluster.gateway():
        await quiet()
        assert not workers.decode[0].requests
        workers.decode[0].is_full = False
        await cluster.ends(Outcome.PROVEN)


@pytest.mark.parametrize("is_full", [True, False])
async def test_of_a_kind_the_worker_with_the_least_to_do_is_asked(is_full: bool) -> None:
    workers = Workers(devices=("a device", "a device"))
    workers.decode[0].is_full = is_full
    workers.decode[0].stats = EngineStats(num_waiting=1)
    async with Cluster([workers]).gateway() as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
    assert not workers.decode[0].requests
    assert workers.decode[1].requests


async def test_a_worker_that_is_full_for_a_moment_does_not_end_the_proof(cluster: Cluster, workers: Workers) -> None:
    decode = workers.decode[0]
    answer = decode.answer

    def answer_and_be_full(request: EngineRequest) -> Sequence[EngineOutput]:
        decode.is_full = True
        asyncio.get_running_loop().call_later(2 * prover_module.LOOK_S, setattr, decode, "is_full", False)
        return answer(request)

    decode.answer = answer_and_be_full
    async with cluster.gateway():
        await cluster.ends(Outcome.PROVEN)
    assert len({each.cache_salt[: len("proof-00000000")] for each in workers.requests}) == 1


async def test_requests_that_wait_are_waited_for_but_not_for_ever(
    cluster: Cluster, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover_module, "LOOK_S", 0.01)
    workers.decode[0].stats = EngineStats(num_waiting=1)
    async with cluster.gateway():
        await quiet()
        assert not workers.decode[0].requests
        monkeypatch.setattr(prover_module, "LOOK_S", 0.0)
        await cluster.ends(Outcome.PROVEN)


async def test_a_request_without_an_answer_is_cancelled_in_time_and_tried_again(
    cluster: Cluster, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover_module, "REQUEST_TIMEOUT_S", 0.02)
    gate = workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway():
        await until(lambda: len(workers.requests) > 1, within_s=SOON_S)
        assert workers.decode[0].remotes[0].is_cancelled
        assert cluster.record.outcome is not Outcome.PROVEN
        gate.set()
        await cluster.ends(Outcome.PROVEN)


async def test_a_whole_proof_has_a_limit_too(
    cluster: Cluster, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover_module, "PROOF_TIMEOUT_S", 0.02)
    workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway():
        await until(lambda: len(workers.requests) > 1, within_s=SOON_S)
        monkeypatch.setattr(prover_module, "PROOF_TIMEOUT_S", SOON_S)
        workers.decode[0].gate.set()
        await cluster.ends(Outcome.PROVEN)


async def test_a_failed_request_leaves_it_undecided(cluster: Cluster, workers: Workers) -> None:
    workers.fail(lambda: EngineError("it failed on this request\nand says more"))
    async with cluster.gateway() as prover:
        await cluster.ends(Outcome.UNDECIDED)
        num_requests = len(workers.requests)
        await quiet()
        assert len(workers.requests) == num_requests
        assert "it failed on this request" in cluster.record.reason
        assert cluster.record.reason.isprintable()
        assert not is_proven(prover, workers)


async def test_pages_that_do_not_come_leave_it_undecided() -> None:
    cluster = Cluster([Workers(pulls=False)])
    async with cluster.gateway():
        await cluster.ends(Outcome.UNDECIDED)


async def test_a_text_of_few_tokens_proves_nothing(cluster: Cluster, workers: Workers) -> None:
    cluster.tokens = [1, 2, 3] * 50
    async with cluster.gateway():
        await cluster.ends(Outcome.UNDECIDED)
    assert not workers.requests


@pytest.mark.parametrize("when", ["at the start", "in the middle"])
async def test_while_the_registry_is_away_nothing_is_lost(cluster: Cluster, workers: Workers, when: str) -> None:
    if when == "at the start":
        cluster.registry.begin_outage()
    gate = workers.decode[0].gate = asyncio.Event()
    async with cluster.gateway() as prover:
        if when == "in the middle":
            await until(lambda: bool(workers.requests), within_s=SOON_S)
            cluster.registry.begin_outage()
        gate.set()
        await quiet()
        assert not is_proven(prover, workers)
        cluster.registry.end_outage()
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await cluster.ends(Outcome.PROVEN)


async def test_a_kind_is_not_proven_by_workers_that_became_others(cluster: Cluster, workers: Workers) -> None:
    gate, before = asyncio.Event(), workers.decode[0].member
    workers.decode[0].gate = gate
    async with cluster.gateway() as prover:
        await until(lambda: bool(workers.requests), within_s=SOON_S)
        for link in workers.links:
            link.member = structs.replace(link.member, exchange_digest="f")
        gate.set()
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        assert not prover.is_proven(kind_of(before), kind_of(before), has_adapter=False)


async def test_an_unreadable_record_is_proven_over(cluster: Cluster, workers: Workers) -> None:
    cluster.registry._write_record(f"{FOLDER}/{workers.key}", b"{", 0)
    async with cluster.gateway():
        await cluster.ends(Outcome.PROVEN)


async def test_gateways_with_different_secrets_do_not_replace_records_without_a_pause(
    cluster: Cluster, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover_module, "RECHECK_S", 60.0)
    # Each has a result of its own at hand, so nothing else takes time.
    for name in ("one", "other"):
        Certificates(tmp_path / name, name.encode() * 16).keep(a_certificate(workers))
    async with (
        cluster.gateway("one", tmp_path / "one", b"one" * 16),
        cluster.gateway("other", tmp_path / "other", b"other" * 16),
    ):
        await until(lambda: sum(cluster.num_changes.values()) > 2, within_s=SOON_S)
        await quiet()
        assert cluster.registry._revision <= 3, "each has written once or twice"


# What is proven


async def test_each_kind_is_proven_for_all_of_its_workers() -> None:
    workers = Workers(devices=("a device", "another device", "a device"))
    cluster = Cluster([workers])
    async with cluster.gateway() as prover:
        await until(lambda: all(is_proven(prover, workers, each) for each in range(3)), within_s=SOON_S)
        assert len(list(prover.results())) == 2
    assert [bool(link.requests) for link in workers.decode] == [True, True, False]


async def test_adapters_that_both_have_are_a_way_of_their_own(workers: Workers, cluster: Cluster) -> None:
    workers.prefill.adapters = frozenset({"b@1", "c@2"})
    workers.decode[0].adapters = frozenset({"b@9", "c@2"})
    async with cluster.gateway() as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await until(lambda: is_proven(prover, workers, has_adapter=True), within_s=SOON_S)
        assert {subject.way for subject, _ in prover.results()} == set(Way)
    assert {each.adapter for each in workers.requests} == {"", "c@2"}


async def test_workers_that_exchange_no_pages_or_need_no_proof_are_left_alone(workers: Workers) -> None:
    in_pool = Workers(pool="off")
    for link in in_pool.links:
        link.member = structs.replace(link.member, exchange_digest="off")
    unequal = Workers(pool="unequal")
    unequal.decode[0].member = structs.replace(unequal.decode[0].member, exchange_digest="f")
    cluster = Cluster([workers, in_pool, unequal], wanted=lambda pool: pool != "off")
    async with cluster.gateway() as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await quiet()
        assert [subject.decode.member.pool for subject, _ in prover.results()] == [""]
    assert not in_pool.requests
    assert not unequal.requests


async def test_workers_that_come_later_are_proven(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover_module, "RECHECK_S", SOON_S)
    cluster = Cluster([])
    async with cluster.gateway() as prover:
        await quiet()
        cluster.workers.append(workers)
        prover.workers_changed()
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)


async def test_failures_of_workers_that_are_gone_are_forgotten() -> None:
    unready = Workers(pool="unready")
    cluster = Cluster([unready], unready={"unready"})
    async with cluster.gateway() as prover:
        await until(lambda: prover._num_failures.total() > 1, within_s=SOON_S)
        cluster.workers.clear()
        prover.workers_changed()
        await until(lambda: not prover._num_failures and not prover._not_before_s, within_s=SOON_S)


async def test_a_way_that_fails_does_not_hold_up_workers_that_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover_module, "RETRY_S", 2 * SOON_S)
    unready, workers = Workers(pool="unready"), Workers(pool="z")
    for link in workers.links:
        link.member = structs.replace(link.member, exchange_digest="z")
    cluster = Cluster([unready], unready={"unready"})
    async with cluster.gateway() as prover:
        await until(lambda: cluster.read() is not None and not cluster.record.claimed_by, within_s=SOON_S)
        cluster.workers.append(workers)
        prover.workers_changed()
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)


async def test_pools_of_the_same_engines_share_a_result_and_any_of_them_can_find_it() -> None:
    unready, workers = Workers(pool="a"), Workers(pool="b")
    cluster = Cluster([unready, workers], unready={"a"})
    async with cluster.gateway() as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        await quiet()
        found = {subject.decode.member.pool: result for subject, result in prover.results()}
    assert set(found) == {"a", "b"}
    assert all(result is not None and result.is_proven for result in found.values())
    assert not unready.requests
    assert len({each.cache_salt[: len("proof-00000000")] for each in workers.requests}) == 1


async def test_a_way_that_cannot_be_proven_now_does_not_hold_up_others() -> None:
    unready, workers = Workers(pool="unready", block_size=16), Workers(pool="z")
    for link in workers.links:
        link.member = structs.replace(link.member, exchange_digest="z")
    cluster = Cluster([unready, workers], unready={"unready"})
    async with cluster.gateway() as prover:
        await until(lambda: is_proven(prover, workers), within_s=SOON_S)
        assert not unready.requests
        cluster.unready.clear()
        await until(lambda: is_proven(prover, unready), within_s=SOON_S)


def test_the_key_is_of_both_kinds(workers: Workers) -> None:
    assert workers.key == key_of(kind_of(workers.prefill.member), kind_of(workers.decode[0].member), Way.TRANSFER)
