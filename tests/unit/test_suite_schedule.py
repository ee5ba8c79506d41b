"""tests/support/suite_schedule.py: which tests run side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.suite_schedule import NEEDS, Resources, next_unit, unit_of

ONE_CORE = Resources(cores=1.5, gib=14.0)
TWO_CORES = Resources(cores=2.5, gib=22.0)
MANY_CORES = Resources(cores=16.5, gib=60.0)
UNITS = [
    *("real_cluster:a", "model:a", "model:b", "cluster:a", "cluster:b"),
    *("shared_pair:", "vllm:", ":a", ":b", ":c"),
]


@pytest.mark.parametrize(
    ("markers", "unit"),
    [
        ((), ":tests/a.py"),
        (("asyncio", "timeout"), ":tests/a.py"),
        (("model",), "model:tests/a.py"),
        (("cluster",), "cluster:tests/a.py"),
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
        (ONE_CORE, ["model:a"]),
        (TWO_CORES, ["model:a", "cluster:a"]),
        (MANY_CORES, UNITS[1:]),
    ],
)
def test_units_start_until_the_machine_is_full(machine: Resources, together: list[str]) -> None:
    waiting, running = UNITS[1:], list[str]()
    while (unit := next_unit(waiting, running, machine)) is not None:
        waiting.remove(unit)
        running.append(unit)
    assert running == together


def test_beside_a_cluster_with_engines_runs_one_that_starts_nothing() -> None:
    assert next_unit(UNITS, [], TWO_CORES) == "real_cluster:a"
    assert next_unit(UNITS[1:], ["real_cluster:a"], TWO_CORES) == "vllm:"
    assert next_unit(UNITS[1:], ["real_cluster:a", "vllm:"], TWO_CORES) is None


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
