"""The chart: valid everywhere, the same as before, closed against mistakes, and every value where it belongs."""

from __future__ import annotations

import copy
import json
import re
import resource
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry import __version__, model_folder
from kvferry import config as configuration
from support.chart import chart_rules, helm_check, newest_helm, one, rendering, write_values
from support.kuberay_model import written_back
from support.waiting import PATIENCE_S

merged = helm_check.merged

VALUES = yaml.safe_load((helm_check.CHART / "values.yaml").read_text())
SCHEMA = json.loads((helm_check.CHART / "values.schema.json").read_text())


def at(path: str, value: Any) -> dict[str, Any]:
    """Nested mappings that hold one value: `a.b` -> {a: {b: value}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def leaves(values: dict[str, Any], path: str = "") -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}"


# Examples


@pytest.mark.parametrize("major", [3, 4])
@pytest.mark.parametrize("example", [None, *helm_check.examples()], ids=lambda each: each.stem if each else "values")
def test_an_example_is_clean_valid_and_as_before(example: Path | None, major: int) -> None:
    newest_helm()
    found = [helm for helm in helm_check.helms() if helm.major == major]
    if not found:
        pytest.skip(f"no Helm {major} here")
    assert helm_check._check_example(found[0], example, update=False) == []


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    assert helm_check._check_manifests(newest_helm(), update=False) == []


def test_the_chart_s_version_is_the_package_s() -> None:
    chart = yaml.safe_load((helm_check.CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert f"ray[serve]=={VALUES['ray']['version']}" in (helm_check.ROOT / "pyproject.toml").read_text()


# The check sees faults


@pytest.fixture(scope="module")
def trial() -> list[dict[str, Any]]:
    return rendering(helm_check.EXAMPLES / "cpu-trial.yaml")


def spoil(document: dict[str, Any], path: list[Any], value: Any) -> dict[str, Any]:
    spoilt = copy.deepcopy(document)
    here = spoilt
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return spoilt


@pytest.mark.parametrize(
    ("kind", "path", "value", "message"),
    [
        ("StatefulSet", ["kind"], "StatefullSet", "no schema knows apps/v1 StatefullSet"),
        ("PodDisruptionBudget", ["apiVersion"], "policy/v3", "no schema knows policy/v3"),
        ("StatefulSet", ["spec", "replcas"], 3, "replcas"),
        ("StatefulSet", ["spec", "replicas"], "three", "three"),
        ("RayService", ["kind"], "RayServices", "no schema knows ray.io/v1 RayServices"),
        ("RayService", ["spec", "serveConfig"], "", "serveConfig"),
        ("RayService", ["spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplica"], 1, "minReplica"),
        (
            "RayService",
            ["spec", "rayClusterConfig", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "imagePullPolicy"],
            1,
            "imagePullPolicy",
        ),
        (
            "RayService",
            ["spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "tolerance"],
            [],
            "tolerance",
        ),
    ],
)
def test_a_spoilt_object_is_seen(
    trial: list[dict[str, Any]], kind: str, path: list[Any], value: Any, message: str
) -> None:
    with pytest.raises(helm_check.CheckFailed, match=re.escape(message)):
        helm_check.validate(spoil(one(trial, kind), path, value))


GROUPS = ["spec", "rayClusterConfig", "workerGroupSpecs"]
HEAD = ["spec", "rayClusterConfig", "headGroupSpec", "template", "spec", "containers", 0]
POD = [*GROUPS, 0, "template", "spec"]


@pytest.mark.parametrize(
    ("kind", "path", "value", "fault"),
    [
        ("RayService", [*HEAD, "ports"], [{"name": "gcs-server"}], "has no port named serve"),
        ("RayService", [*GROUPS, 0, "scaleStrategy"], None, "group prefill has no scaleStrategy"),
        ("RayService", [*POD, "initContainers", 0, "resources"], None, "container model has no resources"),
        ("RayService", [*POD, "containers", 0, "env", 0, "value"], "", "has an empty value"),
        ("RayService", [*POD, "containers", 0, "resources", "requests", "cpu"], 2, "cpu is 2, which is written back"),
        ("RayService", [*POD, "containers", 0, "resources", "requests", "cpu"], "0.5", "cpu is '0.5'"),
        ("RayService", [*POD, "containers", 0, "resources", "limits", "memory"], "1024Mi", "memory is '1024Mi'"),
        ("RayService", [*POD, "volumes"], [{"name": "v", "ephemeral": {"volumeClaimTemplate": {}}}], "no metadata"),
        ("RayService", ["spec", "rayClusterConfig", "enableInTreeAutoscaling"], True, "autoscaler is on"),
        ("RayService", [*GROUPS, 0, "minReplicas"], 0, "group prefill has several counts"),
        ("RayService", [*POD, "terminationGracePeriodSeconds"], 120, "drains 150 s of 120 s of grace"),
        ("RayService", [*POD, "containers", 0, "env"], [{"name": "A"}], "drains None s"),
        (
            "RayService",
            [*POD, "containers", 0, "securityContext", "capabilities", "add"],
            ["IPC_LOCK"],
            "adds ['IPC_LOCK'], which has no effect",
        ),
        ("PodDisruptionBudget", ["spec", "minAvailable"], "50%", "needs an integer minAvailable"),
        ("PodDisruptionBudget", ["spec", "maxUnavailable"], 1, "needs an integer minAvailable"),
        ("StatefulSet", ["spec", "persistentVolumeClaimRetentionPolicy"], None, "does not say whether its claims"),
        (
            "StatefulSet",
            ["spec", "persistentVolumeClaimRetentionPolicy", "whenDeleted"],
            "Delete",
            "Secret/trial-etcd-users and the claims of StatefulSet/trial-etcd do not go together",
        ),
        ("Secret", ["metadata", "annotations"], {}, "Secret/trial-keys is part of the release's manifest"),
        (
            "StatefulSet",
            ["spec", "template", "spec", "containers", 0, "image"],
            "etcd-development/etcd:v3.5.21",
            "is in no registry",
        ),
    ],
)
def test_a_fault_that_no_schema_states_is_seen(
    trial: list[dict[str, Any]], kind: str, path: list[Any], value: Any, fault: str
) -> None:
    assert chart_rules.faults(trial) == []
    spoilt = [spoil(each, path, value) if each["kind"] == kind else each for each in trial]
    if value is None:
        for each in spoilt:
            if each["kind"] == kind:
                here = each
                for part in path[:-1]:
                    here = here[part]
                del here[path[-1]]
    assert any(fault in each for each in chart_rules.faults(spoilt)), chart_rules.faults(spoilt)


def test_an_operator_known_by_its_namespace_is_a_fault(trial: list[dict[str, Any]]) -> None:
    policy = one(trial, "NetworkPolicy", "trial-operator")
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kuberay-system"}}}]
    spoilt = spoil(policy, ["spec", "ingress", 0, "from"], peers)
    assert chart_rules.faults([spoilt]) == [
        "NetworkPolicy/trial-operator: the operator is known by its namespace alone"
    ]


@pytest.mark.parametrize(
    ("gib", "becomes"), [(0.5, "512Mi"), (1, "1Gi"), (1.5, "1536Mi"), (1400, "1400Gi"), (2048, "2Ti"), (0.0001, "1Mi")]
)
def test_quantities_are_as_kubernetes_writes_them(gib: float, becomes: str) -> None:
    values = merged(at("model.cache.sizeGiB", gib), at("roles.decode.cpusPerWorker", 0.5))
    rendered = rendering(values)
    group = one(rendered, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]
    (cache,) = (each for each in group["volumes"] if each["name"] == "cache")
    assert cache["emptyDir"]["sizeLimit"] == becomes
    assert group["containers"][0]["resources"]["requests"]["cpu"] == "500m"
    assert chart_rules.faults(rendered) == []


def test_keys_and_certificates_are_never_in_golden_files() -> None:
    text = "".join(file.read_text() for file in helm_check.GOLDEN.glob("*.yaml"))
    assert "BEGIN" not in text
    assert not re.search(r"kvf_[A-Za-z0-9_-]{20}", text)


# Refusals

GPU = {"config": {"engine": {"device": "gpu"}}}
VOLUME = {"name": "nvme0", "capacityGiB": 10, "hostPath": "/mnt/nvme0"}
TIER = {"tier": {"enabled": True, "volumes": [VOLUME]}}
PREFILL_GPU = merged(GPU, {"roles": {"prefill": {"gpusPerWorker": 1}, "decode": {"gpusPerWorker": 1}}})

ON_A_RAY_THAT_IS_THERE = merged(
    at("ray", {"mode": "existing", "existing": {"dashboardAddress": "http://ray:8265"}}),
    at("config.model.path", "/models/m"),
    at("model.volume.claimName", "m"),
    at("networkPolicy.rayFrom", [{"podSelector": {}}]),
)
WEIGHTS = merged(at("model.weights.enabled", True), at("config.model.revision", "v1"))
CHAT: dict[str, Any] = {
    "name": "chat",
    "model": {"path": "/models/chat", "served_name": "Chat", "aliases": ["best"]},
    "engine": {"tensor_parallel_size": 2},
}
SMALL: dict[str, Any] = {"name": "small", "model": {"path": "/models/small"}}


def models(*entries: dict[str, Any]) -> dict[str, Any]:
    """Values with entries of config.models, by default two, beside the default model."""
    return at("config.models", list(entries or (CHAT, SMALL)))


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


def drafted(folder: str = "/models/d") -> dict[str, Any]:
    """Values with a draft model of all models."""
    return at("config.engine.args.speculative_config", {"method": "draft_model", "model": folder})


MODELS = merged(models(), at("config.model.path", "/models/m"), at("model.volume.claimName", "m"))
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((helm_check.CHART / "files" / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
EXTERNAL = {"name": "keys", "entries": {"keys.yaml": {"key": "k"}}}

REFUSALS: list[tuple[dict[str, Any], str]] = [
    (at("roles.prefill.replicas", 0), "decode workers need prefill workers. Say aggregated: true"),
    (at("aggregated", True), "with aggregated there are no prefill workers"),
    (GPU, "a worker has as many GPUs as its engine uses"),
    (merged(PREFILL_GPU, at("config.engine.tensor_parallel_size", 2)), "tensor_parallel_size is 2"),
    (
        merged(PREFILL_GPU, at("roles.decode.engine.tensor_parallel_size", 2)),
        "roles.decode.gpusPerWorker is 1 and roles.decode.engine.tensor_parallel_size is 2",
    ),
    (at("roles.decode.gpusPerWorker", 1), "config.engine.device is cpu"),
    (merged(TIER, at("tier.shmGiB", 3), at("tier.cpuGiB", 4)), "tier.shmGiB is 3 and the CPU tiers of a prefill pod"),
    (
        merged(TIER, at("tier.shmGiB", 3), at("tier.cpuGiB", 2), at("roles.decode.workersPerPod", 2)),
        "CPU tiers of a decode pod take 4 GiB (workersPerPod 2 x tier.cpuGiB 2)",
    ),
    (merged(TIER, at("tier.cpuGiB", 9)), "roles.prefill.memoryGiB is 8 and /dev/shm of the pod"),
    (at("tier.enabled", True), "tier.volumes is empty: name a volume, or say tier.cpuOnly: true"),
    (merged(TIER, at("tier.cpuOnly", True)), "tier.cpuOnly is true: it needs"),
    (at("tier.volumes", [VOLUME]), "tier.volumes are named and tier.enabled is false"),
    (merged(at("tier", {"enabled": True, "cpuOnly": True, "encryptionKeysSecret": "x"})), "no tier.volumes to seal"),
    (at("tier", {"enabled": True, "volumes": [{"name": "a", "capacityGiB": 1}]}), "has 0 of hostPath"),
    (at("tier", {"enabled": True, "volumes": [{**VOLUME, "claimName": "c"}]}), "has 2 of hostPath"),
    (at("tier", {"enabled": True, "volumes": [VOLUME, VOLUME]}), 'tier.volumes has two volumes named "nvme0"'),
    (at("model.volume", {"claimName": "a", "hostPath": "/b"}), "model.volume has both claimName and hostPath"),
    (at("model.volume", {"claimName": "a"}), "the model's folder lies below it"),
    (at("config.model.path", "/models/m"), "model.volume must say"),
    (at("config.model.path", "default"), "name a hub id or a folder"),
    (at("auth.generateKey", False), "gateways would serve whoever calls"),
    (at("gateway.tls.requireClientCertificates", True), "needs gateway.tls.secretName"),
    (at("gateway", {"mode": "serve", "autoscaling": {"enabled": True}}), "Kubernetes cannot scale Serve replicas"),
    (at("gateway.autoscaling", {"enabled": True, "minReplicas": 9}), "minReplicas is 9, more than maxReplicas 8"),
    (at("gateway.gatewayApi.enabled", True), "needs gateway.gatewayApi.parentRefs"),
    (at("gateway.grpcPort", 8000), "gateway.httpPort and gateway.grpcPort are both 8000"),
    (at("ray.mode", "existing"), "needs ray.existing.dashboardAddress"),
    (
        merged(
            at("ray", {"mode": "existing", "existing": {"dashboardAddress": "http://h"}}), at("gateway.mode", "serve")
        ),
        "ray.mode existing needs gateway.mode: deployment",
    ),
    (at("ray.gang.queue", "q"), "ray.gang.queue needs ray.gang.scheduler"),
    (at("ray.redis.passwordSecret", "q"), "ray.redis.passwordSecret needs ray.redis.address"),
    (at("etcd.endpoints", ["a:1"]), "run one, or use the one that is there"),
    (at("etcd.enabled", False), "members must find each other somewhere"),
    (at("etcd.external.user", "u"), "etcd.external is for etcd.enabled: false"),
    (at("etcd", {"enabled": False, "endpoints": ["a:1"], "external": {"user": "u"}}), "go together"),
    (
        merged(at("monitoring.serviceMonitor.enabled", True), at("auth.keysSecret", "k")),
        "monitoring needs monitoring.keySecret",
    ),
    (
        merged(
            at("monitoring.serviceMonitor.enabled", True),
            at("gateway.tls", {"secretName": "t", "requireClientCertificates": True}),
        ),
        "monitoring cannot ask gateways that require client certificates",
    ),
    (
        at("monitoring", {"members": {"enabled": True}, "serviceMonitor": {"enabled": True}}),
        "gateways would be counted twice",
    ),
    (at("roles.decode.env.UCX_TLS", "rc,cuda_copy"), 'roles.decode.env.UCX_TLS is "rc,cuda_copy" and has no tcp'),
    (at("roles.decode.extraResources", {"a/b": "1000m"}), 'roles.decode.extraResources.a/b is "1000m": write it with'),
    (
        merged(at("gateway.mode", "serve"), at("gateway.podDisruptionBudget.maxUnavailable", "50%")),
        'gateway.podDisruptionBudget.maxUnavailable is "50%": with gateway.mode serve say a number',
    ),
    (
        merged(at("gateway.mode", "serve"), at("gateway.resources.limits.memory", "4096Mi")),
        'gateway.resources.limits.memory is "4096Mi": write it with the largest unit',
    ),
    (at("model.download.resources.limits.memory", "1.5Gi"), "model.download.resources.limits.memory"),
    (
        at("ray", {"mode": "existing", "existing": {"dashboardAddress": "http://h"}}),
        "nothing downloads a model to that",
    ),
    (
        merged(
            at("ray", {"mode": "existing", "existing": {"dashboardAddress": "http://h"}}),
            at("config.model.path", "/models/m"),
            at("model.volume.claimName", "m"),
        ),
        "ray.mode existing needs networkPolicy.rayFrom",
    ),
    (at("networkPolicy.rayFrom", [{"podSelector": {}}]), "networkPolicy.rayFrom is for ray.mode: existing"),
    (at("image.registry", ""), "etcd.image.registry and image.registry are empty: etcd-development/etcd is in no"),
    (at("config.pools", {"finance": {}}), "pods for the default pool only, so theirs would never start"),
    (
        merged(ON_A_RAY_THAT_IS_THERE, at("config.models", [{"name": "b", "model": {"path": "acme/b"}}])),
        'config.models[0].model.path is "acme/b": gateways and workers read each model below model.volume.mountPath',
    ),
    (
        merged(ON_A_RAY_THAT_IS_THERE, at("config.models", [{"name": "b"}])),
        'config.models[0].model.path is "": gateways and workers read',
    ),
    (models(), 'config.models[0].model.path is the folder "/models/chat": model.volume must say with claimName'),
    (
        merged(models(), at("config.model.path", "HuggingFaceTB/x"), at("model.volume.claimName", "m")),
        "the model's folder lies below it",
    ),
    (
        merged(WEIGHTS, models()),
        'config.models[0].model.path is "/models/chat": with model.weights it is the folder of a model that the volume '
        "is filled with, /models/OWNER--NAME--REVISION, of model.weights.also",
    ),
    (
        merged(
            WEIGHTS,
            models({"name": "b"}),
            at("config.engine.kind", "sim"),
            at("roles", {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}),
        ),
        "model.weights.enabled is true and there is no default model",
    ),
    (at("roles", {"prefill": {"replicas": 0}, "decode": {"replicas": 0}}), "there is no model to serve"),
    (at("roles.decode.replicas", 0), "roles.decode.replicas is 0: decode workers answer, so a model needs one"),
    (merged(MODELS, at("config.models", [{"name": "-a"}])), 'config.models[0].name is "-a": groups of pods are called'),
    (merged(MODELS, at("config.models", [{"name": "A"}])), 'config.models[0].name is "A": groups of pods'),
    (merged(MODELS, at("config.models", [{"name": "a" * 32}])), f'config.models[0].name is "{"a" * 32}": groups'),
    (merged(MODELS, at("config.models", [{"name": "default"}])), "at most 31, and not default or other"),
    (
        merged(MODELS, at("config.models", [CHAT, {**CHAT, "model": {"path": "/models/x", "served_name": "x"}}])),
        'config.models[1].name is "chat", the name of an entry before it',
    ),
    (
        merged(MODELS, at("config.models", [CHAT, {"name": "x", "model": {"path": "/models/x", "aliases": ["best"]}}])),
        'config.models[1].model would be asked for as "best", as is config.models[0]: each name leads to one model',
    ),
    (
        merged(MODELS, at("config.models", [{"name": "m", "model": {"path": "/models/x"}}])),
        'config.models[0].model would be asked for as "m", as is config.model:',
    ),
    (
        merged(MODELS, at("config.models", [{"name": f"m{number}"} for number in range(17)])),
        "config.models and config.pools have 17 entries in all: 16 is the limit",
    ),
    (
        merged(MODELS, at("config.models", [{**CHAT, "decode": {"replicas": 2}}])),
        "config.models[0].decode is for ray.mode: existing; of the pods that this chart makes say it in "
        "roles.models.chat.decode",
    ),
    (
        merged(MODELS, at("roles.models.chat.decode.replicas", 0)),
        "roles.models.chat.decode.replicas is 0: decode workers answer, so a model needs one. Or remove its entry",
    ),
    (
        merged(MODELS, at("config.model.canary", {"chad": 5})),
        'config.model.canary names "chad", which is no entry of config.models',
    ),
    (
        merged(MODELS, at("config.model.canary", {"default": 5})),
        "config.model.canary names the model itself: what is left of 100 per cent is its own",
    ),
    (
        merged(MODELS, at("config.models", [{**CHAT, "model": {**CHAT["model"], "canary": {"chat": 5}}}])),
        "config.models[0].model.canary names the model itself",
    ),
    (
        merged(MODELS, at("config.model.canary", {"chat": 60, "small": 40.5})),
        "config.model.canary: the shares are over 100 per cent in all",
    ),
    (
        merged(MODELS, at("roles.models.chad.decode.replicas", 2)),
        "roles.models.chad: there is no such entry of config.models (chat, small)",
    ),
    (at("roles.models.chat.decode.replicas", 2), "there is no such entry of config.models (none)"),
    (
        merged(ON_A_RAY_THAT_IS_THERE, models(), at("roles.models.chat.decode.replicas", 2)),
        "roles.models.chat is for ray.mode: rayservice",
    ),
    (
        merged(MODELS, TIER),
        "config.tier.blocks_per_chunk must be set where models share tier.volumes (default, chat, small)",
    ),
    (
        merged(MODELS, GPU, at("roles.prefill.gpusPerWorker", 1), at("roles.decode.gpusPerWorker", 1)),
        "roles.models.chat.prefill.gpusPerWorker is 1 and config.models[0].engine.tensor_parallel_size is 2",
    ),
    (
        merged(MODELS, at("roles.models.small.decode.env.UCX_TLS", "rc")),
        'roles.models.small.decode.env.UCX_TLS is "rc" and has no tcp',
    ),
    (
        merged(MODELS, at("roles.models.small.decode.extraVolumes", [{"name": "shm"}])),
        'roles.models.small.decode.extraVolumes name "shm" twice',
    ),
    (at("config.model.path", "s3://bucket/m"), 'config.model.path is "s3://bucket/m": models are not read from URLs'),
    (
        drafted("acme/d"),
        'config.engine.args.speculative_config.model is "acme/d": workers download no draft model. Name its folder '
        "below model.volume.mountPath, /models, or fill one with model.weights.also",
    ),
    (drafted(), 'model is "/models/d": workers download no draft model'),
    (
        merged(models(SMALL), at("config.model.path", "/models/m"), at("model.volume.claimName", "m"), drafted("/m/d")),
        'config.engine.args.speculative_config.model is "/m/d": workers download no draft model',
    ),
    (
        merged(
            at("config.model.path", "/models/m"),
            at("model.volume.claimName", "m"),
            models({**SMALL, "engine": {"args": drafted("d")["config"]["engine"]["args"]}}),
        ),
        'config.models[0].engine.args.speculative_config.model is "d": workers download no draft model',
    ),
    (
        merged(WEIGHTS, drafted()),
        'config.engine.args.speculative_config.model is "/models/d": with model.weights it is the folder of a model '
        "that the volume is filled with, /models/OWNER--NAME--REVISION, of model.weights.also",
    ),
    (
        merged(ON_A_RAY_THAT_IS_THERE, drafted("acme/d")),
        'config.engine.args.speculative_config.model is "acme/d" and ray.mode is existing: nothing downloads a model',
    ),
    (
        merged(WEIGHTS, at("config.engine.args.speculative_config", {"method": "eagle3"})),
        "config.engine.args.speculative_config.model is missing: the folder of the draft model or EAGLE head",
    ),
    (
        at("roles.prefill.engine.args.speculative_config", NGRAM),
        "roles.prefill.engine.args.speculative_config: n-grams stand in roles.decode.engine.args, where no draft model "
        "is; a draft model or EAGLE head is of both roles, in engine.args of config or of an entry of config.models",
    ),
    (
        at("roles.decode.engine.args.speculative_config", {"method": "draft_model", "model": "/models/d"}),
        "roles.decode.engine.args.speculative_config: n-grams stand in roles.decode.engine.args",
    ),
    (
        merged(
            at("config.model.path", "/models/m"),
            at("model.volume.claimName", "m"),
            drafted(),
            at("roles.decode.engine.args.speculative_config", NGRAM),
        ),
        "roles.decode.engine.args.speculative_config: n-grams stand in roles.decode.engine.args, where no draft",
    ),
    (
        at("config.model.chat_template", "chat.jinja"),
        'config.model.chat_template is "chat.jinja": name an absolute path',
    ),
    (
        merged(MODELS, at("config.models", [{**CHAT, "model": {**CHAT["model"], "chat_template": "./c.jinja"}}])),
        'config.models[0].model.chat_template is "./c.jinja": name an absolute path',
    ),
    (
        at("config.gateway.images.max_per_request", 4),
        "gateway.resources.limits.memory is 4Gi and config.gateway.images is set: a gateway may take 5242 MiB",
    ),
    (
        merged(WEIGHTS, at("config.model.path", "/models/m")),
        'model.weights.enabled is true and config.model.path is "/models/m": the volume is filled with a model of',
    ),
    (merged(WEIGHTS, at("model.volume.claimName", "c")), "model.volume says where the model is: name one of them"),
    (at("model.weights.enabled", True), "model.weights needs a revision of HuggingFaceTB/SmolLM2-135M-Instruct"),
    (merged(WEIGHTS, at("config.model.revision", "refs/pr/1")), 'and it is "refs/pr/1": letters, digits'),
    (
        merged(WEIGHTS, at("model.weights.also", [{"path": "a/b", "revision": "v1"}] * 2)),
        "model.weights would fill a--b--v1 twice",
    ),
    (
        merged(WEIGHTS, at("model.download.env.HTTPS_PROXY", "http://proxy:3128/")),
        'model.download.env.HTTPS_PROXY is "http://proxy:3128/" and model.weights.egress.ports lacks 3128',
    ),
    (at("model.weights.also", [{"path": "a/b", "revision": "v1"}]), "model.weights.also names models and"),
    (merged(WEIGHTS, at("model.weights.mountPath", "/tmp/models")), 'model.weights.mountPath is "/tmp/models"'),
    (at("roles.decode.dnsPolicy", "Default"), "roles.decode.dnsPolicy is for roles.decode.hostNetwork: true"),
    (
        merged(at("ray", {"mode": "existing"}), at("roles.decode.hostNetwork", True)),
        "roles.decode.hostNetwork is true and ray.mode is existing: that Ray's pods are not this chart's",
    ),
    (
        merged(at("roles.decode.hostNetwork", True), at("roles.decode.affinity", {"nodeAffinity": {}})),
        "needs a required podAntiAffinity with topologyKey kubernetes.io/hostname",
    ),
    (
        at("roles.decode.hostNetwork", True),
        "roles.decode.hostNetwork is true and networkPolicy.hostNetworkFrom is empty: policies know such pods by their "
        "hosts' addresses alone, so name these (ipBlock), or neither Ray's head nor etcd could be reached",
    ),
    (at("networkPolicy.hostNetworkFrom", [{"podSelector": {}}]), "networkPolicy.hostNetworkFrom is for roles with"),
    (at("gateway.inferencePool.enabled", True), "the service of an endpoint picker, which the chart does not run"),
    (
        at(
            "gateway", {"inferencePool": {"enabled": True, "endpointPicker": {"name": "p"}}, "tls": {"secretName": "t"}}
        ),
        "gateway.inferencePool.enabled and gateway.tls.secretName: a pool's endpoints are called by plain HTTP",
    ),
    (at("gateway.tls.certificate.issuerRef.name", "ca"), "gateway.tls.certificate needs gateway.tls.secretName"),
    (at("internalTls.certificate.issuerRef.name", "ca"), "internalTls.certificate needs internalTls.secretName"),
    (
        at("monitoring.alerts", {"enabled": True, "thresholds": {"KvferryNothing": 1}}),
        'monitoring.alerts has no alert "KvferryNothing"; there are KvferryKvPagesScarce, ',
    ),
    (at("monitoring.members.enabled", True), "monitoring.members.enabled needs networkPolicy.monitoringNamespace"),
    (
        merged(at("monitoring.serviceMonitor.enabled", True), at("gateway.tls.secretName", "edge")),
        "monitoring needs monitoring.gatewayTls.serverName",
    ),
    (
        merged(at("monitoring.members.tlsSecret", "inside"), at("internalTls.secretName", "inside")),
        "monitoring.members.tlsSecret is the secret of internalTls",
    ),
    (at("externalSecrets.secrets", [EXTERNAL]), "externalSecrets.secrets needs externalSecrets.store.name"),
    (
        at("externalSecrets", {"store": {"name": "v"}, "secrets": [EXTERNAL, EXTERNAL]}),
        'secret "keys" is made twice, by two of externalSecrets.secrets, gateway.tls, internalTls and the chart itself',
    ),
    (
        at("externalSecrets", {"store": {"name": "v"}, "secrets": [EXTERNAL | {"name": "trial-internal-tls"}]}),
        'secret "trial-internal-tls" is made twice',
    ),
    (
        at("externalSecrets", {"store": {"name": "v"}, "secrets": [EXTERNAL | {"name": "trial-etcd-users"}]}),
        'secret "trial-etcd-users" is made twice',
    ),
    (
        at(
            "internalTls",
            {
                "secretName": "t",
                "certificate": {"issuerRef": {"name": "ca"}, "duration": "24h", "renewBefore": "24h"},
            },
        ),
        "internalTls.certificate.renewBefore is 24h and its duration 24h: cert-manager refuses a certificate that",
    ),
    (
        # cert-manager's own duration.
        at(
            "gateway.tls",
            {
                "secretName": "t",
                "certificate": {"issuerRef": {"name": "ca"}, "dnsNames": ["a.b"], "renewBefore": "2161h"},
            },
        ),
        "gateway.tls.certificate.renewBefore is 2161h and its duration 2160h",
    ),
    (
        at("monitoring.alerts", {"enabled": True, "without": ALERTS}),
        "monitoring.alerts.without names every alert: say monitoring.alerts.enabled: false instead",
    ),
    (
        at("gateway.extraVolumes", [{"name": "tmp", "emptyDir": {}}]),
        'gateway.extraVolumes name "tmp" twice, or as the chart names its own',
    ),
    (at("etcd.extraVolumes", [{"name": "a", "emptyDir": {}}] * 2), 'etcd.extraVolumes name "a" twice'),
    (
        at("rollout", {"extraContainers": [{"name": "a"}], "extraInitContainers": [{"name": "a"}]}),
        'rollout.extraContainers and extraInitContainers name "a" twice',
    ),
    (
        at("roles.decode", {"env": {"A": "1"}, "extraEnv": [{"name": "A", "value": "2"}]}),
        'roles.decode.env and extraEnv name "A" twice',
    ),
    (
        at("ray.head.extraVolumeMounts", [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/a/"}]),
        'ray.head.extraVolumeMounts has something at "/a/" twice, or where the chart mounts its own',
    ),
    (at("gateway.extraVolumeMounts", [{"name": "a", "mountPath": "/etc/kvferry/tls"}]), 'at "/etc/kvferry/tls" twice'),
]

# Refused by the schema, with the fault as Helm 4 names it.
BY_SCHEMA: list[tuple[dict[str, Any], str]] = [
    (at("roles.decode.engine.args.watermrk", 0.1), "at '/roles/decode/engine/args': additional properties 'watermrk'"),
    (at("roles.decode.engine.args.seed", 1), "at '/roles/decode/engine/args': additional properties 'seed'"),
    (at("config.engine.args.max_num_seqs", 1), "at '/config/engine/args/max_num_seqs': false schema"),
    (
        models({**SMALL, "engine": {"args": {"block_size": 1}}}),
        "at '/config/models/0/engine/args/block_size': false schema",
    ),
    (at("config.engine.unproven", []), "at '/config/engine': additional properties 'unproven'"),
    (models({**SMALL, "engine": {"kind": "vllm"}}), "at '/config/models/0/engine': additional properties 'kind'"),
    (at("config.metrics.host", "auto"), "at '/config': additional properties 'metrics'"),
    (
        at("model.weights.claim.accessMode", "ReadOnlyMany"),
        "at '/model/weights/claim/accessMode': value must be one of 'ReadWriteMany', 'ReadWriteOnce'",
    ),
    (at("model.weights.also", [{"path": "a/b"}]), "at '/model/weights/also/0': missing property 'revision'"),
    (
        at("monitoring.alerts.selector", "namespace=serving"),
        "at '/monitoring/alerts/selector': 'namespace=serving' does not match pattern",
    ),
    (
        at("monitoring.alerts.thresholds", {"KvferryKvPagesScarce": "85 %"}),
        "at '/monitoring/alerts/thresholds/KvferryKvPagesScarce': got string, want number",
    ),
    (at("model.weights.egress.ports", []), "at '/model/weights/egress/ports': minItems: got 0, want 1"),
    (
        at("gateway.inferencePool.endpointPicker.failureMode", "Maybe"),
        "at '/gateway/inferencePool/endpointPicker/failureMode': value must be one of 'FailOpen', 'FailClose'",
    ),
    (
        at("externalSecrets.secrets", [{"name": "k", "entries": {}}]),
        "at '/externalSecrets/secrets/0/entries': minProperties: got 0, want 1",
    ),
    (
        at("internalTls.certificate.duration", "5y"),
        "at '/internalTls/certificate/duration': '5y' does not match pattern",
    ),
    (
        at("internalTls.certificate.renewBefore", "0h"),
        "at '/internalTls/certificate/renewBefore': '0h' does not match pattern",
    ),
    (
        at("internalTls.certificate.issuerRef.kind", ""),
        "at '/internalTls/certificate/issuerRef/kind': minLength: got 0, want 1",
    ),
    (at("internalTls.secretName", "Not_A_Name"), "at '/internalTls/secretName': 'Not_A_Name' does not match pattern"),
    (at("fullnameOverride", "1st"), "at '/fullnameOverride': '1st' does not match pattern"),
    (at("image.pullSecrets", ["pull", "pull"]), "at '/image/pullSecrets': items at 0 and 1 are equal"),
    (at("image.pullSecrets", [""]), "at '/image/pullSecrets/0': '' does not match pattern"),
    (at("image.repository", ""), "at '/image/repository': minLength: got 0, want 1"),
    (at("auth.keysSecret", "keys/"), "at '/auth/keysSecret': 'keys/' does not match pattern"),
    (at("model.hubToken.key", "a token"), "at '/model/hubToken/key': 'a token' does not match pattern"),
    (at("model.volume.claimName", "a..b"), "at '/model/volume/claimName': 'a..b' does not match pattern"),
    (
        at("gateway.gatewayApi", {"enabled": True, "parentRefs": [{"name": ""}]}),
        "at '/gateway/gatewayApi/parentRefs/0/name': '' does not match pattern",
    ),
    (
        at("gateway.gatewayApi.hostnames", ["a_b.example.com"]),
        "at '/gateway/gatewayApi/hostnames/0': 'a_b.example.com' does not match pattern",
    ),
    (
        at("gateway.ingress.host", "https://kvferry.example.com"),
        "at '/gateway/ingress/host': 'https://kvferry.example.com' does not match pattern",
    ),
    (
        at("gateway.tls.certificate.dnsNames", [""]),
        "at '/gateway/tls/certificate/dnsNames/0': '' does not match pattern",
    ),
    (
        at("gateway.inferencePool.endpointPicker.name", "a.b"),
        "at '/gateway/inferencePool/endpointPicker/name': 'a.b' does not match pattern",
    ),
    (
        at("networkPolicy.monitoringNamespace", "Monitoring"),
        "at '/networkPolicy/monitoringNamespace': 'Monitoring' does not match pattern",
    ),
    (
        at("externalSecrets.secrets", [{**EXTERNAL, "name": "a..b"}]),
        "at '/externalSecrets/secrets/0/name': 'a..b' does not match pattern",
    ),
    (at("externalSecrets.secrets", [{"name": "k", "entries": {"a/b": {"key": "k"}}}]), "invalid propertyName 'a/b'"),
    (
        at("roles.decode.extraContainers", [{"image": "a"}]),
        "at '/roles/decode/extraContainers/0': missing property 'name'",
    ),
    (
        at("roles.decode.extraContainers", [{"name": "a.b"}]),
        "at '/roles/decode/extraContainers/0/name': 'a.b' does not match pattern",
    ),
    (at("rollout.extraEnv", [{"name": "A B"}]), "at '/rollout/extraEnv/0/name': 'A B' does not match pattern"),
    (at("gateway.extraVolumes", [{"name": "x" * 64}]), "at '/gateway/extraVolumes/0/name': maxLength: got 64, want 63"),
    (
        at("gateway.extraVolumeMounts", [{"name": "a", "mountPath": "/a:b"}]),
        "at '/gateway/extraVolumeMounts/0/mountPath': '/a:b' does not match pattern",
    ),
    (at("gateway.podLabels", {"team": "a b"}), "at '/gateway/podLabels/team': 'a b' does not match pattern"),
    (at("etcd.nodeSelector", {"a b": "c"}), "invalid propertyName 'a b'"),
    (at("roles.decode.podLabels", {"kvferry.io/component": "x"}), "invalid propertyName 'kvferry.io/component'"),
    (at("rollout.podAnnotations", {"kvferry.io/release": "x"}), "invalid propertyName 'kvferry.io/release'"),
    (at("roles.prefil", {"replicas": 1}), "at '/roles': additional properties 'prefil'"),
    (at("config.engine.blok_size", 16), "at '/config/engine': additional properties 'blok_size'"),
    (at("config.engine.block_size", 0), "at '/config/engine/block_size': minimum: got 0, want 1"),
    (at("config.worker.host", "10.0.0.1"), "at '/config/worker': additional properties 'host'"),
    (at("config.gateway.keys_file", "/x"), "at '/config/gateway': additional properties 'keys_file'"),
    (at("config.membership.endpoints", ["a:1"]), "at '/config/membership': additional properties 'endpoints'"),
    (at("config.prefill.replicas", 2), "at '/config': additional properties 'prefill'"),
    (at("roles.decode.engine.block_size", 64), "at '/roles/decode/engine': additional properties 'block_size'"),
    (at("etcd.replicas", 2), "at '/etcd/replicas': value must be one of 1, 3"),
    (
        at("insecure", ["worker.host"]),
        "at '/insecure/0': value must be one of 'gateway.host', 'engine.side_channel_host'",
    ),
    (at("gateway.mode", "daemonset"), "at '/gateway/mode': value must be one of 'deployment', 'serve'"),
    (at("tier.volumes", [{"name": "A", "capacityGiB": 1}]), "at '/tier/volumes/0/name': 'A' does not match pattern"),
]


@pytest.mark.parametrize(("values", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_what_cannot_work_is_refused_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_check.CheckFailed) as caught:
        rendering(values)
    assert message in str(caught.value)


def beside_each_other(
    entries: Sequence[tuple[dict[str, Any], str]],
) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield merged values and their faults, as few as possible: Helm names all faults of the schema at once.

    No two have a value, or a place of their faults, in common.
    """
    left = list(entries)
    while left:
        values: dict[str, Any] = {}
        found: dict[str, str] = {}  # the faults by place
        others = []
        for more, fault in left:
            place = fault.partition(": ")[0]
            both = merged(values, more)
            is_both = both == merged(more, values) and {*leaves(both)} == {*leaves(values), *leaves(more)}
            if is_both and place not in found:
                values, found[place] = both, fault
            else:
                others.append((more, fault))
        yield values, list(found.values())
        left = others


