"""What the engine sends and records, against a server whose delays are known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry_loadtest import content
from kvferry_loadtest.apis import Sampling
from kvferry_loadtest.engine import Engine
from kvferry_loadtest.fake_server import Answering, FakeServer
from kvferry_loadtest.http_client import Endpoint
from kvferry_loadtest.openai_api import OpenAiApi
from kvferry_loadtest.plan import AnswerOf, Message, Plan, PlannedRequest, RequestId, Segment
from kvferry_loadtest.record import Outcome, Record
from support.beside import beside
from support.waiting import PATIENCE_S, until

HELLO = (Message("user", (Segment("hello", 4),)),)


def planned(*requests: dict[str, Any], warmup: Sequence[int] = ()) -> Plan:
    made = []
    for i, fields in enumerate(requests):
        fields = {"session_id": f"s{i}", "max_tokens": 3, **fields}
        if "tokens" not in fields:
            fields.setdefault("messages", HELLO)
        made.append(PlannedRequest(request_id=RequestId(i), **fields))
    plan = Plan(scenario="t", seed=0, requests=tuple(made), warmup=frozenset(RequestId(i) for i in warmup))
    plan.check()
    return plan


@asynccontextmanager
async def serving(**values: Any) -> AsyncIterator[FakeServer]:
    server = await FakeServer(Answering(**{"ttft_ms": 1.0, "itl_ms": 1.0, **values})).start()
    try:
        yield server
    finally:
        await server.stop()


async def run(
    server: FakeServer,
    plan: Plan,
    *,
    loop_kind: Any = "open",
    after_warmup: Any = None,
    sampling: Sampling = Sampling(model="fake"),  # noqa: B008
    **values: Any,
) -> list[Record]:
    client = OpenAiApi(Endpoint(f"127.0.0.1:{server.port}"))
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await Engine(plan, [client], sampling, loop_kind=loop_kind, **values).run(after_warmup)
    finally:
        await client.close()


async def test_a_request_is_recorded_from_due_to_end() -> None:
    async with serving(ttft_ms=30.0, itl_ms=5.0) as server:
        (record,) = await run(server, planned({"arrival_s": 0.02, "max_tokens": 5}))
        assert record.outcome is Outcome.OK
        assert (record.status, record.finish_reason) == (200, "length")
        assert (record.prompt_tokens, record.completion_tokens) == (1, 5)
        assert len(record.token_s) == 5
        assert record.due_s == 0.02
        assert record.sent_s is not None
        assert record.first_token_s is not None
        assert record.end_s is not None
        assert record.due_s <= record.sent_s < record.first_token_s < record.token_s[-1] <= record.end_s
        # Never less than what the server says that it took.
        assert record.first_token_s - record.sent_s >= server.ttft_us[0] / 1e6
        assert record.token_s == sorted(record.token_s)


async def test_a_turn_follows_its_predecessor_and_contains_its_answer() -> None:
    history = (*HELLO, Message("assistant", (AnswerOf(RequestId(0)),)), *HELLO)
    plan = planned(
        {"arrival_s": 0.0, "session_id": "a", "max_tokens": 4},
        {"session_id": "a", "turn": 1, "after": (RequestId(0),), "pause_s": 0.05, "messages": history},
    )
    async with serving(keep_bodies=True) as server:
        first, second = await run(server, plan)
        bodies = [json.loads(body) for body in server.bodies]
    assert first.end_s is not None
    assert second.due_s == pytest.approx(first.end_s + 0.05)
    assert second.predecessor_wait_s == 0.0  # it has no time of its own to be late for
    assert [message["content"] for message in bodies[1]["messages"]] == [
        content.text_of(Segment("hello", 4)),
        " x x x x",
        content.text_of(Segment("hello", 4)),
    ]
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]


async def test_a_turn_with_a_time_of_its_own_says_how_long_its_predecessor_kept_it() -> None:
    plan = planned(
        {"arrival_s": 0.0, "session_id": "a"},
        {"arrival_s": 0.01, "session_id": "a", "turn": 1, "after": (RequestId(0),)},
        {"arrival_s": 0.5, "session_id": "a", "turn": 2, "after": (RequestId(1),)},
    )
    async with serving(ttft_ms=100.0) as server:
        first, second, third = await run(server, plan)
    assert first.end_s is not None
    assert second.predecessor_wait_s == pytest.approx(first.end_s - 0.01)
    assert second.due_s == pytest.approx(first.end_s)
    assert (third.due_s, third.predecessor_wait_s) == (0.5, 0.0)


async def test_what_follows_a_failure_is_skipped_all_the_way() -> None:
    plan = planned(
        {"arrival_s": 0.0},
        {"arrival_s": 0.0},
        {"after": (RequestId(1),)},
        {"after": (RequestId(2),)},
        {"after": (RequestId(0),)},
    )
    async with serving(refuse_every=2) as server:
        records = await run(server, plan)
    outcomes = [record.outcome for record in records]
    assert outcomes[0] is Outcome.OK
    assert outcomes[1:4] == [Outcome.REFUSED, Outcome.SKIPPED, Outcome.SKIPPED]
    assert outcomes[4] is Outcome.OK
    assert (records[1].status, records[1].error) == (429, "429: too much at once")
    assert records[3].error == "a turn before it did not end well"
    assert records[3].sent_s is None


async def test_a_join_waits_for_all_of_its_branches() -> None:
    plan = planned(
        {"arrival_s": 0.0, "max_tokens": 2},
        {"after": (RequestId(0),), "max_tokens": 2},
        {"after": (RequestId(0),), "max_tokens": 60},
        {"after": (RequestId(1), RequestId(2))},
    )
    async with serving() as server:
        records = await run(server, plan)
    ends = [record.end_s or 0.0 for record in records]
    assert records[1].due_s == records[2].due_s
    assert ends[1] < ends[2]
    assert records[3].due_s == pytest.approx(ends[2])


async def test_a_closed_loop_keeps_its_number_of_users_busy() -> None:
    plan = planned(*({"session_id": f"s{i // 2}", "after": (RequestId(i - 1),) if i % 2 else ()} for i in range(24)))
    async with serving(ttft_ms=5.0) as server:
        records = await run(server, plan, loop_kind="closed", num_users=3)
    assert all(record.outcome is Outcome.OK for record in records)
    changes = sorted(
        [(record.sent_s or 0.0, 1) for record in records] + [(record.end_s or 0.0, -1) for record in records],
        key=lambda change: (change[0], change[1]),
    )
    running, most = 0, 0
    for _, change in changes:
        running += change
        most = max(most, running)
    assert most == 3
    # A session begins when one before it has ended.
    ends = sorted(record.end_s or 0.0 for record in records if record.turn == 0 and int(record.request_id) % 2)
    begins = sorted(record.due_s for record in records if not int(record.request_id) % 2)
    assert begins[:3] == [0.0, 0.0, 0.0]
    for begin_s, end_s in zip(begins[3:], ends, strict=False):
        assert begin_s == pytest.approx(end_s)


async def test_warmup_is_over_before_anything_is_measured() -> None:
    seen: list[int] = []
    plan = planned({"arrival_s": 50.0}, {"arrival_s": 0.0}, {"arrival_s": 50.1}, warmup=(1,))
    async with serving() as server:

        async def after_warmup() -> None:
            seen.append(server.num_requests)

        records = await run(server, plan, after_warmup=after_warmup)
    assert seen == [1]
    assert [record.warmup for record in records] == [False, True, False]
    # Not fifty seconds later: a plan does not know how long its warm-up takes.
    assert [record.due_s for record in records] == pytest.approx([0.0, 0.0, 0.1])


async def test_token_prompts_go_to_completions() -> None:
    segments = (Segment("block-1", 8), Segment("block-2", 3))
    async with serving(keep_bodies=True) as server:
        (record,) = await run(server, planned({"arrival_s": 0.0, "tokens": segments}))
        bodies = [json.loads(body) for body in server.bodies]
    assert record.outcome is Outcome.OK
    assert bodies[0]["prompt"] == content.token_ids_of(segments[0]) + content.token_ids_of(segments[1])
    assert "messages" not in bodies[0]


async def test_several_servers_are_asked_in_turn() -> None:
    async with serving() as one, serving() as other:
        clients = [OpenAiApi(Endpoint(f"127.0.0.1:{server.port}")) for server in (one, other)]
        plan = planned(*({"arrival_s": 0.0} for _ in range(6)))
        records = await Engine(plan, clients, Sampling(model="fake"), loop_kind="open").run()
        assert all(record.outcome is Outcome.OK for record in records)
        assert (one.num_requests, other.num_requests) == (3, 3)
        for client in clients:
            await client.close()


async def test_each_tenant_has_its_key() -> None:
    plan = planned({"arrival_s": 0.0, "tenant": "a"}, {"arrival_s": 0.0, "tenant": "b"}, {"arrival_s": 0.0})
    async with serving(api_key="of-a") as server:
        records = await run(server, plan, tenant_to_key={"a": "of-a", "b": "of-b"}, default_key="of-a")
    assert [record.outcome for record in records] == [Outcome.OK, Outcome.FAILED, Outcome.OK]
    assert records[1].error == "401: this key is not known"


async def test_an_answer_that_does_not_end_in_time_is_given_up() -> None:
    sampling = Sampling(model="fake", timeout_s=0.1)
    async with serving(itl_ms=10_000.0) as server:
        (record,) = await run(server, planned({"arrival_s": 0.0}), sampling=sampling)
        assert record.outcome is Outcome.TIMED_OUT
        assert record.error == "not over within 0.1 s"
        assert len(record.token_s) == 1  # what came before is kept
        assert record.e2e_s is None
        await until(lambda: not server.connections, what="the server is told")


async def test_nobody_listening_is_a_failure_of_every_request_and_no_hang() -> None:
    async with serving() as server:
        pass
    records = await run(server, planned({"arrival_s": 0.0}, {"arrival_s": 0.0}))
    assert {record.outcome for record in records} == {Outcome.FAILED}
    assert all("connection refused" in record.error.lower() for record in records)


async def test_a_cancelled_run_leaves_nothing_open() -> None:
    async with serving(ttft_ms=60_000.0) as server:
        client = OpenAiApi(Endpoint(f"127.0.0.1:{server.port}"))
        engine = Engine(planned({"arrival_s": 0.0}), [client], Sampling(model="fake"), loop_kind="open")
        async with beside(engine.run()) as (running,):
            await until(lambda: server.num_requests == 1)
        assert running.cancelled()
        assert engine.num_in_flight == 0
        assert engine.records[0].outcome is Outcome.SKIPPED
        await client.close()
