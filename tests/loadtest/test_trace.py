"""Mooncake's traces: what a line may be, what a cache would find, and how they are replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_loadtest.content import token_ids_of
from kvferry_loadtest.errors import ScenarioError, TraceError
from kvferry_loadtest.floor import floor_of
from kvferry_loadtest.plan import Plan, PlannedRequest
from kvferry_loadtest.scenario import load
from kvferry_loadtest.trace import TraceRequest, hit_rates, read_trace
from kvferry_loadtest.workloads import make_plan

GOOD = {"timestamp": 1000, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def plan_of(path: Path, **parameters: object) -> Plan:
    overrides = {f"trace.{key}": str(value) for key, value in {"path": path, **parameters}.items()}
    return make_plan(load("trace", overrides))


def sizes(request: PlannedRequest) -> list[int]:
    return [part.num_tokens for part in request.tokens]


def ids(request: PlannedRequest) -> list[int]:
    return [token for part in request.tokens for token in token_ids_of(part)]


def test_lines_become_requests(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 1500.5, "extra": "is left alone"})
    first, second = read_trace(path)
    assert first == TraceRequest(1000.0, 1100, 20, (0, 1, 2))
    assert second.timestamp == 1500.5
    assert read_trace(path, 1) == [first]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes: line 2 column 1 (char 2)"),
        ("", "not JSON: Expecting value: line 2 column 1 (char 1)"),
        ("[1]", "must be an object with timestamp, input_length, output_length and hash_ids"),
        ({"input_length": 1}, "timestamp: missing"),
        ({**GOOD, "timestamp": -1}, "timestamp: must be a number of at least 0, not -1"),
        ({**GOOD, "timestamp": "0"}, 'timestamp: must be a number of at least 0, not "0"'),
        ({**GOOD, "timestamp": float("nan")}, "timestamp: must be a number of at least 0, not NaN"),
        ({**GOOD, "input_length": 0}, "input_length: must be a whole number of at least 1, not 0"),
        ({**GOOD, "input_length": 11.5}, "input_length: must be a whole number of at least 1, not 11.5"),
        ({**GOOD, "output_length": None}, "output_length: must be a whole number of at least 0, not null"),
        ({**GOOD, "output_length": True}, "output_length: must be a whole number of at least 0, not true"),
        ({**GOOD, "hash_ids": "0"}, "hash_ids: must be an array of whole numbers from 0 to 2^64 - 1"),
        ({**GOOD, "hash_ids": [0, -1, 2]}, "hash_ids: must be an array of whole numbers from 0 to 2^64 - 1"),
        ({**GOOD, "hash_ids": [0, 1]}, "hash_ids: 2 blocks, but input_length 1100 makes 3 of 512 tokens"),
    ],
)
def test_a_broken_line_is_named_with_its_field(tmp_path: Path, line: object, why: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}: line 2: {why}"


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file or directory"):
        plan_of(tmp_path / "none.jsonl")
    with pytest.raises(ScenarioError) as caught:
        make_plan(load("trace"))
    assert str(caught.value) == 'trace.toml: trace.path = "": must be a file; give it with -s trace.path=FILE'
    with pytest.raises(ScenarioError, match="the file is empty"):
        plan_of(write(tmp_path / "empty.jsonl"))


def test_requests_are_due_when_the_trace_says(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, "timestamp": 4000}, {**GOOD, "timestamp": 2000})
    assert [request.arrival_s for request in plan_of(path).requests] == [0.0, 1.0, 3.0]
    assert [request.arrival_s for request in plan_of(path, time_scale=2).requests] == [0.0, 0.5, 1.5]
    assert [request.after for request in plan_of(path).requests] == [(), (), ()]


def test_prompts_share_the_blocks_that_the_trace_says(tmp_path: Path) -> None:
    other = {**GOOD, "input_length": 1536, "hash_ids": [0, 1, 7]}
    first, second = plan_of(write(tmp_path / "t.jsonl", GOOD, other)).requests
    assert (sizes(first), sizes(second)) == ([512, 512, 76], [512, 512, 512])
    assert ids(first)[:1024] == ids(second)[:1024]
    assert ids(first)[1024:] != ids(second)[1024:1100]
    assert (first.max_tokens, len(ids(first))) == (20, 1100)


def test_lengths_scale_by_whole_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, "input_length": 1025, "output_length": 640})
    first, second = plan_of(path, length_scale=0.03125).requests
    assert (sizes(first), first.max_tokens) == ([16, 16, 2], 1)
    assert (sizes(second), second.max_tokens) == ([16, 16, 1], 20)
    assert plan_of(path, output_tokens_cap=100).requests[1].max_tokens == 100


def test_long_prompts_are_cut_at_a_block_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, {**GOOD, "input_length": 500, "hash_ids": [9]})
    plan = plan_of(path, max_prompt_tokens=1099)
    assert [sizes(request) for request in plan.requests] == [[512, 512], [500]]
    assert plan.notes == {"prompts_cut": 1}
    assert plan_of(path, max_prompt_tokens=1100).notes == {"prompts_cut": 0}
    assert len(plan_of(path, max_requests=1).requests) == 1


def test_only_leading_whole_blocks_hit() -> None:
    requests = [
        TraceRequest(0, 1100, 1, (1, 2, 3)),
        TraceRequest(0, 1100, 1, (1, 2, 3)),  # its partial third block is no hit
        TraceRequest(0, 1536, 1, (1, 9, 2)),  # 2 does not lead
        TraceRequest(0, 1024, 1, (2, 1)),  # known blocks in another order are other content
    ]
    rates = hit_rates(requests)
    assert rates.of_blocks == 3 / 9
    assert rates.of_tokens == 3 * 512 / (1100 + 1100 + 1536 + 1024)
    assert hit_rates([]).of_blocks == hit_rates([]).of_tokens == 0.0


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 512)), min_size=1, max_size=12
    )
)
def test_hit_rates_and_floor_agree(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[tuple[list[int], int]]
) -> None:
    requests = [
        {"timestamp": 0, "input_length": 512 * (len(ids) - 1) + last, "output_length": 1, "hash_ids": ids}
        for ids, last in prompts
    ]
    path = write(tmp_path_factory.mktemp("traces") / "t.jsonl", *requests)
    floor = floor_of(plan_of(path), 512)
    assert 1 - floor.recompute_share == pytest.approx(hit_rates(read_trace(path)).of_tokens)