def test_what_the_schema_excludes_is_refused_by_its_place() -> None:
    if newest_helm().major < 4:
        pytest.skip("the faults are worded as by Helm 4")
    missing = []
    for values, faults in beside_each_other(BY_SCHEMA):
        with pytest.raises(helm_check.CheckFailed) as caught:
            rendering(values)
        missing += [fault for fault in faults if fault not in str(caught.value)]
    assert not missing, "\n".join(missing)


OF_RELEASES = ", after the release: services need small letters, digits and dashes, and a letter first"


@pytest.mark.parametrize("name", ["1st", "a.b"])
def test_a_release_whose_name_services_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    def rendered(values: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        file = str(write_values(tmp_path, values))
        return newest_helm().run("template", name, str(helm_check.CHART), "--values", file)

    assert f'objects would be named "{name}"{OF_RELEASES}' in rendered({}).stderr
    assert rendered({"fullnameOverride": "kv"}).returncode == 0


def test_names_of_the_chart_s_own_are_known_to_it() -> None:
    """Those that values may not take again."""
    text = (helm_check.CHART / "templates" / "_checks.tpl").read_text()
    known_volumes, known_containers = (
        set(re.findall(r'"([^"]+)"', re.findall(rf'define "kvferry.own{kind}" .*\n(.*)', text)[0]))
        for kind in ("Volumes", "Containers")
    )
    rdma = {"roles": {"decode": {"rdma": True}}}
    layers = [{}, *(yaml.safe_load(file.read_text()) for file in helm_check.examples())]
    layers += [
        merged(WEIGHTS, rdma),
        merged(TIER, at("tier.encryptionKeysSecret", "seal"), at("gateway.mode", "serve")),
    ]
    found = 0
    for values in layers:
        for document in rendering(values):
            for pod in pods_of(document):
                found += 1
                names = {each["name"] for each in pod.get("volumes", []) if not each["name"].startswith("volume-")}
                assert names <= known_volumes
                assert {
                    each["name"] for each in [*pod.get("initContainers", []), *pod["containers"]]
                } <= known_containers
    assert found > 20


def pods_of(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Specs of pods anywhere in an object."""
    if isinstance(document.get("containers"), list):
        yield document
    for value in document.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield from pods_of(each)


def test_every_refusal_of_the_templates_is_tested() -> None:
    text = (helm_check.CHART / "templates" / "_checks.tpl").read_text()
    fails = re.findall(r'fail \(?(?:printf )?"((?:[^"\\]|\\.)*)"', text)
    assert len(fails) == text.count("{{- fail ")
    said = [OF_RELEASES, *(message for _, message in REFUSALS)]
    untested = []
    for words in fails:
        pattern = re.escape(words.replace('\\"', '"'))
        for verb in ("%d", "%q", "%v", "%s"):
            pattern = pattern.replace(verb, ".*")
        pieces = [re.sub(r"\\(.)", r"\1", piece) for piece in pattern.split(".*")]
        if not any(any(piece in each or each in piece for piece in pieces if len(piece) > 12) for each in said):
            untested.append(words)
    assert not untested, "\n".join(untested)


def test_no_object_of_the_schema_takes_unknown_keys_but_arguments_of_vllm() -> None:
    def walk(schema: Any, path: str) -> Iterator[str]:
        if isinstance(schema, dict):
            if "properties" in schema and schema.get("additionalProperties") is not False:
                yield path
            for key, value in schema.items():
                yield from walk(value, f"{path}/{key}")
        if isinstance(schema, list):
            for number, value in enumerate(schema):
                yield from walk(value, f"{path}/{number}")

    assert list(walk(SCHEMA, "")) == ["/$defs/arguments"]


# Values


def test_every_value_has_a_default_a_schema_and_words() -> None:
    def keys(schema: dict[str, Any], path: str = "") -> Iterator[str]:
        if "properties" not in schema:
            yield path
        for key, value in schema.get("properties", {}).items():
            if key not in ("config", "global"):
                yield from keys(value, f"{path}.{key}".lstrip("."))

    documented = {leaf for leaf in leaves(VALUES) if not leaf.startswith("config.")}
    known = set(keys(SCHEMA))
    assert {
        leaf for leaf in documented if leaf not in known and not any(leaf.startswith(f"{k}.") for k in known)
    } == set()
    assert {
        key for key in known if key not in documented and not any(d.startswith(f"{key}.") for d in documented)
    } == set()
    text = (helm_check.CHART / "values.yaml").read_text()
    tops = re.findall(r"(?m)((?:^#.*\n)*)^([a-z]\w*):", text)
    assert [
        key for words, key in tops if not words and key not in ("image", "gateway", "ray", "etcd", "monitoring")
    ] == [
        "serviceAccount",
        "securityContext",
    ]


def pod_values(section: str, name: str) -> dict[str, tuple[Any, str]]:
    """What every component's pods take, as in EVERYTHING."""
    spread = {"maxSkew": 1, "topologyKey": f"zone-{name}", "whenUnsatisfiable": "DoNotSchedule"}
    secret = {"secretKeyRef": {"name": f"secret-{name}", "key": "k"}}
    values: dict[str, tuple[Any, str]] = {
        "podLabels": ({f"label-{name}": "x"}, f"label-{name}: x"),
        "podAnnotations": ({f"{name}-note": "a"}, f"{name}-note: a"),
        "affinity": ({"nodeAffinity": {"x": f"{name}-affinity"}}, f"{name}-affinity"),
        "priorityClassName": (f"{name}-prio", f"priorityClassName: {name}-prio"),
        "schedulerName": (f"{name}-scheduler", f"schedulerName: {name}-scheduler"),
        "topologySpreadConstraints": ([spread], f"topologyKey: zone-{name}"),
        "extraEnv": ([{"name": f"{name}_ENV", "valueFrom": secret}], f"name: secret-{name}"),
        "extraVolumes": ([{"name": f"volume-{name}", "configMap": {"name": f"map-{name}"}}], f"name: map-{name}"),
        "extraVolumeMounts": ([{"name": f"volume-{name}", "mountPath": f"/at/{name}"}], f"mountPath: /at/{name}"),
        "extraInitContainers": ([{"name": f"before-{name}", "image": f"i-{name}"}], f"name: before-{name}"),
        "extraContainers": ([{"name": f"beside-{name}", "image": f"c-{name}"}], f"name: beside-{name}"),
    }
    return {f"{section}.{key}": value for key, value in values.items()}


# Groups of values that a rendering can hold at once: what they stand on, and path -> (value, what it becomes: a text
# that was not there; with `!`, one that was).
EVERYTHING: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, str]]]] = {
    "names": (
        {},
        {
            "fullnameOverride": ("ferry", "name: ferry-etcd"),
            "image.registry": ("reg.example", "image: reg.example/my/kvferry:9.9"),
            "image.repository": ("my/kvferry", "image: reg.example/my/kvferry:9.9"),
            "image.tag": ("9.9", "image: reg.example/my/kvferry:9.9"),
            "image.pullPolicy": ("Always", "imagePullPolicy: Always"),
            "image.pullSecrets": (["pull-me"], "- name: pull-me"),
            "config.model.path": ("org/tiny", "path: org/tiny"),
            "insecure": (["gateway.host", "engine.side_channel_host"], "- gateway.host"),
            "model.hubToken.secretName": ("hub-secret", "name: hub-secret"),
            "model.hubToken.key": ("hub-key", "key: hub-key"),
            "model.cache.sizeGiB": (77, "sizeLimit: 77Gi"),
            "etcd.replicas": (3, "ferry-etcd-2=https://"),
            "etcd.image.registry": ("etcd.example", "image: etcd.example/my/etcd:v9"),
            "etcd.image.repository": ("my/etcd", "image: etcd.example/my/etcd:v9"),
            "etcd.image.tag": ("v9", "image: etcd.example/my/etcd:v9"),
            "etcd.persistence.keep": (False, "whenDeleted: Delete"),
            "model.download.env": ({"HTTPS_PROXY": "http://proxy:3128"}, "value: http://proxy:3128"),
            "model.download.resources.requests.cpu": ("4011m", "cpu: 4011m"),
            "model.download.resources.requests.memory": ("4012Mi", "memory: 4012Mi"),
            "model.download.resources.limits.memory": ("4013Mi", "memory: 4013Mi"),
            "etcd.persistence.sizeGiB": (71, "storage: 71Gi"),
            "etcd.persistence.storageClassName": ("fast", "storageClassName: fast"),
            "etcd.resources.requests.cpu": ("3100m", "cpu: 3100m"),
            "etcd.resources.requests.memory": ("3101Mi", "memory: 3101Mi"),
            "etcd.resources.limits.memory": ("3102Mi", "memory: 3102Mi"),
            "etcd.nodeSelector": ({"etcd": "here"}, "etcd: here"),
            "etcd.tolerations": ([{"key": "etcd-taint"}], "key: etcd-taint"),
            "networkPolicy.gatewayFrom": ([{"ipBlock": {"cidr": "10.9.0.0/16"}}], "cidr: 10.9.0.0/16"),
            "networkPolicy.operatorNamespace": ("rays", "kubernetes.io/metadata.name: rays"),
            "networkPolicy.monitoringNamespace": ("watch", "kubernetes.io/metadata.name: watch"),
            "serviceAccount.annotations": ({"sa": "note"}, "sa: note"),
            "securityContext.runAsUser": (4001, "runAsUser: 4001"),
            "securityContext.runAsGroup": (4002, "runAsGroup: 4002"),
            "securityContext.fsGroup": (4003, "fsGroup: 4003"),
            "tests.timeoutSeconds": (4004, "activeDeadlineSeconds: 4004"),
            "rollout.restartedAt": ("2026-11-24", "kvferry.io/restarted-at: '2026-11-24'"),
            "rollout.resources.requests.cpu": ("4014m", "cpu: 4014m"),
            "rollout.resources.requests.memory": ("4015Mi", "memory: 4015Mi"),
            "rollout.resources.limits.memory": ("4016Mi", "memory: 4016Mi"),
            "rollout.nodeSelector": ({"rollout": "here"}, "rollout: here"),
            "rollout.tolerations": ([{"key": "rollout-taint"}], "key: rollout-taint"),
            "ray.version": ("2.99.0", "rayVersion: 2.99.0"),
            "ray.head.cpu": ("41", "cpu: '41'"),
            "ray.head.memoryGiB": (42, "memory: 42Gi"),
            "ray.head.nodeSelector": ({"head": "here"}, "head: here"),
            "ray.head.tolerations": ([{"key": "head-taint"}], "key: head-taint"),
            "ray.env": ({"RAY_backend_log_level": "debug"}, "value: debug"),
            "ray.redis.address": ("redis:6379", "redisAddress: redis:6379"),
            "ray.redis.passwordSecret": ("redis-secret", "name: redis-secret"),
            "ray.redis.passwordKey": ("redis-key", "key: redis-key"),
            "ray.gang.scheduler": ("volcano", "ray.io/scheduler-name: volcano"),
            "ray.gang.queue": ("line-up", "volcano.sh/queue-name: line-up"),
            "gateway.replicas": (43, "replicas: 43"),
            "gateway.httpPort": (4006, "containerPort: 4006"),
            "gateway.grpcPort": (4007, "grpc_port: 4007"),
            "gateway.resources.requests.cpu": ("44", "cpu: '44'"),
            "gateway.resources.requests.memory": ("4008Mi", "memory: 4008Mi"),
            "gateway.resources.limits.memory": ("4009Mi", "memory: 4009Mi"),
            "gateway.env": ({"G_ENV": 7}, "name: G_ENV"),
            "gateway.nodeSelector": ({"gateway": "here"}, "gateway: here"),
            "gateway.tolerations": ([{"key": "gateway-taint"}], "key: gateway-taint"),
            "gateway.lingerSeconds": (45, "linger_s: 45"),
            "gateway.service.type": ("LoadBalancer", "type: LoadBalancer"),
            "gateway.service.annotations": ({"service": "note"}, "service: note"),
            "gateway.tls.secretName": ("gateway-cert", "secretName: gateway-cert"),
            "gateway.ingress.enabled": (True, "kind: Ingress"),
            "gateway.ingress.className": ("my-class", "ingressClassName: my-class"),
            "gateway.ingress.annotations": ({"ingress": "note"}, "ingress: note"),
            "gateway.ingress.grpcAnnotations": ({"ingress-grpc": "note"}, "ingress-grpc: note"),
            "gateway.ingress.host": ("my.host", "- host: my.host"),
            "gateway.ingress.tlsSecretName": ("host-cert", "secretName: host-cert"),
            "gateway.gatewayApi.enabled": (True, "kind: GRPCRoute"),
            "gateway.gatewayApi.parentRefs": ([{"name": "parent"}], "- name: parent"),
            "gateway.gatewayApi.hostnames": (["route.host"], "- route.host"),
            "gateway.podDisruptionBudget.maxUnavailable": ("46%", "maxUnavailable: 46%"),
            "monitoring.serviceMonitor.enabled": (True, "kind: ServiceMonitor"),
            "monitoring.serviceMonitor.interval": ("47s", "interval: 47s"),
            "monitoring.serviceMonitor.labels": ({"pick": "me"}, "pick: me"),
            "monitoring.gatewayTls.serverName": ("llm.example", "serverName: llm.example"),
            "monitoring.gatewayTls.caSecret": ("edge-ca", "name: edge-ca"),
            "monitoring.gatewayTls.caEntry": ("edge.crt", "key: edge.crt"),
            "monitoring.keySecret": ("scrape-key", "name: scrape-key"),
            "monitoring.keyEntry": ("scrape-entry", "key: scrape-entry"),
            "extraObjects": (
                [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}}],
                "name: trial-more",
            ),
        }
        | pod_values("gateway", "gateway")
        | pod_values("ray.head", "head")
        | pod_values("rollout", "rollout")
        | pod_values("etcd", "etcd"),
    ),
    "roles and tier": (
        at("config.engine.device", "gpu"),
        {
            f"roles.{role}.{key}": value
            for role, number in (("prefill", 5), ("decode", 6))
            for key, value in {
                "replicas": (number * 10, f"num_replicas: {number}0"),
                "workersPerPod": (number, f"kvferry_{role}: '{number}'"),
                "gpusPerWorker": (2, "num_gpus: 2"),
                "cpusPerWorker": (number + 2.5, f"num_cpus: {number + 2.5}"),
                "memoryGiB": (number * 100, f"memory: {number}00Gi"),
                "engine": ({"max_num_seqs": 900 + number}, f"max_num_seqs: {900 + number}"),
                "extraResources": ({f"rdma/{role}": number}, f"rdma/{role}: '{number}'"),
                "env": ({f"UCX_{role.upper()}": "rc"}, f"name: UCX_{role.upper()}"),
                "rdma": (True, "name: memlock"),
                "nodeSelector": ({f"pool-{role}": "a"}, f"pool-{role}: a"),
                "tolerations": ([{"key": f"{role}-taint"}], f"key: {role}-taint"),
                "resourceClaims": ([{"name": f"claim-{role}"}], f"- name: claim-{role}"),
                "containerClaims": ([{"name": f"used-{role}"}], f"- name: used-{role}"),
                "runtimeClassName": (f"{role}-class", f"runtimeClassName: {role}-class"),
            }.items()
        }
        | pod_values("roles.prefill", "prefill")
        | pod_values("roles.decode", "decode")
        | {
            "config.engine.device": ("gpu", "image: registry.example/kvferry:0.1.0-gpu"),
            "config.engine.tensor_parallel_size": (2, "tensor_parallel_size: 2"),
            "config.model.path": ("/m/x", 'model_folder: "/m/x"'),
            "model.volume.claimName": ("model-claim", "claimName: model-claim"),
            "model.volume.mountPath": ("/m", "mountPath: /m"),
            "tier.enabled": (True, "cpu_gib: 7"),
            "tier.cpuGiB": (7, "cpu_gib: 7"),
            "tier.shmGiB": (91, "sizeLimit: 91Gi"),
            "tier.volumes": (
                [
                    {"name": "one", "capacityGiB": 101, "writeGiBPerDay": 102, "hostPath": "/mnt/one"},
                    {"name": "two", "capacityGiB": 103, "storageClassName": "local-class"},
                    {"name": "three", "capacityGiB": 104, "claimName": "shared-claim"},
                ],
                "path: /mnt/one/prefill",
            ),
            "tier.encryptionKeysSecret": ("page-keys", "secretName: page-keys"),
            "auth.keysSecret": ("api-keys", "secretName: api-keys"),
            "internalTls.secretName": ("own-internal", "secretName: own-internal"),
            "serviceAccount.name": ("own-account", "serviceAccountName: own-account"),
        },
    ),
    "weights": (
        {},
        {
            "config.model.path": ("acme/tiny", "path: acme/tiny"),
            "config.model.revision": ("v1", 'model_folder: "/w/acme--tiny--v1"'),
            "model.weights.enabled": (True, "name: trial-weights"),
            "model.weights.mountPath": ("/w", "mountPath: /w"),
            "model.weights.claim.sizeGiB": (81, "storage: 81Gi"),
            "model.weights.claim.storageClassName": ("shared-class", "storageClassName: shared-class"),
            "model.weights.claim.accessMode": ("ReadWriteOnce", "accessModes:\n  - ReadWriteOnce\n  storageClassName"),
            "model.weights.also": ([{"path": "acme/next", "revision": "v2"}], "- /w/acme--next--v2"),
            "model.weights.egress.to": ([{"ipBlock": {"cidr": "10.7.0.0/16"}}], "cidr: 10.7.0.0/16"),
            "model.weights.egress.ports": ([4431], "port: 4431"),
            "model.weights.backoffLimit": (17, "backoffLimit: 17"),
            "model.weights.deadlineSeconds": (4017, "activeDeadlineSeconds: 4017"),
            "model.weights.nodeSelector": ({"weights": "here"}, "weights: here"),
            "model.weights.tolerations": ([{"key": "weights-taint"}], "key: weights-taint"),
        }
        | {
            path: value
            for path, value in pod_values("model.weights", "weights").items()
            if path.rpartition(".")[2] in VALUES["model"]["weights"]
        },
    ),
    "weights kept nowhere": (
        {},
        {
            "config.model.revision": ("v1", "revision: v1"),
            "model.weights.enabled": (True, "name: trial-weights"),
            "model.weights.claim.keep": (False, "kind: PersistentVolumeClaim"),
        },
    ),
    "weights of a claim that is there": (
        {},
        {
            "config.model.revision": ("v1", "revision: v1"),
            "model.weights.enabled": (True, "kvferry.io/component: weights"),
            "model.weights.claim.existing": ("other-claim", "claimName: other-claim"),
        },
    ),
    "secrets of operators": (
        {},
        {
            "gateway.tls.secretName": ("edge", "secretName: edge"),
            "gateway.tls.certificate.issuerRef.name": ("public-ca", "name: public-ca"),
            "gateway.tls.certificate.issuerRef.kind": ("EdgeIssuer", "kind: EdgeIssuer"),
            "gateway.tls.certificate.issuerRef.group": ("edge.io", "group: edge.io"),
            "gateway.tls.certificate.dnsNames": (["llm.example.com"], "- llm.example.com"),
            "gateway.tls.certificate.duration": ("2161h", "duration: 2161h"),
            "gateway.tls.certificate.renewBefore": ("721h", "renewBefore: 721h"),
            "internalTls.secretName": ("inside", "secretName: inside"),
            "internalTls.certificate.issuerRef.name": ("inside-ca", "name: inside-ca"),
            "internalTls.certificate.issuerRef.kind": ("InsideIssuer", "kind: InsideIssuer"),
            "internalTls.certificate.issuerRef.group": ("inside.io", "group: inside.io"),
            "internalTls.certificate.duration": ("43801h", "duration: 43801h"),
            "internalTls.certificate.renewBefore": ("2162h", "renewBefore: 2162h"),
            "externalSecrets.store.name": ("vault", "name: vault"),
            "externalSecrets.store.kind": ("SecretStore", "kind: SecretStore"),
            "externalSecrets.refreshInterval": ("17m", "refreshInterval: 17m"),
            "externalSecrets.secrets": (
                [{"name": "api-keys", "entries": {"keys.yaml": {"key": "serving/keys", "property": "p"}}}],
                "key: serving/keys",
            ),
        },
    ),
    "an endpoint picker": (
        {},
        {
            "gateway.gatewayApi.enabled": (True, "kind: HTTPRoute"),
            "gateway.gatewayApi.parentRefs": ([{"name": "parent"}], "- name: parent"),
            "gateway.inferencePool.enabled": (True, "kind: InferencePool"),
            "gateway.inferencePool.endpointPicker.name": ("picker", "name: picker"),
            "gateway.inferencePool.endpointPicker.port": (9003, "number: 9003"),
            "gateway.inferencePool.endpointPicker.failureMode": ("FailClose", "failureMode: FailClose"),
        },
    ),
    "hosts' network": (
        {},
        {
            "roles.prefill.hostNetwork": (True, "hostNetwork: true"),
            "roles.prefill.dnsPolicy": ("Default", "dnsPolicy: Default"),
            "roles.decode.hostNetwork": (True, "hostNetwork: true"),
            "roles.decode.dnsPolicy": ("ClusterFirst", "dnsPolicy: ClusterFirst\n"),
            "networkPolicy.hostNetworkFrom": ([{"ipBlock": {"cidr": "10.6.0.0/16"}}], "cidr: 10.6.0.0/16"),
        },
    ),
    "further models": (
        {},
        {
            "config.model.path": ("/models/m", 'model_folder: "/models/m"'),
            "model.volume.claimName": ("m", "claimName: m"),
            "config.models": ([SMALL], "- name: kvferry-model-small"),
            "roles.models": ({"small": {"decode": {"nodeSelector": {"for": "small"}}}}, "for: small"),
        },
    ),
    "gateways of Serve": (
        {},
        {"gateway.mode": ("serve", "kvferry_gateway: '1'")} | pod_values("gateway", "gateway"),
    ),
    "without": (
        {},
        {
            "monitoring.members.enabled": (True, "kind: ScrapeConfig"),
            "monitoring.members.interval": ("48s", "scrapeInterval: 48s"),
            "monitoring.members.labels": ({"pick": "us"}, "pick: us"),
            "monitoring.members.tlsSecret": ("scrape-tls", "secretName: scrape-tls"),
            "monitoring.alerts.enabled": (True, "kind: PrometheusRule"),
            "monitoring.alerts.labels": ({"alert": "here"}, "alert: here"),
            "monitoring.alerts.selector": ('namespace="n1"', 'kvferry_ready{namespace="n1"}'),
            "monitoring.alerts.thresholds": ({"KvferryKvPagesScarce": 0.77}, "> 0.77"),
            "monitoring.alerts.without": (["KvferryWorkerUnpaired"], "alert: KvferryVolumeNotWritable"),
            "monitoring.dashboards.enabled": (True, "name: trial-dashboards"),
            "monitoring.dashboards.labels.grafana_dashboard": ("yes", "grafana_dashboard: 'yes'"),
            "monitoring.dashboards.annotations": ({"grafana_folder": "LLM"}, "grafana_folder: LLM"),
            "networkPolicy.enabled": (False, "!kind: NetworkPolicy"),
            "tests.enabled": (False, "!helm.sh/hook: test"),
            "gateway.podDisruptionBudget.enabled": (False, "!kind: PodDisruptionBudget"),
            "ray.tokenAuth": (False, "!authOptions"),
        },
    ),
    "scaled": (
        {},
        {
            "gateway.autoscaling.enabled": (True, "kind: HorizontalPodAutoscaler"),
            "gateway.autoscaling.minReplicas": (3, "minReplicas: 3"),
            "gateway.autoscaling.maxReplicas": (33, "maxReplicas: 33"),
            "gateway.autoscaling.targetCpuPercent": (61, "averageUtilization: 61"),
            "aggregated": (True, "!PrefillWorker"),
            "roles.prefill.replicas": (0, "!PrefillWorker"),
            "auth.generateKey": (False, "!name: trial-first-key"),
            "gateway.tls.secretName": ("gateway-cert", "secretName: gateway-cert"),
            "gateway.tls.requireClientCertificates": (True, "client_ca_file: /etc/kvferry/tls/gateway/ca.crt"),
            "model.volume.hostPath": ("/data", "path: /data"),
            "config.model.path": ("/models/m", 'model_folder: "/models/m"'),
            "tier.enabled": (True, "enabled: true"),
            "tier.cpuOnly": (True, "volumes: []"),
        },
    ),
    "fenced from a Ray that is there": (
        merged(
            at("ray", {"mode": "existing", "existing": {"dashboardAddress": "http://ray:8265"}}),
            at("config.model.path", "/models/m"),
            at("model.volume.claimName", "m"),
            at("networkPolicy.rayFrom", [{"podSelector": {}}]),
        ),
        {"networkPolicy.rayFrom": ([{"ipBlock": {"cidr": "10.8.0.0/16"}}], "cidr: 10.8.0.0/16")},
    ),
    "elsewhere": (
        merged(at("config.model.path", "/models/m"), at("model.volume.claimName", "m")),
        {
            "ray.mode": ("existing", "name: trial-deploy"),
            "ray.existing.dashboardAddress": ("http://ray:8265", "- http://ray:8265"),
            "ray.existing.tokenSecret": ("ray-token", "name: ray-token"),
            "ray.existing.waitSeconds": (4010, "- '4010'"),
            "etcd.enabled": (False, "!kind: StatefulSet"),
            "etcd.endpoints": (["far:2379"], "- far:2379"),
            "etcd.external.tlsSecret": ("far-tls", "name: far-tls"),
            "etcd.external.user": ("far-user", "user: far-user"),
            "etcd.external.passwordSecret": ("far-password", "name: far-password"),
        },
    ),
}


