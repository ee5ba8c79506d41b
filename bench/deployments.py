"""Deployments of one model on this machine, each with the same two engines' worth of processor, memory and threads.

Every one is a context manager: up on entering, ended with everything it started on leaving.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.engine_device import on_gpu
from kvferry.model_folder import cache_folder, resolve
from kvferry.util.addresses import free_port

BENCH = Path(__file__).resolve().parent
BIN = Path(sys.executable).parent
MODEL_NAME = "smollm2"
START_TIMEOUT_S = 420.0
BLOCK_SIZE = 32
MAX_NUM_SEQS = 64
CPU_TIER_BYTES = 1 << 30


class DeploymentFailed(Exception):
    """A deployment did not come up; the message ends with its last output."""


@dataclass(frozen=True)
class Settings:
    """Settings that all deployments share."""

    max_model_len: int = 2048
    kv_cache_gib: int = 1  # of each of the two engines
    gpu_share: float = 0.4  # of a GPU's memory that each of the two may take
    gpu_kv_gib: int = 6  # of it for KV pages: given, since engines that start at once measure each other
    volume_gib: float = 8.0  # of a tier on files, where a deployment has one


@dataclass(frozen=True)
class Running:
    """Where a deployment answers. Several URLs are asked in turn."""

    urls: tuple[str, ...]
    metrics_urls: tuple[str, ...]
    model: str


@dataclass(frozen=True)
class Deployment:
    name: str
    description: str
    up: Callable[[Settings], contextlib.AbstractContextManager[Running]]
    is_twin: bool = False  # its engines compute nothing: of use for counts, not for times
    on_gpu: bool = False  # it can be told to use a GPU


@contextlib.contextmanager
def kvferry(settings: Settings) -> Iterator[Running]:
    """One prefill and one decode worker, as `make up` starts them."""
    with kvferry_up(engines(settings)) as running:
        yield running


@contextlib.contextmanager
def kvferry_tier(settings: Settings) -> Iterator[Running]:
    """The same two with their CPU tiers and a volume behind a keeper."""
    with temporary_folder() as folder:
        tier = {"tier.cpu_gib": CPU_TIER_BYTES / (1 << 30), **volume(settings, folder)}
        with kvferry_up({**engines(settings), **tier}) as running:
            yield running


@contextlib.contextmanager
def kvferry_sim(settings: Settings) -> Iterator[Running]:
    """The same with simulated engines: up within seconds, and of no use for figures of engines."""
    with kvferry_up({"engine.kind": "sim", "sim.max_model_len": settings.max_model_len}) as running:
        yield running


@contextlib.contextmanager
def kvferry_sim_tier(settings: Settings) -> Iterator[Running]:
    """Simulated engines with pages of 16 tokens, real CPU tiers and a real volume: any prompt length, true page counts.

    An engine holds a dozen prompts, its CPU tier fifty; the rest has to come from the volume.
    """
    with temporary_folder() as folder:
        values = {
            "engine.kind": "sim",
            "engine.block_size": 16,
            "sim.max_model_len": 16_384,
            "sim.num_pages": 8_192,
            "sim.cpu_pages": 32_768,
            **volume(settings, folder),
        }
        with kvferry_up(values) as running:
            yield running


@contextlib.contextmanager
def vllm_round_robin(settings: Settings) -> Iterator[Running]:
    """Two `vllm serve`, each of which computes prompts and answers; requests go to them in turn."""
    with two_vllm_serve(settings, lambda folder: None) as running:
        yield running


@contextlib.contextmanager
def vllm_file_tier(settings: Settings) -> Iterator[Running]:
    """The same two with vLLM's own CPU tier and file-system tier, over one folder that both use."""

    def transfer_config(folder: Path) -> dict[str, object]:
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "cpu_tiering",
                "cpu_bytes_to_use": CPU_TIER_BYTES,
                "eviction_policy": "lru",
                "secondary_tiers": [
                    {"type": "fs", "root_dir": str(folder / "tier"), "n_read_threads": 2, "n_write_threads": 2}
                ],
            },
        }

    with two_vllm_serve(settings, transfer_config) as running:
        yield running


