"""Run the life of a release on a Kubernetes cluster for tests: install, upgrade, roll back, uninstall, install again.

    make k8s-check                                        # the cluster of $KUBECONFIG, cpu-trial, every Helm found
    python tools/k8s_check.py --example 8x-h200-pair --imitated-pods

Needs KubeRay's operator, and what an example names outside its namespace (priority class, queue, CRDs). Every run has
a namespace of its own, which it deletes at the end. A cluster that is not on this machine is refused without
--cluster-is-for-tests. With --imitated-pods, pods run nothing (an API server with imitated kubelets): then the rollout
runs here, and the workers of ready pods count as registered.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_check
import kubernetes
import urllib3
import yaml

from kvferry.membership.base import Member, MemberId, MemberKind
from kvferry_operator.__main__ import DONE_ROUNDS, Rollout, words
from kvferry_operator.kubernetes_api import KubernetesApi, worker_counts
from kvferry_operator.plan import ROLES, Blocked, Done

RELEASE = "kv"
READY_S = 900
HELM_TIMEOUT = "15m"
# Example -> values of the upgrade that changes counts.
COUNTS: Mapping[str, Mapping[str, Any]] = {
    "cpu-trial": {"roles": {"decode": {"replicas": 3}}, "gateway": {"replicas": 2}},
    "1-gpu": {"gateway": {"replicas": 3}},
    "8x-h200-pair": {"roles": {"decode": {"replicas": 16}, "prefill": {"replicas": 4}}},
    "70b-4plus4": {"roles": {"decode": {"replicas": 6}, "prefill": {"replicas": 6}}},
}
OTHER_TAG = "0.1.1-test"
# What an example names and does not make: secret -> entries, claim -> access mode.
SECRETS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "8x-h200-pair": {"kvferry-gateway-tls": {"tls.crt": "-", "tls.key": "-"}},
    "70b-4plus4": {
        "kvferry-page-keys": {"keys.json": "{}"},
        "redis-password": {"password": "x"},
        "platform-etcd-client": {"ca.crt": "-", "tls.crt": "-", "tls.key": "-"},
        "platform-etcd-password": {"password": "x"},
        "kvferry-api-keys": {"keys.yaml": "[]"},
    },
}
CLAIMS: Mapping[str, Mapping[str, str]] = {
    "8x-h200-pair": {"models": "ReadOnlyMany"},
    "70b-4plus4": {"kvferry-pages": "ReadWriteMany"},
}


class CheckFailed(Exception):
    """The life cycle is not as it should be; the message says where."""


def refuse_other_clusters(server: str, *, is_for_tests: bool) -> None:
    """Raises CheckFailed for a cluster elsewhere that nobody said is for tests."""
    host = urllib.parse.urlsplit(server).hostname or ""
    if not is_for_tests and host not in ("127.0.0.1", "::1", "localhost"):
        raise CheckFailed(f"{host} is not this machine: say --cluster-is-for-tests if releases may come and go there")


def version_of(api_client: Any) -> str:
    """Returns the API server's version. Raises CheckFailed."""
    try:
        version: str = kubernetes.client.VersionApi(api_client).get_code(_request_timeout=10).git_version
    except (kubernetes.client.ApiException, urllib3.exceptions.HTTPError) as error:
        raise CheckFailed(
            f"the API server at {api_client.configuration.host} does not answer: {type(error).__name__}"
        ) from None
    return version


def imitated_member(group: str, number: int, address: str) -> Member:
    """A worker as etcd has it."""
    role, _, entry = group.partition("-")
    return Member(
        kind=MemberKind(role),
        member_id=MemberId(f"{group}-{number}"),
        pool=f"{entry}@0" if entry else "",
        address=f"{address}:{7000 + number}",
        model="m",
        version="0",
    )


class ImitatedWorkers:
    """Members as a membership gives them: the workers that Serve would have on the pods that are ready."""

    def __init__(self, namespace: str, api_client: Any) -> None:
        self._namespace = namespace
        self._core = kubernetes.client.CoreV1Api(api_client)
        self._custom = kubernetes.client.CustomObjectsApi(api_client)
        self.least: dict[str, int] = {}

    async def members(self) -> tuple[Member, ...]:
        service = self._custom.get_namespaced_custom_object("ray.io", "v1", self._namespace, "rayservices", RELEASE)
        counts = worker_counts(service["spec"]["serveConfigV2"])
        places = {
            group["groupName"]: int(group["resources"].get(f"kvferry_{group['groupName']}", 0))
            for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        }
        found = []
        for role in ROLES:
            addresses = [address for address in self._ready(role) for _ in range(places.get(role, 0))]
            workers = addresses[: counts.get(role, 0)]
            self.least[role] = min(self.least.get(role, len(workers)), len(workers))
            found += [imitated_member(role, number, address) for number, address in enumerate(workers)]
        return tuple(found)

    def _ready(self, role: str) -> list[str]:
        pods = self._core.list_namespaced_pod(self._namespace, label_selector=f"ray.io/group={role}").items
        return [
            pod.status.pod_ip
            for pod in sorted(pods, key=lambda pod: pod.metadata.creation_timestamp)
            if pod.metadata.deletion_timestamp is None
            and any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())
        ]


