"""A small KubeRay, kubelet and Serve, in turns, behind an API server that kvferry_operator calls over HTTP.

The operator's rules are those of KubeRay v1.7.0 (ray-operator/controllers/ray): each names its function there.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import http.server
import itertools
import json
import random
import re
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import yaml

from kvferry_operator.kubernetes_api import worker_counts

Document = dict[str, Any]

TURNS_TO_READY = 1
MAX_TURNS_TO_END = 6  # pods drain
TURNS_TO_LOAD = 2


@dataclass
class ModelPod:
    name: str
    group: str
    template: Document
    address: str
    age: int = 0
    idle: int = 0  # turns without a registered worker
    ending: int | None = None  # turns left
    has_redis: bool = False
    can_start: bool = True

    @property
    def has_run(self) -> bool:
        return (
            self.can_start
            and self.age >= TURNS_TO_READY
            and "no-such" not in self.template["spec"]["containers"][0]["image"]
        )

    @property
    def is_ready(self) -> bool:
        return self.ending is None and self.has_run


@dataclass
class Worker:
    group: str
    pod: ModelPod
    version: str = ""
    loading: int = TURNS_TO_LOAD
    number: int = field(default_factory=itertools.count().__next__)  # no two of a run have the same


@dataclass
class Model:
    """One release. `apply` is what Helm does; `turn` lets everybody else act once."""

    name: str = "kv"
    namespace: str = "serving"
    seed: int = 0
    places_workers: bool = True  # else Serve always says that all run
    address: str = ""  # of all pods; empty: each has its own
    service: Document | None = None
    cluster: Document | None = None
    pods: list[ModelPod] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    submitted: str = ""
    events: list[tuple[str, str]] = field(default_factory=list)
    lease: Document | None = None
    calls: set[tuple[str, str]] = field(default_factory=set)  # method and path
    num_made: int = 0
    unready: set[str] = field(default_factory=set)  # groups whose pods never start
    made_from: Document = field(default_factory=dict)  # the spec whose hash the cluster's annotation has
    num_updates: int = 0  # of the cluster by the operator itself
    num_taken: int = 0  # pods with workers that the operator ended unnamed

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.lock = threading.RLock()

    def apply(self, service: Document) -> None:
        """Creates or changes the RayService."""
        with self.lock:
            generation = 1 if self.service is None else self.service["metadata"]["generation"] + 1
            status = {} if self.service is None else self.service.get("status", {})
            self.service = copy.deepcopy(service)
            self.service["metadata"] |= {"generation": generation, "namespace": self.namespace, "uid": "service"}
            self.service["status"] = status

    def delete(self) -> None:
        """Deletes the RayService; owner references take the rest."""
        with self.lock:
            self.service = self.lease = None
            self.delete_cluster()

    def delete_cluster(self) -> None:
        """Deletes the RayCluster, as a person does who wants it made anew."""
        with self.lock:
            self.cluster = None
            self.pods, self.workers, self.submitted = [], [], ""
            self.made_from = {}

    def turn(self) -> None:
        with self.lock:
            self._kubelet()
            if self.service is not None:
                self._reconcile_service(self.service)
            if self.cluster is not None:
                self._reconcile_cluster(self.cluster)
            self._serve()
            for pod in self.pods:
                pod.idle = 0 if self.holds(pod) else pod.idle + 1

    def registered(self, group: str) -> int:
        return sum(worker.group == group and not worker.loading for worker in self.workers)

    def holds(self, pod: ModelPod) -> int:
        """Registered workers on a pod."""
        return sum(worker.pod is pod and not worker.loading for worker in self.workers)

    def counts(self, group: str) -> int:
        """Workers that Serve is to have."""
        return _counts(self.submitted).get(group, 0)

    def addresses(self) -> Iterator[tuple[str, str]]:
        for worker in self.workers:
            if not worker.loading:
                yield worker.group, worker.pod.address

    # The operator

    def _reconcile_service(self, service: Document) -> None:
        if self.cluster is None:
            # constructRayClusterForRayService: annotations and labels are the service's.
            self.cluster = {
                "apiVersion": "ray.io/v1",
                "kind": "RayCluster",
                "metadata": {
                    "name": f"{self.name}-x1",
                    "resourceVersion": "1",
                    "annotations": copy.deepcopy(service["metadata"].get("annotations", {})),
                },
                "spec": copy.deepcopy(service["spec"]["rayClusterConfig"]),
            }
            self.made_from = self.cluster["spec"]
        elif len(service["spec"]["rayClusterConfig"]["workerGroupSpecs"]) > len(self.made_from["workerGroupSpecs"]):
            # shouldUpdateCluster: against what it made the cluster of, whatever that has become.
            num_groups = len(self.made_from["workerGroupSpecs"])
            if _without_counts(service, num_groups) == _without_counts({"spec": {"rayClusterConfig": self.made_from}}):
                self.cluster["spec"] = copy.deepcopy(service["spec"]["rayClusterConfig"])
                self.cluster["metadata"]["annotations"] = copy.deepcopy(service["metadata"].get("annotations", {}))
                self.made_from = self.cluster["spec"]
                self.num_updates += 1
        # shouldPrepareNewCluster, isZeroDowntimeUpgradeEnabled: with upgradeStrategy None another hash changes nothing.
        assert service["spec"]["upgradeStrategy"] == {"type": "None"}
        ready = any(pod.group == "head" and pod.is_ready for pod in self.pods)
        if ready:
            # updateServeDeployment: whenever the configuration differs from the one submitted.
            self.submitted = service["spec"]["serveConfigV2"]
        side = {"rayClusterName": self.cluster["metadata"]["name"]}
        if ready:
            side["applicationStatuses"] = {name: {"status": status} for name, status in self._statuses().items()}
        service["status"] = {"observedGeneration": service["metadata"]["generation"]}
        # calculateStatus, reconcileServices: without a port `serve` on the head an error ends the reconcile before it.
        head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
        has_port = any(port["name"] == "serve" for port in head["ports"])
        is_active = has_port and self._is_running()
        service["status"]["activeServiceStatus" if is_active else "pendingServiceStatus"] = side

    def _reconcile_cluster(self, cluster: Document) -> None:
        """reconcilePods, with Ray's autoscaler off."""
        spec = cluster["spec"]
        assert not spec.get("enableInTreeAutoscaling")
        if not any(pod.group == "head" for pod in self.pods):
            self._make("head", spec["headGroupSpec"]["template"])
        for group in spec["workerGroupSpecs"]:
            name = group["groupName"]
            # GetWorkerGroupDesiredReplicas
            wanted = min(max(group["replicas"], group["minReplicas"]), group["maxReplicas"])
            deleted = set(group.get("scaleStrategy", {}).get("workersToDelete", ()))
            for pod in self.pods:
                if pod.name in deleted:
                    self.end(pod)
            # Pods that are ending still count, unless they were named.
            running = [pod for pod in self.pods if pod.group == name and pod.name not in deleted]
            self.random.shuffle(running)
            for _ in range(wanted - len(running)):
                self._make(name, group["template"])
            for pod in running[: max(0, len(running) - wanted)]:
                self.num_taken += bool(self.holds(pod)) and pod.ending is None
                self.end(pod)

    def _make(self, group: str, template: Document) -> None:
        self.num_made += 1
        address = self.address or f"10.0.{self.num_made // 250}.{self.num_made % 250 + 1}"
        if template["spec"].get("hostNetwork"):
            # The scheduler: of hosts that no other such pod has, the first.
            taken = {pod.address for pod in self.pods}
            address = next(host for number in range(1, 250) if (host := f"10.1.0.{number}") not in taken)
        assert self.cluster is not None
        has_redis = "gcsFaultToleranceOptions" in self.cluster["spec"]
        name = f"{self.name}-{group}-{self.num_made}"
        pod = ModelPod(name, group, copy.deepcopy(template), address, has_redis=has_redis)
        pod.can_start = group not in self.unready
        self.pods.append(pod)

    # The kubelet

    def end(self, pod: ModelPod) -> None:
        if pod.ending is None:
            pod.ending = self.random.randint(1, MAX_TURNS_TO_END)

    def _kubelet(self) -> None:
        for pod in self.pods:
            pod.age += 1
            if pod.ending is not None:
                pod.ending -= 1
        gone = [pod for pod in self.pods if pod.ending is not None and pod.ending <= 0]
        self.pods = [pod for pod in self.pods if pod not in gone]
        if any(pod.group == "head" and not pod.has_redis for pod in gone):
            # Without tables in Redis the head's end is the cluster's.
            self.workers = []
            self.submitted = ""

    # Serve

    def _serve(self) -> None:
        if not self.places_workers:
            return
        self.workers = [worker for worker in self.workers if worker.pod in self.pods and worker.pod.ending is None]
        for worker in self.workers:
            worker.loading = max(0, worker.loading - 1)
        counts, versions = _counts(self.submitted), _versions(self.submitted)
        for group in sorted({*counts, *(worker.group for worker in self.workers)} - {"gateway"}):
            there = [worker for worker in self.workers if worker.group == group]
            excess = len(there) - counts.get(group, 0)
            old = [worker for worker in there if worker.version != versions.get(group)]
            if excess > 0 and self.submitted:
                # One a turn.
                self.workers.remove(self.random.choice(there))
            elif old and group in counts and excess == 0 and not any(worker.loading for worker in there):
                self.workers.remove(old[0])
                excess -= 1
            for pod in self.random.sample(self.pods, len(self.pods)):
                places = self._places(group) - sum(worker.pod is pod for worker in self.workers)
                fits = _num_gpus(pod.template) >= _needs(self.submitted).get(group, 0)
                while pod.group == group and pod.is_ready and fits and places > 0 and excess < 0:
                    self.workers.append(Worker(group, pod, versions[group]))
                    places, excess = places - 1, excess + 1

    def _places(self, name: str) -> int:
        assert self.cluster is not None
        for group in self.cluster["spec"]["workerGroupSpecs"]:
            if group["groupName"] == name:
                return int(group["resources"][f"kvferry_{name}"])
        return 0

    def _statuses(self) -> dict[str, str]:
        """Serve's applications, those that are no longer declared until their last worker has gone."""
        found = {}
        left = {worker.group for worker in self.workers}
        versions = _versions(self.submitted)
        for application in _applications(self.submitted):
            counts = _counts(json.dumps({"applications": [application]}))
            groups = [group for group in counts if group != "gateway"]
            is_whole = all(self.registered(group) == counts[group] for group in groups) and all(
                worker.version == versions[worker.group] for worker in self.workers if worker.group in groups
            )
            found[application["name"]] = "RUNNING" if is_whole or not self.places_workers else "DEPLOYING"
            left -= {*groups}
        for entry in {group.partition("-")[2] for group in left} - {""}:
            found.setdefault(f"kvferry-model-{entry}", "DELETING")
        return found

    def _is_running(self) -> bool:
        statuses = self._statuses()
        return bool(statuses) and set(statuses.values()) == {"RUNNING"}

    # The API server

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Document]:
        with self.lock:
            path, _, query = path.partition("?")
            ray = f"/apis/ray.io/v1/namespaces/{self.namespace}"
            core = f"/api/v1/namespaces/{self.namespace}"
            leases = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
            self.calls.add((method, path))
            if (method, path) == ("GET", f"{ray}/rayservices/{self.name}") and self.service is not None:
                return 200, self.service
            if self.cluster is not None and path == f"{ray}/rayclusters/{self.cluster['metadata']['name']}":
                return (200, self.cluster) if method == "GET" else self._patch(json.loads(body))
            if path.startswith(leases):
                return self._answer_lease(method, path.removeprefix(leases), json.loads(body) if body else {})
            if (method, path) == ("GET", f"{core}/pods"):
                assert self.cluster is not None
                assert urllib.parse.unquote(query) == f"labelSelector=ray.io/cluster={self.cluster['metadata']['name']}"
                return 200, {"kind": "PodList", "apiVersion": "v1", "items": [self._as_pod(pod) for pod in self.pods]}
            if (method, path) == ("POST", f"{core}/events"):
                event = json.loads(body)
                self.events.append((event["reason"], event["message"]))
                return 201, event
            if method == "DELETE" and (match := re.fullmatch(rf"{core}/pods/([^/]+)", path)):
                for pod in self.pods:
                    if pod.name == match[1]:
                        if json.loads(body)["preconditions"]["uid"] != f"uid-{pod.name}":
                            return 409, _status(409, "the UID in the precondition does not match")
                        self.end(pod)
                        return 200, self._as_pod(pod)
            return 404, _status(404, f"{path} not found")

    def _answer_lease(self, method: str, name: str, sent: Document) -> tuple[int, Document]:
        there = self.lease
        if method == "POST":
            if there is not None:
                return 409, _status(409, "the lease already exists")
            self.lease = sent | {"metadata": sent["metadata"] | {"resourceVersion": "1"}}
            return 201, self.lease
        if there is None or name != f"/{there['metadata']['name']}":
            return 404, _status(404, "no such lease")
        if method == "PUT":
            version = there["metadata"]["resourceVersion"]
            if sent["metadata"]["resourceVersion"] != version:
                return 409, _status(409, "the object has been modified")
            self.lease = sent | {"metadata": sent["metadata"] | {"resourceVersion": str(int(version) + 1)}}
        return 200, self.lease or {}

    def _patch(self, operations: list[Document]) -> tuple[int, Document]:
        assert self.cluster is not None
        metadata = self.cluster["metadata"]
        for operation in operations:
            if operation["op"] == "test":
                if operation["value"] != metadata["resourceVersion"]:
                    return 422, _status(422, "the server rejected our request: testing value failed")
            elif operation["path"] == "/spec":
                self.cluster["spec"] = operation["value"]
            elif operation["path"] in ("/metadata/annotations", "/metadata/labels"):
                metadata[operation["path"].rpartition("/")[2]] = operation["value"]
            else:
                return 422, _status(422, f"unknown operation {operation}")
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
        return 200, self.cluster

    def _as_pod(self, pod: ModelPod) -> Document:
        # buildHeadPod, buildWorkerPod: the template's annotations are the pod's.
        metadata = {
            "name": pod.name,
            "uid": f"uid-{pod.name}",
            "annotations": {
                **pod.template["metadata"].get("annotations", {}),
                "ray.io/ft-enabled": str(pod.has_redis).lower(),
            },
            "labels": {"ray.io/node-type": "head" if pod.group == "head" else "worker", "ray.io/group": pod.group},
        }
        if pod.ending is not None:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        condition = {"type": "Ready", "status": str(pod.is_ready)}
        state = {"running": {}} if pod.has_run else {"waiting": {"reason": "ImagePullBackOff"}}
        container = {
            "name": "ray",
            "image": "",
            "imageID": "",
            "ready": pod.is_ready,
            "restartCount": 0,
            "state": state,
        }
        return {
            "metadata": metadata,
            "spec": pod.template["spec"],
            "status": {"podIP": pod.address, "conditions": [condition], "containerStatuses": [container]},
        }