@contextlib.contextmanager
def serve_llm(settings: Settings) -> Iterator[Running]:
    """ray.serve.llm's prefill/decode application: one prefill and one decode replica."""
    port = free_port("127.0.0.1")
    with temporary_folder() as folder:
        packages = extra_packages("pyarrow", "jsonref", "jsonschema")
        environment = engine_environment(settings, folder, packages)
        token = folder / "ray-token"
        token.write_text(secrets.token_hex(32), encoding="ascii")
        environment |= {
            "UCX_TLS": "tcp,cma,sm,self",
            "RAY_worker_niceness": "0",
            "RAY_TMPDIR": str(folder),
            "RAY_metrics_report_interval_ms": "1000",
            # Its listeners: on loopback where Ray lets them be, and behind a token everywhere.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_AUTO_CONNECT": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        arguments = [str(port), str(model_folder()), MODEL_NAME, str(settings.max_model_len)]
        command = [sys.executable, str(BENCH / "peers" / "serve_llm.py"), *arguments]
        with process(command, environment, folder / "log", ends_with_input=True) as (started, log):
            line = wait_for_line(started, log, "READY")
            url = f"http://127.0.0.1:{port}"
            wait_for_http(f"{url}/v1/models", started, log)
            yield Running((url,), tuple(line.split()[1:]), MODEL_NAME)


DEPLOYMENTS = {
    deployment.name: deployment
    for deployment in (
        Deployment("kvferry", "kvferry: 1 prefill and 1 decode worker", kvferry, on_gpu=True),
        Deployment(
            "kvferry-tier", "kvferry with its NVMe tier: 1 prefill and 1 decode worker", kvferry_tier, on_gpu=True
        ),
        Deployment("kvferry-sim", "kvferry on sim engines", kvferry_sim, is_twin=True),
        Deployment("kvferry-sim-tier", "kvferry with its NVMe tier on sim engines", kvferry_sim_tier, is_twin=True),
        Deployment("vllm-rr", "2 × vllm serve, round robin", vllm_round_robin, on_gpu=True),
        Deployment("vllm-rr-fs", "2 × vllm serve with vLLM's file-system tier, round robin", vllm_file_tier),
        Deployment("serve-llm", "ray.serve.llm: 1 prefill and 1 decode replica", serve_llm),
    )
}


def dtype() -> str:
    return "bfloat16" if on_gpu() else "float32"


def engines(settings: Settings) -> dict[str, object]:
    values: dict[str, object] = {
        "model.dtype": dtype(),
        "model.max_model_len": settings.max_model_len,
        "engine.block_size": BLOCK_SIZE,
        "engine.max_num_seqs": MAX_NUM_SEQS,
    }
    if not on_gpu():
        return {**values, "engine.kv_cache_gib": settings.kv_cache_gib, "engine.threads": 1}
    # Ray hides the GPU from a replica that asks for none of it.
    shares: dict[str, object] = {f"{role}.num_gpus": 0.5 for role in ("prefill", "decode")}
    pages = json.dumps({"kv_cache_memory_bytes": settings.gpu_kv_gib << 30})
    return {
        **values,
        "engine.device": "gpu",
        "engine.gpu_memory_utilization": settings.gpu_share,
        "engine.args": pages,
        **shares,
    }


def volume(settings: Settings, folder: Path) -> dict[str, object]:
    volumes = [{"path": str(folder / "volume"), "capacity_gib": settings.volume_gib}]
    return {"tier.enabled": True, "tier.volumes": json.dumps(volumes)}


def gpu_arguments(settings: Settings) -> list[str]:
    pages = settings.gpu_kv_gib << 30
    return ["--gpu-memory-utilization", str(settings.gpu_share), "--kv-cache-memory-bytes", str(pages)]


@contextlib.contextmanager
def kvferry_up(values: Mapping[str, object]) -> Iterator[Running]:
    port = free_port("127.0.0.1")
    with temporary_folder() as folder:
        environment = {**os.environ, "KVFERRY_RUN_DIR": str(folder)}
        command = [str(BIN / "kvferry"), "up", "--no-ask", "--timeout", f"{START_TIMEOUT_S:g}"]
        own = {"gateway.http_port": port, "gateway.grpc_port": 0, "model.served_name": MODEL_NAME}
        for key, value in {**values, **own}.items():
            command += ["--set", f"{key}={value}"]
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if done.returncode:
                said = last_lines(done.stdout + done.stderr)
                raise DeploymentFailed(f"kvferry up ended with {done.returncode}: {said}")
            url = f"http://127.0.0.1:{port}"
            yield Running((url,), (f"{url}/metrics",), MODEL_NAME)
        finally:
            down = [str(BIN / "kvferry"), "down"]
            subprocess.run(down, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)


@contextlib.contextmanager
def two_vllm_serve(
    settings: Settings, transfer_config: Callable[[Path], dict[str, object] | None]
) -> Iterator[Running]:
    with temporary_folder() as folder, contextlib.ExitStack() as stack:
        environment = engine_environment(settings, folder, folder / "packages", BENCH / "peers")
        if not on_gpu():
            pretend_vllm_is_installed(folder / "packages")
        urls = []
        started = []
        for i in range(2):
            port = free_port("127.0.0.1")
            command = [str(BIN / "vllm"), "serve", str(model_folder()), "--host", "127.0.0.1", "--port", str(port)]
            command += ["--served-model-name", MODEL_NAME, "--dtype", dtype()]
            command += gpu_arguments(settings) if on_gpu() else ["--enforce-eager"]
            command += ["--max-model-len", str(settings.max_model_len), "--max-num-seqs", str(MAX_NUM_SEQS)]
            command += ["--block-size", str(BLOCK_SIZE)]
            if (extra := transfer_config(folder)) is not None:
                command += ["--kv-transfer-config", json.dumps(extra)]
            started.append(stack.enter_context(process(command, environment, folder / f"log{i}")))
            urls.append(f"http://127.0.0.1:{port}")
        for url, (server, log) in zip(urls, started, strict=True):
            wait_for_http(f"{url}/health", server, log)
        yield Running(tuple(urls), tuple(f"{url}/metrics" for url in urls), MODEL_NAME)


def model_folder() -> Path:
    return Path(resolve("default"))


def engine_environment(settings: Settings, folder: Path, *python_path: Path) -> dict[str, str]:
    """As kvferry sets up its own engines: one compute thread each, nothing pinned, nothing asked of the network."""
    of_cpu = {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",  # or two servers would name the same page differently
        "PYTHONPATH": os.pathsep.join(map(str, python_path)),
        "TMPDIR": str(folder),
        "VLLM_NO_USAGE_STATS": "1",
        **({} if on_gpu() else of_cpu),
    }


def pretend_vllm_is_installed(folder: Path) -> None:
    """`vllm serve` asks for the version of a package `vllm`; PyPI's CPU build is called otherwise."""
    metadata = folder / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n", encoding="ascii")


def extra_packages(*names: str) -> Path:
    """A folder with packages that a rival needs and this project does not; made once."""
    folder = cache_folder() / "rival-packages"
    if not (folder / ".complete").exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *names],
            check=True,
        )
        (folder / ".complete").touch()
    return folder


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    # Short: sockets are made in it, and their paths have a limit.
    folder = Path(tempfile.mkdtemp(prefix="kvf-", dir="/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def process(
    command: Sequence[str], environment: Mapping[str, str], log: Path, *, ends_with_input: bool = False
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process in a session of its own; on leaving, all of that session is ended."""
    shared_memory = set(Path("/dev/shm").glob("vllm_offload_*"))
    with log.open("wb") as output:
        started = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield started, log
    finally:
        if started.stdin is not None:
            started.stdin.close()
        if ends_with_input:
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(60.0)
        for number, patience_s in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(patience_s)
                break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # children that outlived their parent
        for leaked in set(Path("/dev/shm").glob("vllm_offload_*")) - shared_memory:
            leaked.unlink(missing_ok=True)


def wait_for_http(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers 200. Raises DeploymentFailed when it ends, or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        check_alive(server, log, deadline_s)


def wait_for_line(server: subprocess.Popen[bytes], log: Path, beginning: str) -> str:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(beginning):
                return line
        check_alive(server, log, deadline_s)


def check_alive(server: subprocess.Popen[bytes], log: Path, deadline_s: float) -> None:
    if server.poll() is not None:
        raise DeploymentFailed(f"it ended with {server.returncode}: {last_lines(log.read_text(errors='replace'))}")
    if time.monotonic() > deadline_s:
        raise DeploymentFailed(f"not up within {START_TIMEOUT_S:g} s: {last_lines(log.read_text(errors='replace'))}")
    time.sleep(0.5)


def last_lines(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])
