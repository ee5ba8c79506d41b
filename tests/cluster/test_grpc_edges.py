"""gRPC clients that show no key, send no message, open too much, or do not read; and TLS clients that say nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvferry.gateway import admission, unread_answers
from kvferry.gateway.admission import CountedRequest
from kvferry.gateway.grpc import grpc_health, grpc_messages, grpc_reflection, grpc_server
from kvferry.gateway.grpc.grpc_messages import MessageReads
from kvferry.gateway.grpc.grpc_server import SERVICE
from kvferry.gateway.http import asgi, tls_handshake
from kvferry.gateway.identity.key_file import new_key
from kvferry.inference.v1 import inference_pb2 as pb
from support.beside import beside
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import Certificates, bearer, http_to
from .test_gateway_grpc import ENDLESS, GREEDY, channel_to, details_of, generate, refused, stub_on

# Of a channel: the client's system takes little that is not asked for.
SMALL = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536))

REFLECTION_INFO = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
# Of HTTP/2.
HEADERS, SETTINGS, GOAWAY = 1, 4, 7
END_HEADERS = 4

METHODS = ("Generate", "GenerateStream", "Tokenize", "ListModels")


def own_channel_to(cluster: SimCluster, *options: tuple[str, int]) -> grpc.aio.Channel:
    """A channel with a connection of its own; others of this process share one."""
    assert cluster.gateway is not None
    options = (("grpc.use_local_subchannel_pool", 1), *options)
    return grpc.aio.insecure_channel(f"127.0.0.1:{cluster.gateway.grpc.port}", options=options)


def silent(channel: grpc.aio.Channel, method: str, metadata: Any = ()) -> Any:
    """A call whose client sends nothing, not even an end."""
    return channel.stream_stream(f"/kvferry.inference.v1.Inference/{method}")(metadata=metadata)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, int, bytes]:
    """Kind, stream and payload."""
    head = await reader.readexactly(9)
    return head[3], int.from_bytes(head[5:], "big"), await reader.readexactly(int.from_bytes(head[:3], "big"))


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value


@pytest.mark.parametrize("method", METHODS)
async def test_a_client_without_a_key_is_refused_before_its_message(tmp_path: Path, method: str) -> None:
    keys = tmp_path / "keys.yaml"
    key = new_key(keys, "acme", "ci")
    async with running(gateway={"keys_file": str(keys)}) as cluster, channel_to(cluster) as channel:
        async with asyncio.timeout(SOON_S):
            error = await failure_of(silent(channel, method))
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            both = (*bearer(key).items(), *bearer(f"{key}x").items())
            assert "more than one" in str((await failure_of(silent(channel, method, both))).details())
        assert cluster.gateway is not None
        await until(lambda: cluster.gateway is not None and cluster.gateway.admission.num_in_flight == 0)


async def test_a_message_that_does_not_come_is_waited_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_messages, "MESSAGE_TIMEOUT_S", 0.3)
    async with running() as cluster, channel_to(cluster) as channel:
        calls = [
            silent(channel, "Generate"),
            channel.stream_stream("/grpc.health.v1.Health/Watch")(),
            channel.stream_stream(REFLECTION_INFO)(),
        ]
        for call in calls:
            error = await failure_of(call)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert details_of(error)["ErrorInfo"].reason == "BODY_TIMEOUT"


async def test_calls_whose_messages_are_slow_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_messages, "PATIENCE_S", 0.1)
    monkeypatch.setattr(admission, "MAX_PENDING_BODY_BYTES", 20_000)
    async with running(gateway={"max_body_bytes": 4096}) as cluster:
        async with channel_to(cluster) as slow, channel_to(cluster) as channel:
            gateway = cluster.gateway
            assert gateway is not None
            reads = gateway.grpc._reads
            assert reads._max_reads == 2
            calls, readers = [], []
            for number in (1, 2):
                calls.append(silent(slow, "Generate"))
                readers.append(asyncio.create_task(failure_of(calls[-1])))
                await until(lambda n=number: reads._num_reads == n, what="it is read")  # type: ignore[misc]
            answer = await stub_on(channel).Generate(generate(sampling=GREEDY), timeout=PATIENCE_S)
            assert answer.usage.completion_tokens == 8
            cut = await readers[0]
            assert cut.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "while others waited" in str(cut.details())
            assert not readers[1].done(), "one was enough"
            calls[1].cancel()
            await asyncio.gather(*readers, return_exceptions=True)
        await until(lambda: gateway.admission.num_in_flight == 0)
        assert repr(reads) == "<MessageReads 0/2, 0 wait>"
        reads.check()
        assert isinstance(reads, MessageReads)


async def test_whole_answers_that_are_not_read_are_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two answers of 1 MB, the one that was unread longer is cut; the other one is whole."""
    monkeypatch.setattr(admission, "MAX_PENDING_BODY_BYTES", 3 << 19)
    limits = {"max_body_bytes": 4096}
    sim = {"step_ms": 0.1, "prefill_tokens_per_s": 200_000.0}
    async with running(gateway=limits, sim=sim) as cluster, own_channel_to(cluster, *SMALL) as first:
        gateway = cluster.gateway
        assert gateway is not None
        unread = gateway.app.unread_answers
        request = generate(sampling=pb.Sampling(max_tokens=512, ignore_eos=True, logprobs=20, temperature=0))
        request.num_choices = 4
        request.return_token_ids = True
        async with own_channel_to(cluster, *SMALL) as second:
            calls = []
            for channel in (first, second):
                # Of a streamed answer nothing is read until the test asks for it.
                call = channel.unary_stream(f"/{SERVICE}/Generate")(request.SerializeToString())
                calls.append(call)
                await until(lambda: unread.num_bytes > 900_000, what="an answer waits for its client")
                if channel is first:
                    assert gateway.admission.in_flight == (0, 0, 0), "its place is free"
                    num_bytes = unread.num_bytes
                else:
                    await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1, what="one is cut")
            await until(lambda: unread.num_bytes == num_bytes, what="its bytes are given back")
            await until(calls[0].done, what="its connection ends")
            assert gateway.admission.num_in_flight == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await calls[0].read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, "its connection ends"
            answer = pb.GenerateResponse.FromString(await calls[1].read())
            assert await calls[1].read() is grpc.aio.EOF
        assert len(answer.answers) == 4
        for choice in answer.answers:
            assert len(choice.logprobs) == len(choice.token_ids) == 512
            assert [position.top[0].token_id for position in choice.logprobs] == list(choice.token_ids)
            assert "".join(position.top[0].text for position in choice.logprobs) == choice.text
        await until(lambda: gateway.admission.num_in_flight == 0)
        assert unread.num_bytes == 0


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Tokenize"])
async def test_a_call_that_is_over_does_not_wait_for_its_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """The time of the request ends while its answer is not read. Nine such calls of a connection are one scan."""
    monkeypatch.setattr(grpc_server, "ABORT_TIMEOUT_S", 0.3)
    begun: list[CountedRequest] = []
    enter = CountedRequest.__enter__

    def remember(counted: CountedRequest) -> CountedRequest:
        begun.append(counted)
        return enter(counted)

    monkeypatch.setattr(CountedRequest, "__enter__", remember)
    sim = {"step_ms": 0.1, "prefill_tokens_per_s": 200_000.0, "max_model_len": 200_000}
    async with running(sim=sim) as cluster, own_channel_to(cluster, *SMALL) as slow:
        gateway = cluster.gateway
        assert gateway is not None
        request: Any = generate(sampling=pb.Sampling(max_tokens=512, ignore_eos=True, logprobs=20))
        request.num_choices = 4
        num_calls = 1
        if method == "Tokenize":
            request, num_calls = pb.TokenizeRequest(model=MODEL, text="word " * 120_000), 9
        calls = [slow.unary_stream(f"/{SERVICE}/{method}")(request.SerializeToString()) for _ in range(num_calls)]
        unread = gateway.app.unread_answers
        # More than the client's window has room for: a stream that ends before would end within it, and be read.
        await until(
            lambda: len(unread._connections) == num_calls and unread.num_bytes > num_calls * 4 * 65_536,
            what="its answer waits for its client",
        )
        for counted in begun:
            assert counted.expire is not None
            counted.expire()
        await until(lambda: gateway.admission.num_in_flight == 0, what="it does not keep its place")
        assert unread.num_bytes == 0
        endpoint = {"Generate": "generate", "GenerateStream": "generate_stream", "Tokenize": "tokenize"}[method]
        num_late = cluster.metric(f'kvferry_requests_total{{endpoint="grpc_{endpoint}",status="504"}}')
        assert 1 <= num_late <= num_calls
        for call in calls:
            await until(call.done, what="its connection ends")
        assert grpc.StatusCode.UNAVAILABLE in {await call.code() for call in calls}
        assert gateway.grpc._ender is not None
        assert 1 <= gateway.grpc._ender.num_passes <= max(1, num_calls // 2)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_call_that_its_client_left_ends_no_other_call_of_its_connection() -> None:
    async with running() as cluster, own_channel_to(cluster) as channel:
        gateway = cluster.gateway
        assert gateway is not None
        other = stub_on(channel).GenerateStream(ENDLESS)
        await other.read()

        class Context:
            """Of a call that is over: gRPC takes no status for it."""

            def peer(self) -> str:
                raise AssertionError("nothing is ended")

        async def abort() -> NoReturn:
            raise grpc.aio.InternalError("Failed execute_batch")

        with pytest.raises(asyncio.CancelledError):
            await gateway.grpc._abort_soon(abort(), 5.0, cast(Any, Context()))
        assert gateway.grpc._ender is not None
        assert gateway.grpc._ender.num_passes == 0
        await other.read()
        other.cancel()
        await cluster.until_quiet()


async def test_an_answer_that_is_not_read_is_cut_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "STALL_S", 0.5)
    monkeypatch.setattr(grpc_server, "MIN_READ_BYTES_PER_S", 1e9)
    sim = {"step_ms": 0.1, "prefill_tokens_per_s": 200_000.0}
    async with running(sim=sim) as cluster, own_channel_to(cluster, *SMALL) as slow:
        gateway = cluster.gateway
        assert gateway is not None
        request = generate(sampling=pb.Sampling(max_tokens=512, ignore_eos=True, logprobs=20))
        request.num_choices = 4
        call = slow.unary_stream(f"/{SERVICE}/Generate")(request.SerializeToString())
        await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1)
        await until(call.done, what="its connection ends")
        await until(lambda: gateway.admission.num_in_flight == 0)
        assert cluster.metric('kvferry_requests_total{endpoint="grpc_generate",status="499"}') == 1


