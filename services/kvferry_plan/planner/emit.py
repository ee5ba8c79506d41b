"""Files and commands that run a plan: values of the chart, a file for `serve deploy`, or `vllm serve`."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import PurePosixPath
from typing import Any, Final

from kvferry import config as configuration
from kvferry_plan.planner.question import Question
from kvferry_plan.planner.sizing import Candidate

_CPUS_PER_GPU: Final = 8
_MEMORY_GIB_PER_GPU: Final = 64  # of a pod, without its CPU tier: engines' host memory and the loading of weights
_CPU_NODE: Final = (32, 128)  # CPUs and GiB of a worker on a CPU node
_GIB: Final = 1 << 30
_FP8_PAGES: Final = ("fp8", "fp8_e4m3", "fp8_e5m2")
_HUB_REVISION: Final = "COMMIT"  # placeholder
_CLAIM_SHARE: Final = 1.05  # of the weights: tokenizer, configuration and the file system's own
# As the chart mounts them, and as deploy/ray/README.md asks for them.
_ENDPOINTS: Final = ["etcd-0.etcd:2379", "etcd-1.etcd:2379", "etcd-2.etcd:2379"]


def obstacles(candidate: Candidate, question: Question) -> list[str]:
    """Return why kvferry would not serve this candidate, although vLLM would; empty: it does."""
    found = []
    if candidate.layout.pipeline_parallel_size > 1:
        found.append("kvferry's engines have one pipeline stage")
    if candidate.layout.expert_parallel:
        found.append("kvferry has no expert parallelism")
    own_type = question.model.geometry.dtype
    if question.kv_dtype not in (own_type, *_FP8_PAGES):
        found.append(
            f"kvferry serves KV pages of the model's own type, {own_type}, and of 8-bit floats without scales of their "
            f"own, not in {question.kv_dtype}"
        )
    architecture = question.model.geometry.architecture
    if question.cpu_tier_bytes and question.tier_architectures and architecture not in question.tier_architectures:
        found.append(
            f"tiers keep no pages of {architecture or question.model.geometry.model_type} (docs/user/models.md)"
        )
    return found


def configuration_of(candidate: Candidate, question: Question, *, model_path: str, served_name: str) -> dict[str, Any]:
    """Return the sections `model` and `engine` of kvferry's configuration."""
    engine: dict[str, Any] = {"device": "cpu" if candidate.gpu.is_cpu else "gpu"}
    if candidate.layout.tensor_parallel_size > 1:
        engine["tensor_parallel_size"] = candidate.layout.tensor_parallel_size
    if question.model.geometry.checkpoint_kv_dtype or question.kv_dtype != question.model.geometry.dtype:
        engine["kv_cache_dtype"] = question.kv_dtype
    engine["block_size"] = question.block_size
    engine["max_num_seqs"] = max_num_seqs(candidate, question)
    if candidate.gpu.is_cpu:
        engine["kv_cache_gib"] = max(1, math.floor(candidate.memory.kv_bytes / _GIB))
    else:
        engine["gpu_memory_utilization"] = question.gpu_memory_utilization
        engine["max_num_batched_tokens"] = question.max_num_batched_tokens
    model: dict[str, Any] = {"path": model_path, "served_name": served_name}
    if cast_to := _cast_to(candidate, question):
        model["dtype"] = cast_to
    return {"model": model | {"max_model_len": question.demand.context_tokens}, "engine": engine}


def _cast_to(candidate: Candidate, question: Question) -> str:
    # Return the type that engines have to cast the checkpoint's weights to; empty: they are as they are.
    model = question.model
    there = model.checkpoint_weights
    return "" if candidate.gpu.is_cpu or there in ("", model.weights) or model.needs_other_checkpoint else model.weights


def max_num_seqs(candidate: Candidate, question: Question) -> int:
    """Return the largest batch that KV pages and TPOT allow: more would be preempted, or miss the objective."""
    return max(1, min(candidate.max_batch_of_pages, candidate.max_batch_of_tpot, question.max_num_seqs))


