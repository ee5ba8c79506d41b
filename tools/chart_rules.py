"""Rules for rendered objects that no schema states: each is a fault that an API server accepts and a cluster then has.

`faults` is part of tools/helm_check.py. The rules come from runs against a real API server with KubeRay 1.7.0, and
from the sources that a rule names (KubeRay v1.7.0).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Document = dict[str, Any]

# Kubernetes' resource.Quantity, as it is written back: the largest unit that divides it.
_QUANTITY = re.compile(r"(0|[1-9][0-9]*)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")


def faults(rendered: Sequence[Document]) -> list[str]:
    """Returns a sentence for each fault of a release's objects."""
    return [fault for rule in RULES for fault in rule(rendered)]


def is_canonical(quantity: object) -> bool:
    """Whether a quantity is a string that Kubernetes would write back unchanged."""
    match = _QUANTITY.fullmatch(quantity) if isinstance(quantity, str) else None
    if match is None:
        return False
    number, unit = int(match[1]), match[2]
    return number == 0 or unit is None or number % (1024 if unit.endswith("i") else 1000) != 0


def _head_has_a_serve_port(rendered: Sequence[Document]) -> Iterator[str]:
    # service.go, BuildServeService: an error without it, and rayservice_controller.go then never computes a status.
    for service in _of_kind(rendered, "RayService"):
        head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        names = [port.get("name", "") for port in head.get("ports", [])]
        if not any(name == "serve" or name.startswith("serve-") for name in names):
            yield f"{_name(service)}: the Ray head has no port named serve, so the RayService is never ready"


def _groups_are_written_as_the_operator_writes_them(rendered: Sequence[Document]) -> Iterator[str]:
    # workerGroupSpecs is an atomic list: one field that the operator's Go types write otherwise makes it the owner of
    # all, and a server-side apply (Helm 4) ends with a conflict.
    for document, cluster in _clusters(rendered):
        for group in cluster.get("workerGroupSpecs", []):
            where = f"{_name(document)}: group {group['groupName']}"
            if "scaleStrategy" not in group:
                yield f"{where} has no scaleStrategy"
            for container in _containers(group["template"]["spec"]):
                if "resources" not in container:
                    yield f"{where}: container {container['name']} has no resources"
                for variable in container.get("env", []):
                    if variable.get("value") == "":
                        yield f"{where}: {variable['name']} has an empty value: leave the value out"
            for volume in group["template"]["spec"].get("volumes", []):
                if "ephemeral" in volume and "metadata" not in volume["ephemeral"]["volumeClaimTemplate"]:
                    yield f"{where}: the claim of volume {volume['name']} has no metadata"
        for path, quantity in _quantities(cluster):
            if not is_canonical(quantity):
                yield f"{_name(document)}: {path} is {quantity!r}, which is written back otherwise"


def _counts_are_fixed(rendered: Sequence[Document]) -> Iterator[str]:
    # With Ray's autoscaler minReplicas is less than the count, and a gang is as large as the sum of minReplicas
    # (util.go, CalculateMinReplicas): the head alone.
    for document, cluster in _clusters(rendered):
        if cluster.get("enableInTreeAutoscaling"):
            yield f"{_name(document)}: Ray's autoscaler is on"
        for group in cluster.get("workerGroupSpecs", []):
            if not group["minReplicas"] == group["replicas"] == group["maxReplicas"]:
                yield f"{_name(document)}: group {group['groupName']} has several counts"


def _budgets_allow_evictions(rendered: Sequence[Document]) -> Iterator[str]:
    # disruption.go: pods whose controller has no scale subresource are counted only against an integer minAvailable.
    templates = [group["template"] for _, cluster in _clusters(rendered) for group in cluster["workerGroupSpecs"]]
    for budget in _of_kind(rendered, "PodDisruptionBudget"):
        spec = budget["spec"]
        if not any(_selects(spec["selector"], template["metadata"]["labels"]) for template in templates):
            continue
        if not isinstance(spec.get("minAvailable"), int) or "maxUnavailable" in spec:
            yield f"{_name(budget)}: a budget over Ray's pods needs an integer minAvailable, or it allows no eviction"


def _pods_have_time_to_drain(rendered: Sequence[Document]) -> Iterator[str]:
    for document, cluster in _clusters(rendered):
        for group in cluster.get("workerGroupSpecs", []):
            pod = group["template"]["spec"]
            container = pod["containers"][0]  # Ray's, as KubeRay takes it
            values = {each["name"]: each.get("value") for each in container["env"]}
            drain = values.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
            grace = pod.get("terminationGracePeriodSeconds", 30)
            if drain is None or not 0 < float(drain) < grace:
                yield f"{_name(document)}: group {group['groupName']} drains {drain} s of {grace} s of grace"


