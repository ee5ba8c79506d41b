"""The life of a release on a model of KubeRay: install, change counts, change the image, roll back, uninstall, again.

The chart renders, kvferry_operator acts through its own client over HTTP, and tests/support/kuberay_model.py answers.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes
import pytest
import yaml

from kvferry.errors import UnavailableError
from kvferry.membership.base import Member
from kvferry_operator.__main__ import Rollout
from kvferry_operator.kubernetes_api import KubernetesApi
from kvferry_operator.lease import DURATION_S
from kvferry_operator.plan import Blocked, Done, SetSpec, Step, Wait
from support.chart import helm_check, load_tool, newest_helm, one, write_values
from support.fake_api_server import write_kubeconfig
from support.fake_leases import Clock
from support.kuberay_model import Model, serving, written_back

k8s_check = load_tool("k8s_check")

MAX_TURNS = 400
ROLES = ("prefill", "decode")
COUNTS = k8s_check.COUNTS


class ModelMembership:
    """The workers that the model has registered."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.is_away = False

    async def members(self) -> tuple[Member, ...]:
        if self.is_away:
            raise UnavailableError("etcd does not answer")
        with self.model.lock:
            return tuple(
                k8s_check.imitated_member(role, number, address)
                for number, (role, address) in enumerate(self.model.addresses())
            )