def values(candidate: Candidate, question: Question, *, model_path: str, served_name: str) -> dict[str, Any]:
    """Return values for `helm install`. `model_path` is a hub id, or the absolute path of a folder of every node."""
    cpu_gib = math.floor(question.cpu_tier_bytes / _GIB)
    per_node = _engines_of_node(candidate)
    roles = {
        name: _role(candidate, replicas, _engines_of_pod(candidate, question, replicas), cpu_gib)
        for name, replicas in _replicas(candidate).items()
    }
    result: dict[str, Any] = {"image": {"registry": "registry.example"}}
    if not candidate.disaggregated:
        result["aggregated"] = True
        roles["prefill"] = {"replicas": 0}
    config = configuration_of(candidate, question, model_path=model_path, served_name=served_name)
    result["config"] = config
    folder = PurePosixPath(model_path)
    if folder.is_absolute():
        result["model"] = {"volume": {"hostPath": str(folder.parent)}}
        config["model"]["path"] = f"/models/{folder.name}"
    else:
        config["model"]["revision"] = _HUB_REVISION
        result["model"] = _hub_model(question)
    result["roles"] = roles
    if question.volume_tier_bytes:
        per_worker = max(1, cpu_gib // per_node)
        volume = {
            "name": "nvme0",
            "capacityGiB": max(1, math.floor(question.volume_tier_bytes / _GIB)),
            # One full write of the volume a day, which data-centre NVMe endures for five years.
            "writeGiBPerDay": max(1, math.floor(question.volume_tier_bytes / _GIB)),
            "hostPath": "/mnt/nvme0/kvferry",
        }
        result["tier"] = {"enabled": True, "cpuGiB": per_worker, "volumes": [volume]}
    objective = question.demand.ttft_s
    thresholds = {"KvferrySlowFirstTokensQueued": objective, "KvferrySlowFirstTokensUnqueued": objective}
    result["monitoring"] = {"alerts": {"thresholds": thresholds}}
    return result


def notes(candidate: Candidate, question: Question, *, model_path: str) -> list[str]:
    """Return what has to be filled in of `values`, and what follows from how pods are made; lines for a comment."""
    found = ["Fill in before helm install:", "  image.registry: where kvferry's image lies"]
    if not PurePosixPath(model_path).is_absolute():
        found += [
            f"  config.model.revision: the commit of {model_path} to serve",
            "  model.weights.claim: a storage class whose claims all pods can mount (ReadWriteMany)",
            "  model.hubToken: make this secret, or remove the line if the hub asks for no token",
        ]
    else:
        found.append(f"  model.volume: {model_path} has to be on every node, or on a claim")
    if question.volume_tier_bytes:
        found.append("  tier.volumes: a folder of each node, with subfolders prefill and decode")
    if _has_rdma(candidate):
        found += [
            "  roles.*.extraResources: the name that the nodes' device plugin gives to RDMA devices, one for each GPU",
            "  roles.*.env: UCX_NET_DEVICES if not all of them are to be used. Without RDMA remove rdma, env and",
            f"    extraResources: each decode GPU then gets {candidate.transfer_bytes_s / 1e9:.3g} GB/s of KV over TCP",
        ]
    reserved = sum(
        math.ceil(replicas / per_pod) * per_pod * candidate.layout.num_gpus
        for replicas in _replicas(candidate).values()
        for per_pod in (_engines_of_pod(candidate, question, replicas),)
    )
    if reserved > candidate.num_gpus:
        found.append(
            f"Pods reserve {reserved} GPUs, {reserved - candidate.num_gpus} more than planned: with node-local volumes "
            "each takes a whole node."
        )
    return found


def _replicas(candidate: Candidate) -> dict[str, int]:
    counts = {"prefill": candidate.num_prefill, "decode": candidate.num_decode}
    return {name: count for name, count in counts.items() if count}


def _engines_of_node(candidate: Candidate) -> int:
    return max(1, candidate.gpu.gpus_per_node // candidate.layout.num_gpus)


def _engines_of_pod(candidate: Candidate, question: Question, replicas: int) -> int:
    most = min(replicas, _engines_of_node(candidate))
    if question.volume_tier_bytes:
        return most  # pods of one role are on different nodes then
    return next(count for count in range(most, 0, -1) if replicas % count == 0)


def _has_rdma(candidate: Candidate) -> bool:
    return candidate.disaggregated and candidate.num_nodes > 1 and not candidate.gpu.is_cpu


def _hub_model(question: Question) -> dict[str, Any]:
    size_gib = math.ceil(question.model.weight_bytes(question.assumptions) * _CLAIM_SHARE / _GIB) + 1
    return {
        "weights": {"enabled": True, "claim": {"sizeGiB": size_gib}},
        "hubToken": {"secretName": "hub-token"},
    }


def _role(candidate: Candidate, replicas: int, per_pod: int, cpu_gib: int) -> dict[str, Any]:
    gpus = 0 if candidate.gpu.is_cpu else candidate.layout.num_gpus
    cpus, memory_gib = _CPU_NODE if candidate.gpu.is_cpu else (_CPUS_PER_GPU * gpus, _MEMORY_GIB_PER_GPU * gpus)
    role: dict[str, Any] = {
        "replicas": replicas,
        "workersPerPod": per_pod,
        "gpusPerWorker": gpus,
        "cpusPerWorker": cpus,
        "memoryGiB": memory_gib * per_pod + cpu_gib,
    }
    if _has_rdma(candidate):
        kind = "rocm" if candidate.gpu.compute_capability.startswith("gfx") else "cuda"
        role["rdma"] = True
        role["extraResources"] = {"rdma/ib": gpus * per_pod}
        role["env"] = {"UCX_TLS": f"rc,{kind}_copy,{kind}_ipc,tcp"}
    return role


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
    cast_to = _cast_to(candidate, question)
    if cast_to:
        arguments += ["--dtype", cast_to]
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