def _no_capability_is_added(rendered: Sequence[Document]) -> Iterator[str]:
    # Added capabilities are not effective for a user that is not root: Kubernetes sets no ambient ones.
    for where, pod in _pods(rendered):
        for container in _containers(pod):
            added = container.get("securityContext", {}).get("capabilities", {}).get("add")
            if added and pod.get("securityContext", {}).get("runAsUser") != 0:
                yield f"{where}: container {container['name']} adds {added}, which has no effect on its user"


def _the_operator_is_admitted_anywhere(rendered: Sequence[Document]) -> Iterator[str]:
    for policy in _of_kind(rendered, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            if {port["port"] for port in rule.get("ports", [])} != {8265}:
                continue
            if not any(peer.get("podSelector") for peer in rule.get("from", [])):
                yield f"{_name(policy)}: the operator is known by its namespace alone"


def _kept_claims_have_their_secrets(rendered: Sequence[Document]) -> Iterator[str]:
    for stateful in _of_kind(rendered, "StatefulSet"):
        policy = stateful["spec"].get("persistentVolumeClaimRetentionPolicy", {}).get("whenDeleted")
        if policy not in ("Retain", "Delete"):
            yield f"{_name(stateful)} does not say whether its claims are kept"
        # An uninstall leaves a hook's secret, unless a hook of the same name replaces it then.
        secrets = list(_of_kind(rendered, "Secret"))
        deleted = {_name(each) for each in secrets if _hooks(each) == "post-delete"}
        for name in dict.fromkeys(map(_name, secrets)):
            is_of_etcd = name.startswith(f"Secret/{stateful['metadata']['name']}-")
            if is_of_etcd and (name in deleted) != (policy == "Delete"):
                yield f"{name} and the claims of {_name(stateful)} do not go together"


def _secrets_are_in_no_manifest(rendered: Sequence[Document]) -> Iterator[str]:
    # `helm rollback` applies the manifest of an earlier release: revoked keys and old passwords.
    for secret in _of_kind(rendered, "Secret"):
        if not _hooks(secret):
            yield f"{_name(secret)} is part of the release's manifest, which a rollback brings back"


def _images_name_a_registry(rendered: Sequence[Document]) -> Iterator[str]:
    for where, pod in _pods(rendered):
        for container in _containers(pod):
            if container["image"].startswith("etcd-development/"):
                yield f"{where}: {container['image']} is in no registry that runtimes ask by themselves"


RULES: Sequence[Callable[[Sequence[Document]], Iterator[str]]] = (
    _head_has_a_serve_port,
    _groups_are_written_as_the_operator_writes_them,
    _counts_are_fixed,
    _budgets_allow_evictions,
    _pods_have_time_to_drain,
    _no_capability_is_added,
    _the_operator_is_admitted_anywhere,
    _kept_claims_have_their_secrets,
    _secrets_are_in_no_manifest,
    _images_name_a_registry,
)


def _of_kind(rendered: Sequence[Document], kind: str) -> Iterator[Document]:
    return (document for document in rendered if document["kind"] == kind)


def _hooks(document: Document) -> str:
    return str(document["metadata"].get("annotations", {}).get("helm.sh/hook", ""))


def _name(document: Document) -> str:
    return f"{document['kind']}/{document['metadata']['name']}"


def _clusters(rendered: Sequence[Document]) -> Iterator[tuple[Document, Document]]:
    for document in rendered:
        if document["kind"] == "RayService":
            yield document, document["spec"]["rayClusterConfig"]
        elif document["kind"] == "RayCluster":
            yield document, document["spec"]


def _pods(rendered: Sequence[Document]) -> Iterator[tuple[str, Document]]:
    for document, cluster in _clusters(rendered):
        yield f"{_name(document)}, head", cluster["headGroupSpec"]["template"]["spec"]
        for group in cluster.get("workerGroupSpecs", []):
            yield f"{_name(document)}, {group['groupName']}", group["template"]["spec"]
    for document in rendered:
        if document["kind"] == "Pod":
            yield _name(document), document["spec"]
        elif "template" in document.get("spec", {}):
            yield _name(document), document["spec"]["template"]["spec"]


def _containers(pod: Document) -> list[Document]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def _quantities(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        for i, each in enumerate(value):
            yield from _quantities(each, f"{path}[{i}]")
    elif isinstance(value, dict):
        for key, each in value.items():
            here = f"{path}.{key}".lstrip(".")
            if key in ("requests", "limits") and isinstance(each, dict):
                yield from ((f"{here}.{name}", quantity) for name, quantity in each.items())
            elif key == "sizeLimit":
                yield here, each
            else:
                yield from _quantities(each, here)


def _selects(selector: Document, labels: Mapping[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items()
