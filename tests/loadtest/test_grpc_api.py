from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry_loadtest.apis import Sampling
from kvferry_loadtest.engine import Engine
from kvferry_loadtest.errors import TargetError
from kvferry_loadtest.fake_server import Answering, FakeGrpc, FakeServer
from kvferry_loadtest.grpc_api import GrpcApi
from kvferry_loadtest.plan import AnswerOf, Message, Plan, PlannedRequest, RequestId, Segment
from kvferry_loadtest.record import Outcome, Record
from kvferry_loadtest.run import apis_of, look_at
from kvferry_loadtest.wire import inference_pb2 as pb
from support.beside import beside
from support.waiting import PATIENCE_S, until

SAMPLING = Sampling(model="fake")


@asynccontextmanager
async def serving(**answering: Any) -> AsyncIterator[tuple[FakeServer, str]]:
    server = FakeServer(Answering(**answering))
    over_grpc = FakeGrpc(server)
    port = await over_grpc.start()
    try:
        yield server, f"grpc://127.0.0.1:{port}"
    finally:
        await over_grpc.stop()


def planned(*requests: dict[str, Any]) -> Plan:
    hello = (Message("user", (Segment("hello", 4),)),)
    return Plan(
        scenario="test",
        seed=0,
        requests=tuple(
            PlannedRequest(
                **{
                    "request_id": RequestId(i),
                    "session_id": f"s{i}",
                    "max_tokens": 2,
                    **({} if "tokens" in request else {"messages": hello}),
                    **request,
                }
            )
            for i, request in enumerate(requests)
        ),
    )


async def run(url: str, plan: Plan, sampling: Sampling = SAMPLING, **values: Any) -> list[Record]:
    api = GrpcApi(url)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await Engine(plan, [api], sampling, loop_kind="open", **values).run()
    finally:
        await api.close()


async def test_a_request_is_recorded_from_due_to_end() -> None:
    async with serving(ttft_ms=30.0, itl_ms=5.0) as (server, url):
        (record,) = await run(url, planned({"arrival_s": 0.02, "max_tokens": 5}))
    assert record.outcome is Outcome.OK
    assert (record.status, record.finish_reason) == (200, "length")
    assert (record.prompt_tokens, record.completion_tokens) == (1, 5)
    assert len(record.token_s) == 5
    assert record.ttft_s is not None
    assert record.ttft_s >= server.ttft_us[0] / 1e6
    assert record.end_s is not None
    assert record.end_s >= record.token_s[-1]


async def test_a_conversation_goes_on_with_the_answer_before_it() -> None:
    first = RequestId(0)
    following = (
        Message("user", (Segment("hello", 4),)),
        Message("assistant", (AnswerOf(first),)),
        Message("user", (Segment("more", 4),)),
    )
    plan = planned(
        {"arrival_s": 0.0, "max_tokens": 3},
        {"messages": following, "after": (first,), "session_id": "s0", "tools": True},
        {"tokens": (Segment("ids", 7),), "arrival_s": 0.0},
    )
    async with serving(ttft_ms=1.0, itl_ms=1.0, keep_bodies=True) as (server, url):
        records = await run(url, plan)
    assert {record.outcome for record in records} == {Outcome.OK}
    sent = [pb.GenerateRequest.FromString(body) for body in server.bodies]
    (second,) = (request for request in sent if len(request.conversation.messages) == 3)
    assert [message.role for message in second.conversation.messages] == ["user", "assistant", "user"]
    assert second.conversation.messages[1].content == " x x x"
    assert [tool.name for tool in second.conversation.tools] == ["search_documents", "read_file", "run_command"]
    assert second.conversation.tool_choice == "none"
    (of_ids,) = (request for request in sent if request.WhichOneof("prompt") == "token_ids")
    assert len(of_ids.token_ids.ids) == 7
    assert all(request.sampling.ignore_eos and request.sampling.temperature == 0 for request in sent)


async def test_refusals_and_time_outs_are_told_apart_from_failures() -> None:
    async with serving(ttft_ms=1.0, itl_ms=1.0, refuse_every=2) as (_, url):
        records = await run(url, planned(*({"arrival_s": i * 0.05} for i in range(4))))
        assert [record.outcome for record in records] == [Outcome.OK, Outcome.REFUSED] * 2
        assert records[1].status == 429
        assert records[1].error == "429: RESOURCE_EXHAUSTED: too much at once"
    async with serving(ttft_ms=60_000.0) as (_, url):
        (record,) = await run(url, planned({"arrival_s": 0.0}), Sampling(model="fake", timeout_s=0.1))
        assert record.outcome is Outcome.TIMED_OUT
    # gRPC does not say whether a server or the way to it is unavailable.
    (record,) = await run(url, planned({"arrival_s": 0.0}))
    assert (record.outcome, record.status) == (Outcome.REFUSED, 503)


async def test_keys_are_sent_and_refused_ones_named() -> None:
    async with serving(ttft_ms=1.0, itl_ms=1.0, api_key="right") as (_, url):
        (record,) = await run(url, planned({"arrival_s": 0.0}), default_key="right")
        assert record.outcome is Outcome.OK
        (record,) = await run(url, planned({"arrival_s": 0.0}), default_key="wrong")
        assert (record.outcome, record.status) == (Outcome.FAILED, 401)
        (api,) = apis_of([url])
        try:
            assert await look_at(api, "", "right", "THE_KEY") == "fake"
            with pytest.raises(TargetError, match=r"refuses the key in \$THE_KEY: UNAUTHENTICATED: this key is not"):
                await look_at(api, "", "wrong", "THE_KEY")
            with pytest.raises(TargetError, match=r"refuses requests without a key \(--api-key-env\)"):
                await look_at(api, "", "", "")
            with pytest.raises(TargetError, match="does not serve 'other', but fake"):
                await look_at(api, "other", "right", "")
        finally:
            await api.close()


async def test_nobody_listening_is_one_line() -> None:
    async with serving() as (_, url):
        pass
    (api,) = apis_of([url])
    try:
        with pytest.raises(TargetError, match=f"{url}: UNAVAILABLE: "):
            await look_at(api, "", "", "")
    finally:
        await api.close()


@pytest.mark.parametrize("url", ["grpc://127.0.0.1", "grpc://", "grpc://127.0.0.1:x", "grpc://127.0.0.1:1/path"])
async def test_what_is_no_url_is_said(url: str) -> None:
    with pytest.raises(TargetError, match="not a URL like grpc://HOST:PORT"):
        apis_of([url])


async def test_servers_of_one_run_speak_one_protocol() -> None:
    with pytest.raises(TargetError, match="one protocol"):
        apis_of(["http://127.0.0.1:1", "grpc://127.0.0.1:2"])


async def test_a_cancelled_run_cancels_its_calls() -> None:
    async with serving(ttft_ms=60_000.0) as (server, url):
        api = GrpcApi(url)
        engine = Engine(planned({"arrival_s": 0.0}), [api], SAMPLING, loop_kind="open")
        async with beside(engine.run()) as (running,):
            await until(lambda: server.num_requests == 1)
        assert running.cancelled()
        assert engine.num_in_flight == 0
        assert engine.records[0].outcome is Outcome.SKIPPED
        await api.close()
