"""Plans of every kind of workload: when requests are due, what they share, what chance there is in them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import fmean

import msgspec
import pytest

from kvferry_loadtest.plan import AnswerOf, Message, Plan, PlannedRequest, Segment
from kvferry_loadtest.scenario import load, names
from kvferry_loadtest.workloads import make_plan

TENANTS = '[{ name = "large", weight = 3 }, { name = "small" }]'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 9 * n, "input_length": 600, "output_length": 5, "hash_ids": [0, n]} for n in range(20))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def plan_of(name: str, **overrides: object) -> Plan:
    return make_plan(load(name, {key.replace("__", "."): str(value) for key, value in overrides.items()}))


def sessions_of(plan: Plan) -> dict[str, list[PlannedRequest]]:
    sessions: dict[str, list[PlannedRequest]] = defaultdict(list)
    for request in plan.requests:
        sessions[request.session_id].append(request)
    return sessions


def measured(plan: Plan) -> list[PlannedRequest]:
    return [request for request in plan.requests if request.request_id not in plan.warmup]


def items(request: PlannedRequest) -> list[tuple[str, Segment | AnswerOf]]:
    return [(message.role, part) for message in request.messages for part in message.parts]


def shared(one: PlannedRequest, other: PlannedRequest) -> list[tuple[str, Segment | AnswerOf]]:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(items(one), items(other), strict=False))
    return [pair[0] for pair in pairs]


def keys(request: PlannedRequest) -> set[str]:
    parts = [part for _, part in items(request)] + list(request.tokens)
    return {part.key for part in parts if isinstance(part, Segment)}


def prompt_tokens(plan: Plan, request: PlannedRequest) -> int:
    return sum(
        part.num_tokens if isinstance(part, Segment) else plan.requests[part.request_id].max_tokens
        for _, part in items(request)
    )


@pytest.mark.parametrize("name", names())
def test_the_same_seed_makes_the_same_plan_and_another_shares_nothing_with_it(name: str, trace: Path) -> None:
    path = {"trace__path": trace} if name == "trace" else {}
    plan = plan_of(name, **path)
    assert msgspec.json.encode(plan.requests) == msgspec.json.encode(plan_of(name, **path).requests)
    other = plan_of(name, seed=2, **path)
    assert not {key for request in plan.requests for key in keys(request)} & {
        key for request in other.requests for key in keys(request)
    }
    assert (plan.scenario, plan.seed, other.seed) == (name, 1, 2)


@pytest.mark.parametrize("name", names())
def test_only_what_follows_nothing_has_a_time(name: str, trace: Path) -> None:
    plan = plan_of(name, **({"trace__path": trace} if name == "trace" else {}))
    is_open = load(name).loop == "open"
    for request in plan.requests:
        assert (request.arrival_s is not None) == (is_open and not request.after)
    for session in sessions_of(plan).values():
        assert [request.turn for request in session] == list(range(len(session)))
        assert len({request.tenant for request in session}) == 1
        assert len({request.request_id in plan.warmup for request in session}) == 1


@pytest.mark.parametrize("name", ["agent", "chat", "rag-chat", "batch-summarise", "long-prompt"])
def test_all_may_run_in_a_closed_loop(name: str) -> None:
    plan = plan_of(name, loop="closed", concurrency=4, arrivals="", num_sessions=5)
    assert all(request.arrival_s is None for request in plan.requests)


@pytest.mark.parametrize("name", ["agent", "chat", "sibling-burst", "long-prompt"])
def test_more_sessions_and_another_rate_change_no_session(name: str) -> None:
    few, many = plan_of(name, num_sessions=3), plan_of(name, num_sessions=30, arrivals__rate_per_s=50)
    assert [request.messages for request in few.requests] == [
        request.messages for request in many.requests[: len(few.requests)]
    ]


def test_warm_up_sessions_come_first_and_beside_the_measured_ones() -> None:
    plan = plan_of("chat", num_sessions=30, warmup_sessions=7)
    sessions = sessions_of(plan)
    warm = {request.session_id for request in plan.requests if request.request_id in plan.warmup}
    assert (len(sessions), len(warm)) == (37, 7)
    starts = {name: session[0].arrival_s or 0.0 for name, session in sessions.items()}
    assert max(starts[name] for name in warm) < min(start for name, start in starts.items() if name not in warm)


def test_tenants_have_their_share_of_sessions_and_nothing_in_common() -> None:
    plan = plan_of("chat", tenants=TENANTS, num_sessions=2000, chat__turns="{min = 1, max = 1}")
    counts = Counter(request.tenant for request in plan.requests)
    assert counts["large"] / counts["small"] == pytest.approx(3, rel=0.15)
    used = {name: {key for r in plan.requests if r.tenant == name for key in keys(r)} for name in counts}
    assert not used["large"] & used["small"]


def test_scale_shrinks_every_prompt_and_answer() -> None:
    full, small = plan_of("rag-chat", num_sessions=5), plan_of("rag-chat", num_sessions=5, scale=0.05)
    for one, other in zip(full.requests, small.requests, strict=True):
        assert prompt_tokens(small, other) == pytest.approx(prompt_tokens(full, one) / 20, abs=8)
        assert other.max_tokens == max(1, round(one.max_tokens / 20))
    assert max(prompt_tokens(small, request) for request in small.requests) < 1000


def test_a_chat_repeats_itself_with_the_servers_answers() -> None:
    plan = plan_of("chat")
    for session in sessions_of(plan).values():
        for earlier, later in pairwise(session):
            assert later.after == (earlier.request_id,)
            assert later.messages[:-1] == (*earlier.messages, Message("assistant", (AnswerOf(earlier.request_id),)))
            assert later.messages[-1].role == "user"
    turns = [len(session) for session in sessions_of(plan).values()]
    assert (min(turns), max(turns)) == (2, 8)


def test_think_time_has_its_mean() -> None:
    pauses = [request.pause_s for request in plan_of("chat", num_sessions=500).requests if request.after]
    assert fmean(pauses) == pytest.approx(15.0, rel=0.08)
    assert not any(request.pause_s for request in plan_of("chat", chat__think_time_s=0).requests)


def test_sessions_arrive_at_their_rate() -> None:
    plan = plan_of("chat", num_sessions=4000, warmup_sessions=0, chat__turns="{ min = 1, max = 1 }")
    starts = [request.arrival_s for request in plan.requests if request.arrival_s is not None]
    assert len(starts) / max(starts) == pytest.approx(2.0, rel=0.05)


def cold_and_warm(plan: Plan) -> tuple[int, Counter[str]]:
    """Sessions with a document of their own, and how many use each of the others'."""
    documents = [session[0].messages[1].parts[0] for session in sessions_of(plan).values() if session[0].max_tokens > 1]
    names = [part.key for part in documents if isinstance(part, Segment)]
    assert len(names) == len(documents)
    cold = [name for name in names if "session-" in name]
    assert len(set(cold)) == len(cold)
    return len(cold), Counter(name for name in names if "session-" not in name)