MOST_UNREAD_BYTES = 200_000  # of one of the streams below, which have about 265,000


async def test_streams_that_are_not_read_count_as_answers_do_and_are_cut_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tokens are generated, and they have left less unread than a stream may."""
    monkeypatch.setattr(unread_answers, "LOOK_S", 0.01)
    sim = {"step_ms": 0.1, "prefill_tokens_per_s": 200_000.0}
    request = generate(sampling=pb.Sampling(max_tokens=1000, ignore_eos=True, logprobs=20, temperature=0))
    request.num_choices = 2
    async with running(gateway={"max_requests": 4}, sim=sim) as cluster, own_channel_to(cluster, *SMALL) as first:
        gateway = cluster.gateway
        assert gateway is not None
        unread = gateway.app.unread_answers
        async with own_channel_to(cluster, *SMALL) as second:
            calls = [first.unary_stream(f"/{SERVICE}/GenerateStream")(request.SerializeToString())]
            await until(lambda: unread.num_bytes > 0, what="the stream is counted")
            await cluster.until_quiet()
            await until(lambda: unread.num_bytes > MOST_UNREAD_BYTES, what="all of it is generated")
            unread.max_bytes = unread.num_bytes * 3 // 2  # of one, and not of two
            calls.append(second.unary_stream(f"/{SERVICE}/GenerateStream")(request.SerializeToString()))
            await until(lambda: cluster.metric("kvferry_slow_clients_total") == 1, what="the first one is cut")
            await until(calls[0].done, what="its connection ends")
            await cluster.until_quiet()
            await until(lambda: gateway.admission.choices.num_taken == 2, what="its place is free")
            assert not calls[1].done()
            monkeypatch.setattr(grpc_server, "STALL_S", 0.1)
            monkeypatch.setattr(grpc_server, "MIN_READ_BYTES_PER_S", 1e9)
            unread.stall_s = 0.1
            await until(lambda: cluster.metric("kvferry_slow_clients_total") == 2, what="the other one stalled")
            await until(calls[1].done, what="its connection ends")
        await until(lambda: gateway.admission.num_in_flight == 0)
        assert unread.num_bytes == 0
        assert cluster.metric('kvferry_requests_total{endpoint="grpc_generate_stream",status="499"}') == 2


async def test_calls_at_once_are_limited_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 2)
    async with running() as cluster, channel_to(cluster) as channel:
        streams = [stub_on(channel).GenerateStream(ENDLESS) for _ in range(2)]
        for stream in streams:
            await stream.read()
        error = await refused(stub_on(channel).Generate(generate(sampling=GREEDY)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for stream in streams:
            stream.cancel()
        await cluster.until_quiet()


async def test_a_connection_carries_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further calls wait in the client."""
    monkeypatch.setattr(grpc_server, "MAX_STREAMS_PER_CONNECTION", 2)
    async with running() as cluster, channel_to(cluster) as channel:
        gateway = cluster.gateway
        assert gateway is not None
        streams = []
        for _ in range(2):
            streams.append(stub_on(channel).GenerateStream(ENDLESS))
            await streams[-1].read()
        streams.append(stub_on(channel).GenerateStream(ENDLESS))
        third = asyncio.create_task(streams[2].read())
        async with own_channel_to(cluster) as other:
            # The third would have come before this one.
            await stub_on(other).Generate(generate(sampling=GREEDY), timeout=PATIENCE_S)
        assert gateway.admission.choices.num_taken == 2
        streams[0].cancel()
        async with asyncio.timeout(SOON_S):
            await third
        for stream in streams:
            stream.cancel()
        await cluster.until_quiet()


