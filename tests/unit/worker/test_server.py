"""The Attach stream over real gRPC, spoken by hand."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import pytest_asyncio

from kvferry import __version__
from kvferry.config import SimConfig
from kvferry.engine.base import EngineInfo, EngineLoad, EngineOutput, EngineRequest, FinishReason, RequestId, Sampling
from kvferry.engine.sim import SimEngine
from kvferry.engine.sim.engine import Faults
from kvferry.errors import EngineDead
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.wire.v1 import worker_pb2_grpc
from kvferry.worker import codec, server
from kvferry.worker.server import CHANNEL_OPTIONS, WorkerServer

SIM = SimConfig(step_ms=1.0, prefill_tokens_per_s=200_000.0, transfer_lease_s=60.0)


async def until(condition: Callable[[], bool], *, within_s: float = 30.0, what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s:g} s: {what or condition}"
        await asyncio.sleep(0.002)


class Gateway:
    """One end of an Attach stream."""

    def __init__(self, port: int, *options: tuple[str, int]) -> None:
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=(*CHANNEL_OPTIONS, *options))
        self.call = worker_pb2_grpc.WorkerStub(self._channel).Attach()
        self.num_messages = 0
        self.num_tokens: dict[int, int] = {}
        self.ended: dict[int, Any] = {}

    async def hello(self) -> pb.Welcome:
        await self.call.write(pb.Downward(hello=pb.Hello(gateway_id="g", version=__version__)))
        welcome: pb.Welcome = (await self.call.read()).welcome
        return welcome

    async def submit(self, number: int, request: EngineRequest) -> None:
        await self.call.write(codec.submit_to_wire(number, request))

    async def cancel(self, number: int) -> None:
        await self.call.write(pb.Downward(cancel=pb.Cancel(number=number)))

    async def read_step(self) -> pb.Step:
        message = await self.call.read()
        assert message is not grpc.aio.EOF, "the worker ended the stream"
        step: pb.Step = message.step
        if step.numbers or step.finished:
            self.num_messages += 1
        for number, item in codec.outputs_of(step):
            if isinstance(item, EngineOutput):
                self.num_tokens[number] = self.num_tokens.get(number, 0) + len(item.token_ids)
                if item.finish_reason is None:
                    continue
            self.ended[number] = item
        return step

    async def read_ends(self, *numbers: int, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not self.ended.keys() >= set(numbers):
                await self.read_step()

    async def leave(self) -> None:
        self.call.cancel()
        await self._channel.close()


def request(name: str, *, max_tokens: int = 5, num_prompt: int = 20, **values: Any) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=values.pop("logprobs", None))
    return EngineRequest(RequestId(name), list(range(10, 10 + num_prompt)), sampling, **values)


@asynccontextmanager
async def serving(engine: Any, **values: Any) -> AsyncIterator[WorkerServer]:
    options: dict[str, Any] = {"max_requests": 64, "heartbeat_s": 0.2, **values}
    worker = WorkerServer(engine, worker_id="w", role="decode", host="127.0.0.1", **options)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.stop(0.2)


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with simulated() as engine:
        yield engine


@asynccontextmanager
async def simulated(**values: Any) -> AsyncIterator[SimEngine]:
    engine = SimEngine("m", SIM.model_copy(update=values), block_size=16, max_num_seqs=256)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


@pytest_asyncio.fixture
async def worker(engine: SimEngine) -> AsyncIterator[WorkerServer]:
    async with serving(engine) as worker:
        yield worker


@pytest_asyncio.fixture
async def gateway(worker: WorkerServer) -> AsyncIterator[Gateway]:
    gateway = Gateway(worker.port)
    await gateway.hello()
    try:
        yield gateway
    finally:
        await gateway.leave()


def quiet(engine: SimEngine) -> bool:
    load = engine.load()
    return not (load.num_running or load.num_waiting or load.num_pages_used or engine.num_offers)


async def test_the_first_message_must_be_hello(worker: WorkerServer) -> None:
    gateway = Gateway(worker.port)
    await gateway.submit(1, request("a"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Hello" in (refused.value.details() or "")
    assert worker.num_requests == 0
    await gateway.leave()


async def test_a_welcome_describes_the_worker(worker: WorkerServer, engine: SimEngine) -> None:
    gateway = Gateway(worker.port)
    welcome = await gateway.hello()
    assert (welcome.worker_id, welcome.role, welcome.version) == ("w", "decode", __version__)
    assert welcome.engine_id == engine.info.engine_id
    assert (welcome.block_size, welcome.page_bytes) == (16, engine.info.page_bytes)
    assert not welcome.load.draining
    await gateway.leave()


async def test_a_gateway_that_breaks_off_ends_only_its_own_requests(worker: WorkerServer, engine: SimEngine) -> None:
    stays, leaves = Gateway(worker.port), Gateway(worker.port)
    for name, gateway in (("stays", stays), ("leaves", leaves)):
        await gateway.hello()
        for number in (1, 2):
            await gateway.submit(number, request(f"{name}-{number}", max_tokens=200))
    await until(lambda: engine.load().num_running == 4)
    await leaves.leave()
    await until(lambda: worker.num_requests == 2, what="the requests of the gateway that left are aborted")
    await stays.read_ends(1, 2)
    assert all(end.finish_reason is FinishReason.LENGTH for end in stays.ended.values())
    assert stays.num_tokens == {1: 200, 2: 200}
    await stays.leave()
    await until(lambda: quiet(engine))
    engine.check()


async def test_a_gateway_that_half_closes_ends_its_requests(worker: WorkerServer, engine: SimEngine) -> None:
    gateway = Gateway(worker.port)
    await gateway.hello()
    await gateway.submit(1, request("a", max_tokens=5000))
    await until(lambda: engine.load().num_running == 1)
    await gateway.call.done_writing()
    await until(lambda: quiet(engine) and not worker.num_requests)
    await gateway.leave()


@pytest.mark.parametrize("repeat", range(5))
async def test_a_submit_directly_followed_by_its_cancel_leaks_nothing(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine, repeat: int
) -> None:
    for number in range(1, 9):
        await gateway.submit(number, request(f"r{number}", max_tokens=5000))
        await gateway.cancel(number)
    await gateway.read_ends(*range(1, 9))
    await until(lambda: quiet(engine) and not worker.num_requests)
    engine.check()


async def test_cancelling_a_request_that_names_pages_elsewhere_releases_them_there(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    async with simulated() as prefill:
        prompt = request("p", max_tokens=1, keep_for_transfer=True)
        last = [output async for output in prefill.generate(prompt)][-1]
        assert prefill.num_offers == 1
        await gateway.submit(1, request("p", max_tokens=5000, transfer_params=last.transfer_params))
        await gateway.cancel(1)
        await gateway.read_ends(1)
        await until(lambda: quiet(prefill) and quiet(engine), what="the offer is released")
        prefill.check()
        engine.check()


async def test_cancels_of_unknown_and_finished_requests_are_ignored(gateway: Gateway) -> None:
    await gateway.cancel(77)
    await gateway.submit(1, request("a"))
    await gateway.read_ends(1)
    await gateway.cancel(1)
    await gateway.submit(2, request("b"))
    await gateway.read_ends(2)
    assert gateway.num_tokens == {1: 5, 2: 5}


async def test_more_requests_than_the_limit_are_refused_as_overloaded(engine: SimEngine) -> None:
    async with serving(engine, max_requests=2) as worker:
        gateway = Gateway(worker.port)
        await gateway.hello()
        engine.faults = Faults(stalled=True)
        for number in (1, 2, 3):
            await gateway.submit(number, request(f"r{number}"))
        await gateway.read_ends(3)
        assert gateway.ended[3].code == "overloaded"
        engine.faults = Faults()
        await gateway.read_ends(1, 2)
        await gateway.submit(4, request("r4"))
        await gateway.read_ends(4)
        assert gateway.ended[4].finish_reason is FinishReason.LENGTH
        await gateway.leave()


async def test_a_submit_that_cannot_be_read_fails_alone(gateway: Gateway) -> None:
    await gateway.submit(1, request("a", max_tokens=200))
    bad = codec.submit_to_wire(2, request("b"))
    bad.submit.transfer_params = b"{not json"
    await gateway.call.write(bad)
    await gateway.read_ends(1, 2)
    assert gateway.ended[2].code == "invalid_request"
    assert gateway.num_tokens[1] == 200


async def test_a_step_of_many_requests_is_one_message(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    num_requests, num_tokens = 32, 40
    engine.faults = Faults(stalled=True)
    for number in range(num_requests):
        await gateway.submit(number + 1, request(f"r{number}", max_tokens=num_tokens))
    await until(lambda: engine.load().num_waiting == num_requests)
    engine.faults = Faults()
    await gateway.read_ends(*range(1, num_requests + 1))
    assert sum(gateway.num_tokens.values()) == num_requests * num_tokens
    # About one a step; a few more where prompts were not all computed in one.
    assert gateway.num_messages < 2 * num_tokens
    assert gateway.num_messages < num_requests * num_tokens / 10


class Firehose:
    """An engine that puts out as fast as the event loop turns, until told to stop."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.num_outputs = 0
        self.num_open = 0
        self.info = EngineInfo("e", "m", 8192, 16, 64, 64, "sim")  # type: ignore[arg-type]

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.num_open += 1
        try:
            while True:
                self.num_outputs += 1
                yield EngineOutput((1,), self._text)
                await asyncio.sleep(0)
        finally:
            self.num_open -= 1

    def load(self) -> EngineLoad:
        return EngineLoad()


