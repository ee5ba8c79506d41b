"""What a worker owes its gateways, spoken by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from msgspec import structs

from kvferry import __version__
from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, Turn
from kvferry.errors import EngineDead
from kvferry.link import codec, gateway_session, outgoing_queue
from kvferry.link.flow_control import MAX_UNREAD_MESSAGES
from kvferry.link.outgoing_queue import MAX_STEP_BYTES
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker.server import WorkerServer
from kvferry.worker.turns import OnEngine, Turns
from kvferry_sim import Faults, SimEngine
from support.link_peers import (
    Firehose,
    FrameWire,
    Gateway,
    LinkEnded,
    Slow,
    quiet,
    request,
    serving,
    simulated,
)
from support.waiting import PATIENCE_S, SOON_S, until


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[SimEngine]:
    async with simulated() as engine:
        yield engine


@pytest_asyncio.fixture
async def worker(engine: SimEngine) -> AsyncIterator[WorkerServer]:
    async with serving(engine) as worker:
        yield worker


@pytest_asyncio.fixture
async def gateway(worker: WorkerServer) -> AsyncIterator[Gateway]:
    gateway = Gateway(worker)
    await gateway.hello()
    try:
        yield gateway
    finally:
        await gateway.leave()


async def test_the_first_message_must_be_hello(worker: WorkerServer) -> None:
    gateway = Gateway(worker)
    await gateway.submit(1, request("a"))
    with pytest.raises(LinkEnded):
        await gateway.read()
    assert not worker.sessions
    assert worker.num_requests == 0
    await gateway.leave()


async def test_a_welcome_describes_the_worker(worker: WorkerServer, engine: SimEngine) -> None:
    gateway = Gateway(worker)
    welcome = await gateway.hello()
    assert (welcome.worker_id, welcome.role, welcome.version) == ("w", "decode", __version__)
    assert welcome.engine_id == engine.info.engine_id
    assert (welcome.block_size, welcome.page_bytes) == (16, engine.info.page_bytes)
    assert not welcome.load.draining
    await gateway.leave()


async def test_a_gateway_that_breaks_off_ends_only_its_own_requests(worker: WorkerServer, engine: SimEngine) -> None:
    stays, leaves = Gateway(worker), Gateway(worker)
    for name, gateway in (("stays", stays), ("leaves", leaves)):
        await gateway.hello()
        for number in (1, 2):
            await gateway.submit(number, request(f"{name}-{number}", max_tokens=200))
    await until(lambda: engine.stats().num_running == 4)
    await leaves.leave()
    await until(lambda: worker.num_requests == 2, what="the requests of the gateway that left are aborted")
    await stays.read_ends(1, 2)
    assert all(end.finish_reason is FinishReason.LENGTH for end in stays.ended.values())
    assert stays.num_tokens == {1: 200, 2: 200}
    await stays.leave()
    await until(lambda: quiet(engine))
    engine.check()


async def test_a_gateway_that_half_closes_ends_its_requests(worker: WorkerServer, engine: SimEngine) -> None:
    gateway = Gateway(worker)
    await gateway.hello()
    await gateway.submit(1, request("a", max_tokens=5000))
    await until(lambda: engine.stats().num_running == 1)
    await gateway.wire.half_close()
    await until(lambda: quiet(engine) and not worker.num_requests)
    await gateway.leave()


async def test_a_worker_stops_though_a_gateway_has_just_reset_its_connection(
    worker: WorkerServer, engine: SimEngine
) -> None:
    gateway = Gateway(worker)
    await gateway.hello()
    await gateway.submit(1, request("a", max_tokens=5000))
    await until(lambda: engine.stats().num_running == 1)
    assert isinstance(gateway.wire, FrameWire)
    # The reset has arrived, and the worker stops before its event loop reads of it.
    await gateway.wire.reset()
    await worker.stop(0)
    await until(lambda: quiet(engine) and not worker.num_requests)


async def test_a_workers_grpc_server_stops_though_its_frames_cannot(
    worker: WorkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(grace_s: float) -> None:
        raise OSError("the connection is in a state that nobody thought of")

    monkeypatch.setattr(worker._frames, "stop", fail)
    with pytest.raises(OSError, match="nobody thought of"):
        await worker.stop(0)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", worker.port)
    monkeypatch.undo()


async def test_a_worker_that_has_stopped_has_no_request_left(worker: WorkerServer, engine: SimEngine) -> None:
    gateways = [Gateway(worker) for _ in range(20)]
    for number, gateway in enumerate(gateways):
        await gateway.hello()
        await gateway.submit(1, request(f"r{number}", max_tokens=5000))
    await until(lambda: worker.num_requests == len(gateways))
    await worker.stop(0)
    assert quiet(engine)
    assert not worker.num_requests
    for gateway in gateways:
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


@pytest.mark.parametrize("deadline_s", [None, 0.3])
async def test_pages_of_a_request_that_leaves_while_it_waits_for_a_slot_are_released(
    engine: SimEngine, deadline_s: float | None
) -> None:
    async with serving(engine, turns=Turns(1)) as worker, simulated() as prefill:
        gateway = Gateway(worker)
        await gateway.hello()
        await gateway.submit(1, request("long", max_tokens=50_000, turn=Turn("a", 1.0)))
        await until(lambda: engine.stats().num_running == 1)
        last = [output async for output in prefill.generate(request("p", max_tokens=1, keep_for_transfer=True))][-1]
        waiting = request("p", transfer_params=last.transfer_params, turn=Turn("b", 1.0))
        if deadline_s is not None:
            waiting = structs.replace(waiting, deadline_s=time.monotonic() + deadline_s)
        await gateway.submit(2, waiting)
        await until(lambda: worker._engine_stats().num_waiting == 1)
        assert prefill.num_offers == 1
        if deadline_s is None:
            await gateway.cancel(2)
        await gateway.read_ends(2)
        await until(lambda: quiet(prefill), what="the offer is released")
        assert worker.num_requests == 1
        await gateway.cancel(1)
        await gateway.read_ends(1)
        await gateway.leave()


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
        gateway = Gateway(worker)
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
    await gateway.write(bad)
    await gateway.read_ends(1, 2)
    assert gateway.ended[2].code == "invalid_request"
    assert gateway.num_tokens[1] == 200


async def test_a_request_for_an_adapter_that_the_worker_does_not_have_is_refused(
    gateway: Gateway, engine: SimEngine
) -> None:
    """A worker with none, and with other files of it, never answers with the model itself."""
    for number, adapter in enumerate(("sql@00", "sql", "@", "x" * 5000), start=1):
        await gateway.submit(number, request(f"r{number}", adapter=adapter))
        await gateway.read_ends(number)
        assert gateway.ended[number].code == "worker_draining"
        assert "has no adapter" in gateway.ended[number].message
        assert len(gateway.ended[number].message) < 500
    assert engine.stats().prompt_tokens.total == 0


async def test_a_step_of_many_requests_is_one_message(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    num_requests, num_tokens = 32, 40
    engine.faults = Faults(stalled=True)
    for number in range(num_requests):
        await gateway.submit(number + 1, request(f"r{number}", max_tokens=num_tokens))
    await until(lambda: engine.stats().num_waiting == num_requests)
    engine.faults = Faults()
    await gateway.read_ends(*range(1, num_requests + 1))
    assert sum(gateway.num_tokens.values()) == num_requests * num_tokens
    # About one a step; a few more where prompts were not all computed in one.
    assert gateway.num_messages < 2 * num_tokens
    assert gateway.num_messages < num_requests * num_tokens / 10


async def test_steps_merge_while_a_gateway_does_not_read() -> None:
    engine = Firehose("x" * 100)
    async with serving(engine) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        await gateway.submit(1, request("a"))
        await until(lambda: engine.num_outputs > 3000)
        await gateway.cancel(1)
        await until(lambda: worker.num_requests == 0)
        await gateway.read_ends(1)
        assert gateway.num_tokens[1] == engine.num_outputs
        # What the credit allows, and then messages of a limited size.
        num_bytes = engine.num_outputs * codec.approximate_bytes(EngineOutput([1], "x" * 100))
        assert gateway.num_messages <= MAX_UNREAD_MESSAGES + num_bytes / MAX_STEP_BYTES + 1
        assert gateway.num_messages < engine.num_outputs / 10
        await gateway.leave()


async def test_a_gateway_that_never_reads_loses_its_requests_and_memory_stays_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    max_pending_bytes = 1 << 20
    monkeypatch.setattr(outgoing_queue, "MAX_PENDING_BYTES", max_pending_bytes)
    engine = Firehose("x" * 1000)
    engine.open.clear()
    async with serving(engine) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        for number in (1, 2):
            await gateway.submit(number, request(f"r{number}"))
        # Before anything is put out: the first to arrive would fill all there is before the second arrives.
        await until(lambda: engine.num_begun == 2)
        (session,) = worker.sessions
        engine.open.set()
        largest = 0
        deadline = asyncio.get_running_loop().time() + 60
        while engine.num_running:
            largest = max(largest, session.pending_bytes)
            assert asyncio.get_running_loop().time() < deadline, "the requests go on though nobody reads"
            await asyncio.sleep(0)
        assert max_pending_bytes / 2 < largest <= max_pending_bytes
        await until(lambda: worker.num_requests == 0)
        assert session.pending_bytes < 1000
        # The link lives on: its gateway is told, and may go on.
        await gateway.read_ends(1, 2)
        assert {end.code for end in gateway.ended.values()} == {"worker_lost"}
        await gateway.submit(3, request("r3"))
        async with asyncio.timeout(SOON_S):
            while not gateway.num_tokens.get(3):
                await gateway.read_step()
        await gateway.cancel(3)
        await gateway.read_ends(3)
        await gateway.leave()


async def test_a_gateway_that_asks_and_never_reads_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerServer
) -> None:
    """Not even the refusals may pile up."""
    monkeypatch.setattr(outgoing_queue, "MAX_PENDING_BYTES", 64 << 10)
    gateway = Gateway(worker)
    await gateway.hello()
    worker.refuse_new()
    number = 0
    async with asyncio.timeout(PATIENCE_S):
        while worker.sessions:
            number += 1
            try:
                await gateway.submit(number, request("r"))
            except Exception:
                break  # cut off while writing: each transport has its own error
    await until(lambda: not worker.sessions, what="the link was ended")
    await gateway.leave()


async def test_a_gateway_that_falls_silent_loses_its_requests(
    monkeypatch: pytest.MonkeyPatch, worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    engine.faults = Faults(stalled=True)
    await gateway.submit(1, request("a"))
    await until(lambda: worker.num_requests == 1)
    monkeypatch.setattr(gateway_session, "SILENCE_LIMIT_S", 0.5)
    await until(lambda: not worker.sessions, what="its link was ended")
    assert quiet(engine)


async def test_an_acknowledgement_of_what_was_never_sent_ends_the_link(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    await gateway.submit(1, request("a", max_tokens=5000))
    await until(lambda: engine.stats().num_running == 1)
    await gateway.write(pb.Downward(ack=pb.Ack(num_messages=1 << 40, num_bytes=1)))
    await until(lambda: not worker.sessions)
    await until(lambda: quiet(engine))


async def test_what_cannot_be_read_at_all_ends_its_own_link_only(worker: WorkerServer, gateway: Gateway) -> None:
    bad = Gateway(worker)
    await bad.hello()
    await until(lambda: len(worker.sessions) == 2)
    await bad.wire.send(b"\xff" * 40)
    with pytest.raises(LinkEnded):
        await bad.read_ends(1)
    await until(lambda: len(worker.sessions) == 1)
    await gateway.submit(1, request("a"))
    await gateway.read_ends(1)
    assert gateway.num_tokens == {1: 5}
    await bad.leave()


async def test_a_number_that_is_in_use_ends_the_link(worker: WorkerServer, gateway: Gateway, engine: SimEngine) -> None:
    """Two requests under one number could not be told apart."""
    for name in ("a", "b"):
        await gateway.submit(1, request(name, max_tokens=5000))
    await until(lambda: not worker.sessions)
    await until(lambda: quiet(engine))


async def test_residency_comes_in_order_with_the_steps(worker: WorkerServer, gateway: Gateway) -> None:
    (session,) = worker.sessions
    sent = pb.Residency(sequence=7, stored=[pb.TierKeys(tier="gpu", keys=b"k" * 16)])
    assert session.send_residency(sent)
    assert session.send_residency(pb.Residency(sequence=8, cleared=True))
    got = []
    async with asyncio.timeout(SOON_S):
        while len(got) < 2:
            message = await gateway.read()
            if message.HasField("residency"):
                got.append(message.residency)
    assert got[0] == sent
    assert (got[1].sequence, got[1].cleared) == (8, True)


async def test_a_snapshot_is_asked_for(engine: SimEngine) -> None:
    asked: list[str] = []
    async with serving(engine, on_snapshot_wanted=lambda session: asked.append(session.gateway_id)) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        await gateway.write(pb.Downward(want_snapshot=pb.WantSnapshot()))
        await until(lambda: asked == ["g"])
        await gateway.leave()


async def test_residency_gives_way_to_outputs_when_too_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_queue, "MAX_PENDING_BYTES", 1 << 20)
    # Short outputs: what waits grows slowly enough to be looked at between two of its limits.
    engine = Firehose("x" * 10)
    async with serving(engine) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        (session,) = worker.sessions
        # Nothing is acknowledged: at first the credit goes, then what waits grows.
        piece = pb.Residency(stored=[pb.TierKeys(tier="gpu", keys=b"k" * 100_000)])
        await until(lambda: not session.send_residency(piece))
        full = session.pending_bytes
        assert full > 900_000
        await gateway.submit(1, request("a"))
        await until(lambda: session.pending_bytes < full, what="residency is dropped")
        assert worker.num_requests == 1
        await gateway.leave()


async def test_pages_that_nobody_comes_for_are_released() -> None:
    async with simulated() as prefill, serving(prefill) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        await gateway.submit(1, request("p", max_tokens=1, keep_for_transfer=True))
        async with asyncio.timeout(SOON_S):
            while not (step := await gateway.read_step()).finished:
                pass
        params = step.finished[0].transfer_params
        assert prefill.num_offers == 1
        for unknown in (b"{not json", b"[]", b'{"other": "engine"}'):
            await gateway.write(pb.Downward(release=pb.Release(transfer_params=unknown)))
        for _ in range(2):
            await gateway.write(pb.Downward(release=pb.Release(transfer_params=params)))
        await until(lambda: quiet(prefill))
        prefill.check()
        await gateway.submit(2, request("q"))
        await gateway.read_ends(2)
        await gateway.leave()


async def test_the_load_is_fresh_soon_after_the_last_step(engine: SimEngine) -> None:
    """Also when nothing follows, and long before a heartbeat."""
    async with serving(engine, heartbeat_s=14.0) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        await gateway.submit(1, request("a", max_tokens=20))
        seen = []
        async with asyncio.timeout(SOON_S):
            while 1 not in gateway.ended or not seen or seen[-1].num_generated_tokens < 20:
                step = await gateway.read_step()
                if step.HasField("load"):
                    seen.append(step.load)
        assert seen[-1].num_running == 0
        await gateway.leave()


async def test_an_overloaded_worker_says_when_to_come_back(engine: SimEngine) -> None:
    async with serving(engine, max_requests=1) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        for number in range(1, 4):
            await gateway.submit(number, request(f"r{number}"))
            await gateway.read_ends(number)
        engine.faults = Faults(stalled=True)
        await gateway.submit(4, request("r4"))
        await gateway.submit(5, request("r5"))
        await gateway.read_ends(5)
        assert gateway.ended[5].code == "overloaded"
        assert 1 <= gateway.ended[5].retry_after_s <= 60
        engine.faults = Faults()
        await gateway.read_ends(4)
        await gateway.leave()


async def test_a_dead_engine_fails_every_request_after_what_it_gave(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    engine.faults = Faults(stalled=True)
    for number in (1, 2):
        await gateway.submit(number, request(f"r{number}"))
    await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
    worker.engine_died("the engine is hung")
    await gateway.read_ends(1, 2)
    assert all(isinstance(end, EngineDead) and "hung" in end.message for end in gateway.ended.values())
    assert worker.died.is_set()
    await until(lambda: worker.num_requests == 0)


@pytest.mark.parametrize("is_resumed", [False, True])
async def test_a_dead_engine_is_blamed_on_requests_of_any_gateway_that_never_had_an_output(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine, is_resumed: bool
) -> None:
    other = Gateway(worker)
    await other.hello()
    await other.submit(1, request("stream", max_tokens=5000))
    async with asyncio.timeout(SOON_S):
        while not other.num_tokens.get(1):
            await other.read_step()
    engine.faults = Faults(stalled=True)
    await gateway.submit(2, structs.replace(request("no output here"), is_resumed=is_resumed))
    await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
    worker.engine_died("the engine is hung")
    await gateway.read_ends(2)
    await other.read_ends(1)
    ends = [other.ended[1], gateway.ended[2]]
    # Where none is starting, each gateway decides for its own requests.
    assert [isinstance(end, EngineDead) and end.is_blameless for end in ends] == [not is_resumed, False]
    await other.leave()


async def test_a_request_that_waits_for_its_turn_has_no_part_in_a_death(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, waiting = worker.turn, asyncio.Event()

    @contextlib.asynccontextmanager
    async def turn_of_some(asked: EngineRequest) -> AsyncIterator[OnEngine]:
        if asked.request_id == "waits":
            waiting.set()
            await asyncio.Event().wait()
        async with turn(asked) as on_engine:
            yield on_engine

    monkeypatch.setattr(worker, "turn", turn_of_some)
    engine.faults = Faults(stalled=True)
    await gateway.submit(1, request("no output here"))
    await gateway.submit(2, request("waits"))
    await waiting.wait()
    await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 1)
    worker.engine_died("the engine is hung")
    await gateway.read_ends(1, 2)
    assert isinstance(gateway.ended[1], EngineDead)
    assert gateway.ended[2].code == "worker_draining"


async def test_a_request_that_ended_without_an_output_is_not_blamed_for_a_later_death(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    await gateway.submit(1, request("stream", max_tokens=5000))
    async with asyncio.timeout(SOON_S):
        while not gateway.num_tokens.get(1):
            await gateway.read_step()
    engine.faults = Faults(stalled=True)
    await gateway.submit(2, request("no output here"))
    await until(lambda: engine.stats().num_running + engine.stats().num_waiting == 2)
    await gateway.cancel(2)
    await until(lambda: worker.num_requests == 1)
    worker.engine_died("the engine is hung")
    await gateway.read_ends(1)
    assert isinstance(gateway.ended[1], EngineDead)
    assert not gateway.ended[1].is_blameless


async def test_a_blocked_link_that_breaks_ends_its_requests_without_the_garbage_collector() -> None:
    engine = Firehose("x" * 10_000)
    async with serving(engine) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        await gateway.submit(1, request("a"))
        await until(lambda: engine.num_outputs > 200, what="more is put out than the link takes")
        gc.disable()
        try:
            await gateway.leave()
            await until(lambda: engine.num_running == 0, what="the request ends with its link")
            await until(lambda: not worker.sessions)
        finally:
            gc.enable()


async def test_letting_go_of_a_request_is_not_cancelled_itself() -> None:
    """Neither by a cancel and then the end of the link, nor by a stop that lasts longer than its grace."""
    engine = Slow("")
    async with serving(engine) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        for number in (1, 2):
            await gateway.submit(number, request(f"r{number}"))
        await until(lambda: engine.num_running == 2)
        await gateway.cancel(1)
        await until(lambda: any(task.cancelling() for task in worker.sessions[0].tasks.values()))
        await gateway.leave()
        await until(lambda: engine.num_running == 0)
        assert engine.num_let_go == 2

        other = Gateway(worker)
        await other.hello()
        await other.submit(1, request("r3"))
        await until(lambda: engine.num_running == 1)
        await worker.stop(0.01)
        assert engine.num_let_go == 3
        assert not worker.sessions
        await other.leave()


async def test_what_is_ready_is_sent_before_the_link_ends(engine: SimEngine) -> None:
    async with serving(engine) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        engine.faults = Faults(stalled=True)  # until it was seen
        await gateway.submit(1, request("a", max_tokens=3))
        await until(lambda: worker.num_requests == 1)
        engine.faults = Faults()
        assert await worker.drain(5)
        await asyncio.gather(worker.stop(1.0), gateway.read_ends(1))
        await gateway.leave()


async def test_an_engine_that_dies_fails_its_requests_and_is_seen_dead(
    worker: WorkerServer, gateway: Gateway, engine: SimEngine
) -> None:
    await gateway.submit(1, request("a", max_tokens=5000))
    await until(lambda: engine.stats().num_running == 1)
    engine.kill()
    await gateway.read_ends(1)
    assert isinstance(gateway.ended[1], EngineDead)
    assert worker.died.is_set()


async def test_draining_is_told_at_once(engine: SimEngine) -> None:
    async with serving(engine, heartbeat_s=14.0) as worker:
        gateway = Gateway(worker)
        await gateway.hello()
        worker.refuse_new()
        async with asyncio.timeout(SOON_S):
            while not (await gateway.read_step()).load.draining:
                pass
        await gateway.submit(1, request("a"))
        await gateway.read_ends(1)
        assert gateway.ended[1].code == "worker_draining"
        await gateway.leave()