@pytest.mark.parametrize("cold_fraction", [0.0, 0.3, 1.0])
def test_rag_sessions_are_cold_as_often_as_asked(cold_fraction: float) -> None:
    plan = plan_of("rag-chat", rag__cold_fraction=cold_fraction, num_sessions=2000, warmup_sessions=0, rag__turns=1)
    cold, warm = cold_and_warm(plan)
    assert cold + warm.total() == 2000
    assert cold / 2000 == pytest.approx(cold_fraction, abs=0.03)


def test_rag_documents_are_as_popular_as_zipf_says() -> None:
    plan = plan_of(
        "rag-chat", rag__cold_fraction=0, rag__zipf_s=1, rag__num_documents=50, num_sessions=4000, rag__turns=1
    )
    _, warm = cold_and_warm(plan)
    sum_of_weights = sum(1 / rank for rank in range(1, 51))
    for rank in (1, 2, 4, 8):
        assert warm[f"s1//document-{rank - 1}"] / warm.total() == pytest.approx(1 / rank / sum_of_weights, rel=0.2)


def test_rag_prompts_have_the_published_lengths() -> None:
    plan = plan_of("rag-chat", num_sessions=3)
    session = sessions_of(plan)["session-0"]
    lengths = [prompt_tokens(plan, request) for request in session]
    assert lengths == [1500 + 8192 + 200 + turn * (200 + 32) for turn in range(6)]
    assert [request.max_tokens for request in session] == [32] * 6


def test_rag_documents_are_sent_once_before_any_session() -> None:
    plan = plan_of("rag-chat", rag__num_documents=20, num_sessions=40, tenants=TENANTS)
    primes = [request for request in plan.requests if request.session_id.startswith("prime")]
    assert {request.request_id for request in primes} <= plan.warmup
    assert len(primes) == 2 * 20
    assert [request.arrival_s for request in primes] == [index / 4 for index in range(40)]
    sessions = [session[0] for name, session in sessions_of(plan).items() if not name.startswith("prime")]
    assert min(request.arrival_s or 0.0 for request in sessions) > 10.0
    for request in sessions:
        found = [prime for prime in primes if items(prime) == items(request)[:2]]
        assert len(found) == (0 if "session-" in str(items(request)[1]) else 1)
    for without in ({"rag__prime_documents": "false"}, {"rag__cold_fraction": 1}):
        unprimed = plan_of("rag-chat", num_sessions=40, **without)
        assert not any(request.session_id.startswith("prime") for request in unprimed.requests)


