"""Keepers of a local cluster with simulated engines: start, restart, loss of the application, and end."""

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
import yaml

from kvferry_local.ray_process import ray_environment
from support.local_machine import Machine, a_machine, assert_nothing_left, listening_ports
from support.tier_chunks import chunk_files
from support.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.ray]

PROMPTS = [" ".join(f"word{i}" for i in range(start, start + 200)) for start in range(0, 24_000, 1000)]
PROMPT = PROMPTS[0]
DELETE = """
import ray, sys
from ray import serve

ray.init(address=sys.argv[1], log_to_driver=False)
serve.delete("kvferry")
"""


@pytest.fixture
def machine() -> Iterator[Machine]:
    with a_machine("sim") as machine:
        yield machine


def up(machine: Machine, *volumes: Path) -> subprocess.CompletedProcess[str]:
    listed = ", ".join(f"{{path: {path}, capacity_gib: 0.1}}" for path in volumes)
    started = machine.up("--set", "tier.enabled=true", "--set", f"tier.volumes=[{listed}]")
    assert started.returncode == 0, started.stdout + started.stderr
    return started


def members(machine: Machine, kind: str) -> list[Mapping[str, Any]]:
    seen = machine.run("status", "--json")
    return [member for member in json.loads(seen.stdout)["members"] if member["kind"] == kind]


def asked(machine: Machine, prompt: str) -> httpx.Response:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{machine.url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)


def ask(machine: Machine) -> str:
    answer = asked(machine, PROMPT)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def reading(machine: Machine, metric: str, label: str = "") -> float:
    lines = httpx.get(f"{machine.url}/metrics", timeout=PATIENCE_S, trust_env=False).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{") and label in line)


def cached_tokens(machine: Machine, tier: str) -> float:
    return reading(machine, "kvferry_worker_cached_prompt_tokens_total", f'tier="{tier}"')


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def run_python(machine: Machine, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, *arguments],
        env=ray_environment(machine.folder),
        check=True,
        timeout=PATIENCE_S,
        capture_output=True,
    )


def test_pages_outlive_a_cluster_and_its_keeper_does_not(machine: Machine, tmp_path: Path) -> None:
    volume, bad = tmp_path / "volume", tmp_path / "bad"
    bad.write_text("a file")
    up(machine, volume)
    (keeper,) = members(machine, "keeper")
    assert len(members(machine, "prefill")) == len(members(machine, "decode")) == 1
    text = ask(machine)
    others = [asked(machine, prompt).json()["choices"] for prompt in PROMPTS[1:]]
    wait_until(lambda: len(chunk_files(volume)) >= 6 * len(PROMPTS), what="pages on the volume")

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

    # Another cluster finds them, beside a volume that cannot be used, which is named.
    started = up(machine, bad, volume)
    fault = f"does not use volume {bad}: {bad}/layouts: Not a directory"
    assert fault in started.stderr
    assert fault in machine.run("status").stderr
    # A gateway is ready before it has heard of a keeper, and computes until then.
    num_chunks = len(chunk_files(volume))
    wait_until(lambda: reading(machine, "kvferry_volume_pages") >= num_chunks, what="chunks that the gateway knows")
    assert ask(machine) == text
    # What an engine computes, because its keeper is not there yet or late, it never reads: others are asked for.
    unread = zip(PROMPTS[1:], others, strict=True)

    def one_is_read() -> bool:
        prompt, choices = next(unread)
        answer = asked(machine, prompt).json()
        assert answer["choices"][0]["text"] == choices[0]["text"]
        num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return num_cached >= 192

    wait_until(one_is_read, what="a prompt from the volume")
    wait_until(lambda: cached_tokens(machine, "volume") >= 192, what="tokens from the volume")

    # Deployed anew with other settings and without a volume that can be used, the workers replace the keeper they find.
    (keeper,) = members(machine, "keeper")
    address = json.loads(machine.folder.record_file.read_text())["ray_address"]
    config = yaml.safe_load(machine.folder.config_file.read_text())
    config["tier"]["volumes"] = [each for each in config["tier"]["volumes"] if each["path"] == str(bad)]
    changed = tmp_path / "changed.yaml"
    changed.write_text(yaml.safe_dump(config))
    deploy = ("--config", str(changed), "--model-folder", "default", "--ray-address", address)
    run_python(machine, "-m", "kvferry.app", "deploy", *deploy)
    wait_until(lambda: not alive(keeper["pid"]), what="the end of the first keeper")
    wait_until(lambda: len(members(machine, "keeper")) == 1, what="another keeper")
    (keeper,) = members(machine, "keeper")
    assert alive(keeper["pid"])
    assert len(keeper["volume_faults"]) == 1
    wait_until(lambda: asked(machine, PROMPT + " more").status_code == 200, what="an answer without volumes")

    # It ends with the application.
    run_python(machine, "-c", DELETE, address)
    wait_until(lambda: not alive(keeper["pid"]), what="the end of the keeper")
    assert members(machine, "keeper") == []
