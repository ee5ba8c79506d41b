"""tests/support/suite_schedule.py: which tests run side by side."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.suite_schedule import NEEDS, Resources, UnitScheduling, next_unit, unit_of

ONE_CORE = Resources(cores=1.5, gib=14.0)
TWO_CORES = Resources(cores=2.5, gib=22.0)
MANY_CORES = Resources(cores=16.5, gib=60.0)
UNITS = [
    *("real_cluster:a", "model:a", "model:b", "shared_pair:", "cluster:a", "cluster:b"),
    *("vllm:", ":a", ":b", ":c"),
]


@pytest.mark.parametrize(
    ("markers", "unit"),
    [
        ((), ":tests/a.py"),
        (("asyncio", "timeout"), ":tests/a.py"),
        (("model",), "model:tests/a.py"),
        (("cluster",), "cluster:tests/a.py"),
        (("cluster", "ray"), "ray:tests/a.py"),
        (("cluster", "model", "ray"), "real_cluster:tests/a.py"),
        (("model", "cluster"), "real_cluster:tests/a.py"),
        (("model", "shared_pair"), "shared_pair:"),
        (("vllm",), "vllm:"),
    ],
)
def test_a_marker_names_the_unit(markers: tuple[str, ...], unit: str) -> None:
    assert unit_of("tests/a.py", markers) == unit


@pytest.mark.parametrize(
    ("machine", "together"),
    [
        (ONE_CORE, ["model:a", "vllm:", ":a", ":b", ":c"]),
        (TWO_CORES, ["model:a", "model:b", "vllm:", ":a", ":b", ":c"]),
        (MANY_CORES, UNITS[1:]),
    ],
)
def test_units_start_until_the_machine_is_full(machine: Resources, together: list[str]) -> None:
    waiting, running = UNITS[1:], list[str]()
    while (unit := next_unit(waiting, running, machine)) is not None:
        waiting.remove(unit)
        running.append(unit)
    assert running == together


def test_beside_a_cluster_with_engines_no_other_starts() -> None:
    assert next_unit(UNITS, [], TWO_CORES) == "real_cluster:a"
    assert next_unit(UNITS[1:], ["real_cluster:a"], TWO_CORES) == "vllm:"
    assert next_unit(UNITS[1:6], ["real_cluster:a"], TWO_CORES) is None


def test_what_waits_for_a_process_has_its_memory_and_needs_no_cores() -> None:
    machine = Resources(cores=2.5, gib=14.0)
    assert next_unit(UNITS[1:], [":z"], machine, held=["real_cluster:a"]) == ":a"
    assert next_unit(UNITS[1:], [":z"], machine, held=["model:z"]) == "model:a"
    assert next_unit(UNITS[1:], [], machine, held=["real_cluster:a"]) == "model:a"


def test_what_waits_for_cores_is_not_overtaken_by_what_needs_cores() -> None:
    assert next_unit(["ray:a", "cluster:a", ":a"], ["ray:z"], TWO_CORES) == ":a"
    assert next_unit(["ray:a", "cluster:a"], ["ray:z"], TWO_CORES) is None
    assert next_unit(["ray:a", "cluster:a"], [":z"], TWO_CORES) == "ray:a"
    no_memory = Resources(cores=2.5, gib=8.0)
    assert next_unit(["ray:a", "cluster:a"], [":z"], no_memory, held=["cluster:z"]) is None
    assert next_unit(["model:a", ":a"], [":z"], no_memory, held=["cluster:z"]) == ":a"
    assert next_unit(["ray:a", "cluster:a"], ["cluster:z"], Resources(cores=2.5, gib=9.0)) == "cluster:a"


def test_a_ray_cluster_starts_beside_an_engine() -> None:
    assert next_unit(["ray:a", "cluster:a"], ["model:z", ":z"], TWO_CORES) == "ray:a"


def test_a_unit_that_fits_nowhere_runs_alone() -> None:
    nothing = Resources(cores=0.0, gib=0.0)
    assert next_unit(["model:a"], [], nothing) == "model:a"
    assert next_unit(["model:a"], [":a"], nothing) is None


@given(
    st.lists(st.sampled_from(UNITS), unique=True),
    st.lists(st.sampled_from(UNITS), max_size=4),
    st.builds(Resources, st.floats(0, 8), st.floats(0, 64)),
)
def test_never_more_than_the_machine_has(waiting: list[str], running: list[str], machine: Resources) -> None:
    unit = next_unit(waiting, running, machine)
    if unit is not None and running:
        needs = [NEEDS[each.partition(":")[0]] for each in (unit, *running)]
        assert sum(each.cores for each in needs) <= machine.cores
        assert sum(each.gib for each in needs) <= machine.gib


class Node:
    """A process of pytest-xdist: it runs a test when it has the next one, or has been told that there is none."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.queue: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        assert not self.shutting_down
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    @property
    def is_running(self) -> bool:
        return len(self.queue) > (0 if self.shutting_down else 1)


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("seed", range(200))
def test_every_test_runs_and_never_more_than_the_machine_has(seed: int, crashes: bool) -> None:
    seeded = random.Random(seed)
    kinds = [(seeded.choice([*NEEDS]), seeded.randint(1, 4)) for _ in range(seeded.randint(1, 12))]
    machine = Resources(seeded.uniform(0, 4), seeded.uniform(0, 30))
    units = {f"file{i}.py::test{j}": f"{kind}:{i}" for i, (kind, count) in enumerate(kinds) for j in range(count)}
    tests = list(units)
    config: Any = SimpleNamespace(option=SimpleNamespace(loadscopereorder=False), getvalue=lambda name: None)
    nodes: list[Any] = [Node(f"gw{i}") for i in range(seeded.randint(1, 4))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xdist.scheduler.loadscope.parse_tx_spec_config", lambda config: nodes)
        patch.setattr(Path, "read_text", lambda self, encoding: json.dumps(units))
        schedule = UnitScheduling(config, SimpleNamespace(loadscopesched=print), units=Path("units"), machine=machine)
        for node in nodes:
            schedule.add_node(node)
        for node in nodes:
            schedule.add_node_collection(node, tests)
        schedule.schedule()
    done = list[int]()
    while running := [node for node in nodes if node.is_running]:
        needs = [NEEDS[units[tests[node.queue[0]]].partition(":")[0]] for node in running if not node.shutting_down]
        assert len(needs) < 2 or sum(each.cores for each in needs) <= machine.cores
        node = seeded.choice(running)
        if crashes and seeded.random() < 0.2:
            crashes = False
            nodes[nodes.index(node)] = other = Node("gw9")
            assert schedule.remove_node(node) == tests[node.queue[0]]
            done.append(node.queue[0])
            schedule.add_node(other)
            schedule.add_node_collection(other, tests)
            schedule.schedule()
            continue
        index = node.queue.pop(0)
        done.append(index)
        schedule.mark_test_complete(node, index)
    assert sorted(done) == list(range(len(tests)))