async def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 1)
    async with running() as cluster, channel_to(cluster) as channel:
        await stub_on(channel).ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)
        async with own_channel_to(cluster) as other:
            error = await refused(stub_on(other).ListModels(pb.ListModelsRequest(), timeout=1))
            assert error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        await stub_on(channel).ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)


async def test_a_watcher_that_does_not_read_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its write does not return; others hear of changes, and of `notify`, all the same."""
    monkeypatch.setattr(grpc_health, "MAX_WATCHERS", 2)
    ready = True
    health = grpc_health.Health(("",), lambda: ready)

    class StuckContext:
        def peer(self) -> str:
            return ""

        async def read(self) -> bytes:
            return b""

        async def write(self, _: object) -> None:
            await asyncio.Event().wait()

        async def abort(self, code: grpc.StatusCode, _: str) -> None:
            aborted.append(code)

    aborted: list[grpc.StatusCode] = []
    stuck = asyncio.create_task(health._watch(None, StuckContext()))  # type: ignore[arg-type]
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((health.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(SOON_S):
            stub: Any = health_pb2_grpc.HealthStub(channel)
            watched = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
            ready = False
            health.notify()
            assert (await watched.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert "watchers=2" in repr(health)
            # A third one takes the place of the oldest, though its client does not read.
            third = stub.Watch(health_pb2.HealthCheckRequest())
            assert (await third.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert aborted == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            assert "watchers=2" in repr(health)
            unknown = await refused(stub.Check(health_pb2.HealthCheckRequest(service="x" * 100_000)))
            assert len(str(unknown.details())) < 300
    finally:
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        await server.stop(None)
    await until(lambda: "watchers=0" in repr(health))


async def test_silent_calls_of_the_health_service_are_few_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs no key: calls whose messages do not come must not fill the gateway, nor keep probes waiting for long."""
    monkeypatch.setattr(grpc_health, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(grpc_health, "_MAX_WAITING", 4)
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 12)
    async with running() as cluster, channel_to(cluster) as channel:
        gateway = cluster.gateway
        assert gateway is not None
        reads = gateway.grpc._health._check_reads
        silent_check = channel.stream_stream("/grpc.health.v1.Health/Check")
        calls = [silent_check() for _ in range(7)]
        await until(lambda: reads._num_reads + reads._num_waiting == 7, what="they wait")
        probe: Any = health_pb2_grpc.HealthStub(channel)
        assert (await probe.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)).status
        calls += [silent_check() for _ in range(40)]
        readers = [asyncio.create_task(failure_of(call)) for call in calls]
        # Four are left, which are read while no other call waits.
        await until(lambda: sum(reader.done() for reader in readers) >= 43, what="the others are refused or cut")
        failures = {reader.result().code() for reader in readers if reader.done()}
        assert failures == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        answer = await stub_on(channel).Generate(generate(sampling=GREEDY), timeout=PATIENCE_S)
        assert answer.usage.completion_tokens == 8
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await until(lambda: not reads._num_reads)
        reads.check()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_silent_health_calls_of_one_connection_hold_up_no_probe_of_another(method: str) -> None:
    """More than may wait, opened again when they are cut."""
    async with running() as cluster, own_channel_to(cluster) as channel, own_channel_to(cluster) as other:

        async def be_silent() -> None:
            while True:
                call = channel.stream_stream(f"/grpc.health.v1.Health/{method}")()
                await asyncio.gather(call.read(), return_exceptions=True)

        async with beside(*(be_silent() for _ in range(100))):
            assert cluster.gateway is not None
            health = cluster.gateway.grpc._health
            reads = health._check_reads if method == "Check" else health._watch_reads
            await until(lambda: reads._num_waiting == grpc_health._MAX_WAITING, what="the line is full")
            probe: Any = health_pb2_grpc.HealthStub(other)
            async with asyncio.timeout(SOON_S):
                for _ in range(3):
                    await probe.Check(health_pb2.HealthCheckRequest())
                    watch = probe.Watch(health_pb2.HealthCheckRequest())
                    await watch.read()
                    watch.cancel()