@dataclass
class Site:
    """One run: an example, a Helm, and a namespace for both."""

    helm: helm_check.Helm
    example: str
    namespace: str
    folder: Path
    api_client: Any
    is_imitated: bool

    def values(self, *layers: Mapping[str, Any]) -> Path:
        """A file of the example's values with changes."""
        example = yaml.safe_load((helm_check.EXAMPLES / f"{self.example}.yaml").read_text())
        values = helm_check.merged(example, *layers)
        file = self.folder / f"values-{secrets.token_hex(4)}.yaml"
        file.write_text(yaml.safe_dump(values))
        return file

    def run_helm(self, *arguments: str) -> float:
        """Runs Helm and returns its seconds. Raises CheckFailed."""
        begun_s = time.monotonic()
        environ = {**os.environ, "HOME": str(self.folder), "HELM_PLUGINS": str(self.folder)}
        command = [str(self.helm.program), *arguments, "--namespace", self.namespace]
        result = subprocess.run(command, env=environ, capture_output=True, text=True)
        if result.returncode:
            raise CheckFailed(f"helm {' '.join(arguments)}: {result.stderr.strip()[-1000:]}")
        return time.monotonic() - begun_s

    async def settle(self) -> tuple[str, dict[str, int]]:
        """Waits until the rollout has nothing left to do. Returns what it said last, and the fewest workers."""
        if not self.is_imitated:
            # Helm waited for the rollout's own deployment (--wait).
            return "as the rollout's deployment says", {}
        workers = ImitatedWorkers(self.namespace, self.api_client)
        rollout = Rollout(KubernetesApi(self.namespace, RELEASE, self.api_client), workers, self.folder)  # type: ignore[arg-type]
        deadline_s = time.monotonic() + READY_S
        said = ""
        num_done = 0
        while time.monotonic() < deadline_s:
            step = await rollout.round()
            if words(step)[1] != said:
                said = words(step)[1]
                print(f"      {words(step)[0]}: {said}", flush=True)
            if isinstance(step, Blocked):
                raise CheckFailed(said)
            # As the rollout's own deployment: the API server may show what was before a change.
            num_done = num_done + 1 if isinstance(step, Done) else 0
            if num_done == DONE_ROUNDS:
                return said, workers.least
            await asyncio.sleep(1)
        raise CheckFailed(f"not done in {READY_S} s: {said}")

    def check(self, values: Path) -> str:
        """Compares the RayCluster and its pods with a rendering. Raises CheckFailed."""
        rendered = self.helm.documents(values=values)
        (service,) = (each for each in rendered if each["kind"] == "RayService")
        wanted = service["spec"]["rayClusterConfig"]
        custom = kubernetes.client.CustomObjectsApi(self.api_client)
        (cluster,) = custom.list_namespaced_custom_object("ray.io", "v1", self.namespace, "rayclusters")["items"]
        groups = {group["groupName"]: group["replicas"] for group in wanted["workerGroupSpecs"]}
        found = {group["groupName"]: group["replicas"] for group in cluster["spec"]["workerGroupSpecs"]}
        if groups != found:
            raise CheckFailed(f"the RayCluster has {found}, and the release says {groups}")
        images = {
            group["groupName"]: group["template"]["spec"]["containers"][0]["image"]
            for group in wanted["workerGroupSpecs"]
        }
        pods: collections.Counter[tuple[str, str]] = collections.Counter()
        core = kubernetes.client.CoreV1Api(self.api_client)
        for pod in core.list_namespaced_pod(self.namespace, label_selector="ray.io/node-type=worker").items:
            pods[(pod.metadata.labels["ray.io/group"], pod.spec.containers[0].image)] += 1
        expected = {(name, images[name]): count for name, count in groups.items()}
        if pods != expected:
            raise CheckFailed(f"pods are {dict(pods)}, and the release says {expected}")
        ready = self._is_ready()
        return f"RayService Ready={ready}, groups {found}"

    def _is_ready(self) -> str:
        custom = kubernetes.client.CustomObjectsApi(self.api_client)
        for _ in range(60):
            service = custom.get_namespaced_custom_object("ray.io", "v1", self.namespace, "rayservices", RELEASE)
            conditions = {each["type"]: each["status"] for each in service.get("status", {}).get("conditions", [])}
            if conditions.get("Ready") == "True":
                return "True"
            time.sleep(1)
        raise CheckFailed(f"the RayService is not ready: {conditions}")

    def left(self) -> list[str]:
        """Names of claims, secrets and pods of the namespace that an uninstall left, without the example's own."""
        core = kubernetes.client.CoreV1Api(self.api_client)
        own = {*SECRETS.get(self.example, {}), *CLAIMS.get(self.example, {})}
        for _ in range(60):
            listed = core.list_namespaced_pod(self.namespace, label_selector="kvferry.io/component notin (test)").items
            if not listed:
                break
            time.sleep(1)
        found = [f"pod/{each.metadata.name}" for each in listed]
        found += [
            f"claim/{each.metadata.name}" for each in core.list_namespaced_persistent_volume_claim(self.namespace).items
        ]
        found += [f"secret/{each.metadata.name}" for each in core.list_namespaced_secret(self.namespace).items]
        return [each for each in found if each.partition("/")[2] not in own]