SMALL_WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))


async def test_steps_merge_while_a_gateway_does_not_read() -> None:
    engine = Firehose("x" * 1000)
    async with serving(engine) as worker:
        gateway = Gateway(worker.port, *SMALL_WINDOW)
        await gateway.hello()
        await gateway.submit(1, request("a"))
        await until(lambda: engine.num_outputs > 3000)
        await gateway.cancel(1)
        await gateway.read_ends(1)
        assert gateway.num_tokens[1] == engine.num_outputs
        assert gateway.num_messages < engine.num_outputs / 10
        await gateway.leave()


async def test_a_gateway_that_never_reads_loses_its_requests_and_memory_stays_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_PENDING_BYTES", 1 << 20)
    engine = Firehose("x" * 1000)
    async with serving(engine) as worker:
        gateway = Gateway(worker.port, *SMALL_WINDOW)
        await gateway.hello()
        for number in (1, 2):
            await gateway.submit(number, request(f"r{number}"))
        await until(lambda: engine.num_open == 2)
        (attachment,) = worker._attachments
        largest = 0
        deadline = asyncio.get_running_loop().time() + 30
        while engine.num_open:
            largest = max(largest, attachment._step.ByteSize())
            assert asyncio.get_running_loop().time() < deadline, "the requests go on though nobody reads"
            await asyncio.sleep(0)
        assert largest < 2 << 20
        await until(lambda: worker.num_requests == 0)
        assert attachment._step.ByteSize() < 1000
        # The stream lives on: its gateway is told, and may go on.
        await gateway.read_ends(1, 2)
        assert {end.code for end in gateway.ended.values()} == {"worker_lost"}
        await gateway.submit(3, request("r3"))
        async with asyncio.timeout(30):
            while not gateway.num_tokens.get(3):
                await gateway.read_step()
        await gateway.cancel(3)
        await gateway.read_ends(3)
        await gateway.leave()


