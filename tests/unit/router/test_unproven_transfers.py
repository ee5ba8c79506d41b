"""What a request is placed on where not every transfer is proven."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.engine.base import EngineStats, RequestId, Sampling
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.observability.exposition import Exposition
from kvferry.observability.telemetry import Exporter
from kvferry.proof.certificates import EngineKind
from kvferry.residency.index import ResidencyIndex
from kvferry.router.placement import Reason
from kvferry.router.placement_policy import Policy, PricedPolicy, RoundRobinPolicy
from kvferry.router.request import Answer, Prompt, Request, RequestRecord
from kvferry.router.request_placer import NOT_PROVEN, PlacedAttempt, RequestPlacer, Router, RouterMetrics
from kvferry.router.request_run import KeptPages, RequestRun, engine_of
from kvferry.router.worker_pool import WorkerPool
from kvferry_sim.membership import MemoryMembership, MemoryRegistry

PREFILL, DECODE = MemberKind.PREFILL, MemberKind.DECODE
POLICIES: list[Callable[[], Policy]] = [lambda: PricedPolicy(ResidencyIndex(), seed=1), RoundRobinPolicy]
ADAPTER = "a@1"


class FakeLink:
    usable = connected = True
    is_quiet = False
    generation = 1

    def __init__(self, kind: MemberKind, name: str, device: str = "", digest: str = "e", *, pool: str = "") -> None:
        self.member = Member(
            kind=kind,
            member_id=MemberId(name),
            address="a:1",
            model="m",
            version="1",
            block_size=16,
            device=device,
            exchange=(("page", digest),),
            exchange_digest=digest,
            pool=pool,
        )
        self.stats = EngineStats()
        self.features = frozenset[str]()
        self.adapters = frozenset({ADAPTER})
        self.has_room = True
        self.released: list[Any] = []

    def has_room_for(self, turn: object) -> bool:
        return self.has_room

    async def reserve(self, *args: object, **kwargs: object) -> Any:
        return SimpleNamespace(release=lambda: None)

    def release(self, params: Any) -> None:
        self.released.append(params)


class Placing:
    """One request, and the workers that it may be placed on. `proven` has devices of prefill and decode workers."""

    def __init__(
        self,
        policy: Callable[[], Policy],
        *links: FakeLink,
        proven: Collection[tuple[str, str]] = (),
        proven_with_adapter: Collection[tuple[str, str]] = (),
        adapter: str = "",
        pool: str = "",
    ) -> None:
        self.asked: list[tuple[EngineKind, EngineKind, str, bool]] = []
        self.proven = {False: proven, True: proven_with_adapter}
        workers = WorkerPool(MemoryMembership(MemoryRegistry()), "g")
        workers._links.update({link.member.member_id: link for link in links})  # type: ignore[misc]
        self.exposition = Exposition(Exporter.GATEWAY)
        self.router = Router(
            *(workers, policy(), RouterMetrics(self.exposition), 10.0, lambda pool: {}, itertools.count(), 10.0),
            may_transfer=self._may_transfer,
        )
        prompt = Prompt(list(range(64)), adapter=adapter)
        request = Request(RequestId("r"), prompt, Sampling(max_tokens=4), pool=pool)
        self.record = RequestRecord()
        self.run = RequestRun(Answer(request, lambda output: None, self.record), self.record)

    def _may_transfer(self, prefill: EngineKind, decode: EngineKind, pool: str, has_adapter: bool) -> bool:
        self.asked.append((prefill, decode, pool, has_adapter))
        return (prefill.device, decode.device) in self.proven[has_adapter]

    async def place(self) -> PlacedAttempt:
        # Decode workers compute the prompt only where no prefill worker can.
        return await RequestPlacer(self.router, self.run, may_be_aggregated=False).place()

    async def pairs(self) -> set[tuple[str | None, str]]:
        """Return workers that are chosen in some attempts."""
        found = set()
        for _ in range(12):
            attempt = await self.place()
            found.add((attempt.placement.prefill, attempt.placement.decode))
            self.run.lose_placement(None)  # type: ignore[arg-type]
        return found


@pytest.fixture(params=POLICIES, ids=["priced", "round robin"])
def policy(request: pytest.FixtureRequest) -> Callable[[], Policy]:
    found: Callable[[], Policy] = request.param
    return found


async def test_without_a_proof_the_decode_worker_computes_the_prompt(policy: Callable[[], Policy]) -> None:
    placing = Placing(policy, FakeLink(PREFILL, "p", "P"), FakeLink(DECODE, "d", "D"))
    placement = (await placing.place()).placement
    assert (placement.prefill, placement.decode, placement.reason) == (None, "d", Reason.UNPROVEN)
    assert placing.record.reason == Reason.UNPROVEN.value
    assert placing.record.unequal_pages == NOT_PROVEN
    assert b'kvferry_placements_total{reason="unproven"} 1' in placing.exposition.render()


async def test_with_a_proof_the_prefill_worker_does(policy: Callable[[], Policy]) -> None:
    placing = Placing(policy, FakeLink(PREFILL, "p", "P"), FakeLink(DECODE, "d", "D"), proven=[("P", "D")])
    placement = (await placing.place()).placement
    assert (placement.prefill, placement.reason) == ("p", Reason.DISAGGREGATED)
    assert placing.record.unequal_pages == ""
    ((prefill, decode, pool, has_adapter),) = set(placing.asked)
    assert (prefill, decode) == (EngineKind("e", "P", "1"), EngineKind("e", "D", "1"))
    assert (pool, has_adapter) == ("", False)


async def test_it_is_asked_for_the_pool_of_the_request(policy: Callable[[], Policy]) -> None:
    links = FakeLink(PREFILL, "p", "P", pool="x"), FakeLink(DECODE, "d", "D", pool="x"), FakeLink(DECODE, "o", "O")
    placing = Placing(policy, *links, proven=[("P", "D")], pool="x")
    assert (await placing.place()).placement.prefill == "p"
    assert {pool for _, _, pool, _ in placing.asked} == {"x"}


async def test_without_prefill_workers_no_proof_is_missing(policy: Callable[[], Policy]) -> None:
    placing = Placing(policy, FakeLink(DECODE, "d", "D"))
    assert (await placing.place()).placement.reason is Reason.NO_PREFILL_WORKER
    assert placing.record.unequal_pages == ""


async def test_a_prefill_worker_is_used_only_if_its_pages_may_go_to_each_decode_worker(
    policy: Callable[[], Policy],
) -> None:
    links = FakeLink(PREFILL, "p", "P"), FakeLink(DECODE, "d1", "D1"), FakeLink(DECODE, "d2", "D2")
    placing = Placing(policy, *links, proven=[("P", "D1")])
    assert {prefill for prefill, _ in await placing.pairs()} == {None}
    placing = Placing(policy, *links, proven=[("P", "D1"), ("P", "D2")])
    assert {prefill for prefill, _ in await placing.pairs()} == {"p"}


async def test_a_few_decode_workers_without_a_proof_do_not_end_transfers_to_others(
    policy: Callable[[], Policy],
) -> None:
    decode = [FakeLink(DECODE, f"d{number}", "D") for number in (1, 2)]
    new = FakeLink(DECODE, "n", "N")
    placing = Placing(policy, FakeLink(PREFILL, "p", "P"), *decode, new, proven=[("P", "D")])
    assert await placing.pairs() == {("p", "d1"), ("p", "d2")}
    for link in decode:
        link.has_room = False
    assert await placing.pairs() == {(None, "n")}, "it takes what others have no room for"
    placing = Placing(policy, FakeLink(PREFILL, "p", "P"), *decode, new, proven=[("P", "N")])
    for link in decode:
        link.has_room = True
    assert {prefill for prefill, _ in await placing.pairs()} == {None}, "most decode workers are not left out"


async def test_of_prefill_workers_only_those_that_are_proven_are_used(policy: Callable[[], Policy]) -> None:
    links = [FakeLink(PREFILL, name, name.upper()) for name in ("p1", "p2", "p3")]
    placing = Placing(policy, *links, FakeLink(DECODE, "d", "D"), proven=[("P2", "D"), ("D", "P1")])
    assert await placing.pairs() == {("p2", "d")}


async def test_a_proof_is_not_asked_for_where_pages_are_not_exchanged(policy: Callable[[], Policy]) -> None:
    links = FakeLink(PREFILL, "p", "P"), FakeLink(DECODE, "d1", "D1"), FakeLink(DECODE, "d2", "D2", "f")
    pairs = await Placing(policy, *links, proven=[("P", "D1")]).pairs()
    assert ("p", "d1") in pairs
    assert ("p", "d2") not in pairs
    placing = Placing(policy, links[0], links[2])
    assert (await placing.place()).placement.reason is Reason.UNEQUAL_PAGES
    assert placing.record.unequal_pages not in ("", NOT_PROVEN)


@pytest.mark.parametrize("is_proven", [True, False])
async def test_a_transfer_with_an_adapter_is_proven_apart(policy: Callable[[], Policy], is_proven: bool) -> None:
    links, pair = (FakeLink(PREFILL, "p", "P"), FakeLink(DECODE, "d", "D")), [("P", "D")]
    placing = Placing(
        policy,
        *links,
        proven=[] if is_proven else pair,
        proven_with_adapter=pair if is_proven else [],
        adapter=ADAPTER,
    )
    placement = (await placing.place()).placement
    assert (placement.prefill == "p") is is_proven
    assert {has_adapter for *_, has_adapter in placing.asked} == {True}


async def test_a_full_prefill_worker_is_not_waited_for_without_a_proof(policy: Callable[[], Policy]) -> None:
    prefill = FakeLink(PREFILL, "p", "P")
    prefill.has_room = False
    placing = Placing(policy, prefill, FakeLink(DECODE, "d", "D"))
    placement = (await placing.place()).placement
    assert (placement.prefill, placement.reason) == (None, Reason.UNPROVEN)


async def test_kept_pages_go_only_where_their_transfer_is_proven(policy: Callable[[], Policy]) -> None:
    prefill = FakeLink(PREFILL, "p", "P")
    decode = [FakeLink(DECODE, name, name.upper()) for name in ("d1", "d2", "d3")]
    placing = Placing(policy, prefill, *decode, proven=[("P", "D2")])
    kept = KeptPages(prefill.member, engine_of(prefill), {"id": 1})  # type: ignore[arg-type]
    placing.run.kept = kept
    assert await placing.pairs() == {(None, "d2")}
    assert placing.run.kept is kept
    assert not prefill.released


async def test_kept_pages_without_a_proven_transfer_are_released(policy: Callable[[], Policy]) -> None:
    prefill = FakeLink(PREFILL, "p", "P")
    placing = Placing(policy, prefill, FakeLink(DECODE, "d", "D"), proven=[("P", "other")])
    placing.run.kept = KeptPages(prefill.member, engine_of(prefill), {"id": 1})  # type: ignore[arg-type]
    placement = (await placing.place()).placement
    assert (placement.prefill, placement.decode, placement.reason) == (None, "d", Reason.UNPROVEN)
    assert placing.run.kept is None
    assert prefill.released == [{"id": 1}]