async def test_watchers_of_one_connection_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_health, "MAX_WATCHERS", 3)
    monkeypatch.setattr(grpc_health, "_MAX_WATCHERS_PER_CONNECTION", 2)
    async with running() as cluster, own_channel_to(cluster) as channel, own_channel_to(cluster) as other:
        stubs: list[Any] = [health_pb2_grpc.HealthStub(channel), health_pb2_grpc.HealthStub(other)]
        calls = []
        for stub, is_refused in ((stubs[0], False), (stubs[0], False), (stubs[0], True), (stubs[1], False)):
            calls.append(stub.Watch(health_pb2.HealthCheckRequest()))
            if is_refused:
                error = await failure_of(calls[-1])
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "this connection" in str(error.details())
            else:
                await calls[-1].read()
        for call in calls:
            call.cancel()


async def test_whoever_watches_most_gives_way_to_a_new_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers have no key: else one of them would take the gateway from its balancer."""
    monkeypatch.setattr(grpc_health, "MAX_WATCHERS", 4)
    async with running() as cluster, own_channel_to(cluster) as channel, own_channel_to(cluster) as other:
        many, one = (health_pb2_grpc.HealthStub(each) for each in (channel, other))
        calls: list[Any] = []
        for stub in (one, many, many, many):
            calls.append(stub.Watch(health_pb2.HealthCheckRequest()))
            await calls[-1].read()
        async with own_channel_to(cluster) as third:
            last: Any = health_pb2_grpc.HealthStub(third).Watch(health_pb2.HealthCheckRequest())
            await last.read()
            assert await calls[1].code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "a newer call" in await calls[1].details()
            assert [call.done() for call in calls] == [False, True, False, False]
            for call in (*calls, last):
                call.cancel()


async def test_silent_calls_of_reflection_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_messages, "PATIENCE_S", 0.05)
    monkeypatch.setattr(grpc_reflection, "_MAX_WAITING", 4)
    monkeypatch.setattr(grpc_server, "MAX_CALLS", 12)
    async with running() as cluster, own_channel_to(cluster) as channel:
        calls = [channel.stream_stream(REFLECTION_INFO)() for _ in range(40)]
        readers = [asyncio.create_task(failure_of(call)) for call in calls]
        await until(lambda: sum(reader.done() for reader in readers) >= 36, what="all but those read are refused")
        assert {reader.result().code() for reader in readers if reader.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        async with own_channel_to(cluster) as other, asyncio.timeout(SOON_S):
            await stub_on(other).Generate(generate(sampling=GREEDY))
            ask = reflection_pb2.ServerReflectionRequest(list_services="")
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(other)
            assert [answer async for answer in stub.ServerReflectionInfo(iter([ask, ask]))]
        for call in calls:
            call.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def test_an_answer_of_reflection_that_is_not_read_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_reflection, "STALL_S", 0.2)
    monkeypatch.setattr(grpc_server, "ABORT_TIMEOUT_S", 0.2)
    async with running() as cluster, own_channel_to(cluster, *SMALL) as channel:
        call = channel.stream_stream(REFLECTION_INFO)()
        ask = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE).SerializeToString()

        async def ask_on() -> NoReturn:
            while True:
                await call.write(ask)

        with pytest.raises((grpc.aio.AioRpcError, asyncio.InvalidStateError)):
            await ask_on()
        await until(call.done, what="its connection ends")


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_never_shakes_hands_is_counted_and_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop: str
) -> None:
    """Under the loop of Ray Serve too, whose transports are others."""
    monkeypatch.setattr(tls_handshake, "HANDSHAKE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(asgi, "MAX_CONNECTIONS", 2)
    run: Any = pytest.importorskip(loop).run
    run(shake_no_hands(Certificates(tmp_path)))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_handshake_that_begins_with_the_connection_ends(tmp_path: Path, loop: str) -> None:
    """The client's first bytes are there before the gateway has seen the connection."""

    async def connect() -> None:
        certificates = Certificates(tmp_path)
        async with running(gateway={"tls": certificates.config()}) as cluster:
            assert cluster.gateway is not None
            async with asyncio.timeout(SOON_S):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", cluster.gateway.port, ssl=certificates.context(), server_hostname="localhost"
                )
                writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
            writer.close()

    run: Any = pytest.importorskip(loop).run
    run(connect())


