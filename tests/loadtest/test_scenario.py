"""Scenario files: what they may say, and the line that says what is wrong with one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

import pytest

from kvferry_loadtest.errors import ScenarioError
from kvferry_loadtest.result import Objective
from kvferry_loadtest.scenario import Span, load, names

CHAT = """
description = "A chat"
kind = "chat"
loop = "open"
num_sessions = 3
arrivals = { process = "fixed", rate_per_s = 1 }
[chat]
system_tokens = 10
user_tokens = { min = 1, max = 2 }
answer_tokens = { min = 1, max = 2 }
turns = { min = 1, max = 2 }
think_time_s = 0
"""


def fault(name: str, overrides: Mapping[str, str] = MappingProxyType({})) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(name, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_all_shipped_scenarios_load() -> None:
    assert names() == [
        "agent",
        "batch-summarise",
        "chat",
        "long-prompt",
        "noisy-neighbour",
        "rag-chat",
        "sibling-burst",
        "smoke",
        "trace",
    ]
    for name in names():
        scenario = load(name)
        assert (scenario.name, scenario.file) == (name, f"{name}.toml")
        assert scenario.description
        assert isinstance(scenario.objective, Objective)


def test_the_published_workload_has_the_published_sizes() -> None:
    rag = load("rag-chat").rag
    assert rag is not None
    sizes = (rag.system_tokens, rag.document_tokens, rag.user_tokens, rag.turns, rag.answer_tokens)
    assert sizes == (1500, 8192, 200, 6, 32)
    assert rag.prime_documents


def test_what_a_file_leaves_out_has_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(CHAT)
    scenario = load(str(tmp_path / "mine.toml"))
    assert scenario.name == "mine"
    assert (scenario.temperature, scenario.ignore_eos, scenario.page_tokens, scenario.scale) == (0, True, 16, 1)
    assert (scenario.tenants, scenario.warmup_sessions) == ((), 0)


def test_a_file_in_the_working_directory_is_named_by_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chat.toml").write_text(CHAT)
    monkeypatch.chdir(tmp_path)
    assert load("chat.toml").description == "A chat"
    assert load("chat").description != "A chat"


def test_overrides_reach_into_tables_and_arrays() -> None:
    scenario = load(
        "noisy-neighbour",
        {
            "neighbours.steady.turns.max": "9",
            "neighbours.noisy_arrivals.rate_per_s": "2",
            "tenants.1.name": "loud",
            "objective.ttft_ms": "",
            "description": "12",
            "ignore_eos": "false",
            "page_tokens": "256",
        },
    )
    assert scenario.neighbours is not None
    assert scenario.neighbours.steady.turns == Span(min=4, max=9)
    assert scenario.neighbours.noisy_arrivals.rate_per_s == 2.0
    assert [tenant.name for tenant in scenario.tenants] == ["premium", "loud"]
    assert scenario.objective.ttft_ms is None
    assert scenario.description == "12"
    assert (scenario.ignore_eos, scenario.page_tokens) == (False, 256)


def test_overrides_make_an_open_loop_a_closed_one_and_take_whole_tables() -> None:
    overrides = {"loop": "closed", "concurrency": "8", "arrivals": "", "chat.turns": "{ min = 1, max = 1 }"}
    scenario = load("chat", {**overrides, "tenants": '[{ name = "a" }, { name = "b", weight = 3 }]'})
    assert (scenario.loop, scenario.concurrency, scenario.arrivals) == ("closed", 8, None)
    assert scenario.chat is not None
    assert scenario.chat.turns.max == 1
    assert [(tenant.name, tenant.weight) for tenant in scenario.tenants] == [("a", 1.0), ("b", 3.0)]


@pytest.mark.parametrize(
    ("scale", "tokens"), [("1", {0: 0, 1: 1, 200: 200}), ("0.05", {0: 0, 1: 1, 200: 10}), ("2", {0: 0, 200: 400})]
)
def test_scale_multiplies_and_leaves_at_least_one(scale: str, tokens: dict[int, int]) -> None:
    scenario = load("chat", {"scale": scale})
    assert {full: scenario.tokens(full) for full in tokens} == tokens


def test_a_span_draws_all_its_values_alike() -> None:
    rng = Random(1)
    drawn = [Span(min=3, max=6).draw(rng) for _ in range(4000)]
    assert set(drawn) == {3, 4, 5, 6}
    assert all(drawn.count(value) == pytest.approx(1000, rel=0.1) for value in range(3, 7))


def test_parameters_are_plain_and_hold_nothing_that_leads_to_keys() -> None:
    parameters = load("noisy-neighbour", {"seed": "7"}).parameters()
    assert json.loads(json.dumps(parameters)) == parameters
    assert parameters["seed"] == 7
    assert parameters["neighbours"]["steady"]["turns"] == {"min": 4, "max": 8}
    assert parameters["tenants"] == [{"name": "premium", "weight": 1.0}, {"name": "noisy", "weight": 1.0}]
    assert not {"name", "file", "chat", "rag", "concurrency"} & set(parameters)
    assert "KEY" not in json.dumps(parameters)


def test_parameters_make_the_same_scenario_again() -> None:
    scenario = load("rag-chat", {"rag.cold_fraction": "0.5"})
    parameters = scenario.parameters()
    again = load("rag-chat", {key: json.dumps(value) for key, value in flat(parameters)})
    assert again == scenario


def flat(values: dict[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for key, value in values.items():
        found += flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return [(key, value) for key, value in found if not isinstance(value, str) and value != []]


@pytest.mark.parametrize(
    ("name", "overrides", "line"),
    [
        (
            "rag-chat",
            {"rag.cold_fraction": "1.3"},
            "rag-chat.toml: rag.cold_fraction = 1.3: must be a number of at least 0 and at most 1",
        ),
        (
            "rag-chat",
            {"rag.cold_fractoin": "0.3"},
            "rag-chat.toml: rag.cold_fractoin = 0.3: unknown key; did you mean cold_fraction?",
        ),
        (
            "chat",
            {"arrivals.every": "3"},
            "chat.toml: arrivals.every = 3: unknown key; there are process, rate_per_s, burstiness",
        ),
        ("rag-chat", {"rag.turns": "six"}, 'rag-chat.toml: rag.turns = "six": must be a whole number of at least 1'),
        ("rag-chat", {"rag.turns": "1.5"}, "rag-chat.toml: rag.turns = 1.5: must be a whole number of at least 1"),
        ("rag-chat", {"rag.turns": "true"}, "rag-chat.toml: rag.turns = true: must be a whole number of at least 1"),
        (
            "rag-chat",
            {"rag.turns": ""},
            "rag-chat.toml: rag.turns is missing: must be a whole number of at least 1",
        ),
        ("chat", {"scale": "0"}, "chat.toml: scale = 0: must be a number above 0"),
        ("chat", {"scale": "inf"}, "chat.toml: scale = Infinity: must be a number above 0"),
        ("chat", {"scale": "1" + 400 * "0"}, f"chat.toml: scale = 1{76 * '0'}...: must be a number above 0"),
        ("chat", {"a\nb": "1"}, "chat.toml: a b = 1: unknown key; there are ..."),
        ("chat", {"ignore_eos": "yes"}, 'chat.toml: ignore_eos = "yes": must be true or false'),
        ("chat", {"description": ""}, "chat.toml: description is missing: must be text that is not empty"),
        ("chat", {"loop": "shut"}, 'chat.toml: loop = "shut": must be "closed" or "open"'),
        ("chat", {"chat.turns": "9"}, "chat.toml: chat.turns = 9: must be a table of min, max"),
        ("chat", {"chat.turns.min": "9"}, 'chat.toml: chat.turns = {"min": 9, "max": 8}: min must not be above max'),
        ("chat", {"objective.ttft_ms": "0"}, "chat.toml: objective.ttft_ms = 0: must be a number above 0"),
        ("chat", {"objective.ttft": "9"}, "chat.toml: objective.ttft = 9: unknown key; did you mean ttft_ms?"),
        ("chat", {"seed": "1\nloop = 2"}, 'chat.toml: seed = "1\\nloop = 2": must be a whole number of at least 0'),
        ("chat", {"seed.x": "1"}, 'chat.toml: seed.x = "1": seed has nothing called x'),
        ("chat", {"name": "x"}, 'chat.toml: name = "x": unknown key; there are ...'),
        (
            "chat",
            {"loop": "closed"},
            "chat.toml: concurrency is missing: a closed loop needs a whole number of at least 1",
        ),
        ("chat", {"concurrency": "3"}, "chat.toml: concurrency = 3: not used in an open loop"),
        (
            "chat",
            {"arrivals": ""},
            "chat.toml: arrivals is missing: an open loop needs a table of process, rate_per_s, burstiness",
        ),
        ("chat", {"num_sessions": ""}, "chat.toml: num_sessions is missing: must be a whole number of at least 1"),
        (
            "batch-summarise",
            {"arrivals.process": "fixed", "arrivals.rate_per_s": "1"},
            'batch-summarise.toml: arrivals = {"process": "fixed", "rate_per_s": 1.0}: not used in a closed loop',
        ),
        (
            "chat",
            {"arrivals.process": "gamma"},
            'chat.toml: arrivals = {"process": "gamma", "rate_per_s": 2.0}: gamma arrivals need burstiness,'
            " a number above 0",
        ),
        (
            "long-prompt",
            {"arrivals.process": "fixed"},
            'long-prompt.toml: arrivals = {"process": "fixed", "rate_per_s": 0.5, "burstiness": 0.5}:'
            " burstiness is for gamma arrivals only",
        ),
        ("chat", {"kind": "burst"}, 'chat.toml: burst is missing: kind "burst" needs a table of siblings, ...'),
        (
            "chat",
            {"trace.path": "x"},
            'chat.toml: trace = {"path": "x", "time_scale": 1.0, "length_scale": 1.0}: not used by kind "chat"',
        ),
        (
            "sibling-burst",
            {"loop": "closed", "concurrency": "1", "arrivals": ""},
            'sibling-burst.toml: loop = "closed": must be "open": kind "burst" says when requests are due',
        ),
        (
            "noisy-neighbour",
            {"tenants.1.name": "premium"},
            'noisy-neighbour.toml: tenants = ["premium", "premium"]: two tenants have the same name',
        ),
        (
            "noisy-neighbour",
            {"tenants": '[{name = "one"}]'},
            'noisy-neighbour.toml: tenants = ["one"]: must be two without weight: the steady one, then the noisy one',
        ),
        (
            "noisy-neighbour",
            {"tenants.1.nam": "x"},
            'noisy-neighbour.toml: tenants.1.nam = "x": unknown key; did you mean name?',
        ),
        (
            "noisy-neighbour",
            {"tenants.2.name": "x"},
            'noisy-neighbour.toml: tenants.2.name = "x": tenants has nothing called 2',
        ),
        ("trace", {"num_sessions": "5"}, "trace.toml: num_sessions = 5: a trace has its own; see trace.max_requests"),
        (
            "trace",
            {"trace.length_scale": "0.03"},
            "trace.toml: trace.length_scale = 0.03: makes blocks of 15.36 tokens, not a whole number;"
            " 0.0292969 makes 15",
        ),
        (
            "trace",
            {"trace.length_scale": "0.0625", "trace.max_prompt_tokens": "31"},
            "trace.toml: trace.max_prompt_tokens = 31: must be at least a block, 32 tokens",
        ),
    ],
)
def test_faults_name_file_key_value_and_what_is_allowed(name: str, overrides: dict[str, str], line: str) -> None:
    found = fault(name, overrides)
    assert found.startswith(line[:-3]) if line.endswith("...") else found == line


def test_the_length_that_a_fault_proposes_is_taken() -> None:
    load("trace", {"trace.length_scale": "0.0292969"})


def test_an_unknown_name_says_which_there_are() -> None:
    assert fault("rag") == (
        "no scenario 'rag'; there are agent, batch-summarise, chat, long-prompt, noisy-neighbour, rag-chat,"
        " sibling-burst, smoke, trace, and files that end in .toml"
    )


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing, broken, binary = tmp_path / "missing.toml", tmp_path / "broken.toml", tmp_path / "binary.toml"
    broken.write_text("kind =\n")
    binary.write_bytes(b"\xff\xfe")
    assert fault(str(missing)) == f"{missing}: No such file or directory"
    assert fault(str(broken)) == f"{broken}: not TOML: Invalid value (at line 1, column 7)"
    assert fault(str(binary)).startswith(f"{binary}: not TOML: ")
    assert fault(f"{tmp_path}/") == f"{tmp_path}/: Is a directory"
