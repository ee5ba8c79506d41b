"""Any sequence of releases, changed at any moment, ends as the last one says, and takes one working pod at a time."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry_operator.kubernetes_api import _not_running, worker_counts
from kvferry_operator.plan import HEAD, Blocked, DeletePods, Done, Observed, Pod, SetSpec, Step, Wait, next_step
from support.kuberay_model import Model

MAX_TURNS = 600
TURNS_IDLE = 8  # more than a worker takes to load


@dataclasses.dataclass(frozen=True)
class Release:
    prefill: int
    decode: int
    gateways: int
    per_pod: int
    image: str
    redis: bool = False
    entries: tuple[tuple[str, int, int], ...] = ()  # name, prefill and decode workers
    gpus: int = 0  # of each worker, where there is one to a pod


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def template(image: str, more: Any = None, *, gpus: int = 0) -> dict[str, Any]:
    spec: dict[str, Any] = {"containers": [{"name": "ray", "image": f"kvferry:{image}", "ports": [{"name": "serve"}]}]}
    if gpus:
        spec["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {"metadata": {"annotations": {"kvferry.io/template": digest([spec, more])}}, "spec": spec}


def service_of(release: Release) -> dict[str, Any]:
    groups = []
    for name, workers, per_pod in (
        ("prefill", release.prefill, release.per_pod),
        ("decode", release.decode, release.per_pod),
        *((f"prefill-{name}", prefill, release.per_pod) for name, prefill, _ in release.entries),
        *((f"decode-{name}", decode, release.per_pod) for name, _, decode in release.entries),
        ("gateway", release.gateways, 1),
    ):
        if workers:
            count = -(-workers // per_pod)
            groups.append(
                {
                    "groupName": name,
                    "replicas": count,
                    "minReplicas": count,
                    "maxReplicas": count,
                    "scaleStrategy": {},
                    "resources": {f"kvferry_{name}": str(per_pod)},
                    "template": template(release.image, per_pod, gpus=release.gpus),
                }
            )
    head = template(release.image, release.redis)
    # As the chart, so that KubeRay does not take counts to the cluster by itself.
    head["metadata"]["annotations"]["kvferry.io/groups"] = ".".join(group["groupName"] for group in groups)
    cluster = {
        "rayVersion": "2.60.0",
        "headGroupSpec": {"template": head},
        "workerGroupSpecs": groups,
    }
    if release.redis:
        cluster["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379"}
    deployments = [{"name": "DecodeWorker", "num_replicas": release.decode}]
    if release.prefill:
        deployments.append({"name": "PrefillWorker", "num_replicas": release.prefill})
    for each in deployments:
        each["ray_actor_options"] = {"num_gpus": release.gpus}
    applications = [{"name": "kvferry", "deployments": deployments, "args": {"gpus": release.gpus}}]
    for name, *counts in release.entries:
        of_entry = [
            {"name": f"{kind}Worker-{name}", "num_replicas": count}
            for kind, count in zip(("Prefill", "Decode"), counts, strict=True)
            if count
        ]
        applications.append({"name": f"kvferry-model-{name}", "deployments": of_entry})
    serve = json.dumps({"applications": applications})
    return {
        "metadata": {"name": "kv", "annotations": {"kvferry.io/cluster": digest(cluster)}},
        "spec": {"upgradeStrategy": {"type": "None"}, "serveConfigV2": serve, "rayClusterConfig": cluster},
    }


def observe(model: Model) -> Observed:
    assert model.service is not None
    status = model.service.get("status", {})
    side = status.get("activeServiceStatus") or status.get("pendingServiceStatus") or {}
    cluster = model.cluster or {}
    workers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for role, address in model.addresses():
        workers[role][address] += 1
    return Observed(
        wanted=model.service["spec"]["rayClusterConfig"],
        wanted_digest=model.service["metadata"]["annotations"]["kvferry.io/cluster"],
        actual=cluster.get("spec", {}),
        actual_digest=cluster.get("metadata", {}).get("annotations", {}).get("kvferry.io/cluster", ""),
        pods=[
            Pod(
                name=pod.name,
                uid=pod.name,
                group=pod.group,
                template=pod.template["metadata"]["annotations"]["kvferry.io/template"],
                address=pod.address,
                is_ready=pod.is_ready,
                is_ending=pod.ending is not None,
                has_run=pod.has_run,
                has_redis=pod.has_redis,
            )
            for pod in model.pods
        ],
        workers=workers,
        counts=worker_counts(model.service["spec"]["serveConfigV2"]),
        idle=frozenset(pod.name for pod in model.pods if pod.is_ready and pod.idle >= TURNS_IDLE),
        applications=_not_running(side, model.service["spec"]["serveConfigV2"]),
        is_submitted=status.get("observedGeneration") == model.service["metadata"]["generation"],
    )


def act(model: Model, step: Step) -> None:
    if isinstance(step, SetSpec):
        assert model.cluster is not None
        assert model.service is not None
        model.cluster["spec"] = step.spec
        model.cluster["metadata"]["annotations"] = dict(model.service["metadata"]["annotations"])
    if isinstance(step, DeletePods):
        for deleted in step.pods:
            (pod,) = (pod for pod in model.pods if pod.name == deleted.name)
            model.end(pod)


def turn(model: Model) -> Step:
    """One turn of all, in which no second working pod of a role is chosen to be replaced."""
    model.turn()
    seen = observe(model)
    step = next_step(seen)
    if isinstance(step, DeletePods):
        working = [pod for pod in step.pods if pod.is_ready and pod.group != HEAD]
        ending = [pod for pod in seen.pods if pod.is_ending and pod.group != HEAD]
        assert len(working) <= 1
        assert not (working and ending), "a pod is replaced while another one ends"
    if isinstance(step, SetSpec):
        for group in step.spec["workerGroupSpecs"]:
            named = group["scaleStrategy"].get("workersToDelete", ())
            holding = [pod for pod in model.pods if pod.name in named and pod.ending is None and model.holds(pod)]
            ending = [pod for pod in seen.pods if pod.is_ending and pod.group == group["groupName"]]
            assert len(holding) <= 1
            assert not (holding and ending), "a pod with workers goes while another one ends"
    act(model, step)
    assert not model.num_taken, "the operator ended a pod with workers that was not named"
    return step


def settle(model: Model, release: Release) -> Done:
    last: Step = Wait("")
    for _ in range(MAX_TURNS):
        step = turn(model)
        if isinstance(step, Done) and isinstance(last, Done):
            return step
        assert not isinstance(step, Blocked)
        last = step
    raise AssertionError(f"{release} is never done: {last}")


releases = st.builds(
    Release,
    prefill=st.integers(0, 6),
    decode=st.integers(1, 6),
    gateways=st.integers(1, 3),
    per_pod=st.sampled_from([1, 2, 4]),
    image=st.sampled_from(["a", "b", "no-such"]),
    redis=st.booleans(),
    entries=st.lists(
        st.tuples(st.sampled_from(["x", "y"]), st.integers(0, 3), st.integers(1, 3)),
        max_size=2,
        unique_by=lambda e: e[0],
    ).map(tuple),
)


def workers_of(release: Release) -> dict[str, int]:
    """Group -> workers, where there are any."""
    found = {"prefill": release.prefill, "decode": release.decode}
    for name, prefill, decode in release.entries:
        found |= {f"prefill-{name}": prefill, f"decode-{name}": decode}
    return {group: count for group, count in found.items() if count}


@given(
    changes=st.lists(st.tuples(releases, st.integers(0, 12)), min_size=1, max_size=5),
    last=releases,
    seed=st.integers(0, 999),
)
def test_any_changes_end_as_the_last_one_says(changes: list[tuple[Release, int]], last: Release, seed: int) -> None:
    last = dataclasses.replace(last, image="b" if last.image == "no-such" else last.image)
    model = Model(seed=seed)
    for release, turns in changes:
        model.apply(service_of(dataclasses.replace(release, redis=last.redis)))
        for _ in range(turns):
            turn(model)
    model.apply(service_of(last))
    done = settle(model, last)
    assert model.cluster is not None
    pods = collections.Counter(pod.group for pod in model.pods)
    wanted = {group: -(-count // last.per_pod) for group, count in workers_of(last).items()}
    assert pods == collections.Counter({**wanted, "gateway": last.gateways, HEAD: 1})
    assert collections.Counter(group for group, _ in model.addresses()) == workers_of(last)
    assert model.num_updates == 0, "the operator took groups and counts to the cluster by itself"
    tags = {pod.group: pod.template["spec"]["containers"][0]["image"] for pod in model.pods if pod.group != HEAD}
    assert set(tags.values()) == {f"kvferry:{last.image}"}
    (head,) = (pod for pod in model.pods if pod.group == HEAD)
    is_old = head.template["spec"]["containers"][0]["image"] != f"kvferry:{last.image}"
    assert bool(done.left) == is_old
    assert not (is_old and last.redis)


@settings(max_examples=settings.default.max_examples // 3)
@given(first=releases, image=st.sampled_from(["a", "b"]), seed=st.integers(0, 999))
def test_a_new_image_leaves_all_pods_of_a_role_but_one(first: Release, image: str, seed: int) -> None:
    first = dataclasses.replace(first, image="old", prefill=max(1, first.prefill))
    model = Model(seed=seed)
    model.apply(service_of(first))
    settle(model, first)
    second = dataclasses.replace(first, image=image)
    model.apply(service_of(second))
    for _ in range(MAX_TURNS):
        if isinstance(turn(model), Done):
            break
        away = {group: model.counts(group) - model.registered(group) for group in workers_of(first)}
        # Other than the head's end with Redis, in this model nothing takes a second pod's workers.
        assert sum(count > 0 for count in away.values()) <= 1, away
        assert all(count <= first.per_pod for count in away.values()), away


@pytest.mark.parametrize("before", [1, 4])
def test_workers_that_need_other_gpus_get_pods_that_have_them(before: int) -> None:
    model = Model()
    model.apply(service_of(first := Release(2, 3, 1, 1, "a", gpus=before)))
    settle(model, first)
    model.apply(service_of(second := dataclasses.replace(first, gpus=2)))
    for _ in range(MAX_TURNS):
        if isinstance(turn(model), Done):
            break
        # One pod of a role may be away, and the worker that Serve took from another one.
        assert all(model.counts(group) - model.registered(group) <= 2 for group in ("prefill", "decode"))
    settle(model, second)
    assert {pod.group for pod in model.pods} == {"head", "prefill", "decode", "gateway"}
    limits = [pod.template["spec"]["containers"][0]["resources"]["limits"] for pod in model.pods if pod.group != HEAD]
    assert limits == [{"nvidia.com/gpu": "2"}] * 6


# Moments that random changes seldom meet


def moment(
    *pods: Pod, decode: int = 2, count: int | None = None, workers: dict[str, int] | None = None, **changes: Any
) -> Observed:
    """A cluster of decode pods and a head, as a release of image `a` says it, but for what is given."""
    wanted = service_of(Release(0, decode, 0, 1, "a"))["spec"]["rayClusterConfig"]
    actual = service_of(Release(0, count or decode, 0, 1, "a"))["spec"]["rayClusterConfig"]
    seen = Observed(
        wanted=wanted,
        wanted_digest="d",
        actual=actual,
        actual_digest="d",
        pods=pods,
        workers={"decode": workers or {}},
        counts={"decode": decode},
    )
    return dataclasses.replace(seen, **changes)


def a_pod(name: str, group: str = "decode", *, image: str = "a", **changes: Any) -> Pod:
    made = template(image, False if group == HEAD else 1)
    digest_of = made["metadata"]["annotations"]["kvferry.io/template"]
    return dataclasses.replace(Pod(name, name, group, digest_of, address=name, is_ready=True), **changes)


OLD_HEAD = a_pod("h", HEAD, image="old")
WORKERS = {"d1": 1, "d2": 1}


def test_a_pod_that_no_worker_starts_in_goes_if_it_is_old_and_nothing_else_is_missing() -> None:
    head, old, other = a_pod("h", HEAD), a_pod("d1", image="old"), a_pod("d2", image="old")
    idle = frozenset({"d1", "d2"})
    seen = moment(head, old, other, workers={"d2": 1}, idle=idle)
    step = next_step(seen)
    assert isinstance(step, DeletePods)
    assert [pod.name for pod in step.pods] == ["d1"]
    waiting = Wait("decode: 1 of 2 workers are registered")
    assert next_step(dataclasses.replace(seen, idle=frozenset())) == waiting, "perhaps one is loading there"
    assert next_step(dataclasses.replace(seen, pods=(head, a_pod("d1"), other))) == waiting, "it has the new template"
    assert isinstance(
        next_step(dataclasses.replace(seen, pods=(head, old, dataclasses.replace(other, is_ready=False)))), Wait
    )
    assert isinstance(next_step(dataclasses.replace(seen, pods=(head, old, other, a_pod("d3", is_ending=True)))), Wait)


def test_an_old_head_that_is_not_ready_for_a_moment_stays_while_workers_serve() -> None:
    head = dataclasses.replace(OLD_HEAD, is_ready=False)
    assert next_step(moment(head, a_pod("d1"), a_pod("d2"), workers=WORKERS)) == Wait("the Ray head is not ready")
    # Where nothing serves, and where it never ran, it goes.
    d1, d2 = (a_pod(name, is_ready=False) for name in ("d1", "d2"))
    assert isinstance(next_step(moment(head, d1, d2)), DeletePods)
    never = dataclasses.replace(head, has_run=False)
    assert isinstance(next_step(moment(never, a_pod("d1"), a_pod("d2"), workers=WORKERS)), DeletePods)


def test_a_head_whose_tables_are_not_in_redis_yet_is_left() -> None:
    seen = moment(OLD_HEAD, a_pod("d1"), a_pod("d2"), workers=WORKERS)
    seen.wanted["gcsFaultToleranceOptions"] = {"redisAddress": "redis:6379"}
    step = next_step(seen)
    assert isinstance(step, Done)
    assert "still has the old template" in step.left
    kept = dataclasses.replace(seen, pods=(dataclasses.replace(OLD_HEAD, has_redis=True), *seen.pods[1:]))
    assert isinstance(next_step(kept), DeletePods)


def test_no_group_shrinks_while_one_of_its_pods_ends() -> None:
    pods = [a_pod("h", HEAD), a_pod("d1"), a_pod("d2"), a_pod("d3"), a_pod("d4", is_ending=True)]
    assert next_step(moment(*pods, count=4, workers=WORKERS)) == Wait("decode: a pod is ending")


def test_loaded_pods_are_not_idle_because_etcd_shows_fewer_members() -> None:
    pods = [a_pod("h", HEAD), *(a_pod(f"d{number}") for number in range(1, 5))]
    assert isinstance(next_step(moment(*pods, count=4)), Wait)
    step = next_step(moment(*pods, count=4, workers=WORKERS))
    assert isinstance(step, SetSpec)
    (group,) = step.spec["workerGroupSpecs"]
    assert (group["replicas"], group["scaleStrategy"]) == (2, {"workersToDelete": ["d3", "d4"]})


def test_pods_that_were_named_stay_named_when_the_templates_change() -> None:
    seen = moment(
        a_pod("h", HEAD), *(a_pod(f"d{number}") for number in range(1, 4)), workers=WORKERS, actual_digest="x"
    )
    seen.actual["workerGroupSpecs"][0]["scaleStrategy"] = {"workersToDelete": ["d3", "gone"]}
    step = next_step(seen)
    assert isinstance(step, SetSpec)
    assert step.spec["workerGroupSpecs"][0]["scaleStrategy"] == {"workersToDelete": ["d3"]}


def test_a_count_lowered_by_hand_is_put_right() -> None:
    seen = moment(a_pod("h", HEAD), a_pod("d1"), decode=2, count=1, workers={"d1": 1})
    step = next_step(seen)
    assert isinstance(step, SetSpec)
    assert step.spec["workerGroupSpecs"][0]["replicas"] == 2


def test_another_way_of_authentication_is_left_to_a_person() -> None:
    seen = moment(a_pod("h", HEAD), a_pod("d1"), a_pod("d2"), workers=WORKERS)
    seen.wanted["authOptions"] = {"mode": "token"}
    step = next_step(seen)
    assert isinstance(step, Blocked)
    assert "ray.tokenAuth changes" in step.why


def test_a_volume_of_weights_that_pods_do_not_mount_is_left_to_a_person() -> None:
    def mounted(spec: dict[str, Any], claim: str = "c", path: str = "/models") -> None:
        pod = spec["workerGroupSpecs"][0]["template"]["spec"]
        pod["volumes"] = [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}]
        pod["initContainers"] = [{"name": "weights", "volumeMounts": [{"name": "model", "mountPath": path}]}]

    for before, after in (
        (None, {}),
        ({}, None),
        ({}, {"claim": "other"}),
        ({}, {"path": "/other"}),
    ):
        seen = moment(a_pod("h", HEAD), a_pod("d1"), a_pod("d2"), workers=WORKERS, actual_digest="before")
        for spec, options in ((seen.actual, before), (seen.wanted, after)):
            if options is not None:
                mounted(spec, **options)
        step = next_step(seen)
        assert isinstance(step, Blocked)
        assert "delete the RayCluster at a time that suits" in step.why
    seen = moment(a_pod("h", HEAD), a_pod("d1"), a_pod("d2"), workers=WORKERS, actual_digest="before")
    mounted(seen.actual)
    mounted(seen.wanted)
    assert isinstance(next_step(seen), SetSpec)


def test_pods_that_are_not_ready_together_go_one_by_one() -> None:
    pods = [a_pod("h", HEAD), *(a_pod(f"d{number}", image="old", is_ready=False) for number in range(1, 3))]
    step = next_step(moment(*pods))
    assert isinstance(step, DeletePods)
    assert [pod.name for pod in step.pods] == ["d1"]
    never = [dataclasses.replace(pod, has_run=False) for pod in pods[1:]]
    step = next_step(moment(pods[0], *never))
    assert isinstance(step, DeletePods)
    assert len(step.pods) == 2