async def shake_no_hands(certificates: Certificates) -> None:
    async with running(gateway={"tls": certificates.config()}) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        limits = gateway.app.connection_limits
        mute = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(2)]
        await until(lambda: limits.num_open == 2, what="handshakes are counted")
        context = ssl.create_default_context()
        with pytest.raises((ConnectionError, ssl.SSLError, asyncio.IncompleteReadError)):
            await asyncio.open_connection("127.0.0.1", gateway.port, ssl=context)
        for reader, writer in mute:
            async with asyncio.timeout(SOON_S):
                assert await reader.read() == b""
            writer.close()
        await until(lambda: limits.num_open == 0)
        async with http_to(cluster, certificates.context()) as http:
            for _ in range(2):
                assert (await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})).status_code == 200
            assert limits.num_open == 1
        await until(lambda: limits.num_open == 0)
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient() as plain:
                await plain.get(f"http://127.0.0.1:{gateway.port}/healthz")
        await until(lambda: limits.num_open == 0)


async def test_no_handler_sees_a_call_that_crosses_a_draining_gateways_goaway(cluster: SimCluster) -> None:
    """gRPC answers CANCELLED, or closes the connection first. kvferry_client has a case for each."""
    gateway = cluster.gateway
    assert gateway is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.grpc.port)
    with contextlib.closing(writer):
        async with asyncio.timeout(SOON_S):
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0))
            assert (await read_frame(reader))[0] == SETTINGS
            await gateway.drain()
            while (await read_frame(reader))[0] != GOAWAY:
                pass
            fields = {
                b":method": b"POST",
                b":scheme": b"http",
                b":path": b"/kvferry.inference.v1.Inference/Generate",
                b":authority": b"x",
                b"te": b"trailers",
                b"content-type": b"application/grpc",
            }
            # HPACK's literals without indexing.
            head = b"".join(b"\0%c%b%c%b" % (len(name), name, len(value), value) for name, value in fields.items())
            writer.write(frame(HEADERS, END_HEADERS, 1, head))
            answers: list[tuple[int, int, bytes]] = []
            # A client sees UNAVAILABLE where the connection is closed.
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while not answers or answers[-1][:2] != (HEADERS, 1):
                    answers.append(await read_frame(reader))
    cancelled = str(grpc.StatusCode.CANCELLED.value[0]).encode()
    statuses = [payload for kind, stream, payload in answers if (kind, stream) == (HEADERS, 1)]
    assert all(b"\x0bgrpc-status%c%b" % (len(cancelled), cancelled) in payload for payload in statuses)
    assert len(statuses) <= 1
    counts = [line for line in gateway.metrics.render().splitlines() if b'_requests_total{endpoint="grpc_gen' in line]
    assert counts
    assert all(line.endswith(b" 0.0") for line in counts)
