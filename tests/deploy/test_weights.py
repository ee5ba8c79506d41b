"""The volume of weights over the life of a release: who fills it, who waits, and what an upgrade changes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.hub_model.fill import fill
from support.chart import chart_rules, helm_check, newest_helm, one, write_values
from support.hub_server import MODEL, hub_server
from support.kuberay_model import written_back

VALUES: dict[str, Any] = {
    "config": {"model": {"path": MODEL, "revision": "v1"}},
    "model": {"weights": {"enabled": True}, "hubToken": {"secretName": "hub"}},
}


def rendered(folder: Path, *layers: dict[str, Any]) -> list[dict[str, Any]]:
    values = helm_check.merged(VALUES, *layers)
    documents: list[dict[str, Any]] = newest_helm().documents(values=write_values(folder, values))
    return documents


def jobs(documents: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """Name -> command of each job that fills the volume."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["containers"][0]["command"]
        for each in documents
        if each["kind"] == "Job" and each["metadata"]["labels"]["kvferry.io/component"] == "weights"
    }


def test_workers_wait_for_their_draft_model_too(tmp_path: Path) -> None:
    drafts = {"method": "draft_model", "model": "/models/acme--draft--v9", "num_speculative_tokens": 3}
    also = [{"path": "acme/draft", "revision": "v9"}, {"path": "acme/next", "revision": "v2"}]
    entry = {
        "name": "next",
        "model": {"path": "/models/acme--next--v2"},
        "engine": {"args": {"speculative_config": None}},
    }
    documents = rendered(
        tmp_path,
        {
            "config": {"engine": {"args": {"speculative_config": drafts}}, "models": [entry]},
            "model": {"weights": {"also": also}},
            "roles": {"decode": {"engine": {"args": {"load_format": "safetensors"}}}},
        },
    )
    for document in documents:
        helm_check.validate(document)
    service = one(documents, "RayService")
    assert written_back(service) == service
    waited = {
        group["groupName"]: [
            (each["name"], each["command"][-1]) for each in group["template"]["spec"]["initContainers"]
        ]
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    model = ("weights", f"/models/{MODEL.replace('/', '--')}--v1")
    both = [model, ("weights-draft", "/models/acme--draft--v9")]
    others = [("weights", "/models/acme--next--v2")]
    assert waited == {"prefill": both, "decode": both, "prefill-next": others, "decode-next": others}
    gateway = one(documents, "Deployment", "trial-gateway")["spec"]["template"]["spec"]
    assert "weights-draft" not in [each["name"] for each in gateway["initContainers"]], "it computes nothing"
    configs = helm_check.parse_configs(documents)
    engines = [config.of_model("next").engine_of("decode", "next") for config in configs if config.models]
    assert engines
    assert all("speculative_config" not in engine.args for engine in engines)


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_every_member_waits_for_the_folder_that_the_job_fills(tmp_path: Path, mode: str) -> None:
    documents = rendered(tmp_path, {"gateway": {"mode": mode}})
    for document in documents:
        helm_check.validate(document)
    assert chart_rules.faults(documents) == []
    service = one(documents, "RayService")
    assert written_back(service) == service
    (command,) = jobs(documents).values()
    folder = f"/models/{MODEL.replace('/', '--')}--v1"
    pods = {
        group["groupName"]: group["template"]["spec"]
        for group in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    }
    if mode == "deployment":
        pods["gateway"] = one(documents, "Deployment", "trial-gateway")["spec"]["template"]["spec"]
        assert folder in pods["gateway"]["containers"][0]["args"]
    assert set(pods) == {"prefill", "decode", "gateway"}
    for pod in pods.values():
        (waits,) = (each for each in pod["initContainers"] if each["name"] == "weights")
        assert [*waits["command"][:3], *waits["command"][4:]] == [*command[:3], *command[4:]]
        assert (waits["command"][3], command[3]) == ("wait", "fill")
        for container in (waits, pod["containers"][0]):
            (mount,) = (each for each in container["volumeMounts"] if each["name"] == "model")
            assert mount == {"name": "model", "mountPath": "/models", "readOnly": True}
        (volume,) = (each for each in pod["volumes"] if each["name"] == "model")
        assert volume["persistentVolumeClaim"] == {"claimName": "trial-weights", "readOnly": True}
    (application,) = helm_check.serve_config(service)["applications"]
    assert application["args"]["model_folder"] == folder == command[-1]
    assert application["args"]["hub_model"] == {"name": MODEL, "revision": "v1"}


def test_the_token_is_in_no_argument(tmp_path: Path) -> None:
    (job,) = (each for each in rendered(tmp_path) if "-weights-" in each["metadata"]["name"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (token,) = (each for each in container["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "args" not in container


def test_the_job_s_command_is_the_project_s(tmp_path: Path) -> None:
    (command,) = jobs(rendered(tmp_path)).values()
    with hub_server({"config.json": b"{}"}) as hub:
        folder = tmp_path / Path(command[-1]).name
        fill(command[5], command[7], folder, report=lambda _: None, endpoint=hub.url)
    assert command[:4] == ["python", "-m", "kvferry.hub_model", "fill"]
    assert (folder / "config.json").read_bytes() == b"{}"


def test_a_job_is_another_one_where_anything_of_it_changes_and_the_same_after_a_rollback(tmp_path: Path) -> None:
    before = jobs(rendered(tmp_path))
    for changes in (
        {"config": {"model": {"revision": "v2"}}},
        {"config": {"model": {"path": "acme/next"}}},
        {"image": {"tag": "0.2.0"}},
        {"model": {"download": {"env": {"HF_ENDPOINT": "https://hub.example.com"}}}},
        {"model": {"weights": {"backoffLimit": 3}}},
    ):
        assert not before.keys() & jobs(rendered(tmp_path, changes)).keys()
    # Counts are nothing of it, and what was there once is again.
    assert jobs(rendered(tmp_path, {"roles": {"decode": {"replicas": 3}}})) == before
    assert jobs(rendered(tmp_path)) == before
    assert all(len(name) <= 63 for name in jobs(rendered(tmp_path, {"fullnameOverride": "x" * 40})))


def test_the_next_model_is_filled_beside_the_present_one(tmp_path: Path) -> None:
    ahead = jobs(rendered(tmp_path, {"model": {"weights": {"also": [{"path": "acme/next", "revision": "v9"}]}}}))
    assert sorted(command[-1] for command in ahead.values()) == ["/models/acme--next--v9", "/models/acme--tiny--v1"]
    # The job that filled it ahead is that of the switch.
    switched = jobs(rendered(tmp_path, {"config": {"model": {"path": "acme/next", "revision": "v9"}}}))
    assert switched.keys() <= ahead.keys()


def test_two_releases_of_one_claim_fill_the_same_folder(tmp_path: Path) -> None:
    shared = {"model": {"weights": {"claim": {"existing": "models"}}}}
    ours, theirs = (rendered(tmp_path, shared, {"fullnameOverride": name}) for name in ("a", "b"))
    assert [*jobs(ours).values()] == [*jobs(theirs).values()]
    assert not jobs(ours).keys() & jobs(theirs).keys()
    assert not [each for each in ours if each["kind"] == "PersistentVolumeClaim"]


@pytest.mark.parametrize("keep", [True, False])
def test_an_uninstall_keeps_the_claim_where_it_is_asked_to(tmp_path: Path, keep: bool) -> None:
    claim = one(rendered(tmp_path, {"model": {"weights": {"claim": {"keep": keep}}}}), "PersistentVolumeClaim")
    assert (claim["metadata"].get("annotations") == {"helm.sh/resource-policy": "keep"}) is keep


def test_the_job_reaches_the_hub_and_nobody_the_job(tmp_path: Path) -> None:
    documents = rendered(tmp_path, {"model": {"weights": {"egress": {"ports": [443, 3128]}}}})
    policy = one(documents, "NetworkPolicy", "trial-weights")["spec"]
    (job,) = (each for each in documents if "-weights-" in each["metadata"]["name"])
    assert policy["podSelector"]["matchLabels"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy
    assert [{port["port"] for port in rule["ports"]} for rule in policy["egress"]] == [{53}, {443, 3128}]


def test_a_try_that_is_in_vain_is_the_last_one(tmp_path: Path) -> None:
    (job,) = (each for each in rendered(tmp_path) if "-weights-" in each["metadata"]["name"])
    drained, vain = job["spec"]["podFailurePolicy"]["rules"]
    assert drained == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert vain == {
        "action": "FailJob",
        "onExitCodes": {"containerName": "fill", "operator": "In", "values": [2]},
    }
    # What Kubernetes asks of jobs with such a policy.
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_the_notes_say_how_to_watch_it(tmp_path: Path) -> None:
    notes = newest_helm().notes(values=write_values(tmp_path, VALUES))
    assert f"fills the volume trial-weights with {MODEL} at v1" in notes
