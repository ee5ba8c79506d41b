"""VolumePool of a whole local cluster with the twin engine: made, restarted, outlived, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.local.ray_process import ray_environment
from support.local_machine import Machine, a_machine, assert_nothing_left, listening_ports
from support.tier_chunks import chunk_files
from support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cluster]

PROMPT = " ".join(f"word{i}" for i in range(200))


@pytest.fixture
def machine() -> Iterator[Machine]:
    with a_machine("sim") as machine:
        yield machine


def up(machine: Machine, volume: Path, *more: str) -> None:
    started = machine.up(
        "--set", "tier.enabled=true", "--set", f"tier.volumes=[{{path: {volume}, capacity_gib: 0.1}}]", *more
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr


def members(machine: Machine, kind: str) -> list[Mapping[str, Any]]:
    seen = machine.run("status", "--json")
    return [member for member in json.loads(seen.stdout)["members"] if member["kind"] == kind]


def ask(machine: Machine, prompt: str = PROMPT) -> str:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{machine.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def reading(machine: Machine, metric: str, label: str = "") -> float:
    lines = httpx.get(f"{machine.url}/metrics", timeout=PATIENCE_S, trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{") and label in line)


def cached_tokens(machine: Machine, tier: str) -> float:
    return reading(machine, "kvferry_worker_cached_prompt_tokens_total", f'tier="{tier}"')


def test_pages_outlive_a_cluster_and_its_keeper_does_not(machine: Machine, tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    up(machine, volume)
    (keeper,) = members(machine, "keeper")
    assert len(members(machine, "prefill")) == len(members(machine, "decode")) == 1
    text = ask(machine)
    wait_until(lambda: len(chunk_files(volume)) >= 6, what="pages on the volume")

    # Killed, it is started anew by Ray, registered, and found by the engines.
    os.kill(keeper["pid"], signal.SIGKILL)
    wait_until(
        lambda: any(each["pid"] != keeper["pid"] for each in members(machine, "keeper")),
        what="another keeper",
    )
    assert ask(machine) == text

    processes = machine.processes()
    ports = listening_ports(processes)
    assert set(ports.values()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    down = machine.down()
    assert down.returncode == 0, down.stdout + down.stderr
    assert_nothing_left(machine, processes, ports)

    up(machine, volume)
    # A gateway is ready before it has heard of a keeper, and computes until then.
    wait_until(lambda: reading(machine, "kvferry_volume_pages") >= 6, what="chunks that the gateway knows")
    assert ask(machine) == text
    wait_until(lambda: cached_tokens(machine, "volume") >= 192, what="tokens from the volume")


def test_a_keeper_changes_and_ends_with_the_application(machine: Machine, tmp_path: Path) -> None:
    up(machine, tmp_path / "volume")
    (keeper,) = members(machine, "keeper")
    address = json.loads(machine.folder.record_file.read_text())["ray_address"]

    def run_python(*arguments: str) -> None:
        subprocess.run(
            [sys.executable, *arguments],
            env=ray_environment(machine.folder),
            check=True,
            timeout=PATIENCE_S,
            capture_output=True,
        )

    # Deployed anew with other settings, the workers replace the keeper they find.
    config = machine.folder.config_file
    changed = config.read_text().replace("io_threads: 4", "io_threads: 3")
    assert changed != config.read_text()
    (tmp_path / "changed.yaml").write_text(changed)
    deploy = ("--config", str(tmp_path / "changed.yaml"), "--model-folder", "default", "--ray-address", address)
    run_python("-m", "kvferry.app", "deploy", *deploy)
    wait_until(lambda: not alive(keeper["pid"]), what="the end of the first keeper")
    wait_until(lambda: len(members(machine, "keeper")) == 1, what="another keeper")
    (keeper,) = members(machine, "keeper")
    assert alive(keeper["pid"])

    delete = (
        "import ray, sys; from ray import serve; ray.init(address=sys.argv[1], log_to_driver=False); "
        "serve.delete('kvferry')"
    )
    run_python("-c", delete, address)
    wait_until(lambda: not alive(keeper["pid"]), what="the end of the keeper")
    assert members(machine, "keeper") == []


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_a_volume_that_cannot_be_used_costs_only_its_pages(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("a file")
    up(machine, tmp_path / "volume", "--set", "gateway.replicas=1")
    assert ask(machine)
    (keeper,) = members(machine, "keeper")
    assert len(keeper["volume_faults"]) == 1
    assert ask(machine, PROMPT + " more")


def test_a_volume_that_cannot_be_used_is_named_and_the_other_is_used(machine: Machine, tmp_path: Path) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.write_text("a file")
    volumes = ", ".join(f"{{path: {path}, capacity_gib: 0.1}}" for path in (bad, good))
    started = machine.up("--set", "tier.enabled=true", "--set", f"tier.volumes=[{volumes}]")
    assert started.returncode == 0, started.stdout + started.stderr
    fault = f"does not use volume {bad}: {bad}/layouts: Not a directory"
    assert fault in started.stderr
    assert fault in machine.run("status").stderr
    ask(machine)
    wait_until(lambda: bool(chunk_files(good)), what="pages on the other volume")
