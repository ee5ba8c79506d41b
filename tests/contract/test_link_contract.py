"""What a link owes its gateway its worker silent, gone, somebody else or talking nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from kvferry.config import WorkerConfig
from kvferry.engine.base import EngineOutput, EngineRequest, FinishReason, RequestId, Sampling
from kvferry.errors import EngineError, InvalidRequest, WorkerLost
from kvferry.link import codec, flow_control, worker_link
from kvferry.link.frames import PREAMBLE, FrameDecoder, encode_frames
from kvferry.link.remote_request import RemoteRequest
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry.pages.keys import ImageSpan
from kvferry.wire.v1 import worker_pb2 as pb
from kvferry.worker.server import WorkerServer
from kvferry_sim import Faults, SimEngine
from support.link_peers import Firehose, request, serving, simulated
from support.tcp_relay import TcpRelay
from support.waiting import SOON_S, until


class Worker:
    """A sim engine behind a server, and a relay before it."""

    def __init__(self, engine: SimEngine, server: WorkerServer, relay: TcpRelay) -> None:
        self.engine = engine
        self.server = server
        self.relay = relay

    def member(self, member_id: str = "w") -> Member:
        return member(self.relay.address, member_id)


def member(link_address: str, member_id: str = "w") -> Member:
    return Member(
        kind=MemberKind.DECODE,
        member_id=MemberId(member_id),
        address="127.0.0.1:1",
        link_address=link_address,
        model="m",
        version="0",
    )


@asynccontextmanager
async def working(**values: Any) -> AsyncIterator[Worker]:
    async with simulated() as engine, serving(engine, heartbeat_s=0.1, **values) as server:
        relay = await TcpRelay(f"127.0.0.1:{server.frame_port}").start()
        try:
            yield Worker(engine, server, relay)
        finally:
            await relay.stop()


@asynccontextmanager
async def linked(
    member: Member,
    config: WorkerConfig = WorkerConfig(),  # noqa: B008
    **callbacks: Any,
) -> AsyncIterator[WorkerLink]:
    link = WorkerLink(member, "g", lambda: None, config, **callbacks)
    try:
        yield link
    finally:
        async with asyncio.timeout(SOON_S):
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
    async with working() as worker, linked(worker.member()) as link:
        with pytest.raises(WorkerLost, match="not connected"):
            Sent(link, request())
        await until(lambda: link.usable)
        last = await finish(Sent(link, request()))
        assert last.finish_reason is FinishReason.LENGTH
        assert link.num_requests == 0


async def test_a_silent_worker_is_lost_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "SILENCE_LIMIT_S", 0.5)
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        worker.engine.faults = Faults(stalled=True)
        remote = Sent(link, request())
        await until(lambda: worker.engine.stats().num_waiting == 1)
        worker.relay.backward.clear()
        with pytest.raises(WorkerLost, match="silent"):
            await finish(remote)
        assert not link.usable
        await until(lambda: worker.engine.stats().num_waiting == 0, what="the worker aborted what was lost")
        worker.relay.backward.set()
        worker.engine.faults = Faults()
        await until(lambda: link.usable, what="the link is back")
        assert (await finish(Sent(link, request("again")))).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("how", ["silent", "cut", "silent while draining", "closed here"])
async def test_a_worker_without_requests_that_goes_away_is_reported(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(worker_link, "SILENCE_LIMIT_S", 0.5)
    vanished: list[bool] = []
    async with (
        working() as worker,
        linked(worker.member(), on_vanished=lambda: vanished.append(link.usable)) as link,
    ):
        await until(lambda: link.usable)
        if how == "silent while draining":
            await worker.server.drain(5.0)
            await until(lambda: link.draining)
        if how.startswith("silent"):
            worker.relay.backward.clear()
        elif how == "cut":
            worker.relay.cut()
        else:
            await link.close()
        await until(lambda: not link.connected)
        worker.relay.backward.set()
    assert vanished == ([False] if how in ("silent", "cut") else [])


async def test_a_worker_is_quiet_before_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_link, "QUIET_S", 0.5)
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        assert not link.is_quiet
        worker.relay.backward.clear()
        await until(lambda: link.is_quiet)
        assert link.usable
        worker.relay.backward.set()
        await until(lambda: not link.is_quiet)


async def test_a_stream_that_breaks_ends_every_request_on_it() -> None:
    async with working() as worker, linked(worker.member()) as link:
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

    async with working() as worker:
        monkeypatch.setattr(worker_link, "asyncio", _AsyncioWith(sleep))
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
        whole_s = min(worker_link.REDIAL_FIRST_S * 2**i, worker_link.REDIAL_MOST_S)
        assert whole_s / 2 <= pause_s <= whole_s


class _AsyncioWith:
    """asyncio with another `sleep`, for one module."""

    def __init__(self, sleep: object) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)


Answer = Callable[[int], list[pb.Upward]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    """A worker that says `answer(n)` on its n-th link, whatever it is asked. Its address."""
    num_links = 0

    def payloads() -> list[bytes]:
        nonlocal num_links
        num_links += 1
        return [message.SerializeToString() for message in answer(num_links)]

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport
            self.decoder = FrameDecoder()
            open_transports.add(transport)

        def data_received(self, data: bytes) -> None:
            for payload in self.decoder.feed(data):
                if pb.Downward.FromString(payload).HasField("hello"):
                    self.transport.write(PREAMBLE + encode_frames(payloads()))

        def connection_lost(self, error: Exception | None) -> None:
            open_transports.discard(self.transport)

    open_transports: set[asyncio.Transport] = set()
    listener = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
    yield f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    listener.close()
    await until(lambda: not open_transports, what="its gateways are gone")


WELCOME = pb.Upward(welcome=pb.Welcome(worker_id="w"))


@pytest.mark.parametrize(
    "nonsense",
    [
        pb.Upward(step=pb.Step(numbers=[1, 2], num_tokens=[1])),  # columns of unequal length
        WELCOME,  # once more
    ],
)
async def test_a_message_that_cannot_be_read_does_not_end_the_link(nonsense: pb.Upward) -> None:
    """The connection is given up, and the next one works."""
    links: list[int] = []

    def answer(number: int) -> list[pb.Upward]:
        links.append(number)
        return [WELCOME, nonsense] if number == 1 else [WELCOME]

    async with answering(answer) as address, linked(member(address)) as link:
        await until(lambda: links == [1, 2] and link.usable, what="the link dialled again")
        assert link.generation == 2


async def test_a_kind_of_message_that_is_not_known_here_is_left_out() -> None:
    """A worker of a later release may send it."""
    residency = pb.Upward(residency=pb.Residency(sequence=3, snapshot=True))
    heard: list[pb.Residency] = []
    async with (
        answering(lambda _: [WELCOME, pb.Upward(), residency]) as address,
        linked(member(address), on_residency=lambda link, message: heard.append(message)) as link,
    ):
        await until(lambda: bool(heard))
        assert (heard[0].sequence, link.generation, link.usable) == (3, 1, True)


async def test_what_comes_before_the_welcome_is_not_taken() -> None:
    def answer(number: int) -> list[pb.Upward]:
        return [WELCOME] if number == 2 else [pb.Upward(step=pb.Step()), WELCOME]

    async with answering(answer) as address, linked(member(address)) as link:
        await until(lambda: link.usable)
        assert link.generation == 1


async def test_residency_is_passed_on_and_a_snapshot_asked_for() -> None:
    heard: list[pb.Residency] = []
    snapshot = pb.Residency(sequence=3, snapshot=True)
    async with (
        working(on_snapshot_wanted=lambda session: session.send_residency(snapshot)) as worker,
        linked(worker.member(), on_residency=lambda link, message: heard.append(message)) as link,
    ):
        link.want_snapshot()  # too early: nothing happens
        await until(lambda: link.usable)
        link.want_snapshot()
        await until(lambda: len(heard) == 1)
        assert (heard[0].sequence, heard[0].snapshot) == (3, True)


async def test_what_a_prefill_engine_keeps_is_released_over_its_link() -> None:
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        last = await finish(Sent(link, request("a", max_tokens=1, keep_for_transfer=True)))
        assert worker.engine.num_offers == 1
        assert last.transfer_params is not None
        link.release(last.transfer_params)
        await until(lambda: worker.engine.num_offers == 0)
        worker.engine.check()


async def test_a_gateway_that_reads_never_runs_out_of_credit() -> None:
    """Many times the credit, in steps and in bytes, faster than engines are.

    Not as fast as the loop turns: the gateway, in the same loop, has to read meanwhile.
    """
    engine = Firehose("x" * 2000, pause_s=0.0005)
    async with serving(engine) as server, linked(member(f"127.0.0.1:{server.frame_port}")) as link:
        await until(lambda: link.usable)
        sent = Sent(link, request())
        num_wanted = 4 * flow_control.MAX_UNREAD_BYTES // 2000
        await until(lambda: len(sent.outputs) > num_wanted)
        assert sum(len(output.token_ids) for output in sent.outputs) == len(sent.outputs)
        sent.cancel()
        await until(lambda: engine.num_running == 0)


async def test_an_idle_link_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway speaks of itself, or the worker would take it for lost."""
    assert flow_control.ACK_EVERY_S <= flow_control.SILENCE_LIMIT_S / 2
    monkeypatch.setattr(worker_link, "ACK_EVERY_S", 0.05)
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        (session,) = worker.server.sessions
        for _ in range(3):
            heard_s = session._received_s
            await until(lambda heard_s=heard_s: session._received_s > heard_s, what="the gateway speaks")
        assert link.generation == 1
        assert link.usable