async def life(site: Site) -> None:
    """Runs every step and prints a line for each. Raises CheckFailed at the first that is wrong."""
    chart, counts = str(helm_check.CHART), COUNTS[site.example]
    wait = [] if site.is_imitated else ["--wait", "--timeout", HELM_TIMEOUT]
    first, more = site.values(), site.values(counts)
    other = site.values(counts, {"image": {"tag": OTHER_TAG}})
    steps = [
        ("install", ["install", RELEASE, chart, "-f", str(first)], first),
        ("upgrade, nothing changed", ["upgrade", RELEASE, chart, "-f", str(first)], first),
        ("upgrade of counts", ["upgrade", RELEASE, chart, "-f", str(more)], more),
    ]
    if site.is_imitated:  # there is one image elsewhere
        steps.append(("upgrade of the image", ["upgrade", RELEASE, chart, "-f", str(other)], other))
    steps += [
        ("rollback", ["rollback", RELEASE, "1"], first),
        ("uninstall", ["uninstall", RELEASE], None),
        ("install again", ["install", RELEASE, chart, "-f", str(first)], first),
        ("uninstall at the end", ["uninstall", RELEASE], None),
    ]
    for name, arguments, values in steps:
        if values is None:
            helm_s = site.run_helm(*arguments)
            print(f"{name}: {helm_s:.0f} s; left: {', '.join(site.left()) or 'nothing'}", flush=True)
            continue
        helm_s = site.run_helm(*arguments, *wait)
        _, least = await site.settle()
        fewest = f", fewest workers {least}" if least else ""
        print(f"{name}: {helm_s:.0f} s; {site.check(values)}{fewest}", flush=True)


@contextlib.contextmanager
def namespace_of(example: str, api_client: Any) -> Iterator[str]:
    """A namespace with what an example needs, deleted at the end."""
    core = kubernetes.client.CoreV1Api(api_client)
    name = f"kvferry-check-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "privileged"}  # for folders of nodes
    core.create_namespace({"metadata": {"name": name, "labels": labels}})
    try:
        for secret, entries in SECRETS.get(example, {}).items():
            core.create_namespaced_secret(name, {"metadata": {"name": secret}, "stringData": dict(entries)})
        for claim, mode in CLAIMS.get(example, {}).items():
            spec = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
            core.create_namespaced_persistent_volume_claim(name, {"metadata": {"name": claim}, "spec": spec})
        yield name
    finally:
        core.delete_namespace(name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the life of a release on a Kubernetes cluster for tests.")
    parser.add_argument("--example", choices=sorted(COUNTS), action="append", help="cpu-trial unless said")
    parser.add_argument("--imitated-pods", action="store_true", help="pods of this cluster run nothing")
    parser.add_argument("--cluster-is-for-tests", action="store_true", help="of a cluster that is not on this machine")
    arguments = parser.parse_args()
    if not os.environ.get("KUBECONFIG"):
        print("skipped: KUBECONFIG names no cluster")
        return 0
    kubernetes.config.load_kube_config()
    try:
        with kubernetes.client.ApiClient() as api_client:
            server = api_client.configuration.host
            refuse_other_clusters(server, is_for_tests=arguments.cluster_is_for_tests)
            version = version_of(api_client)
            for example in arguments.example or ["cpu-trial"]:
                for helm in helm_check.helms():
                    print(f"{example}, Helm {helm.version}, Kubernetes {version}", flush=True)
                    with namespace_of(example, api_client) as namespace, tempfile.TemporaryDirectory() as folder:
                        site = Site(helm, example, namespace, Path(folder), api_client, arguments.imitated_pods)
                        asyncio.run(life(site))
    except (CheckFailed, helm_check.CheckFailed, kubernetes.client.ApiException) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
