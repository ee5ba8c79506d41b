"""Decides the next step towards the Ray cluster that a release says. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Document = dict[str, Any]

TEMPLATE_DIGEST = "kvferry.io/template"  # the chart's annotation of pod templates, and so of pods
HEAD = "head"
ROLES = ("prefill", "decode")


def worker_group(role: str, entry: str = "") -> str:
    """Return the worker group whose pods hold a role's workers of the default model, or of an entry of `models`."""
    return f"{role}-{entry}" if entry else role


def holds_workers(group: str) -> bool:
    """Return whether pods of a worker group hold workers; those of others hold gateways."""
    return group.partition("-")[0] in ROLES


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    group: str  # HEAD, or its worker group
    template: str  # digest of the template it was made from; empty: not known
    address: str = ""  # its IP
    is_ready: bool = False
    is_ending: bool = False
    has_run: bool = True  # its container ever ran: an image was found, and a node
    has_redis: bool = False  # of a head: its tables are in Redis
    created_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A release and its Ray cluster."""

    wanted: Document  # the RayService's rayClusterConfig
    wanted_digest: str  # of it, as the chart made it
    actual: Document  # the RayCluster's spec; empty: there is none
    actual_digest: str = ""
    pods: Sequence[Pod] = ()
    workers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # group -> address -> registered workers
    counts: Mapping[str, int] = field(default_factory=dict)  # group -> workers that Serve is to have
    idle: frozenset[str] = frozenset()  # uids of pods that have been ready without a worker for a while
    # What the operator last saw that is not as the release says: application -> Serve's status of it.
    applications: Mapping[str, str] = field(default_factory=dict)
    is_submitted: bool = True  # the operator has seen the release's last change


@dataclass(frozen=True, slots=True)
class SetSpec:
    spec: Document
    why: str


@dataclass(frozen=True, slots=True)
class DeletePods:
    # The operator makes them anew from the cluster's templates.
    pods: tuple[Pod, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    why: str


@dataclass(frozen=True, slots=True)
class Blocked:
    # Until a person acts.
    why: str


@dataclass(frozen=True, slots=True)
class Done:
    left: str = ""  # for a person to do


Step = SetSpec | DeletePods | Wait | Blocked | Done


def next_step(seen: Observed) -> Step:
    """Returns the next step. One pod is away at a time."""
    if not seen.actual:
        return Wait("KubeRay has not made the Ray cluster yet")
    if (old := seen.actual.get("rayVersion")) != (new := seen.wanted.get("rayVersion")):
        return Blocked(
            f"Ray's version changes from {old} to {new}: workers of one cannot join the head of the other. Delete the "
            "RayCluster at a time that suits; KubeRay makes it anew, and all workers start again"
        )
    if seen.actual.get("authOptions") != seen.wanted.get("authOptions"):
        return Blocked(
            "ray.tokenAuth changes: pods with and without Ray's token cannot join one head. Delete the RayCluster at a "
            "time that suits; KubeRay makes it anew, and all workers start again"
        )
    if _weights(seen.actual, seen.wanted) != _weights(seen.wanted, seen.actual):
        return Blocked(
            "the volume of the model's weights changes (model.weights): Serve starts workers of the release in pods "
            "that do not mount it, where they wait in vain. Once a job has filled it, delete the RayCluster at a time "
            "that suits; KubeRay makes it anew, and all workers start again. Or roll back"
        )
    if seen.actual_digest != seen.wanted_digest or _is_behind(seen):
        return SetSpec(_without_shrinking(seen), "the release's templates and counts")
    step = _replace_useless(seen) or _shrink(seen)
    if step is not None:
        return step
    if (missing := _unsettled(seen, seen.wanted)) is not None:
        return _replace_idle(seen) or Wait(missing)
    return _replace_one(seen) or _finish(seen)


def _weights(spec: Document, other: Document) -> set[tuple[str, str, str]]:
    # Group, claim and mount path of the container that waits for the weights, for groups in both specs.
    found = set()
    for name, group in _groups(spec).items():
        pod = group["template"].get("spec", {})
        claims = {
            each["name"]: each.get("persistentVolumeClaim", {}).get("claimName", "") for each in pod.get("volumes", [])
        }
        for container in pod.get("initContainers", []):
            if container["name"] == "weights" and name in _groups(other):
                mounts = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", [])}
                found.add((name, claims.get("model", ""), mounts.get("model", "")))
    return found


def _is_behind(seen: Observed) -> bool:
    actual = _groups(seen.actual)
    return any(_count(actual.get(name)) < _count(group) for name, group in _groups(seen.wanted).items())


def _finish(seen: Observed) -> Step:
    (*heads,) = (pod for pod in seen.pods if pod.group == HEAD and _is_outdated(seen, pod))
    left = ""
    if heads and heads[0].has_redis and "gcsFaultToleranceOptions" in seen.wanted:
        return DeletePods(tuple(heads), "the Ray head, whose tables are in Redis")
    if heads:
        left = (
            f"the Ray head {heads[0].name} still has the old template: without ray.redis all workers end with "
            "it. Delete the pod at a time that suits"
        )
    if not seen.is_submitted:
        return Wait("KubeRay has not seen the release's last change yet")
    for name, status in sorted(seen.applications.items()):
        return Wait(f"Serve says of the application {name}: {status or 'nothing yet'}")
    return Done(left)


# Groups


def _groups(spec: Document) -> dict[str, Document]:
    return {group["groupName"]: group for group in spec.get("workerGroupSpecs", [])}


def _count(group: Document | None) -> int:
    return 0 if group is None else int(group["replicas"])


def _set_count(group: Document, count: int, pods_to_delete: Sequence[Pod] = ()) -> None:
    for key in ("replicas", "minReplicas", "maxReplicas"):
        group[key] = count
    group["scaleStrategy"] = {"workersToDelete": [pod.name for pod in pods_to_delete]} if pods_to_delete else {}


def _named(seen: Observed, group: Document | None) -> list[Pod]:
    # Pods that are to go, and perhaps have not been told yet: without the names others would.
    names = ((group or {}).get("scaleStrategy") or {}).get("workersToDelete") or ()
    return [pod for pod in seen.pods if pod.name in names]


def _without_shrinking(seen: Observed) -> Document:
    # Which pods of a group go is decided later, by what is on them.
    spec = copy.deepcopy(seen.wanted)
    actual = _groups(seen.actual)
    for name, group in _groups(spec).items():
        _set_count(group, max(_count(group), _count(actual.get(name))), _named(seen, actual.get(name)))
    for name, group in actual.items():
        # KubeRay forgets the pods of a group that is not there; they go first.
        if name not in _groups(spec) and (_count(group) or _pods_of(seen, name)):
            kept = copy.deepcopy(group)
            _set_count(kept, _count(group), _named(seen, group))
            spec.setdefault("workerGroupSpecs", []).append(kept)
    # Kueue's, once the cluster is there.
    spec.pop("suspend", None)
    if "suspend" in seen.actual:
        spec["suspend"] = seen.actual["suspend"]
    return spec


def _shrink(seen: Observed) -> Step | None:
    # What one group waits for does not hold up the others.
    steps = [_shrink_group(seen, name, group) for name, group in _groups(seen.actual).items()]
    found = [step for step in steps if step is not None]
    return next((step for step in found if isinstance(step, SetSpec)), found[0] if found else None)


def _shrink_group(seen: Observed, name: str, group: Document) -> Step | None:
    # By pods that hold no worker, once Serve has ended its own.
    wanted = _groups(seen.wanted).get(name)
    pods = _pods_of(seen, name)
    if _count(group) <= _count(wanted):
        if wanted is not None:
            return None
        return Wait(f"{name}: {len(pods)} pods are ending") if pods else _drop_group(seen, name)
    if any(pod.is_ending for pod in pods):
        # The operator counts it until it is gone, and would take another one for it.
        return Wait(f"{name}: a pod is ending")
    surplus = _num_workers(seen, name) - seen.counts.get(name, 0)
    # A ready pod may have a worker that is not registered: only where none is missing does it hold none.
    idle = [pod for pod in pods if not _holds(seen, pod) and (not pod.is_ready or surplus >= 0)]
    idle.sort(key=lambda pod: not _is_outdated(seen, pod))
    if not idle and len(pods) > _count(wanted):
        if holds_workers(name) and surplus > 0:
            return Wait(f"Serve ends {surplus} {name} worker(s)")
        if (missing := _unsettled(seen, seen.actual)) is not None:
            return Wait(missing)
    # Where the workers that stay are spread over more pods than they need, Serve moves those of the emptiest.
    victims = (idle or sorted(pods, key=lambda pod: _holds(seen, pod))[:1])[: max(0, len(pods) - _count(wanted))]
    spec = copy.deepcopy(seen.actual)
    _set_count(_groups(spec)[name], max(_count(wanted), len(pods) - len(victims)), victims)
    return SetSpec(spec, f"{name}: {len(victims)} pod(s) fewer")


def _drop_group(seen: Observed, name: str) -> Step:
    spec = copy.deepcopy(seen.actual)
    spec["workerGroupSpecs"] = [group for group in spec["workerGroupSpecs"] if group["groupName"] != name]
    return SetSpec(spec, f"no group {name} any more")


# Pods


def _pods_of(seen: Observed, group: str) -> list[Pod]:
    return [pod for pod in seen.pods if pod.group == group]


def annotation(document: Document, key: str) -> str:
    """An annotation of an object or a template; empty where it has none."""
    return str((document.get("metadata", {}).get("annotations") or {}).get(key, ""))


def _is_outdated(seen: Observed, pod: Pod) -> bool:
    if pod.is_ending:
        return False
    if pod.group == HEAD:
        return pod.template != annotation(seen.wanted["headGroupSpec"]["template"], TEMPLATE_DIGEST)
    group = _groups(seen.wanted).get(pod.group)
    return group is not None and pod.template != annotation(group["template"], TEMPLATE_DIGEST)


def _holds(seen: Observed, pod: Pod) -> int:
    # A gateway pod is one gateway.
    if holds_workers(pod.group):
        return seen.workers.get(pod.group, {}).get(pod.address, 0) if pod.address else 0
    return int(pod.is_ready)


def _num_workers(seen: Observed, group: str) -> int:
    addresses = {pod.address for pod in _pods_of(seen, group) if not pod.is_ending}
    return sum(count for address, count in seen.workers.get(group, {}).items() if address in addresses)


def _replace_useless(seen: Observed) -> Step | None:
    # Those whose container never ran go at once: an image that cannot be pulled keeps the next one from nothing.
    unready = [pod for pod in seen.pods if _is_outdated(seen, pod) and not pod.is_ready]
    is_serving = any(seen.workers.values()) or any(pod.is_ready and pod.group != HEAD for pod in seen.pods)
    useless = [
        pod for pod in unready if (not pod.has_run and not _holds(seen, pod)) or (pod.group == HEAD and not is_serving)
    ]
    if useless:
        return DeletePods(tuple(useless), "of an older template, and never started")
    if any(pod.is_ending for pod in seen.pods):
        return None
    broken = [pod for pod in unready if pod.group != HEAD and not _holds(seen, pod)]
    return DeletePods((broken[0],), f"{broken[0].group}: of an older template, and not ready") if broken else None


def _unsettled(seen: Observed, spec: Document) -> str | None:
    """Returns what is missing of a spec before another pod may go."""
    heads = _pods_of(seen, HEAD)
    if len(heads) != 1 or not heads[0].is_ready or heads[0].is_ending:
        return "the Ray head is not ready"
    for name, group in _groups(spec).items():
        if name not in _groups(seen.wanted):
            continue  # it goes
        pods = _pods_of(seen, name)
        ready = sum(pod.is_ready and not pod.is_ending for pod in pods)
        if any(pod.is_ending for pod in pods) or ready != _count(group):
            return f"{name}: {ready} of {_count(group)} pods are ready"
        if holds_workers(name) and (num_workers := _num_workers(seen, name)) < seen.counts.get(name, 0):
            return f"{name}: {num_workers} of {seen.counts[name]} workers are registered"
    return None


def _replace_idle(seen: Observed) -> Step | None:
    # Workers that need more than pods of the older template have (GPUs, say) would wait for one of the new one for
    # ever. Such a pod serves nothing, so that a release whose workers never start takes no other pod with it.
    if any(pod.is_ending or not pod.is_ready for pod in seen.pods):
        return None
    idle = [
        pod
        for pod in seen.pods
        if pod.uid in seen.idle
        and _is_outdated(seen, pod)
        and holds_workers(pod.group)
        and not _holds(seen, pod)
        and _num_workers(seen, pod.group) < seen.counts.get(pod.group, 0)
    ]
    return (
        DeletePods((idle[0],), f"{idle[0].group}: of an older template, and no worker starts there") if idle else None
    )


def _replace_one(seen: Observed) -> Step | None:
    # Choose the group with the most left to do, so that both roles soon have workers of the new template.
    shares = {}
    for name in _groups(seen.wanted):
        pods = _pods_of(seen, name)
        outdated = [pod for pod in pods if _is_outdated(seen, pod)]
        if outdated:
            shares[name] = (len(outdated) / len(pods), min(outdated, key=lambda pod: (_holds(seen, pod), pod.name)))
    if not shares:
        return None
    left = sum(_is_outdated(seen, pod) for pod in seen.pods if pod.group != HEAD)
    name = max(shares, key=lambda name: shares[name][0])
    return DeletePods((shares[name][1],), f"{name}: next of {left} pod(s) of an older template")