@pytest.mark.parametrize("group", EVERYTHING)
def test_values_reach_their_place(group: str) -> None:
    base, changes = EVERYTHING[group]

    def render(values: dict[str, Any]) -> str:
        rendered = rendering(values)
        if group != "names":  # which names no configuration of kvferry's
            helm_check.parse_configs(rendered)
        text: str = helm_check.golden_text(rendered)
        return text

    before = render(base if "Ray that is there" in group else {})
    after = render(merged(base, *(at(path, value) for path, (value, _) in changes.items())))
    missing = []
    for path, (_, becomes) in changes.items():
        if becomes.startswith("!"):
            arrived = becomes[1:] in before and becomes[1:] not in after
        else:
            arrived = becomes in after and becomes not in before
        if not arrived:
            missing.append(f"{path}: {becomes}")
    assert not missing, "\n".join(missing)


def test_no_value_is_forgotten() -> None:
    changed = {path for _, changes in EVERYTHING.values() for path in changes}
    assert set(leaves(VALUES)) - changed == set()


# What matters of the result


def test_changing_counts_changes_no_argument_and_no_gateway() -> None:
    def rendered(prefill: int, decode: int) -> list[dict[str, Any]]:
        values = {"roles": {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}}}
        return rendering(values)

    few, many = rendered(1, 1), rendered(3, 5)
    (before,), (after,) = (helm_check.serve_config(one(each, "RayService"))["applications"] for each in (few, many))
    assert before["args"] == after["args"]
    assert [each["num_replicas"] for each in after["deployments"]] == [3, 5]
    gateways = [one(each, "Deployment", "trial-gateway") for each in (few, many)]
    assert gateways[0] == gateways[1]
    groups = one(many, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert {group["groupName"]: group["maxReplicas"] for group in groups} == {"prefill": 3, "decode": 5}


def test_shared_memory_holds_the_cpu_tiers_of_all_workers_of_a_pod() -> None:
    values = merged(TIER, at("tier.cpuGiB", 10.5), at("roles.decode", {"workersPerPod": 3, "memoryGiB": 99}))
    values = merged(values, at("roles.prefill.memoryGiB", 99))
    service = one(rendering(values), "RayService")
    sizes = {}
    for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (shm,) = (each for each in group["template"]["spec"]["volumes"] if each["name"] == "shm")
        sizes[group["groupName"]] = shm["emptyDir"]["sizeLimit"]
    assert sizes == {"prefill": "12Gi", "decode": "33Gi"}


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_pods_with_everything_added_are_valid_and_written_back_alike(mode: str) -> None:
    added = {
        key: value
        for path, (value, _) in pod_values("x", "x").items()
        if (key := path.removeprefix("x.")) not in ("affinity", "extraEnv")
    }
    added["extraEnv"] = [{"name": "EMPTY", "value": ""}, {"name": "FULL", "value": "x"}]
    sections = ("roles.prefill", "roles.decode", "gateway", "ray.head", "rollout", "etcd")
    values = merged(
        *(at(section, added) for section in sections),
        at("gateway.mode", mode),
    )
    rendered = rendering(values)
    for document in rendered:
        helm_check.validate(document)
    assert chart_rules.faults(rendered) == []
    service = one(rendered, "RayService")
    assert written_back(service) == service
    components = set()
    for _, spec in chart_rules._pods(rendered):
        for constraint in spec.get("topologySpreadConstraints", []):
            labels = constraint["labelSelector"]["matchLabels"]
            assert labels.pop("kvferry.io/release") == "trial"
            components.add(labels["kvferry.io/component"])
            assert {"beside-x"} <= {container["name"] for container in spec["containers"]}
            assert {"before-x"} <= {container["name"] for container in spec["initContainers"]}
    assert components == {"prefill", "decode", "gateway", "head", "rollout", "etcd"}


def init_containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in pod["spec"].get("initContainers", [])}


