"""What `kvferry plan` emits runs: values render with the chart, and a serve file starts on a local Ray."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from bench.etcd_server import find_binary
from kvferry import config as configuration
from kvferry.cli import main
from kvferry.util.addresses import free_port
from support.chart import newest_helm, one, write_values
from support.ray_cluster import a_ray_cluster
from support.waiting import wait_until


def emitted(*words: str) -> Any:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == 0, result.stderr
    return yaml.safe_load(result.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ("llama-3.1-8b", "--gpu", "h100", "--users", "256", "--mode", "disaggregated"),
        ("llama-3.1-70b", "--gpu", "h200", "--profile", "agents", "--users", "32", "--ttft", "15"),
        ("llama-3.1-8b", "--gpu", "h100", "--profile", "chat"),
        ("default", "--gpu", "cpu-node", "--context", "1024", "--tpot", "1"),
    ],
    ids=lambda words: " ".join(words[:4]),
)
def test_emitted_values_render(words: tuple[str, ...], tmp_path: Path) -> None:
    values = emitted(*words, "--emit", "values.yaml")
    rendered = newest_helm().documents(values=write_values(tmp_path, values))
    config = configuration.parse(yaml.safe_load(one(rendered, "ConfigMap")["data"]["kvferry.yaml"]))
    engine = values["config"]["engine"]
    assert config.engine.tensor_parallel_size == engine.get("tensor_parallel_size", 1)
    assert config.engine.max_num_seqs == engine["max_num_seqs"]
    assert config.tier.enabled is ("tier" in values)


@pytest.mark.cluster
def test_an_emitted_serve_file_starts_on_a_local_ray(tmp_path: Path) -> None:
    etcd = find_binary("etcd")
    assert etcd is not None
    client, peer = free_port(), free_port()
    member = subprocess.Popen(
        [
            etcd, "--data-dir", str(tmp_path / "etcd"), "--listen-client-urls", f"http://127.0.0.1:{client}",
            "--advertise-client-urls", f"http://127.0.0.1:{client}", "--listen-peer-urls", f"http://127.0.0.1:{peer}",
        ],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        settings = (
            "engine.kind=sim", f"membership.endpoints=[127.0.0.1:{client}]", "prefill.num_cpus=0.5",
            "decode.num_cpus=0.5", "gateway.num_cpus=0.5", f"gateway.http_port={free_port()}", "gateway.grpc_port=null",
        )  # fmt: skip
        words = ["default", "--gpu", "cpu-node", "--context", "1024", "--tpot", "1", "--mode", "disaggregated"]
        words += ["--emit", "serve.yaml", *(word for each in settings for word in ("--set", each))]
        content = emitted(*words)
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump(content))
        resources = {f"kvferry_{role}": 8.0 for role in ("prefill", "decode", "gateway")}
        with a_ray_cluster(resources=resources, environ={"KVFERRY_NODE_ADDRESS": "127.0.0.1"}) as ray:
            ray.run("serve", "deploy", str(file), "-a", ray.dashboard)

            def runs() -> bool:
                application = ray.application()
                assert application is None or application["status"] != "DEPLOY_FAILED", application["message"]
                return application is not None and application["status"] == "RUNNING"

            wait_until(runs, what="the application")
            assert {name: len(ray.running(name)) for name in ("PrefillWorker", "DecodeWorker", "Gateway")} == {
                "PrefillWorker": 1, "DecodeWorker": 1, "Gateway": 1,
            }  # fmt: skip
    finally:
        member.kill()
        member.wait()
