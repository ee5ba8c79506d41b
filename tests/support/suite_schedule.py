"""Which tests run side by side: a test's marker says what it starts, and no more starts than the machine holds."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


@dataclass(frozen=True)
class Resources:
    """`cores` are those that it must not wait for: engines and clusters have limits of time, functions have none."""

    cores: float
    gib: float


_FUNCTIONS = Resources(cores=0.125, gib=1.0)
REAL_CLUSTER = "real_cluster"  # marked both "cluster" and "model"
# By marker; a test with several markers needs what the first of them says. Units start in this order, so that the
# longest ones are first. Engines of `shared_pair` live until the end of the process that started them.
NEEDS: Mapping[str, Resources] = {
    REAL_CLUSTER: Resources(cores=2.0, gib=12.0),
    "model": Resources(cores=1.0, gib=6.0),
    "shared_pair": Resources(cores=1.0, gib=6.0),
    "ray": Resources(cores=1.3, gib=6.0),
    "cluster": Resources(cores=0.6, gib=4.0),
    "vllm": Resources(cores=_FUNCTIONS.cores, gib=2.0),
    "": _FUNCTIONS,
}
_PRECEDENCE = ("shared_pair", *NEEDS)


def unit_of(path: str, markers: Iterable[str]) -> str:
    """Return the name of the tests that one process runs in order: "MARKER:FILE", and one unit of all "vllm" tests."""
    names = {*markers, ""}
    if {"cluster", "model"} <= names:
        names.add(REAL_CLUSTER)
    marker = next(name for name in _PRECEDENCE if name in names)
    return f"{marker}:" if marker in ("vllm", "shared_pair") else f"{marker}:{path}"


def next_unit(
    waiting: Iterable[str], running: Sequence[str], machine: Resources, *, held: Sequence[str] = ()
) -> str | None:
    """Return the first unit that fits beside the running ones, or that runs alone.

    `held` are units that are not over and do not run: they have memory, and need no cores. Where one waits for cores,
    those after it that need cores wait too: it would run last and alone.
    """
    some_wait_for_cores = False
    for unit in sorted(waiting, key=_rank_of):
        if some_wait_for_cores and _needs_of(unit).cores > _FUNCTIONS.cores:
            continue
        if _fits(unit, running, machine, held):
            return unit
        some_wait_for_cores |= _fits(unit, running, Resources(math.inf, machine.gib), held)
    return None


def _fits(unit: str, running: Sequence[str], machine: Resources, held: Sequence[str] = ()) -> bool:
    cores = sum(_needs_of(each).cores for each in (unit, *running))
    gib = sum(_needs_of(each).gib for each in (unit, *running, *held))
    return not running or (cores <= machine.cores and gib <= machine.gib)


def _needs_of(unit: str) -> Resources:
    return NEEDS[unit.partition(":")[0]]


def _rank_of(unit: str) -> int:
    return list(NEEDS).index(unit.partition(":")[0])


def this_machine() -> Resources:
    """Return the cores and the free memory, with half a core more, since tests wait for each other's processes."""
    return Resources(len(os.sched_getaffinity(0)) + 0.5, psutil.virtual_memory().available / 2**30)


def write_units(items: Sequence[pytest.Item], file: Path) -> None:
    """Write each test's unit for `UnitScheduling`: its process knows names of tests, and not their markers."""
    units = {
        item.nodeid: unit_of(item.nodeid.partition("::")[0], [marker.name for marker in item.iter_markers()])
        for item in items
    }
    file.write_text(json.dumps(units), encoding="utf-8")


class UnitScheduling(LoadScopeScheduling):
    """Gives a process of pytest-xdist the next unit that fits beside the units of the other processes."""

    def __init__(self, config: pytest.Config, log: Any, *, units: Path, machine: Resources) -> None:
        super().__init__(config, log)
        self._file = units
        self._machine = machine
        self._nodeid_to_unit: Mapping[str, str] = {}

    def remove_node(self, node: WorkerController) -> str | None:
        """Return the test that ended the process, which is not run again."""
        work = self.assigned_work.pop(node)
        crashed = next((test for tests in work.values() for test, is_done in tests.items() if not is_done), None)
        if crashed is not None:
            work[self._split_scope(crashed)][crashed] = True
            self.workqueue.update({unit: tests for unit, tests in work.items() if not all(tests.values())})
            for other in self.nodes:
                self._reschedule(other)
        return crashed

    def schedule(self) -> None:
        if not self._nodeid_to_unit and any(self.registered_collections.values()):
            self._nodeid_to_unit = json.loads(self._file.read_text(encoding="utf-8"))
        is_first = self.collection is None
        super().schedule()
        num_before = -1
        while not is_first and num_before != (num_before := len(self.workqueue)):
            # A process in the place of one that crashed waits until it has two tests.
            super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._nodeid_to_unit[nodeid]

    def _assign_work_unit(self, node: WorkerController) -> None:
        # A process runs a test when it has the next one: with one test left it waits. Its units run in turn.
        running, held = list[str](), list[str]()
        for other in self.nodes:
            if other is not node:
                (running if self._is_running(other) else held).extend(self._unfinished(other))
        own = [] if self._is_running(node) else self._unfinished(node)
        unit = next_unit(self.workqueue, running, self._machine, held=held)
        if unit is not None and all(_fits(each, running, self._machine) for each in own):
            self.workqueue.move_to_end(unit, last=False)
            super()._assign_work_unit(node)

    def _is_running(self, node: WorkerController) -> bool:
        return node.shutting_down or self._pending_of(self.assigned_work[node]) > 1

    def _unfinished(self, node: WorkerController) -> list[str]:
        return [unit for unit, tests in self.assigned_work[node].items() if not all(tests.values())]

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        # The end of a unit makes room for one in another process, and that of the last unit ends them all.
        for other in self.nodes:
            if other is not node:
                self._reschedule(other)
