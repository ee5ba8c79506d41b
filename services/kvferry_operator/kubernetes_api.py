"""The seam to the API server and to KubeRay's objects (ray.io/v1)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import ipaddress
import json
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import kubernetes
import urllib3
import yaml
from kubernetes.client.exceptions import ApiException

from kvferry.errors import ConfigError, UnavailableError
from kvferry_operator.plan import HEAD, TEMPLATE_DIGEST, Document, Observed, Pod, SetSpec, annotation, worker_group

GROUP, VERSION = "ray.io", "v1"
LEASES = ("coordination.k8s.io", "v1")
# On the RayService, and on the RayCluster that KubeRay makes of it: which rendering of the chart it is.
CLUSTER_DIGEST = "kvferry.io/cluster"
RELEASE_DIGEST = "kvferry.io/release"
# Serve's deployments, by the worker group whose pods they run on. Those of an entry end with its name, as groups do.
DEPLOYMENTS = {"PrefillWorker": "prefill", "DecodeWorker": "decode", "Gateway": "gateway"}
TIMEOUT_S = 10.0
# Kubernetes refuses a longer message of an event.
MAX_EVENT_CHARACTERS = 1024

log = logging.getLogger(__name__)


class KubernetesApi:
    """One release's RayService, its RayCluster and pods. Calls block; UnavailableError where one fails."""

    def __init__(self, namespace: str, name: str, api_client: kubernetes.client.ApiClient) -> None:
        self.namespace = namespace
        self.name = name
        self._custom = kubernetes.client.CustomObjectsApi(api_client)
        self._core = kubernetes.client.CoreV1Api(api_client)
        self._service: Document = {}
        self._cluster: Document | None = None

    def observe(self) -> Observed:
        """Reads everything but the workers that are registered."""
        self._service = self._get("rayservices", self.name)
        status = self._service.get("status") or {}
        sides = [status.get("activeServiceStatus") or {}, status.get("pendingServiceStatus") or {}]
        side, self._cluster = self._find_cluster(sides)
        actual = self._cluster or {}
        cluster = actual.get("metadata", {}).get("name", "")
        return Observed(
            wanted=self._service["spec"]["rayClusterConfig"],
            wanted_digest=annotation(self._service, CLUSTER_DIGEST),
            actual=actual.get("spec", {}),
            actual_digest=annotation(actual, CLUSTER_DIGEST),
            pods=tuple(self._pods(cluster)) if cluster else (),
            counts=worker_counts(self._service["spec"].get("serveConfigV2") or ""),
            applications=_not_running(side, self._service["spec"].get("serveConfigV2") or ""),
            is_submitted=status.get("observedGeneration") == self._service["metadata"].get("generation"),
        )

    @property
    def release(self) -> str:
        """The chart's digest of the observed RayService."""
        return annotation(self._service, RELEASE_DIGEST)

    def set_spec(self, step: SetSpec) -> None:
        """Replaces the observed RayCluster's spec, if unchanged since."""
        assert self._cluster is not None
        metadata = self._cluster["metadata"]
        annotations = {**(metadata.get("annotations") or {})}
        annotations[CLUSTER_DIGEST] = annotation(self._service, CLUSTER_DIGEST)
        labels = self._service["metadata"].get("labels") or {}
        patch = [
            {"op": "test", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
            {"op": "replace", "path": "/spec", "value": step.spec},
            {"op": "add", "path": "/metadata/annotations", "value": annotations},
            # Gang schedulers read them of new pods' cluster.
            {"op": "add", "path": "/metadata/labels", "value": {**(metadata.get("labels") or {}), **labels}},
        ]
        try:
            self._call(
                self._custom.patch_namespaced_custom_object,
                *(GROUP, VERSION, self.namespace, "rayclusters", metadata["name"]),
                patch,
                _content_type="application/json-patch+json",
            )
        except UnavailableError as error:
            if _status(error) == 422:
                # How a failed `test` of a patch is answered, and a spec that the operator's schema refuses.
                raise UnavailableError(f"the RayCluster has changed meanwhile, or refuses its spec: {error}") from error
            raise

    def delete_pod(self, pod: Pod) -> None:
        """Deletes that very pod, if it is there."""
        body = kubernetes.client.V1DeleteOptions(preconditions=kubernetes.client.V1Preconditions(uid=pod.uid))
        try:
            self._call(self._core.delete_namespaced_pod, pod.name, self.namespace, body=body)
        except UnavailableError as error:
            if _status(error) not in (404, 409):
                raise

    def read_lease(self) -> Document | None:
        """Returns the release's Lease, or None."""
        try:
            found: Document = self._call(
                self._custom.get_namespaced_custom_object, *LEASES, self.namespace, "leases", self._lease_name
            )
        except UnavailableError as error:
            if _status(error) == 404:
                return None
            raise
        return found

    def write_lease(self, lease: Document) -> Document:
        """Makes the Lease, or replaces it if it is unchanged since."""
        place = (*LEASES, self.namespace, "leases")
        try:
            if "metadata" in lease:
                written: Document = self._call(
                    self._custom.replace_namespaced_custom_object, *place, self._lease_name, lease
                )
            else:
                # It goes with the release.
                uid = self._service["metadata"]["uid"]
                owner = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "RayService", "name": self.name, "uid": uid}
                metadata = {"name": self._lease_name, "namespace": self.namespace, "ownerReferences": [owner]}
                whole = {"apiVersion": "/".join(LEASES), "kind": "Lease", "metadata": metadata, **lease}
                written = self._call(self._custom.create_namespaced_custom_object, *place, whole)
        except UnavailableError as error:
            if _status(error) in (404, 409):
                raise UnavailableError("another rollout of this release has just acquired its Lease") from error
            raise
        return written

    @property
    def _lease_name(self) -> str:
        return f"{self.name}-rollout"

    def report(self, reason: str, message: str) -> None:
        """Writes an event of the RayService, or logs why not."""
        now = datetime.now(UTC)
        metadata = self._service.get("metadata", {})
        unique = hashlib.sha256(f"{now.isoformat()} {message}".encode()).hexdigest()[:16]
        event = kubernetes.client.CoreV1Event(
            metadata=kubernetes.client.V1ObjectMeta(name=f"{self.name}.{unique}", namespace=self.namespace),
            involved_object=kubernetes.client.V1ObjectReference(
                api_version=f"{GROUP}/{VERSION}",
                kind="RayService",
                name=self.name,
                namespace=self.namespace,
                uid=metadata.get("uid"),
            ),
            type="Warning" if reason == "Blocked" else "Normal",
            reason=reason,
            message=message[:MAX_EVENT_CHARACTERS],
            source=kubernetes.client.V1EventSource(component="kvferry-rollout"),
            first_timestamp=now,
            last_timestamp=now,
            count=1,
        )
        try:
            self._call(self._core.create_namespaced_event, self.namespace, event)
        except UnavailableError as error:
            log.warning("no event: %s", error)

    def _find_cluster(self, sides: list[Document]) -> tuple[Document, Document | None]:
        # The active one, as long as it is there: after somebody deleted it, KubeRay goes on naming it for a while.
        for side in sides:
            if name := side.get("rayClusterName"):
                try:
                    return side, self._get("rayclusters", name)
                except UnavailableError as error:
                    if _status(error) != 404:
                        raise
        return {}, None

    def _get(self, plural: str, name: str) -> Document:
        found: Document = self._call(
            self._custom.get_namespaced_custom_object, GROUP, VERSION, self.namespace, plural, name
        )
        return found

    def _pods(self, cluster: str) -> list[Pod]:
        selector = f"ray.io/cluster={cluster}"
        listed = self._call(self._core.list_namespaced_pod, self.namespace, label_selector=selector)
        return with_own_addresses([_pod(each) for each in listed.items])

    def _call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, _request_timeout=TIMEOUT_S, **options)
        except (ApiException, urllib3.exceptions.HTTPError) as error:
            raise UnavailableError(_words(error)) from error


