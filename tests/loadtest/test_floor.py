"""The floor: known figures, a reference that compares token by token, and a published trace."""

from __future__ import annotations

import os
import time
from itertools import takewhile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_loadtest.floor import floor_of, in_planned_order
from kvferry_loadtest.plan import AnswerOf, Message, Plan, PlannedRequest, RequestId, Segment
from kvferry_loadtest.scenario import ChatTemplate, load
from kvferry_loadtest.trace import hit_rates, read_trace
from kvferry_loadtest.workloads import make_plan

TRACE = "mooncake_conversation_trace.jsonl"


def trace_path() -> Path:
    """Where KVFERRY_TRACES says, or in the folder `shared` beside this repository."""
    beside = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
    path = Path(os.environ.get("KVFERRY_TRACES") or beside) / TRACE
    if not path.is_file():
        pytest.skip(f"no {path}")
    return path


def rag_plan(cold_fraction: float, *, shared: bool = True, num_sessions: int = 20) -> Plan:
    """1,500 + 8,000 + 200 tokens and 200 more with each of six turns, of which 32 are the answer before; everything
    that sessions share was sent once as warm-up.
    """
    requests: list[PlannedRequest] = []
    warmup = set()

    def add(session: str, after: tuple[RequestId, ...], messages: tuple[Message, ...]) -> RequestId:
        request_id = RequestId(len(requests))
        requests.append(
            PlannedRequest(request_id=request_id, session_id=session, after=after, messages=messages, max_tokens=32)
        )
        return request_id

    def begin(session: str, document: str) -> tuple[Message, ...]:
        system = Segment("system" if shared else f"system-{session}", 1500)
        return (Message("system", (system,)), Message("user", (Segment(document, 8000),)))

    warmup.add(add("prime", (), begin("prime", "warm")))
    for index in range(num_sessions):
        session = f"session-{index}"
        cold = index < cold_fraction * num_sessions
        history = begin(session, session if cold else "warm")
        after: tuple[RequestId, ...] = ()
        for turn in range(6):
            history += (Message("user", (Segment(f"{session}/{turn}", 168 if turn else 200),)),)
            after = (add(session, after, history),)
            history += (Message("assistant", (AnswerOf(after[0]),)),)
    plan = Plan(scenario="", seed=0, requests=tuple(requests), warmup=frozenset(warmup))
    plan.check()
    return plan


@pytest.mark.parametrize(
    ("page_tokens", "cold_fraction", "percent"),
    [
        (1, 1.0, 15.03),
        (16, 1.0, 15.11),
        (64, 1.0, 15.40),
        (256, 1.0, 16.34),
        (512, 1.0, 18.01),
        (1, 0.5, 8.50),
        (16, 0.5, 8.58),
        (256, 0.5, 9.65),
        (16, 0.25, 5.31),
        (256, 0.25, 6.30),
        (1, 0.0, 1.96),
        (16, 0.0, 2.04),
        (64, 0.0, 2.33),
        (256, 0.0, 2.95),
        (512, 0.0, 4.63),
    ],
)
def test_known_figures_of_the_published_workload(page_tokens: int, cold_fraction: float, percent: float) -> None:
    floor = floor_of(rag_plan(cold_fraction), page_tokens)
    assert 100 * floor.recompute_share_without_answers == pytest.approx(percent, abs=0.005)
    assert floor.prompt_tokens == 20 * 61_200


@pytest.mark.parametrize(("page_tokens", "percent"), [(1, 17.48), (16, 17.54), (256, 18.43), (512, 19.69)])
def test_known_figures_without_any_sharing(page_tokens: int, percent: float) -> None:
    alone = floor_of(rag_plan(1.0, shared=False), page_tokens)
    assert 100 * alone.recompute_share_without_answers == pytest.approx(percent, abs=0.005)
    assert alone.recompute_share_within_sessions == alone.recompute_share
    # Sessions that share everything have this floor when nothing is found across sessions.
    assert floor_of(rag_plan(0.0), page_tokens).recompute_share_within_sessions == alone.recompute_share


def test_answers_that_are_kept_need_not_be_computed() -> None:
    floor = floor_of(rag_plan(0.0), 1)
    assert floor.recompute_tokens == 20 * (200 + 5 * 168)
    assert floor.recompute_share == floor.recompute_tokens / floor.prompt_tokens


def test_warm_up_fills_the_cache_and_is_counted_only_on_request() -> None:
    plan = rag_plan(0.0, num_sessions=1)
    counted = floor_of(msgspec.structs.replace(plan, warmup=frozenset()), 1)
    assert counted.prompt_tokens == floor_of(plan, 1).prompt_tokens + 9500
    assert counted.recompute_tokens == floor_of(plan, 1).recompute_tokens + 9500


def test_the_shipped_workload_lies_between_all_cold_and_all_warm() -> None:
    shares = [
        floor_of(make_plan(load("rag-chat", {"rag.cold_fraction": str(u), "num_sessions": "100"})), 16).recompute_share
        for u in (0.0, 0.3, 1.0)
    ]
    cold_tokens, warm_tokens = 8192 + 6 * 200, 6 * 200
    prompt_tokens = sum(1500 + 8192 + 200 * turn + 32 * (turn - 1) for turn in range(1, 7))
    assert shares[0] == pytest.approx(warm_tokens / prompt_tokens, abs=0.001)
    assert shares[2] == pytest.approx(cold_tokens / prompt_tokens, abs=0.001)
    assert shares[1] == pytest.approx(shares[0] + 0.3 * (shares[2] - shares[0]), abs=0.015)