@dataclass
class Site:
    """A model, what rolls out on it, and the least that was registered since the last change."""

    model: Model
    membership: ModelMembership
    rollout: Rollout
    folder: Path
    least: dict[str, int] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    async def settle(self) -> Step:
        """Turns until nothing is left to do, or nothing more will be. Returns the last step."""
        self.least = {}
        self.steps = []
        for _ in range(MAX_TURNS):
            self.model.turn()
            step = await self.rollout.round()
            self.steps.append(step)
            for role in ("prefill", "decode"):
                self.least[role] = min(self.least.get(role, 10**9), self.model.registered(role))
            is_done = (self.folder / "done").exists()
            if is_done or (isinstance(step, Blocked) and step == self.steps[-2:][0]):
                return step
        raise AssertionError(f"never done: {self.steps[-3:]}")

    def pods(self, group: str) -> int:
        return sum(pod.group == group for pod in self.model.pods)

    def images(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for pod in self.model.pods:
            found.setdefault(pod.group, set()).add(pod.template["spec"]["containers"][0]["image"].rpartition(":")[2])
        return found


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    model = Model(name=helm_check.RELEASE, namespace=helm_check.NAMESPACE)
    with serving(model) as url:
        client = kubernetes.client.ApiClient(kubernetes.client.Configuration(host=url))
        api = KubernetesApi(helm_check.NAMESPACE, helm_check.RELEASE, client)
        membership = ModelMembership(model)
        yield Site(model, membership, Rollout(api, membership, tmp_path), tmp_path)  # type: ignore[arg-type]
        client.close()


@functools.cache
def example_values(name: str) -> str:
    return (helm_check.EXAMPLES / f"{name}.yaml").read_text()


def service(folder: Path, name: str, *changes: dict[str, Any]) -> dict[str, Any]:
    """The RayService of an example with changed values."""
    values = helm_check.merged(yaml.safe_load(example_values(name)), *changes)
    return one(newest_helm().documents(values=write_values(folder, values)), "RayService")


def places(release: dict[str, Any]) -> dict[str, int]:
    """Role -> workers that fit on a pod."""
    groups = release["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: int(group["resources"].get(f"kvferry_{group['groupName']}", 1)) for group in groups}


IMAGE = {"image": {"tag": "0.1.1-test"}}


@pytest.mark.parametrize("example", sorted(COUNTS))
async def test_the_life_of_a_release(example: str, site: Site, tmp_path: Path) -> None:
    model = site.model

    def counts_of(release: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
        groups = release["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        (application,) = helm_check.serve_config(release)["applications"]
        workers = {each["name"]: each["num_replicas"] for each in application["deployments"]}
        return {group["groupName"]: group["replicas"] for group in groups}, workers

    async def reaches(release: dict[str, Any]) -> Step:
        model.apply(release)
        step = await site.settle()
        assert isinstance(step, Done)
        assert (tmp_path / "done").exists()
        pods, workers = counts_of(release)
        assert {group: site.pods(group) for group in pods} == pods
        assert model.registered("prefill") == workers.get("PrefillWorker", 0)
        assert model.registered("decode") == workers["DecodeWorker"]
        return step

    first = service(tmp_path, example)
    await reaches(first)
    old_image = next(iter(site.images()["decode"]))
    decode = model.registered("decode")
    prefill = model.registered("prefill")

    grown = service(tmp_path, example, COUNTS[example])
    await reaches(grown)
    # In place; where Serve empties no pod, those on the emptiest are moved.
    for role, before in (("prefill", prefill), ("decode", decode)):
        per_pod = places(grown).get(role, 1)
        assert site.least[role] >= min(before, model.registered(role)) - (per_pod - 1)

    decode, prefill = model.registered("decode"), model.registered("prefill")
    changed = service(tmp_path, example, COUNTS[example], IMAGE)
    step = await reaches(changed)
    assert site.least["decode"] >= decode - places(changed)["decode"], "one pod at a time"
    assert site.least["prefill"] >= prefill - places(changed).get("prefill", 0)
    images = site.images()
    has_redis = "gcsFaultToleranceOptions" in changed["spec"]["rayClusterConfig"]
    assert images.pop("head") == ({"0.1.1-test"} if has_redis else {old_image})
    assert all(each == {"0.1.1-test"} for each in images.values())
    assert isinstance(step, Done)
    assert bool(step.left) == (not has_redis)

    await reaches(first)  # as `helm rollback` applies it
    assert all(each == {old_image} for each in site.images().values())

    model.delete()
    assert model.pods == []
    await reaches(first)
    reasons = [reason for reason, _ in model.events]
    assert {"UpdatingCluster", "ReplacingPods", "Done"} <= set(reasons)


async def test_an_upgrade_replaces_an_image_that_is_not_there(site: Site, tmp_path: Path) -> None:
    site.model.apply(service(tmp_path, "8x-h200-pair", {"image": {"tag": "no-such"}}))
    for _ in range(10):
        site.model.turn()
        assert isinstance(await site.rollout.round(), Wait)
    site.model.apply(service(tmp_path, "8x-h200-pair"))
    assert isinstance(await site.settle(), Done)
    assert {tag for tags in site.images().values() for tag in tags} == {"0.1.0-gpu"}


async def test_a_bad_image_takes_one_pod_and_no_more(site: Site, tmp_path: Path) -> None:
    counts = {"roles": {"prefill": {"replicas": 8}, "decode": {"replicas": 8}}}
    good = service(tmp_path, "70b-4plus4", counts)
    site.model.apply(good)
    await site.settle()
    site.model.apply(service(tmp_path, "70b-4plus4", counts, {"image": {"tag": "no-such"}}))
    for _ in range(60):
        site.model.turn()
        step = await site.rollout.round()
    assert isinstance(step, Wait)
    assert "pods are ready" in step.why
    assert not (tmp_path / "done").exists()
    assert site.model.registered("prefill") + site.model.registered("decode") == 14
    site.model.apply(good)
    assert isinstance(await site.settle(), Done)
    assert site.model.registered("prefill") == site.model.registered("decode") == 8


async def test_fewer_workers_take_the_pods_that_serve_emptied(site: Site, tmp_path: Path) -> None:
    def counts(decode: int) -> dict[str, Any]:
        return service(tmp_path, "70b-4plus4", {"roles": {"decode": {"replicas": decode, "workersPerPod": 1}}})

    site.model.apply(counts(8))
    await site.settle()
    site.model.apply(counts(3))
    before = {worker.number for worker in site.model.workers}
    await site.settle()
    assert site.pods("decode") == 3
    assert site.least["decode"] == 3
    # The pods that are left existed before: none was moved because its pod went.
    assert {worker.number for worker in site.model.workers if worker.group == "decode"} <= before


async def test_workers_spread_over_too_many_pods_are_moved_one_pod_at_a_time(site: Site, tmp_path: Path) -> None:
    def counts(decode: int) -> dict[str, Any]:
        return service(tmp_path, "70b-4plus4", {"roles": {"decode": {"replicas": decode, "workersPerPod": 2}}})

    for seed in range(5):
        site.model.delete()
        site.model.random.seed(seed)
        site.model.apply(counts(8))
        await site.settle()
        site.model.apply(counts(4))
        await site.settle()
        assert site.pods("decode") == 2
        assert site.model.registered("decode") == 4
        assert site.least["decode"] >= 2


async def test_a_group_that_goes_is_emptied_first(site: Site, tmp_path: Path) -> None:
    site.model.apply(service(tmp_path, "70b-4plus4"))
    await site.settle()
    site.model.apply(service(tmp_path, "70b-4plus4", {"aggregated": True, "roles": {"prefill": {"replicas": 0}}}))
    assert isinstance(await site.settle(), Done)
    assert site.pods("prefill") == 0
    assert site.model.cluster is not None
    assert [group["groupName"] for group in site.model.cluster["spec"]["workerGroupSpecs"]] == ["decode"]
    site.model.apply(service(tmp_path, "70b-4plus4"))
    assert isinstance(await site.settle(), Done)
    assert site.model.registered("prefill") == 8


def entries(*names: str, **changes: dict[str, Any]) -> dict[str, Any]:
    """Values with entries of config.models, each of two decode workers; `changes` of one by its name."""
    models = [{"name": name, "model": {"path": f"/models/{name}"}, **changes.get(name, {})} for name in names]
    return {"config": {"models": models}, "roles": {"models": {name: {"decode": {"replicas": 2}} for name in names}}}


async def test_models_come_change_and_go_while_the_others_keep_pods_and_workers(site: Site, tmp_path: Path) -> None:
    model = site.model

    def kept(*but: str) -> dict[str, set[tuple[str, int]]]:
        """Group -> its workers and their pods, without those of some entries."""
        found: dict[str, set[tuple[str, int]]] = {}
        for worker in model.workers:
            if worker.group.partition("-")[2] not in but:
                found.setdefault(worker.group, set()).add((worker.pod.name, worker.number))
        return found

    async def change(*values: dict[str, Any], but: str = "") -> None:
        before = kept(but)
        model.apply(service(tmp_path, "70b-4plus4", *values))
        assert isinstance(await site.settle(), Done)
        assert kept(but) == before
        assert model.cluster is not None
        groups = {each["groupName"]: each["replicas"] for each in model.cluster["spec"]["workerGroupSpecs"]}
        assert groups == {name: site.pods(name) for name in {pod.group for pod in model.pods} - {"head"}}
        assert model.num_updates == model.num_taken == 0

    tier = {"config": {"tier": {"blocks_per_chunk": 4}}, "roles": {role: {"workersPerPod": 1} for role in ROLES}}
    await change(tier)
    await change(tier, entries("b"), but="b")
    assert (model.registered("prefill-b"), model.registered("decode-b")) == (1, 2)
    # Together with fewer workers of the default model: KubeRay would end any of their pods.
    model.apply(service(tmp_path, "70b-4plus4", tier, entries("b", "c"), {"roles": {"decode": {"replicas": 2}}}))
    assert isinstance(await site.settle(), Done)
    assert model.num_updates == model.num_taken == 0
    tier["roles"]["decode"]["replicas"] = 2
    # In place.
    workers = {worker.number for worker in model.workers if worker.group == "decode-b"}
    await change(tier, entries("b", "c", b={"engine": {"kv_cache_gib": 3}}), but="b")
    assert workers.isdisjoint(worker.number for worker in model.workers)
    assert model.registered("decode-b") == 2
    pods = {pod.name for pod in model.pods if pod.group == "decode-b"}
    more = {"roles": {"models": {"b": {"decode": {"replicas": 3, "memoryGiB": 901}}}}}
    await change(tier, entries("b", "c", b={"engine": {"kv_cache_gib": 3}}), more, but="b")
    assert pods.isdisjoint(pod.name for pod in model.pods)
    assert model.registered("decode-b") == 3
    # Serve ends an entry's workers, then its pods go.
    await change(tier, entries("c"), but="b")
    assert not [pod.name for pod in model.pods if pod.group.endswith("-b")]
    await change(tier, but="c")
    assert {pod.group for pod in model.pods} == {"head", "prefill", "decode"}


async def test_an_image_replaces_pods_of_all_models_one_at_a_time(site: Site, tmp_path: Path) -> None:
    tier = {"config": {"tier": {"blocks_per_chunk": 4}}}
    site.model.apply(service(tmp_path, "70b-4plus4", tier, entries("b", "c")))
    await site.settle()
    before = {pod.group: site.model.registered(pod.group) for pod in site.model.pods if pod.group != "head"}
    assert before == {"prefill": 8, "decode": 8, "prefill-b": 1, "decode-b": 2, "prefill-c": 1, "decode-c": 2}
    site.model.apply(service(tmp_path, "70b-4plus4", tier, entries("b", "c"), IMAGE))
    missing = []
    for _ in range(MAX_TURNS):
        site.model.turn()
        step = await site.rollout.round()
        missing.append({group for group, count in before.items() if site.model.registered(group) < count})
        if isinstance(step, Done):
            break
    assert isinstance(step, Done)
    assert max(map(len, missing)) == 1
    images = site.images()
    assert {group for group in images if images[group] == {"0.1.1-test"}} == {*before, "head"}


async def test_a_model_that_never_loads_keeps_the_rollout_from_done(site: Site, tmp_path: Path) -> None:
    tier = {"config": {"tier": {"blocks_per_chunk": 4}}}
    site.model.apply(service(tmp_path, "70b-4plus4", tier))
    await site.settle()
    no_node = {"roles": {"models": {"b": {"decode": {"extraInitContainers": [{"name": "never", "image": "x"}]}}}}}
    site.model.unready = {"decode-b"}
    site.model.apply(service(tmp_path, "70b-4plus4", tier, entries("b"), no_node))
    for _ in range(20):
        site.model.turn()
        step = await site.rollout.round()
    assert step == Wait("decode-b: 0 of 1 pods are ready")
    site.model.apply(service(tmp_path, "70b-4plus4", tier))
    assert isinstance(await site.settle(), Done)
    assert {pod.group for pod in site.model.pods} == {"head", "prefill", "decode"}


async def test_new_certificates_replace_all_pods(site: Site, tmp_path: Path) -> None:
    site.model.apply(service(tmp_path, "70b-4plus4"))
    await site.settle()
    before = {pod.name for pod in site.model.pods}
    site.model.apply(service(tmp_path, "70b-4plus4", {"rollout": {"restartedAt": "2026-11-24"}}))
    assert isinstance(await site.settle(), Done)
    assert before & {pod.name for pod in site.model.pods} == set()


async def test_pods_on_their_hosts_network_are_replaced_one_by_one_on_the_same_hosts(
    site: Site, tmp_path: Path
) -> None:
    def release(tag: str) -> dict[str, Any]:
        roles = {role: {"hostNetwork": True, "replicas": 2} for role in ("prefill", "decode")}
        peers = [{"ipBlock": {"cidr": "10.1.0.0/24"}}]
        changes = {"roles": roles, "networkPolicy": {"hostNetworkFrom": peers}, "image": {"tag": tag}}
        return service(tmp_path, "cpu-trial", changes)

    def workers() -> dict[str, str]:
        return {pod.address: pod.name for pod in site.model.pods if pod.template["spec"].get("hostNetwork")}

    site.model.apply(release("1"))
    await site.settle()
    before = workers()
    assert len(before) == 4
    site.model.apply(release("2"))
    assert isinstance(await site.settle(), Done)
    after = workers()
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert site.images()["decode"] == site.images()["prefill"] == {"2"}
    assert min(site.least.values()) >= 1


async def test_another_chart_version_replaces_no_pod(site: Site, tmp_path: Path) -> None:
    release = service(tmp_path, "70b-4plus4")
    site.model.apply(release)
    await site.settle()
    before = {pod.name for pod in site.model.pods}
    text = yaml.safe_dump(release).replace("kvferry-0.1.0", "kvferry-0.1.1")
    later = yaml.safe_load(text)
    later["metadata"]["annotations"]["kvferry.io/cluster"] = "f" * 64
    site.model.apply(later)
    assert isinstance(await site.settle(), Done)
    assert any(isinstance(step, SetSpec) for step in site.steps)
    assert {pod.name for pod in site.model.pods} == before


async def test_a_second_rollout_waits_and_goes_on_where_the_first_one_was(site: Site, tmp_path: Path) -> None:
    clock = Clock()
    (tmp_path / "second").mkdir()
    api = KubernetesApi(helm_check.NAMESPACE, helm_check.RELEASE, site.rollout._api._core.api_client)
    second = Rollout(api, site.membership, tmp_path / "second", identity="second", monotonic=clock)  # type: ignore[arg-type]
    site.model.apply(service(tmp_path, "70b-4plus4"))
    await site.settle()
    site.model.apply(service(tmp_path, "70b-4plus4", IMAGE))
    for _ in range(20):
        site.model.turn()
        await site.rollout.round()
        assert isinstance(await second.round(), Wait)
        # One pod of two workers is away.
        assert min(site.model.registered(role) for role in ("prefill", "decode")) >= 6
    assert len(site.images()["decode"]) == 2, "under way"
    # The first one is silent from now on, as on a node that is cut off.
    site.rollout, site.folder = second, tmp_path / "second"
    clock.now_s += DURATION_S
    assert isinstance(await site.settle(), Done)
    assert min(site.least.values()) >= 6
    assert site.images()["decode"] == site.images()["prefill"] == {"0.1.1-test"}


@pytest.mark.parametrize("redis", [False, True])
async def test_the_chart_s_role_allows_what_the_rollout_calls_and_no_more(
    site: Site, tmp_path: Path, redis: bool
) -> None:
    changes = {"ray": {"redis": {"address": "redis:6379" if redis else "", "passwordSecret": ""}}}
    values = helm_check.merged(yaml.safe_load(example_values("70b-4plus4")), changes)
    documents = newest_helm().documents(values=write_values(tmp_path, values))
    release = one(documents, "RayService")
    site.model.apply(release)
    await site.settle()
    site.model.apply(service(tmp_path, "70b-4plus4", changes, IMAGE))
    await site.settle()
    verbs = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    called = set()
    for method, path in site.model.calls:
        group, _, rest = re.sub("^/apis?/", "", path).partition("/namespaces/")
        resource, _, name = rest.partition("/")[2].partition("/")
        is_list = method == "GET" and not name
        called.add((group.partition("/")[0].replace("v1", ""), resource, "list" if is_list else verbs[method], name))
    rules = one(documents, "Role", "trial-rollout")["rules"]
    allowed = {
        (group, resource, verb, name)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }
    assert all({(*call[:3], ""), call} & allowed for call in called)
    assert {each[:3] for each in allowed} == {each[:3] for each in called}


async def test_another_ray_is_left_to_a_person(site: Site, tmp_path: Path) -> None:
    site.model.apply(service(tmp_path, "70b-4plus4"))
    await site.settle()
    site.model.apply(service(tmp_path, "70b-4plus4", {"ray": {"version": "2.61.0"}}, IMAGE))
    step = await site.settle()
    assert isinstance(step, Blocked)
    assert "from 2.60.0 to 2.61.0" in step.why
    assert site.images()["decode"] == {"0.1.0-gpu"}
    assert site.model.events[-1][0] == "Blocked"


async def test_weights_on_a_volume_are_left_to_a_person_in_a_release_without(site: Site, tmp_path: Path) -> None:
    model = {"path": "acme/tiny", "revision": "v1"}
    site.model.apply(service(tmp_path, "cpu-trial", {"config": {"model": model}}))
    assert isinstance(await site.settle(), Done)
    before = {pod.name for pod in site.model.pods}
    switched = service(tmp_path, "cpu-trial", {"config": {"model": model}, "model": {"weights": {"enabled": True}}})
    site.model.apply(switched)
    step = await site.settle()
    assert isinstance(step, Blocked)
    assert "the volume of the model's weights changes (model.weights)" in step.why
    assert {pod.name for pod in site.model.pods} == before
    assert site.model.events[-1][0] == "Blocked"
    site.model.delete_cluster()
    assert isinstance(await site.settle(), Done)
    # Another revision is another folder of the same volume.
    site.model.apply(
        service(
            tmp_path,
            "cpu-trial",
            {"config": {"model": model | {"revision": "v2"}}, "model": {"weights": {"enabled": True}}},
        )
    )
    assert isinstance(await site.settle(), Done)


async def test_nothing_goes_while_etcd_is_away(site: Site, tmp_path: Path) -> None:
    site.model.apply(service(tmp_path, "70b-4plus4"))
    await site.settle()
    site.membership.is_away = True
    site.model.apply(service(tmp_path, "70b-4plus4", IMAGE))
    for _ in range(10):
        site.model.turn()
        assert await site.rollout.round() == Wait("etcd does not answer")
    assert site.images()["decode"] == {"0.1.0-gpu"}
    site.membership.is_away = False
    assert isinstance(await site.settle(), Done)


async def test_a_release_that_is_gone_is_waited_for(site: Site, tmp_path: Path) -> None:
    step = await site.rollout.round()
    assert isinstance(step, Wait)
    assert "the API server answers 404" in step.why
    assert (tmp_path / "alive").exists()


@pytest.mark.parametrize("example", sorted(COUNTS))
def test_the_operator_writes_a_release_back_as_it_was_rendered(example: str, tmp_path: Path) -> None:
    release = service(tmp_path, example)
    assert written_back(release) == release


def test_the_operator_writes_fractions_and_empty_variables_back_as_they_were_rendered(tmp_path: Path) -> None:
    halves = {"cpusPerWorker": 0.5, "memoryGiB": 300.25, "env": {"EMPTY": ""}}
    release = service(tmp_path, "cpu-trial", {"roles": {"decode": halves}, "tier": {"shmGiB": 1.5}})
    assert written_back(release) == release


# The same life on a cluster


def test_clusters_elsewhere_are_refused_unless_they_are_for_tests() -> None:
    for server in ("https://127.0.0.1:6443", "https://localhost:6443", "https://[::1]:6443"):
        k8s_check.refuse_other_clusters(server, is_for_tests=False)
    with pytest.raises(k8s_check.CheckFailed, match=r"prod\.example is not this machine"):
        k8s_check.refuse_other_clusters("https://prod.example:443", is_for_tests=False)
    k8s_check.refuse_other_clusters("https://prod.example:443", is_for_tests=True)


def test_without_a_cluster_the_check_is_skipped(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr("sys.argv", ["k8s_check.py"])
    assert k8s_check.main() == 0
    assert capsys.readouterr().out == "skipped: KUBECONFIG names no cluster\n"


def test_a_cluster_that_does_not_answer_is_a_failure(tmp_path: Path) -> None:
    kubeconfig = write_kubeconfig(tmp_path, "http://127.0.0.1:1")
    tool = helm_check.ROOT / "tools" / "k8s_check.py"
    ended = subprocess.run(
        [sys.executable, str(tool)], env={**os.environ, "KUBECONFIG": str(kubeconfig)}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("failed: the API server at http://127.0.0.1:1 does not answer")
    assert "Traceback" not in ended.stderr


@pytest.mark.skipif(
    not os.environ.get("KVFERRY_K8S_CHECK"), reason="KVFERRY_K8S_CHECK is not set: no cluster for tests"
)
def test_the_life_of_a_release_on_a_cluster() -> None:
    tool = helm_check.ROOT / "tools" / "k8s_check.py"
    options = os.environ["KVFERRY_K8S_CHECK"].split()
    assert subprocess.run([sys.executable, str(tool), *options], check=False).returncode == 0