def test_agents_share_one_prompt_and_offer_tools() -> None:
    plan = plan_of("agent")
    assert all(request.tools for request in plan.requests)
    assert {items(request)[0] for request in plan.requests} == {("system", Segment("s1//system", 6000))}


def test_agents_grow_branch_and_join() -> None:
    plan = plan_of("agent", agent__branch_probability=0.3, agent__fan_out=3, agent__branch_steps=2)
    followers: dict[int, list[PlannedRequest]] = defaultdict(list)
    for request in plan.requests:
        for earlier in request.after:
            followers[earlier].append(request)
            assert prompt_tokens(plan, request) > prompt_tokens(plan, plan.requests[earlier]) or len(request.after) > 1
    branches = {point: children for point, children in followers.items() if len(children) > 1}
    joins = [request for request in plan.requests if len(request.after) > 1]
    assert len(branches) == len(joins) > 50
    for point, children in branches.items():
        parent = plan.requests[point]
        assert len(children) == 3
        assert all(child.after == (parent.request_id,) for child in children)
        start = [*items(parent), ("assistant", AnswerOf(parent.request_id))]
        assert shared(children[0], children[1]) == start
        lasts = [followers[child.request_id][0] for child in children]
        (join,) = {follower.request_id: follower for last in lasts for follower in followers[last.request_id]}.values()
        assert join.after == tuple(last.request_id for last in lasts)
        assert shared(join, parent) == items(parent)
        reports = [part for part in join.messages[-1].parts if isinstance(part, AnswerOf)]
        assert reports == [AnswerOf(last.request_id) for last in lasts]


def test_agents_branch_as_often_as_asked() -> None:
    plan = plan_of("agent", agent__steps="{ min = 11, max = 11 }", num_sessions=100, warmup_sessions=0)
    joins = sum(len(request.after) > 1 for request in plan.requests)
    assert joins / (100 * 10) == pytest.approx(0.1, abs=0.03)
    assert len(plan.requests) == 100 * 11 + joins * 4 * 3
    straight = plan_of("agent", agent__branch_probability=0)
    assert all(len(request.after) <= 1 for request in straight.requests)


def test_documents_share_the_instructions_and_nothing_else() -> None:
    plan = plan_of("long-prompt")
    assert all(
        shared(one, other) == items(one)[:1] for one, other in zip(plan.requests, plan.requests[1:], strict=False)
    )
    assert {len(session) for session in sessions_of(plan).values()} == {1}
    lengths = [prompt_tokens(plan, request) for request in plan.requests]
    assert 16_200 <= min(lengths) < max(lengths) <= 60_200


def test_siblings_come_at_one_instant_and_differ_in_the_tail() -> None:
    plan = plan_of("sibling-burst", num_sessions=10)
    bursts = list(sessions_of(plan).values())
    assert [burst[0].arrival_s for burst in bursts] == [5.0 * index for index in range(12)]
    for burst in bursts:
        assert len(burst) == 16
        assert len({request.arrival_s for request in burst}) == 1
        assert len({request.messages for request in burst}) == 16
        assert all(shared(burst[0], other) == items(other)[:2] for other in burst[1:])
    assert shared(bursts[0][0], bursts[1][0]) == items(bursts[0][0])[:1]


def test_the_noisy_neighbour_begins_late_and_ends_with_the_steady_one() -> None:
    plan = plan_of("noisy-neighbour")
    steady = [request for request in plan.requests if request.tenant == "premium"]
    noisy = [request for request in plan.requests if request.tenant == "noisy"]
    assert len(steady) + len(noisy) == len(plan.requests)
    last_s = max(request.arrival_s or 0.0 for request in steady)
    times_s = [request.arrival_s or 0.0 for request in noisy]
    assert 60 <= min(times_s) <= max(times_s) <= last_s
    assert len(noisy) == pytest.approx(last_s - 60, rel=0.4)
    assert len({request.session_id for request in noisy}) == len(noisy)
    assert not plan.warmup & {request.request_id for request in noisy}
    assert len({request.session_id for request in measured(plan) if request.tenant == "premium"}) == 180
    alone = plan_of("noisy-neighbour", neighbours__noisy_start_s=10_000)
    assert {request.tenant for request in alone.requests} == {"premium"}
    assert alone.requests == tuple(steady)


def test_a_trace_has_tenants_and_warm_up_too(trace: Path) -> None:
    plan = plan_of("trace", trace__path=trace, tenants=TENANTS, warmup_sessions=3)
    assert plan.warmup == {0, 1, 2}
    assert {request.tenant for request in plan.requests} == {"large", "small"}
    assert all(request.tokens and not request.messages for request in plan.requests)
    assert {request.tokens[0] for request in plan.requests} == {Segment("s1/block-0", 512)}
