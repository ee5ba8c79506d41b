"""Files and commands that run a plan: values of the chart, a file for `serve deploy`, or `vllm serve`."""

from __future__ import annotations

import json
import math
import shlex
from typing import Any, Final

from kvferry import config as configuration
from kvferry.planner.question import Question
from kvferry.planner.sizing import Candidate

_CPUS_PER_GPU: Final = 8
_MEMORY_GIB_PER_GPU: Final = 64  # of a pod, without its CPU tier: engines' host memory and the loading of weights
_CPU_NODE: Final = (32, 128)  # CPUs and GiB of a worker on a CPU node
_GIB: Final = 1 << 30
# As the chart mounts them, and as deploy/ray/README.md asks for them.
_ENDPOINTS: Final = ["etcd-0.etcd:2379", "etcd-1.etcd:2379", "etcd-2.etcd:2379"]


def obstacles(candidate: Candidate, question: Question) -> list[str]:
    """Return why kvferry would not serve this candidate, although vLLM would; empty: it does."""
    found = []
    if candidate.layout.pipeline_parallel_size > 1:
        found.append("kvferry's engines have one pipeline stage")
    if candidate.layout.expert_parallel:
        found.append("kvferry has no expert parallelism")
    if question.kv_dtype != question.model.geometry.dtype:
        found.append(
            f"kvferry serves KV pages of the model's own type alone, {question.model.geometry.dtype}: those in "
            f"{question.kv_dtype} were not shown to answer the same"
        )
    architecture = question.model.geometry.architecture
    if question.served_architectures and architecture not in question.served_architectures:
        found.append(f"{architecture or question.model.geometry.model_type} is not served (docs/models.md)")
    return found


def configuration_of(candidate: Candidate, question: Question, *, model_path: str, served_name: str) -> dict[str, Any]:
    """Return the sections `model` and `engine` of kvferry's configuration."""
    engine: dict[str, Any] = {"device": "cpu" if candidate.gpu.is_cpu else "gpu"}
    if candidate.layout.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = candidate.layout.tensor_parallel_size
    if question.model.geometry.checkpoint_kv_dtype:
        engine["kv_cache_dtype"] = question.kv_dtype
    engine["block_size"] = question.block_size
    engine["max_num_seqs"] = max_num_seqs(candidate, question)
    if candidate.gpu.is_cpu:
        engine["kv_cache_gib"] = max(1, math.floor(candidate.memory.kv_bytes / _GIB))
    else:
        engine["gpu_memory_utilization"] = question.gpu_memory_utilization
        engine["max_num_batched_tokens"] = question.max_num_batched_tokens
    return {
        "model": {"path": model_path, "served_name": served_name, "max_model_len": question.demand.context_tokens},
        "engine": engine,
    }


def max_num_seqs(candidate: Candidate, question: Question) -> int:
    """Return the largest batch that KV pages and TPOT allow: more would be preempted, or miss the objective."""
    return max(1, min(candidate.max_batch_of_pages, candidate.max_batch_of_tpot, question.max_num_seqs))