async def test_a_blocked_stream_that_breaks_ends_its_requests_without_the_garbage_collector() -> None:
    engine = Firehose("x" * 10_000)
    async with serving(engine) as worker:
        gateway = Gateway(worker.port, *SMALL_WINDOW)
        await gateway.hello()
        await gateway.submit(1, request("a"))
        await until(lambda: engine.num_outputs > 200, what="more is put out than the stream takes")
        gc.disable()
        try:
            await gateway.leave()
            await until(lambda: engine.num_open == 0, what="the request ends with its stream")
            await until(lambda: not worker._attachments)
        finally:
            gc.enable()


class Slow(Firehose):
    """Takes a while to let go of a request, as an engine in another process does."""

    num_let_go = 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.num_open += 1
        try:
            yield EngineOutput((1,), "x")
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)
            self.num_let_go += 1
            self.num_open -= 1


async def test_letting_go_of_a_request_is_not_cancelled_itself() -> None:
    """Neither by a cancel and then the end of the stream, nor by a stop that lasts longer than its grace."""
    engine = Slow("")
    async with serving(engine) as worker:
        gateway = Gateway(worker.port)
        await gateway.hello()
        for number in (1, 2):
            await gateway.submit(number, request(f"r{number}"))
        await until(lambda: engine.num_open == 2)
        await gateway.cancel(1)
        await until(lambda: any(task.cancelling() for task in next(iter(worker._attachments)).tasks.values()))
        await gateway.leave()
        await until(lambda: engine.num_open == 0)
        assert engine.num_let_go == 2

        other = Gateway(worker.port)
        await other.hello()
        await other.submit(1, request("r3"))
        await until(lambda: engine.num_open == 1)
        await worker.stop(0.01)
        assert engine.num_let_go == 3
        assert not worker._attachments
        await other.leave()


async def test_what_is_ready_is_sent_before_the_stream_ends(engine: SimEngine) -> None:
    async with serving(engine) as worker:
        gateway = Gateway(worker.port)
        await gateway.hello()
        await gateway.submit(1, request("a", max_tokens=3))
        drained = await worker.drain(5)
        # The submit may not have arrived before the drain; then it was refused, which is an answer as well.
        assert drained
        await asyncio.gather(worker.stop(1.0), gateway.read_ends(1))
        await gateway.leave()


async def test_an_engine_that_dies_fails_its_requests_and_is_seen_dead(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    await gateway.submit(1, request("a", max_tokens=5000))
    await until(lambda: engine.load().num_running == 1)
    engine.kill()
    await gateway.read_ends(1)
    assert isinstance(gateway.ended[1], EngineDead)
    assert worker.died.is_set()


async def test_draining_is_told_at_once(engine: SimEngine) -> None:
    async with serving(engine, heartbeat_s=14.0) as worker:
        gateway = Gateway(worker.port)
        await gateway.hello()
        worker.refuse_new()
        async with asyncio.timeout(5):
            while not (await gateway.read_step()).load.draining:
                pass
        await gateway.submit(1, request("a"))
        await gateway.read_ends(1)
        assert gateway.ended[1].code == "worker_draining"
        await gateway.leave()
