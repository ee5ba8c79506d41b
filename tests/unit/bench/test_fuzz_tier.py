"""A short run of the fuzzer, and proof that it sees a wrong chunk when there is one."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.fuzzed_chunks import Tally
from bench.results import BenchFailed, Results
from kvferry_keeper.store.index.chunk_table import IndexEntry
from kvferry_keeper.store.volume import Outcome, Volume
from support.child_imports import import_environment


@pytest.fixture(scope="module")
def fuzzer() -> ModuleType:
    return importlib.import_module("bench.fuzz_tier")


class Unverified(Volume):
    """Delivers chunks without verifying them."""

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **options)
        self._chunk_reader._verify = _deliver  # type: ignore[method-assign]


def _deliver(
    raw_header: memoryview, payload: memoryview, entry: IndexEntry, into: memoryview, key: bytes | None
) -> Outcome:
    if key is not None:
        into[:] = payload
    return Outcome.OK


def test_no_mutation_of_a_chunk_gets_a_wrong_byte_out_of_a_volume(fuzzer: ModuleType, memory_path: Path) -> None:
    results = Results()
    fuzzer.fuzz(2000, memory_path, results)  # raises where something is wrong
    assert results.figures["mutations"] == 2000
    by_cause = results.figures["by_cause"]
    assert sum(sum(outcomes.values()) for outcomes in by_cause.values()) == 2000
    seen = {outcome for outcomes in by_cause.values() for outcome in outcomes}
    # All files are files, and of this user: tests/unit/store/test_odd_files.py has others.
    assert seen >= set(Outcome) - {Outcome.REFUSED, Outcome.EXISTS, Outcome.UNREADABLE}
    # What must never be delivered, whatever else becomes of it.
    for cause, outcomes in by_cause.items():
        if cause.startswith(("flip", "another", "header of one", "truncate", "extend", "swap", "sealed")):
            assert "ok" not in outcomes, cause


def test_a_volume_that_does_not_verify_is_found_out(fuzzer: ModuleType, memory_path: Path) -> None:
    results = Results()
    with pytest.raises(BenchFailed, match=r"seed 1: \d+ wrong pages delivered after mutation \d+ \("):
        fuzzer.fuzz(300, memory_path, results, volume_class=Unverified)
    assert 0 < results.figures["mutations"] < 300


def test_damaged_chunks_of_a_volume_that_does_not_verify_are_counted(fuzzer: ModuleType, memory_path: Path) -> None:
    tally = Tally()
    list(fuzzer._damage(200, memory_path, random.Random(1), tally, Unverified))
    assert tally.num_wrong_chunks > 100


def test_the_last_line_is_json_and_the_exit_code_tells(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.fuzz_tier", "--mutations", "60", "--folder", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        env=import_environment(),
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert results["mutations"] == 60
    assert {"by_cause", "seconds", "machine"} <= results.keys()
    assert not list(tmp_path.iterdir())
