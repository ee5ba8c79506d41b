"""Who gets the images of a prompt, and who computes it again when its pages do not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec import structs

from kvferry.engine.base import (
    EngineOutput,
    EngineRequest,
    PromptImage,
    RequestId,
    Sampling,
)
from kvferry.errors import InvalidRequest, NoDecodeWorker, Overloaded, PagesNotMoved
from kvferry.link.engine_admission import ImageRoom, WaitingImages
from kvferry.link.identity import FEATURES, IMAGES, Identity
from kvferry.membership.base import MemberKind
from kvferry.router.request import Prompt, Request, RequestRecord
from kvferry_sim import Faults, SimEngine
from support.beside import beside
from support.waiting import until

from .conftest import SimCluster, running

IMAGE = PromptImage("a" * 64, 3, 20, b"features")
SAMPLING = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = Request(RequestId("r"), Prompt(list(range(10, 60))), SAMPLING)
REQUEST = Request(RequestId("r"), Prompt(TEXT.prompt.token_ids, images=(IMAGE,)), SAMPLING)


@dataclass
class Seeing:
    """Simulators that take images: they answer as for the text, and note who got features."""

    num_failing: int = 0  # transfers that do not bring their pages
    requests: list[tuple[SimEngine, EngineRequest]] = field(default_factory=list)

    def of(self, engine: SimEngine) -> list[EngineRequest]:
        return [request for each, request in self.requests if each is engine]


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> Seeing:
    state, plain = Seeing(), SimEngine.generate

    async def generate(engine: SimEngine, request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
        state.requests.append((engine, request))
        if request.transfer_params is not None and state.num_failing:
            state.num_failing -= 1
            await engine.release(request.transfer_params)
            raise PagesNotMoved("the pages did not come")
        async for output in plain(engine, structs.replace(request, images=(), features=[]), **of_worker):
            yield output

    monkeypatch.setattr(SimEngine, "generate", generate)
    return state


async def run(cluster: SimCluster, request: Request = REQUEST) -> tuple[list[int], RequestRecord]:
    assert cluster.gateway is not None
    record, tokens = RequestRecord(), list[int]()
    await cluster.gateway._dispatcher.run(request, record, lambda output: tokens.extend(output.token_ids))
    return tokens, record


async def test_prefill_workers_get_the_features_and_decode_workers_do_not(seeing: Seeing) -> None:
    async with running(1, 1) as cluster:
        expected, _ = await run(cluster, TEXT)
        seeing.requests.clear()
        tokens, record = await run(cluster)
        assert tokens == expected
        assert record.reason == "disaggregated"
        (prefill,), (decode,) = cluster.engines(MemberKind.PREFILL), cluster.engines(MemberKind.DECODE)
        (of_prefill,), (of_decode,) = seeing.of(prefill), seeing.of(decode)
        assert (of_prefill.images, of_prefill.features) == ((IMAGE.span,), [IMAGE.features])
        assert (of_decode.images, of_decode.features) == ((IMAGE.span,), [])


async def test_another_prefill_worker_computes_pages_that_did_not_come(seeing: Seeing) -> None:
    async with running(2, 1) as cluster:
        expected, _ = await run(cluster, TEXT)
        seeing.requests.clear()
        seeing.num_failing = 1
        tokens, record = await run(cluster)
        assert tokens == expected
        assert [len(seeing.of(engine)) for engine in cluster.engines(MemberKind.PREFILL)] == [1, 1]
        (decode,) = cluster.engines(MemberKind.DECODE)
        assert [request.features for request in seeing.of(decode)] == [[], []], "it is tried again"
        assert record.reason == "disaggregated"


async def test_a_decode_worker_encodes_only_where_no_prefill_worker_is_left(seeing: Seeing) -> None:
    async with running(1, 1) as cluster:
        expected, _ = await run(cluster, TEXT)
        seeing.requests.clear()
        seeing.num_failing = 1
        tokens, _ = await run(cluster)
        assert tokens == expected
        (decode,) = cluster.engines(MemberKind.DECODE)
        first, second = seeing.of(decode)
        assert (first.transfer_params is None, first.features) == (False, [])
        assert (second.transfer_params is None, second.features) == (True, [IMAGE.features])
    async with running(0, 1) as cluster:
        tokens, record = await run(cluster)
        assert tokens == expected
        assert record.reason == "no_prefill_worker"


async def test_a_worker_of_an_older_release_gets_no_images(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    old = Identity(features=frozenset(FEATURES) - {IMAGES})
    monkeypatch.setattr("kvferry.worker.lifecycle.identity", lambda config, folder: old)
    async with running(1, 1) as cluster:
        with pytest.raises(NoDecodeWorker, match="that takes images is connected"):
            await run(cluster)
        assert (await run(cluster, TEXT))[0]
        assert all(not request.images for _, request in seeing.requests)


async def test_images_that_wait_at_a_worker_have_a_limit(seeing: Seeing) -> None:
    async with running(0, 1) as cluster:
        (host,), (engine,) = cluster.hosts(MemberKind.DECODE), cluster.engines(MemberKind.DECODE)
        host.server.image_room = room = ImageRoom(max_bytes=2 * len(IMAGE.features))
        engine.faults = Faults(stalled=True)
        requests = [structs.replace(REQUEST, request_id=RequestId(f"r{i}")) for i in range(4)]
        async with beside(*(run(cluster, request) for request in requests)) as asked:
            await until(lambda: len(seeing.requests) == 2, what="two are on the engine")
            await until(lambda: cluster.gateway._dispatcher.num_queued == 2, what="two wait at the gateway")  # type: ignore[union-attr]
            assert room.num_bytes == 2 * len(IMAGE.features)
            engine.faults = Faults()
            tokens = [tokens for tokens, _ in await asyncio.gather(*asked)]
        assert tokens.count(tokens[0]) == 4
        assert room.num_bytes == 0


def test_a_request_larger_than_the_room_has_it_alone() -> None:
    def of(num_bytes: int) -> EngineRequest:
        features = [bytes(num_bytes)]
        return EngineRequest(RequestId("r"), TEXT.prompt.token_ids, SAMPLING, images=(IMAGE.span,), features=features)

    room = ImageRoom(max_bytes=10)
    assert room.refusal(of(11)) is None
    large, text = WaitingImages(room, of(11)), WaitingImages(room, of(0))
    assert room.refusal(of(0)) is None
    refused = room.refusal(of(1))
    assert isinstance(refused, Overloaded)
    assert refused.message == "a worker has no room for 1 bytes of images of this request now; the limit is 10"
    for _ in range(2):
        large.leave()
        text.leave()
    assert room.num_bytes == 0
    first = WaitingImages(room, of(5))
    assert room.refusal(of(5)) is None
    assert room.refusal(of(6)) is not None
    first.leave()


async def test_the_simulator_takes_no_images() -> None:
    async with running(1, 1) as cluster:
        with pytest.raises(InvalidRequest, match="takes no images"):
            await run(cluster)