def values(candidate: Candidate, question: Question, *, model_path: str, served_name: str) -> dict[str, Any]:
    """Return values for `helm install`."""
    cpu_gib = math.floor(question.cpu_tier_bytes / _GIB)
    per_pod = max(1, candidate.gpu.gpus_per_node // candidate.layout.num_gpus)
    roles = {
        name: _role(candidate, replicas, min(max(1, replicas), per_pod), cpu_gib)
        for name, replicas in (("prefill", candidate.num_prefill), ("decode", candidate.num_decode))
        if replicas
    }
    result: dict[str, Any] = {"image": {"registry": "registry.example"}}
    if not candidate.disaggregated:
        result["aggregated"] = True
        roles["prefill"] = {"replicas": 0}
    result["config"] = configuration_of(candidate, question, model_path=model_path, served_name=served_name)
    result["roles"] = roles
    if question.volume_tier_bytes:
        per_worker = max(1, cpu_gib // per_pod)
        volume = {
            "name": "nvme0",
            "capacityGiB": max(1, math.floor(question.volume_tier_bytes / _GIB)),
            # One full write of the volume a day, which data-centre NVMe endures for five years.
            "writeGiBPerDay": max(1, math.floor(question.volume_tier_bytes / _GIB)),
            "hostPath": "/mnt/nvme0/kvferry",
        }
        result["tier"] = {"enabled": True, "cpuGiB": per_worker, "volumes": [volume]}
    return result


def _role(candidate: Candidate, replicas: int, per_pod: int, cpu_gib: int) -> dict[str, Any]:
    gpus = 0 if candidate.gpu.is_cpu else candidate.layout.num_gpus
    cpus, memory_gib = _CPU_NODE if candidate.gpu.is_cpu else (_CPUS_PER_GPU * gpus, _MEMORY_GIB_PER_GPU * gpus)
    return {
        "replicas": replicas,
        "workersPerPod": per_pod,
        "gpusPerWorker": gpus,
        "cpusPerWorker": cpus,
        "memoryGiB": memory_gib * per_pod + cpu_gib,
    }


def serve(
    candidate: Candidate, question: Question, *, model_path: str, served_name: str, settings: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a file for `serve deploy`. `settings` are `section.key=value`, over everything else.

    Raises ConfigError for a setting that kvferry's configuration does not take.
    """
    gpus = 0 if candidate.gpu.is_cpu else candidate.layout.num_gpus
    cpus = _CPU_NODE[0] if candidate.gpu.is_cpu else _CPUS_PER_GPU * gpus

    def role(name: str, replicas: int) -> dict[str, Any]:
        if not replicas:
            return {"replicas": 0}
        return {"replicas": 1, "num_cpus": cpus, "num_gpus": gpus, "resources": {f"kvferry_{name}": 1}}

    config = configuration_of(candidate, question, model_path=model_path, served_name=served_name) | {
        "prefill": role("prefill", candidate.num_prefill),
        "decode": role("decode", candidate.num_decode),
        "gateway": {"replicas": 1, "num_cpus": 1, "resources": {"kvferry_gateway": 1}},
        "membership": {"endpoints": _ENDPOINTS},
    }
    configuration.put_flags(config, settings)
    configuration.parse(config)
    counts = {"PrefillWorker": candidate.num_prefill, "DecodeWorker": candidate.num_decode}
    deployments: list[dict[str, Any]] = [
        {"name": name, "num_replicas": count} for name, count in counts.items() if count
    ]
    expected = {"prefill": candidate.num_prefill, "decode": candidate.num_decode}
    deployments.append({"name": "Gateway", "num_replicas": 1, "user_config": expected})
    return {
        "proxy_location": "Disabled",
        "http_options": {"host": "127.0.0.1"},
        "applications": [
            {
                "name": "kvferry",
                "import_path": "kvferry.app:application",
                "route_prefix": None,
                "args": {"model_folder": model_path, "config": config},
                "deployments": deployments,
            }
        ],
    }


def vllm_arguments(candidate: Candidate, question: Question, *, role: str = "") -> list[str]:
    """Return arguments of `vllm serve` after the model, for an engine of `role`: prefill, decode, or both (empty)."""
    layout = candidate.layout
    arguments = [
        "--tensor-parallel-size", str(layout.tensor_parallel_size),
        "--max-model-len", str(question.demand.context_tokens),
        "--kv-cache-dtype", question.kv_cache_dtype,
        "--block-size", str(question.block_size),
        "--max-num-seqs", str(max_num_seqs(candidate, question)),
        "--max-num-batched-tokens", str(question.max_num_batched_tokens),
    ]  # fmt: skip
    if not candidate.gpu.is_cpu:
        arguments += ["--gpu-memory-utilization", f"{question.gpu_memory_utilization:g}"]
    if layout.pipeline_parallel_size > 1:
        arguments += ["--pipeline-parallel-size", str(layout.pipeline_parallel_size)]
    if layout.expert_parallel:
        arguments.append("--enable-expert-parallel")
    if role:
        kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
        transfer = {"kv_connector": "NixlConnector", "kv_role": kv_role}
        arguments += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    elif question.cpu_tier_bytes:
        per_engine = question.cpu_tier_bytes / _GIB / max(1, candidate.gpu.gpus_per_node // layout.num_gpus)
        arguments += ["--kv-offloading-size", f"{per_engine:g}", "--kv-offloading-backend", "native"]
    return arguments


def vllm_commands(candidate: Candidate, question: Question, *, model_path: str) -> str:
    """Return shell commands with a comment each that says how many engines of a kind to start."""
    kinds = {"": candidate.num_decode}
    if candidate.disaggregated:
        kinds = {"prefill": candidate.num_prefill, "decode": candidate.num_decode}
    lines = []
    for role, count in kinds.items():
        lines.append(
            f"# {count} x{f' {role}' if role else ''}, {candidate.layout.num_gpus} x {candidate.gpu.title} each"
        )
        arguments = vllm_arguments(candidate, question, role=role)
        lines.append(shlex.join(["vllm", "serve", model_path, *arguments]))
    return "\n".join(lines) + "\n"