def run_container(
    container: dict[str, Any], *, path: Path | None = None, memlock: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a container's command here."""

    def limit() -> None:
        if memlock is not None:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (memlock, memlock))

    command = [*container["command"], *container.get("args", [])]
    environ = {"PATH": f"{path}:/usr/bin:/bin"}
    return subprocess.run(command, env=environ, preexec_fn=limit, capture_output=True, text=True, timeout=PATIENCE_S)


def test_a_node_that_limits_locked_memory_is_refused_for_rdma() -> None:
    rendered = rendering(at("roles.decode.rdma", True))
    groups = one(rendered, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    found = {group["groupName"]: init_containers(group["template"]).get("memlock") for group in groups}
    assert found["prefill"] is None
    assert found["decode"] is not None
    limited = run_container(found["decode"], memlock=65536)
    assert limited.returncode == 1
    assert "lets a container lock 64 KiB of memory" in limited.stderr
    assert "LimitMEMLOCK=infinity" in limited.stderr
    # A process may be forbidden to lift its own limit.
    (script,) = found["decode"]["args"]
    unlimited = {**found["decode"], "args": ["ulimit() { echo unlimited; }\n" + script]}
    assert run_container(unlimited).returncode == 0


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_gateways_download_no_weights(mode: str) -> None:
    def commands(values: dict[str, Any]) -> dict[str, list[str]]:
        values = merged(values, at("gateway.mode", mode))
        rendered = rendering(values)
        groups = one(rendered, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        pods = {group["groupName"]: group["template"] for group in groups}
        if mode == "deployment":
            pods["gateway"] = one(rendered, "Deployment", "trial-gateway")["spec"]["template"]
        return {name: init_containers(pod)["model"]["command"] for name, pod in pods.items()}

    suffixes = sorted(model_folder.WEIGHT_SUFFIXES | model_folder.OTHER_WEIGHT_SUFFIXES)
    left_out = [part for suffix in suffixes for part in ("--exclude", f"*{suffix}")]
    for values, revision in (({}, []), (at("config.model.revision", "f" * 40), ["--revision", "f" * 40])):
        found = commands(values)
        assert found["decode"][len(found["decode"]) - len(revision) :] == revision
        assert "--exclude" not in found["decode"]
        assert found["gateway"] == [*found["decode"], *left_out]


def test_a_gateway_s_memory_is_compared_with_what_its_limits_allow(tmp_path: Path) -> None:
    def notes(*changes: dict[str, Any]) -> str:
        text: str = newest_helm().notes(values=write_values(tmp_path, merged(*changes)))
        return text

    images = at("config.gateway.images", {"max_per_request": 4, "processes": 1})
    limit = at("gateway.resources.limits.memory", "4218Mi")
    assert "a gateway may take" not in notes(images, limit).lower()
    with pytest.raises(helm_check.CheckFailed, match="may take 4218 MiB"):
        notes(images, at("gateway.resources.limits.memory", "4217Mi"))
    for enough in ({"gateway": {"resources": {"limits": None}}}, at("config.engine.kind", "sim")):
        notes(images, enough)
    notes(at("config.gateway.images.max_per_request", 0))
    assert "A gateway may take 2455 MiB" in notes(MODELS, at("gateway.resources.limits.memory", "2Gi"))
    assert "a gateway may take" not in notes({}).lower()


def test_a_ray_that_is_there_may_have_several_models_and_pools() -> None:
    entry = {"name": "small", "model": {"path": "/models/small"}, "decode": {"num_gpus": 1}}
    pools = {"finance": {"decode": {"replicas": 1}}}
    values = merged(ON_A_RAY_THAT_IS_THERE, at("config.models", [entry]), at("config.pools", pools))
    rendered = rendering(values)
    text = one(rendered, "ConfigMap", "trial-config")["data"]["kvferry.yaml"]
    config = configuration.parse(yaml.safe_load(text))
    assert [each.model.path for each in config.models] == ["/models/small"]
    assert list(config.pools) == ["finance"]
    assert config.decode.replicas == 1, "the default model stays"
    gateway = one(rendered, "Deployment", "trial-gateway")["spec"]["template"]["spec"]
    (mount,) = (each for each in gateway["containers"][0]["volumeMounts"] if each["name"] == "model")
    assert mount["mountPath"] == "/models"


def test_an_uninstall_does_not_wait_for_a_ray_that_is_gone(tmp_path: Path) -> None:
    values = merged(*EVERYTHING["elsewhere"][:1], at("ray.mode", "existing"), at("etcd.enabled", False))
    values = merged(values, at("ray.existing.dashboardAddress", "http://gone:8265"), at("etcd.endpoints", ["a:1"]))
    rendered = rendering(values)
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "$@"\necho gone >&2\nexit 1\n')
    ray.chmod(0o755)
    for name, status in (("trial-delete", 0), ("trial-deploy", 1)):
        (container,) = one(rendered, "Job", name)["spec"]["template"]["spec"]["containers"]
        ended = run_container(container, path=tmp_path)
        assert ended.returncode == status, name
        assert ended.stdout.startswith(
            "job submit --address http://gone:8265 --working-dir /etc/kvferry/config -- python"
        )
        assert "gone" in ended.stderr


def test_helm_test_reaches_gateways_that_few_may_call() -> None:
    values = at("networkPolicy.gatewayFrom", [{"podSelector": {"matchLabels": {"app": "caller"}}}])
    rendered = rendering(values)
    (rule,) = one(rendered, "NetworkPolicy", "trial-gateway")["spec"]["ingress"]
    labels = one(rendered, "Pod", "trial-test")["metadata"]["labels"]
    assert any(peer["podSelector"]["matchLabels"].items() <= labels.items() for peer in rule["from"])


def test_every_container_is_confined() -> None:
    num_containers = 0
    for example in helm_check.examples():
        for document in rendering(example):
            pods = [template for _, template in helm_check._pod_templates(document)]
            if document["kind"] == "Pod":
                pods.append(document)
            elif "template" in document.get("spec", {}):
                pods.append(document["spec"]["template"])
            for pod in pods:
                spec = pod["spec"]
                assert spec["securityContext"]["runAsNonRoot"] is True
                assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
                for container in [*spec["containers"], *spec.get("initContainers", [])]:
                    num_containers += 1
                    context = container["securityContext"]
                    assert context["readOnlyRootFilesystem"] is True
                    assert context["allowPrivilegeEscalation"] is False
                    assert context["capabilities"]["drop"] == ["ALL"]
    assert num_containers > 20


def pod_security_level(spec: dict[str, Any]) -> str:
    """The strictest Pod Security level that a pod meets, by the parts of the standard that the chart touches."""
    kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
    host = [spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC")]
    containers = [*spec.get("initContainers", []), *spec["containers"]]
    contexts = [container.get("securityContext", {}) for container in containers]
    added = {each for context in contexts for each in context.get("capabilities", {}).get("add", [])}
    ports = [port.get("hostPort") for container in containers for port in container.get("ports", [])]
    if "hostPath" in kinds or any(host) or added or any(ports) or any(each.get("privileged") for each in contexts):
        return "privileged"
    pod = spec.get("securityContext", {})
    is_restricted = (
        kinds <= {"configMap", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
        and pod.get("runAsNonRoot") is True
        and pod.get("runAsUser", 1) != 0
        and pod.get("seccompProfile", {}).get("type") == "RuntimeDefault"
        and all(context.get("allowPrivilegeEscalation") is False for context in contexts)
        and all(context.get("capabilities", {}).get("drop") == ["ALL"] for context in contexts)
    )
    return "restricted" if is_restricted else "baseline"


def test_pods_are_restricted_but_for_folders_of_nodes() -> None:
    privileged = set()
    for example in helm_check.examples():
        for where, spec in chart_rules._pods(rendering(example)):
            level = pod_security_level(spec)
            assert level != "baseline", where
            if level == "privileged":
                assert any("hostPath" in volume for volume in spec["volumes"])
                privileged.add(f"{example.stem}: {where.rpartition(', ')[2]}")
    # Gateways too where the model is a folder of the node.
    assert privileged == {
        "1-gpu: decode",
        "70b-4plus4: decode",
        "70b-4plus4: prefill",
        "70b-4plus4: Deployment/trial-gateway",
        "8x-h200-pair: decode",
        "8x-h200-pair: prefill",
    }


def test_only_gateways_are_open_to_others(trial: list[dict[str, Any]]) -> None:
    policies = [each for each in trial if each["kind"] == "NetworkPolicy"]
    open_to_all = [
        policy["spec"]["podSelector"]["matchLabels"]["kvferry.io/component"]
        for policy in policies
        for rule in policy["spec"]["ingress"]
        if "from" not in rule
    ]
    assert open_to_all == ["gateway"]
    covered = {
        label
        for policy in policies
        for label in policy["spec"]["podSelector"]["matchLabels"].items()
        if label[0] != "kvferry.io/release"
    }
    cluster = one(trial, "RayService")["spec"]["rayClusterConfig"]
    pods = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    pods.append(one(trial, "StatefulSet")["spec"]["template"])
    for pod in pods:
        assert covered & set(pod["metadata"]["labels"].items())


def test_the_service_finds_gateways_in_either_mode() -> None:
    for mode in ("deployment", "serve"):
        rendered = rendering(at("gateway.mode", mode))
        selector = one(rendered, "Service", "trial")["spec"]["selector"].items()
        pods = [one(rendered, "Deployment", "trial-gateway")["spec"]["template"]] if mode == "deployment" else []
        pods += [template for _, template in helm_check._pod_templates(one(rendered, "RayService"))]
        found = [pod for pod in pods if selector <= pod["metadata"]["labels"].items()]
        assert len(found) == 1
        (container,) = found[0]["spec"]["containers"]
        assert [port["name"] for port in container["ports"]] == ["http", "grpc"]


def test_the_notes_give_the_first_request() -> None:
    notes = newest_helm().notes(values=helm_check.EXAMPLES / "cpu-trial.yaml")
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in notes
    assert '"model": "SmolLM2-135M-Instruct"' in notes
    assert "get secret trial-first-key" in notes
    notes = newest_helm().notes(values=helm_check.EXAMPLES / "8x-h200-pair.yaml")
    assert "curl -k https://127.0.0.1:8000" in notes
    assert "install -d -m 700 -o 65532" in notes