def api_client() -> kubernetes.client.ApiClient:
    """Return a client of the pod's service account; outside a pod, of kubectl's configuration. Raises ConfigError."""
    try:
        kubernetes.config.load_incluster_config()
    except kubernetes.config.ConfigException:
        try:
            kubernetes.config.load_kube_config()
        except kubernetes.config.ConfigException as error:
            raise ConfigError(f"neither in a pod nor with a kubeconfig: {error}") from None
    return kubernetes.client.ApiClient()


def worker_counts(serve_config: str) -> dict[str, int]:
    """Worker group -> replicas that Serve is to run there."""
    counts = {}
    for application in _applications(serve_config):
        for deployment in application.get("deployments", []):
            kind, _, entry = deployment["name"].partition("-")
            if (group := DEPLOYMENTS.get(kind)) is not None:
                counts[worker_group(group, entry)] = int(deployment.get("num_replicas", 1))
    return counts


@functools.lru_cache(maxsize=8)  # a release has the same text in every round
def _applications(serve_config: str) -> Sequence[Document]:
    # libyaml reads it ten times as fast; it is missing from some builds of PyYAML.
    values = yaml.load(serve_config, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return (values or {}).get("applications", [])  # type: ignore[no-any-return]


def _words(error: Exception) -> str:
    if not isinstance(error, ApiException):
        return f"the API server does not answer: {type(error).__name__}"
    try:
        message = json.loads(error.body or "")["message"]
    except (TypeError, ValueError, KeyError):
        message = error.reason
    return f"the API server answers {error.status}: {str(message)[:500]}"


def _status(error: UnavailableError) -> int | None:
    """The API server's status, where it answered."""
    return error.__cause__.status if isinstance(error.__cause__, ApiException) else None


def _not_running(side: Document, serve_config: str) -> dict[str, str]:
    statuses = side.get("applicationStatuses") or {}
    # One that is no longer wanted is there until its last replica has ended.
    names = {*statuses, *(application["name"] for application in _applications(serve_config))}
    found = {name: str(statuses.get(name, {}).get("status", "")) for name in names}
    return {name: status for name, status in found.items() if status != "RUNNING"}


def with_own_addresses(pods: list[Pod]) -> list[Pod]:
    """Leave an address to the youngest pod of a group that has it."""
    # On its host's network a pod has the host's: one that failed there keeps it, beside its successor.
    youngest: dict[tuple[str, str], Pod] = {}
    for pod in sorted(pods, key=lambda pod: pod.created_unix_s):
        youngest[pod.group, pod.address] = pod
    return [pod if youngest[pod.group, pod.address] is pod else dataclasses.replace(pod, address="") for pod in pods]


def normal_address(address: str) -> str:
    """An IP address in its shortest form; other text as it is."""
    try:
        return str(ipaddress.ip_address(address.strip("[]")))
    except ValueError:
        return address


def _pod(pod: Any) -> Pod:
    labels, annotations = pod.metadata.labels or {}, pod.metadata.annotations or {}
    conditions = {each.type: each.status for each in pod.status.conditions or ()}
    containers = pod.status.container_statuses or ()
    created = pod.metadata.creation_timestamp
    return Pod(
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        group=HEAD if labels.get("ray.io/node-type") == "head" else labels.get("ray.io/group", ""),
        template=annotations.get(TEMPLATE_DIGEST, ""),
        address=normal_address(pod.status.pod_ip or ""),
        is_ready=conditions.get("Ready") == "True",
        is_ending=pod.metadata.deletion_timestamp is not None,
        has_run=any(
            (each.state is not None and each.state.running is not None)
            or (each.last_state is not None and each.last_state.terminated is not None)
            for each in containers
        ),
        # KubeRay's, on pods of a cluster with gcsFaultToleranceOptions.
        has_redis=annotations.get("ray.io/ft-enabled") == "true",
        created_unix_s=created.timestamp() if created is not None else 0.0,
    )
