"""A Ray of its own for a test, as an operator would have it: with a dashboard, and nobody's application."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvferry.util.addresses import free_port
from kvferry_local.processes import end_all
from kvferry_local.ray_process import ray_environment
from kvferry_local.run_folder import RunFolder
from support.waiting import PATIENCE_S


@dataclass(frozen=True)
class RayCluster:
    """A running head. Its processes are found again by the run folder."""

    folder: RunFolder
    port: int
    dashboard_port: int
    environ: Mapping[str, str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def run(self, *command: str, check: bool = True) -> str:
        """Run a program of this environment beside the cluster; returns all it printed."""
        program = Path(sys.executable).parent / command[0]
        result = subprocess.run(
            [str(program), *command[1:]],
            env=dict(self.environ),
            cwd=self.folder.work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert not check or result.returncode == 0, f"{command}: {result.returncode}\n{result.stdout}"
        return result.stdout

    def serve_details(self) -> dict[str, Any]:
        """What Serve says of its applications."""
        token = self.folder.ray_token_file.read_text().strip()
        answer = httpx.get(
            f"{self.dashboard}/api/serve/applications/",
            headers={"Authorization": f"Bearer {token}"},
            timeout=PATIENCE_S,
            trust_env=False,
        )
        answer.raise_for_status()
        details: dict[str, Any] = answer.json()
        return details

    def application(self) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self.serve_details()["applications"].get("kvferry")
        return found

    def running(self, deployment: str) -> dict[str, int]:
        """replica id -> process id of every replica that runs."""
        application = self.application() or {"deployments": {}}
        replicas = application["deployments"].get(deployment, {"replicas": []})["replicas"]
        return {each["replica_id"]: each["pid"] for each in replicas if each["state"] == "RUNNING"}


@contextlib.contextmanager
def a_ray_cluster(
    *, num_cpus: int = 12, resources: Mapping[str, float] | None = None, environ: Mapping[str, str] | None = None
) -> Iterator[RayCluster]:
    """Started here, gone afterwards with everything that belongs to it. `environ` is added for all its processes."""
    root = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp")).resolve()
    folder = RunFolder(root / "r")
    folder.prepare()
    folder.new_tokens()
    services = Path(__file__).resolve().parents[2] / "services"
    path = os.pathsep.join(filter(None, (str(services), os.environ.get("PYTHONPATH", ""))))
    # A job's `python` is found by PATH, as in the image.
    programs = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
    everywhere = ray_environment(folder) | {"PYTHONPATH": path, "PATH": programs} | dict(environ or {})
    ports: set[int] = set()
    while len(ports) < 5:  # a port is given back at once, and may come again
        ports.add(free_port())
    port, dashboard_port, agent_port, client_port, agent_grpc = ports
    cluster = RayCluster(folder, port, dashboard_port, everywhere)
    try:
        cluster.run(
            *("ray", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}"),
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"),
            *(f"--dashboard-agent-listen-port={agent_port}", f"--dashboard-agent-grpc-port={agent_grpc}"),
            *(f"--ray-client-server-port={client_port}", "--min-worker-port=0", "--max-worker-port=0"),
            *(f"--num-cpus={num_cpus}", "--num-gpus=0", f"--resources={json.dumps(dict(resources or {}))}"),
            *("--object-store-memory=134217728", f"--temp-dir={folder.ray}", "--disable-usage-stats"),
        )
        yield cluster
    finally:
        end_all(folder.marks(), grace_s=0)
        shutil.rmtree(root, ignore_errors=True)
