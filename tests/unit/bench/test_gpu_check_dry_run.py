"""What of each part of `make gpu-check` needs no device: configurations that vLLM takes, commands, tests to collect."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_check.dry_run import faults_of
from bench.gpu_check.parts import PARTS, Part

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_could_run(part: Part, tmp_path: Path) -> None:
    assert faults_of(part, tmp_path) == []


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        (
            {"environ": {"KVFERRY_TEST_ENGINE": '{"args": {"trust_remote_code": true}}'}},
            "not accepted here",
        ),
        (
            {"environ": {"KVFERRY_TEST_ENGINE": '{"args": {"async_schedling": false}}'}},
            "mean async_scheduling",
        ),
        ({"environ": {"KVFERRY_TEST_ENGINE": '{"env": {"VLLM_NO_SUCH": "1"}}'}}, ""),
        ({"environ": {"KVFERRY_TEST_ENGINE": "{"}}, "KVFERRY_TEST_ENGINE: no JSON"),
        ({"environ": {"KVFERRY_TEST_MODEL": '{"dtype": "float7"}'}}, "dtype"),
        ({"environ": {"KVFERRY_TEST_DEVICE": "cpu"}}, "registers memory of 'cpu'"),
        ({"command": ("-m", "bench.no_such_module"), "kind": "bench"}, "No module named bench.no_such_module"),
        ({"command": ("-m", "bench.kv_transfer", "--tokens", "no"), "kind": "bench"}, "is no list of numbers"),
        (
            {"command": ("-m", "pytest", "tests/unit/test_task_set.py", "-k", "no_such_test"), "kind": "tests"},
            "ends with 5",
        ),
    ],
)
def test_a_part_that_could_not_is_named(values: dict[str, object], fault: str, tmp_path: Path) -> None:
    part = Part("p", "", "bench", ("-c", ""), 60)  # a command that ends at once: most of these faults are of values
    changed = Part(**{name: getattr(part, name) for name in Part.__dataclass_fields__} | values)  # type: ignore[arg-type]
    faults = faults_of(changed, tmp_path)
    assert bool(faults) == bool(fault), faults
    assert not fault or any(fault in each and each.startswith("p: ") for each in faults), faults
