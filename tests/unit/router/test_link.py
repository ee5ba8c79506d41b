"""A link to a worker that is silent, gone, somebody else, or talks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from tcp_relay import TcpRelay

from kvferry.config import SimConfig
from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, RequestId, Sampling
from kvferry.engine.sim import SimEngine
from kvferry.engine.sim.engine import Faults
from kvferry.errors import EngineError, WorkerLost
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.router import link as router_link
from kvferry.router.link import RemoteRequest, WorkerLink
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.wire.v1 import worker_pb2_grpc
from kvferry.worker.server import WorkerServer


async def until(condition: Callable[[], bool], *, within_s: float = 30.0, what: str = "") -> None:
    deadline = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s:g} s: {what or condition}"
        await asyncio.sleep(0.002)


def request(name: str = "r", *, max_tokens: int = 5, keep: bool = False) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return EngineRequest(RequestId(name), list(range(10, 30)), sampling, keep_for_transfer=keep)


class Worker:
    """A sim engine behind a server, and a relay before it."""

    def __init__(self, engine: SimEngine, server: WorkerServer, relay: TcpRelay) -> None:
        self.engine = engine
        self.server = server
        self.relay = relay

    def member(self, member_id: str = "w") -> Member:
        return Member(
            kind=MemberKind.DECODE, member_id=MemberId(member_id), address=self.relay.address, model="m", version="0"
        )


@asynccontextmanager
async def serving() -> AsyncIterator[Worker]:
    engine = SimEngine("m", SimConfig(step_ms=1.0), block_size=16, max_num_seqs=64)
    await engine.start()
    server = WorkerServer(engine, worker_id="w", role="decode", host="127.0.0.1", max_requests=64, heartbeat_s=0.1)
    await server.start()
    relay = await TcpRelay(f"127.0.0.1:{server.port}").start()
    try:
        yield Worker(engine, server, relay)
    finally:
        await relay.stop()
        await server.stop(0.2)
        await engine.stop()


@asynccontextmanager
async def linked(member: Member) -> AsyncIterator[WorkerLink]:
    link = WorkerLink(member, "g", lambda: None)
    try:
        yield link
    finally:
        async with asyncio.timeout(5):
            await link.close()


class Sent:
    """A request on a link, and what came for it."""

    def __init__(self, link: WorkerLink, request: EngineRequest) -> None:
        self.outputs: list[EngineOutput] = []
        self.remote: RemoteRequest = link.submit(request, self.outputs.append)
        self.cancel = self.remote.cancel

    async def begin(self) -> None:
        await until(lambda: bool(self.outputs), what="a first output")


async def finish(sent: Sent) -> EngineOutput:
    last = await sent.remote.wait()
    assert sent.outputs[-1] is last
    return last


async def test_a_request_over_a_link() -> None:
    async with serving() as worker, linked(worker.member()) as link:
        with pytest.raises(WorkerLost, match="not connected"):
            Sent(link, request())
        await until(lambda: link.usable)
        last = await finish(Sent(link, request()))
        assert last.finish_reason is FinishReason.LENGTH
        assert link.num_requests == 0


async def test_a_silent_worker_is_lost_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_link, "SILENCE_LIMIT_S", 0.5)
    async with serving() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        worker.engine.faults = Faults(stalled=True)
        remote = Sent(link, request())
        await until(lambda: worker.engine.load().num_waiting == 1)
        worker.relay.backward.clear()
        with pytest.raises(WorkerLost, match="silent"):
            await finish(remote)
        assert not link.usable
        await until(lambda: worker.engine.load().num_waiting == 0, what="the worker aborted what was lost")
        worker.relay.backward.set()
        worker.engine.faults = Faults()
        await until(lambda: link.usable, what="the link is back")
        assert (await finish(Sent(link, request("again")))).finish_reason is FinishReason.LENGTH


async def test_a_stream_that_breaks_ends_every_request_on_it() -> None:
    async with serving() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        remotes = [Sent(link, request(f"r{i}", max_tokens=5000)) for i in range(3)]
        for remote in remotes:
            await remote.begin()
        worker.relay.cut()
        for remote in remotes:
            with pytest.raises(WorkerLost):
                await finish(remote)
        assert link.num_requests == 0
        await until(lambda: link.usable)


async def test_another_worker_at_the_address_is_refused_and_not_dialled_in_a_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses_s: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        pauses_s.append(delay_s)
        await real_sleep(0.001)

    async with serving() as worker:
        monkeypatch.setattr(router_link, "asyncio", _AsyncioWith(sleep))
        changes: list[None] = []
        link = WorkerLink(worker.member("somebody-else"), "g", lambda: changes.append(None))
        try:
            await until(lambda: len(pauses_s) >= 8)
            assert not link.usable
            assert not changes
        finally:
            await link.close()
    # Longer each time, up to the longest; each between half and the whole of it.
    for i, pause_s in enumerate(pauses_s):
        whole_s = min(router_link.REDIAL_FIRST_S * 2**i, router_link.REDIAL_MOST_S)
        assert whole_s / 2 <= pause_s <= whole_s


class _AsyncioWith:
    """asyncio with another `sleep`, for one module."""

    def __init__(self, sleep: object) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


async def test_a_message_that_cannot_be_read_does_not_end_the_link() -> None:
    """Columns of unequal length: the stream is given up, and the next one works."""

    class Nonsense(worker_pb2_grpc.WorkerServicer):
        num_attached = 0

        async def Attach(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: N802
            await anext(aiter(request_iterator))
            self.num_attached += 1
            await context.write(pb.Upward(welcome=pb.Welcome(worker_id="w")))
            if self.num_attached == 1:
                await context.write(pb.Upward(step=pb.Step(numbers=[1, 2], num_tokens=[1])))
            async for _ in request_iterator:
                pass

    nonsense = Nonsense()
    server = grpc.aio.server()
    worker_pb2_grpc.add_WorkerServicer_to_server(nonsense, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    member = Member(
        kind=MemberKind.DECODE, member_id=MemberId("w"), address=f"127.0.0.1:{port}", model="m", version="0"
    )
    async with linked(member) as link:
        await until(lambda: nonsense.num_attached == 2 and link.usable, what="the link dialled again")
    await server.stop(0)


async def test_a_request_that_cannot_be_written_leaves_nothing_behind() -> None:
    async with serving() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        with pytest.raises(ValueError):
            Sent(link, EngineRequest(RequestId("r"), [2**40], Sampling(max_tokens=1)))
        assert link.num_requests == 0
        assert (await finish(Sent(link, request()))).finish_reason is FinishReason.LENGTH


async def test_cancel_may_be_repeated_and_ends_the_outputs() -> None:
    async with serving() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        remote = Sent(link, request(max_tokens=5000))
        await remote.begin()
        remote.cancel()
        remote.cancel()
        num_outputs = len(remote.outputs)
        await until(lambda: worker.engine.load().num_running == 0)
        assert (await finish(Sent(link, request("after")))).finish_reason is FinishReason.LENGTH
        assert len(remote.outputs) == num_outputs  # what the worker sent meanwhile had no reader


async def test_a_reader_that_fails_ends_its_own_request_only() -> None:
    async with serving() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)

        def fail(output: EngineOutput) -> None:
            raise RuntimeError("of this test")

        other = Sent(link, request("other", max_tokens=50))
        failing = link.submit(request("failing", max_tokens=5000), fail)
        with pytest.raises(EngineError, match="its log says why"):
            await failing.wait()
        assert (await finish(other)).finish_reason is FinishReason.LENGTH
        assert sum(len(output.token_ids) for output in other.outputs) == 50
        await until(lambda: worker.engine.load().num_running == 0, what="the worker was told")


async def test_the_end_that_crossed_its_cancel_goes_to_whoever_releases_it() -> None:
    async with serving() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        orphans: list[EngineOutput] = []

        # On its way while the cancel is sent.
        worker.relay.backward.clear()
        remote = Sent(link, request("a", max_tokens=1, keep=True))
        await until(lambda: worker.engine.num_offers == 1)
        remote.cancel(orphans.append)
        assert not orphans
        worker.relay.backward.set()
        await until(lambda: len(orphans) == 1)
        assert orphans[0].transfer_params is not None

        # Here, and not read yet.
        remote = Sent(link, request("b", max_tokens=1, keep=True))
        await until(lambda: link.num_requests == 0, what="its end arrived")
        remote.cancel(orphans.append)
        assert len(orphans) == 2

        # Read: it has a reader who looks after it.
        remote = Sent(link, request("c", max_tokens=1, keep=True))
        await finish(remote)
        remote.cancel(orphans.append)

        # Not finished.
        worker.engine.faults = Faults(stalled=True)
        remote = Sent(link, request("d", max_tokens=1, keep=True))
        await until(lambda: worker.engine.load().num_waiting == 1)
        remote.cancel(orphans.append)
        await until(lambda: not link._number_to_orphaned, what="the worker said how it ended")
        assert len(orphans) == 2


async def test_close_ends_requests_and_returns_while_messages_come() -> None:
    async with serving() as worker:
        link = WorkerLink(worker.member(), "g", lambda: None)
        await until(lambda: link.usable)
        remote = Sent(link, request(max_tokens=5000))
        await remote.begin()
        async with asyncio.timeout(5):
            await link.close()
        with pytest.raises(WorkerLost, match="closed"):
            await finish(remote)
        await until(lambda: worker.engine.load().num_running == 0)