def one(request_id: int, *parts: Segment, **fields: object) -> PlannedRequest:
    return PlannedRequest(
        request_id=RequestId(request_id),
        session_id=str(fields.pop("session_id", request_id)),
        messages=(Message("user", parts),),
        max_tokens=1,
        **fields,  # type: ignore[arg-type]
    )


def test_requests_are_replayed_in_the_order_of_their_times() -> None:
    late = one(0, Segment("a", 64), Segment("b", 64), arrival_s=5.0)
    early = one(1, Segment("a", 64), arrival_s=1.0)
    plan = Plan(scenario="", seed=0, requests=(late, early))
    assert [request.request_id for request in in_planned_order(plan)] == [1, 0]
    assert floor_of(plan, 16).recompute_tokens == 128
    following = one(2, Segment("a", 64), after=(RequestId(1),), pause_s=4.5)
    plan = Plan(scenario="", seed=0, requests=(late, early, following))
    assert [request.request_id for request in in_planned_order(plan)] == [1, 0, 2]


def test_a_closed_loop_is_replayed_in_the_order_of_the_plan() -> None:
    plan = rag_plan(0.0, num_sessions=2)
    assert in_planned_order(plan) == list(plan.requests)


def test_what_begins_with_other_tools_or_another_role_shares_nothing() -> None:
    parts = (Segment("a", 64),)
    user, tools = one(0, *parts), one(1, *parts, tools=True)
    system = msgspec.structs.replace(one(2, *parts), messages=(Message("system", parts),))
    again = one(3, *parts, tools=True)
    floor = floor_of(Plan(scenario="", seed=0, requests=(user, tools, system, again)), 16)
    assert (floor.prompt_tokens, floor.recompute_tokens) == (256, 192)


def test_what_a_chat_template_adds_counts_where_it_is_known() -> None:
    asked = (Message("system", (Segment("s", 16),)), Message("user", (Segment("q", 10),)))
    first = PlannedRequest(request_id=RequestId(0), session_id="a", messages=asked, max_tokens=4)
    more = (*asked, Message("assistant", (AnswerOf(RequestId(0)),)), Message("user", (Segment("r", 10),)))
    second = PlannedRequest(request_id=RequestId(1), session_id="a", after=(RequestId(0),), messages=more, max_tokens=4)
    plan = Plan(scenario="", seed=0, requests=(first, second))
    template = ChatTemplate(system=3, user=3, assistant=4, end=2)
    # (3 + 16 + 2) + (3 + 10 + 2) + 4 = 40, and the answer's 4; then 2 + (3 + 10 + 2) + 4 more.
    floor = floor_of(plan, 1, template)
    assert floor.prompt_tokens == 40 + 65
    assert floor.recompute_tokens == 40 + 21
    assert floor.recompute_share_without_answers * floor.prompt_tokens == pytest.approx(40 + 25)
    assert floor_of(plan, 16, template).recompute_tokens == 40 + 65 - 32
    assert floor_of(plan, 1).recompute_tokens == 26 + 10


parts = st.lists(st.builds(Segment, st.sampled_from("abc"), st.sampled_from([1, 3, 8])), min_size=1, max_size=4)


@settings(max_examples=settings.default.max_examples // 2)
@given(prompts=st.lists(parts, min_size=1, max_size=10), page_tokens=st.sampled_from([1, 2, 4, 16]))
def test_floor_agrees_with_comparing_token_by_token(prompts: list[list[Segment]], page_tokens: int) -> None:
    requests = tuple(
        PlannedRequest(request_id=RequestId(index), session_id=str(index % 2), tokens=tuple(each), max_tokens=1)
        for index, each in enumerate(prompts)
    )
    floor = floor_of(Plan(scenario="", seed=0, requests=requests), page_tokens)
    written_out = [[(part.key, place) for part in each for place in range(part.num_tokens)] for each in prompts]
    assert floor.recompute_tokens == computed(written_out, [0] * len(prompts), page_tokens)
    assert floor.prompt_tokens == sum(map(len, written_out))
    sessions = [index % 2 for index in range(len(prompts))]
    within = computed(written_out, sessions, page_tokens) / floor.prompt_tokens
    assert floor.recompute_share_within_sessions == within


def computed(prompts: list[list[tuple[str, int]]], caches: list[int], page_tokens: int) -> int:
    total = 0
    for index, prompt in enumerate(prompts):
        earlier = [other for other, cache in zip(prompts[:index], caches, strict=False) if cache == caches[index]]
        shared = [
            sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, old, strict=False)))
            for old in earlier
        ]
        total += len(prompt) - max(shared, default=0) // page_tokens * page_tokens
    return total


def test_a_published_trace_has_the_hit_rate_that_its_hashes_say() -> None:
    path = trace_path()
    rates = hit_rates(read_trace(path))
    plan = make_plan(load("trace", {"trace.path": str(path)}))
    start = time.process_time()
    floor = floor_of(plan, 512)
    assert time.process_time() - start < 10
    assert len(plan.requests) == 12_031
    assert 1 - floor.recompute_share == pytest.approx(rates.of_tokens, abs=0.001)
    assert rates.of_tokens == pytest.approx(0.373, abs=0.001)
    # Smaller blocks share as much, but for the rounding of partial ones.
    beginning = {"trace.path": str(path), "trace.max_requests": "1000", "trace.length_scale": "0.03125"}
    small = floor_of(make_plan(load("trace", beginning)), 16)
    assert 1 - small.recompute_share == pytest.approx(hit_rates(read_trace(path, 1000)).of_tokens, abs=0.001)