async def test_a_member_without_a_link_address_is_no_worker_of_this_gateway() -> None:
    async with linked(member("")) as link:
        await until(lambda: link._why_not == "it accepts no links as frames")
        assert not link.usable


async def test_a_request_that_cannot_be_written_leaves_nothing_behind() -> None:
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        with pytest.raises(ValueError):
            Sent(link, EngineRequest(RequestId("r"), [2**40], Sampling(max_tokens=1)))
        assert link.num_requests == 0
        assert (await finish(Sent(link, request()))).finish_reason is FinishReason.LENGTH


async def test_a_request_over_the_limit_of_a_message_is_refused_before_it_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        size = len(codec.submit_to_wire(1, request()).SerializeToString())
        monkeypatch.setattr(worker_link, "MAX_FRAME_BYTES", size)
        assert (await finish(Sent(link, request()))).finish_reason is FinishReason.LENGTH
        monkeypatch.setattr(worker_link, "MAX_FRAME_BYTES", size - 1)
        with pytest.raises(InvalidRequest, match=f"takes {size} bytes to a worker; the limit is {size - 1}"):
            Sent(link, request())
        spans, features = (ImageSpan("a", 0, 1), ImageSpan("b", 2, 1)), [bytes(size - 1), b"x"]
        with pytest.raises(InvalidRequest, match=f"takes {size} bytes, {size} of them for its 2 images, to a worker"):
            Sent(link, request(images=spans, features=features))
        assert link.num_requests == 0
        assert link.connected