@functools.cache
def _applications(serve_config: str) -> list[Document]:
    return list((yaml.load(serve_config, Loader=yaml.CSafeLoader) or {}).get("applications", []))


# A release says the same for many turns.
@functools.cache
def _counts(serve_config: str) -> dict[str, int]:
    return worker_counts(serve_config)


@functools.cache
def _versions(serve_config: str) -> dict[str, str]:
    """Group -> the version of its deployment: get_app_code_version of ray.serve, for what the chart writes."""
    found = {}
    for application in _applications(serve_config):
        version = json.dumps([application.get("import_path"), application.get("args")], sort_keys=True)
        found |= dict.fromkeys(worker_counts(json.dumps({"applications": [application]})), version)
    return found


@functools.cache
def _needs(serve_config: str) -> dict[str, int]:
    """Worker group -> GPUs of each worker, where there is one to a pod."""
    needs = {}
    for application in _applications(serve_config):
        for deployment in application["deployments"]:
            groups = worker_counts(json.dumps({"applications": [{"deployments": [deployment]}]}))
            num_gpus = (deployment.get("ray_actor_options") or {}).get("num_gpus", 0)
            needs |= dict.fromkeys(groups, int(num_gpus))
    return needs


def _num_gpus(template: Document) -> int:
    limits = (template["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    return sum(int(count) for name, count in limits.items() if name.endswith("/gpu"))


def _without_counts(service: Document, num_groups: int | None = None) -> Document:
    """generateHashWithoutReplicasAndWorkersToDelete: of a cluster, up to so many groups."""
    spec = copy.deepcopy(service["spec"]["rayClusterConfig"])
    spec["workerGroupSpecs"] = spec["workerGroupSpecs"][:num_groups]
    for group in spec["workerGroupSpecs"]:
        for key in ("replicas", "minReplicas", "maxReplicas", "scaleStrategy"):
            group.pop(key, None)
    return dict(spec)


def _status(code: int, message: str) -> Document:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


@contextlib.contextmanager
def serving(model: Model) -> Iterator[str]:
    """Serves a model's API on loopback. Yields its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # or each body waits 40 ms for the client to acknowledge its head

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            status, document = model.answer(self.command, self.path, body)
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815  (http.server's names)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


# What the operator's Go types make of an object when it is written back (utils.go has none of these rules: they are
# encoding/json's of the types in apis/ray/v1 and k8s.io/api/core/v1).


def written_back(service: Document) -> Document:
    """A RayService after the operator added its finalizer: the whole object, as its types marshal it."""
    result = copy.deepcopy(service)
    cluster = result["spec"]["rayClusterConfig"]
    for group in cluster["workerGroupSpecs"]:
        group.setdefault("scaleStrategy", {})
    templates = [cluster["headGroupSpec"]["template"], *(group["template"] for group in cluster["workerGroupSpecs"])]
    for template in templates:
        template.setdefault("metadata", {})
        for container in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            container.setdefault("resources", {})
            for variable in container.get("env", []):
                if variable.get("value") == "":
                    del variable["value"]
            for amounts in container["resources"].values():
                for name, amount in amounts.items():
                    amounts[name] = canonical(amount)
        for volume in template["spec"].get("volumes", []):
            if "ephemeral" in volume:
                volume["ephemeral"]["volumeClaimTemplate"].setdefault("metadata", {})
            size = (volume.get("emptyDir") or {}).get("sizeLimit")
            if size is not None:
                volume["emptyDir"]["sizeLimit"] = canonical(size)
    return result


def canonical(quantity: object) -> str:
    """resource.Quantity's CanonicalizeBytes, for what a chart writes."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(quantity))
    assert match is not None, quantity
    decimal = {"m": Fraction(1, 1000), "": Fraction(1), "k": Fraction(10**3), "M": Fraction(10**6)}
    binary = {
        "": Fraction(1),
        **{unit: Fraction(1024**power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti"), 1)},
    }
    scales = binary if match[2] in binary and match[2] else decimal
    value = Fraction(match[1]) * scales[match[2]]
    for unit, scale in sorted(scales.items(), key=lambda each: -each[1]):
        if (value / scale).denominator == 1:
            return f"{value / scale}{unit}"
    raise AssertionError(f"{quantity} has no canonical form here")