async def test_cancel_may_be_repeated_and_ends_the_outputs() -> None:
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        remote = Sent(link, request(max_tokens=5000))
        await remote.begin()
        remote.cancel()
        remote.cancel()
        num_outputs = len(remote.outputs)
        await until(lambda: worker.engine.stats().num_running == 0)
        assert (await finish(Sent(link, request("after")))).finish_reason is FinishReason.LENGTH
        assert len(remote.outputs) == num_outputs  # what the worker sent meanwhile had no reader


async def test_a_reader_that_fails_ends_its_own_request_only() -> None:
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)

        def fail(output: EngineOutput) -> None:
            raise RuntimeError("of this test")

        other = Sent(link, request("other", max_tokens=50))
        failing = link.submit(request("failing", max_tokens=5000), fail)
        with pytest.raises(EngineError, match="its log says why"):
            await failing.wait()
        assert (await finish(other)).finish_reason is FinishReason.LENGTH
        assert sum(len(output.token_ids) for output in other.outputs) == 50
        await until(lambda: worker.engine.stats().num_running == 0, what="the worker was told")


async def test_the_end_that_crossed_its_cancel_goes_to_whoever_releases_it() -> None:
    async with working() as worker, linked(worker.member()) as link:
        await until(lambda: link.usable)
        orphans: list[EngineOutput] = []

        # On its way while the cancel is sent.
        worker.relay.backward.clear()
        remote = Sent(link, request("a", max_tokens=1, keep_for_transfer=True))
        await until(lambda: worker.engine.num_offers == 1)
        remote.cancel(orphans.append)
        assert not orphans
        worker.relay.backward.set()
        await until(lambda: len(orphans) == 1)
        assert orphans[0].transfer_params is not None

        # Here, and not read yet.
        remote = Sent(link, request("b", max_tokens=1, keep_for_transfer=True))
        await until(lambda: link.num_requests == 0, what="its end arrived")
        remote.cancel(orphans.append)
        assert len(orphans) == 2

        # Read: it has a reader who looks after it.
        remote = Sent(link, request("c", max_tokens=1, keep_for_transfer=True))
        await finish(remote)
        remote.cancel(orphans.append)

        # Not finished.
        worker.engine.faults = Faults(stalled=True)
        remote = Sent(link, request("d", max_tokens=1, keep_for_transfer=True))
        await until(lambda: worker.engine.stats().num_waiting == 1)
        remote.cancel(orphans.append)
        await until(lambda: not link._number_to_on_orphan, what="the worker said how it ended")
        assert len(orphans) == 2


async def test_close_ends_requests_and_returns_while_messages_come() -> None:
    async with working() as worker:
        link = WorkerLink(worker.member(), "g", lambda: None)
        await until(lambda: link.usable)
        remote = Sent(link, request(max_tokens=5000))
        await remote.begin()
        async with asyncio.timeout(SOON_S):
            await link.close()
        with pytest.raises(WorkerLost, match="closed"):
            await finish(remote)
        await until(lambda: worker.engine.stats().num_running == 0)


def test_a_link_on_uvloop() -> None:
    """Which gateways run on; its transports are asyncio's by behaviour only."""

    async def one_request() -> None:
        async with working() as worker, linked(worker.member()) as link:
            await until(lambda: link.usable)
            assert (await finish(Sent(link, request()))).finish_reason is FinishReason.LENGTH

    uvloop.run(one_request())
