"""Several models in the chart's own Ray: each has groups of pods and an application of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeDeploySchema

from kvferry import app
from kvferry import config as configuration
from kvferry.config import ClusterConfig
from support.chart import chart_rules, helm_check, newest_helm, one, rendering, write_values
from support.kuberay_model import written_back

Document = dict[str, Any]
merged = helm_check.merged

CHAT: Document = {
    "name": "chat",
    "model": {"path": "/models/chat", "served_name": "Chat", "aliases": ["best"], "canary": {"small": 10}},
    "engine": {"tensor_parallel_size": 2},
}
SMALL: Document = {"name": "small", "model": {"path": "/models/small"}}
VALUES: Document = {
    "config": {
        "model": {"path": "/models/m", "aliases": ["first"], "canary": {"chat": 5}},
        "engine": {"device": "gpu"},
        "models": [CHAT, SMALL],
    },
    "roles": {
        "prefill": {"gpusPerWorker": 1, "nodeSelector": {"gpu": "small"}, "tolerations": [{"key": "gpu"}]},
        "decode": {"gpusPerWorker": 1, "memoryGiB": 99, "engine": {"max_num_seqs": 7}},
        "models": {
            "chat": {
                "prefill": {"gpusPerWorker": 2, "nodeSelector": {}},
                "decode": {"replicas": 5, "workersPerPod": 2, "gpusPerWorker": 2, "engine": {"max_num_seqs": 9}},
            },
            "small": {"prefill": {"replicas": 0}},
        },
    },
    "model": {"volume": {"claimName": "m"}},
    "monitoring": {"members": {"enabled": True}},
    "networkPolicy": {"monitoringNamespace": "watch"},
}
NO_DEFAULT: Document = {"roles": {role: {"replicas": 0} for role in ("prefill", "decode")}}


def render(*changes: Document) -> list[Document]:
    return rendering(merged(VALUES, *changes))


def groups_of(rendered: list[Document]) -> dict[str, Document]:
    groups = one(rendered, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in groups}


def applications_of(rendered: list[Document]) -> dict[str, Document]:
    found = helm_check.serve_config(one(rendered, "RayService"))["applications"]
    return {application["name"]: application for application in found}


def versions_of(rendered: list[Document]) -> dict[str, str]:
    """Application -> Serve's own version of it: another one replaces all of its replicas."""
    schema = ServeDeploySchema.model_validate(helm_check.serve_config(one(rendered, "RayService")))
    return {each.name: get_app_code_version(each) for each in schema.applications}


def config_of(rendered: list[Document]) -> ClusterConfig:
    return configuration.parse(yaml.safe_load(one(rendered, "ConfigMap", "trial-config")["data"]["kvferry.yaml"]))


def deployments(args: Document) -> dict[str, Any]:
    """What Serve makes of an application's arguments, by name."""
    found, waiting = {}, [app.application(args)]
    while waiting:
        deployment = waiting.pop()._bound_deployment
        found[deployment.name] = deployment
        waiting.extend(each for each in deployment.init_args if isinstance(each, Application))
    return found


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_each_model_has_pods_of_its_own(mode: str) -> None:
    rendered = render({"gateway": {"mode": mode}})
    for document in rendered:
        helm_check.validate(document)
    assert chart_rules.faults(rendered) == []
    service = one(rendered, "RayService")
    assert written_back(service) == service
    groups = groups_of(rendered)
    expected = {"prefill": 1, "decode": 1, "prefill-chat": 1, "decode-chat": 3, "decode-small": 1}
    expected |= {"gateway": 1} if mode == "serve" else {}
    assert {name: group["replicas"] for name, group in groups.items()} == expected
    assert groups["decode-chat"]["resources"] == {"kvferry_decode-chat": "2", "CPU": "4", "GPU": "4"}
    assert groups["decode-small"]["resources"] == {"kvferry_decode-small": "1", "CPU": "2", "GPU": "1"}
    pods = {name: group["template"]["spec"] for name, group in groups.items()}
    # What an entry does not say is as the default model has it, and what it says replaces the whole of a key.
    assert pods["decode-small"]["containers"][0]["resources"]["limits"] == {"memory": "99Gi", "nvidia.com/gpu": "1"}
    assert pods["prefill"]["nodeSelector"] == {"gpu": "small"}
    assert "nodeSelector" not in pods["prefill-chat"]
    assert pods["prefill-chat"]["tolerations"] == [{"key": "gpu"}]
    labels = {name: group["template"]["metadata"]["labels"]["kvferry.io/component"] for name, group in groups.items()}
    assert labels == {name: name for name in groups}
    policy = one(rendered, "NetworkPolicy", "trial-monitoring")
    (selected,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert {*groups, "gateway"} == set(selected["values"])


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_serve_makes_each_model_s_workers_where_its_pods_are(mode: str) -> None:
    rendered = render({"gateway": {"mode": mode}})
    groups, whole = groups_of(rendered), config_of(rendered)
    found = {}
    for application in applications_of(rendered).values():
        built = deployments(application["args"])
        assert {each["name"] for each in application["deployments"]} == built.keys()
        found |= built
    assert set(found) - {"Gateway"} == {
        *("PrefillWorker", "DecodeWorker", "PrefillWorker-chat", "DecodeWorker-chat", "DecodeWorker-small")
    }
    for name, deployment in found.items():
        kind, _, entry = name.partition("-")
        group = groups[kind.removesuffix("Worker").lower() + (f"-{entry}" if entry else "")]
        taken = deployment.ray_actor_options["resources"]
        assert taken == {f"kvferry_{group['groupName']}": 1}
        assert taken.keys() <= group["resources"].keys()
        if entry:
            # As gateways name them, or no request would find them.
            assert deployment.init_kwargs == {"pool": entry, "member_pool": whole.entry(entry).pool}
            assert deployment.init_args[1] == f"/models/{entry}"
    engines = {name: configuration.parse(each.init_args[0]) for name, each in found.items()}
    chat = engines["DecodeWorker-chat"].engine_of("decode", "chat")
    assert (chat.tensor_parallel_size, chat.max_num_seqs) == (2, 9)
    small = engines["DecodeWorker-small"].engine_of("decode", "small")
    assert (small.tensor_parallel_size, small.max_num_seqs) == (1, whole.engine.max_num_seqs), "not the default model's"


@pytest.mark.parametrize(
    ("change", "replaced"),
    [
        ({"config": {"models": [CHAT, {**SMALL, "model": {"path": "/models/other"}}]}}, {"small"}),
        ({"config": {"models": [CHAT, {**SMALL, "engine": {"kv_cache_gib": 2}}]}}, {"small"}),
        ({"roles": {"models": {"small": {"decode": {"engine": {"max_num_seqs": 3}}}}}}, {"small"}),
        ({"roles": {"models": {"small": {"prefill": {"replicas": 1}}}}}, {"small"}),
        ({"roles": {"models": {"chat": {"decode": {"replicas": 9}}}}}, set()),
        ({"config": {"models": [{**CHAT, "model": {"path": "/models/chat", "served_name": "Chat"}}, SMALL]}}, set()),
        ({"config": {"models": [SMALL, CHAT]}}, set()),
        ({"config": {"models": [CHAT, SMALL, {"name": "new", "model": {"path": "/models/new"}}]}}, {"new"}),
        ({"config": {"model": {"aliases": ["second"], "canary": {"small": 1}}}}, set()),
        ({"config": {"model": {"path": "/models/m2"}}}, {""}),
        ({"roles": {"prefill": {"engine": {"max_num_seqs": 3}}}}, {""}),
        ({"config": {"adapters": {"served": {"a": {"path": "/models/a"}}}}}, {""}),
        ({"config": {"gateway": {"max_queued_requests": 7}}}, {"", "chat", "small"}),
    ],
)
def test_a_change_replaces_the_workers_of_its_model_alone(change: Document, replaced: set[str]) -> None:
    for mode in ("deployment", "serve"):
        before = render({"gateway": {"mode": mode}})
        after = render({"gateway": {"mode": mode}}, change)
        old, new = versions_of(before), versions_of(after)
        names = {f"kvferry-model-{entry}" if entry else "kvferry" for entry in replaced}
        assert {name for name in new if old.get(name) != new[name]} == names
        assert len(set(new.values())) == len(new)
        # No pod: what its template is made from says whether it is replaced.
        templates = [
            {name: group["template"]["metadata"]["annotations"]["kvferry.io/template"] for name, group in each.items()}
            for each in (groups_of(before), groups_of(after))
        ]
        assert all(templates[1][name] == digest for name, digest in templates[0].items())


def test_an_entry_that_goes_takes_its_groups_and_its_application() -> None:
    before = render()
    shares = {"model": {"canary": {"small": 5}}, "models": [SMALL]}
    values = merged(VALUES, {"config": shares})
    values["config"]["model"]["canary"] = {"small": 5}
    del values["roles"]["models"]["chat"]
    after = rendering(values)
    assert set(groups_of(before)) - set(groups_of(after)) == {"prefill-chat", "decode-chat"}
    old, new = versions_of(before), versions_of(after)
    assert old.keys() - new.keys() == {"kvferry-model-chat"}
    assert new.items() <= old.items()


def test_serve_s_gateways_follow_models_and_counts() -> None:
    rendered = render({"gateway": {"mode": "serve"}})
    (gateway,) = (each for each in applications_of(rendered)["kvferry"]["deployments"] if each["name"] == "Gateway")
    values = deployments(applications_of(rendered)["kvferry"]["args"])["Gateway"].init_args[0]
    followed = configuration.parse(app.gateway_values(values, gateway["user_config"]))
    whole = config_of(rendered)
    assert followed.model == whole.model
    assert [entry.pool for entry in followed.models] == [entry.pool for entry in whole.models]
    assert [entry.model for entry in followed.models] == [entry.model for entry in whole.models]
    assert [entry.decode.replicas for entry in followed.models] == [5, 1]
    assert [entry.prefill.replicas for entry in followed.models] == [1, 0]
    assert [entry.decode.replicas for entry in whole.models] == [1, 1], "counts restart no gateway's pod"


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_all_models_may_be_entries(tmp_path: Path, mode: str) -> None:
    entries = [{**CHAT, "model": {"path": "/models/chat"}}, SMALL]
    changes = {"gateway": {"mode": mode}, "config": {"models": entries, "model": {"canary": {"chat": 1}}}}
    values = merged(VALUES, NO_DEFAULT, changes)
    # The chart's default, a model of the hub, which nobody may download then.
    values["config"]["model"] = {}
    rendered = rendering(values)
    assert "hf" not in json.dumps(rendered).split('"')
    names = {"kvferry-model-chat", "kvferry-model-small"} | ({"kvferry"} if mode == "serve" else set())
    assert applications_of(rendered).keys() == names
    assert not {"prefill", "decode"} & groups_of(rendered).keys()
    assert config_of(rendered).names == ["chat", "small"]
    if mode == "serve":
        application = applications_of(rendered)["kvferry"]
        (gateway,) = application["deployments"]
        built = deployments(application["args"])
        assert built.keys() == {"Gateway"}
        followed = configuration.parse(app.gateway_values(built["Gateway"].init_args[0], gateway["user_config"]))
        assert followed.names == ["chat", "small"]
    assert '"model": "chat"' in newest_helm().notes(values=write_values(tmp_path, values))


def test_entries_of_the_weights_volume_wait_for_their_folder() -> None:
    values: Document = {
        "config": {
            "model": {"path": "acme/base", "revision": "v1"},
            "models": [{"name": "chat", "model": {"path": "/models/acme--chat--v2"}}],
        },
        "model": {"weights": {"enabled": True, "also": [{"path": "acme/chat", "revision": "v2"}]}},
    }
    rendered = rendering(values)
    args = applications_of(rendered)["kvferry-model-chat"]["args"]
    assert args["hub_model"] == {"name": "acme/chat", "revision": "v2"}
    for deployment in deployments(args).values():
        assert deployment.init_args[1] == "/models/acme--chat--v2"
        assert deployment.init_kwargs["hub_model"] == args["hub_model"]
    waited = {}
    for name, group in groups_of(rendered).items():
        (container,) = group["template"]["spec"]["initContainers"]
        waited[name] = container["command"][container["command"].index("--folder") + 1]
    base, chat = "/models/acme--base--v1", "/models/acme--chat--v2"
    assert waited == {"prefill": base, "decode": base, "prefill-chat": chat, "decode-chat": chat}


def test_each_group_has_a_folder_of_a_node_s_volume_and_the_tier_that_its_entry_says(tmp_path: Path) -> None:
    entries = [
        {"name": "chat", "model": {"path": "/models/chat"}, "tier": {"cpu_gib": 3}},
        {"name": "small", "model": {"path": "/models/small"}, "tier": {"enabled": False}},
    ]
    values = copy.deepcopy(VALUES)
    values["config"] = {"model": {"path": "/models/m"}, "models": entries, "tier": {"blocks_per_chunk": 8}}
    values["roles"] = {"models": {"chat": {"decode": {"workersPerPod": 2, "memoryGiB": 20}}}}
    volume = {"name": "nvme0", "capacityGiB": 10, "hostPath": "/mnt/nvme0"}
    values["tier"] = {"enabled": True, "cpuGiB": 2, "volumes": [volume], "encryptionKeysSecret": "k"}
    rendered = rendering(values)
    for document in rendered:
        helm_check.validate(document)
    places, shared = {}, {}
    for name, group in groups_of(rendered).items():
        volumes = {each["name"]: each for each in group["template"]["spec"]["volumes"]}
        mounts = {each["name"] for each in group["template"]["spec"]["containers"][0]["volumeMounts"]}
        assert ("volume-nvme0" in volumes) == ("volume-nvme0" in mounts) == ("tier-keys" in volumes)
        shared[name] = volumes["shm"]["emptyDir"]["sizeLimit"]
        if "volume-nvme0" in volumes:
            places[name] = volumes["volume-nvme0"]["hostPath"]["path"]
    assert places == {name: f"/mnt/nvme0/{name}" for name in ("prefill", "decode", "prefill-chat", "decode-chat")}
    assert shared["decode-chat"] == "7Gi"
    assert shared["prefill"] == "3Gi"
    assert shared["decode-small"] == "1Gi"
    notes = newest_helm().notes(values=write_values(tmp_path, values))
    assert "/mnt/nvme0/prefill /mnt/nvme0/decode /mnt/nvme0/prefill-chat /mnt/nvme0/decode-chat\n" in notes


def test_the_values_of_the_page_are_taken() -> None:
    page = (helm_check.ROOT / "docs" / "operator" / "models-in-a-cluster.md").read_text()
    text = page.partition("## With the chart")[2].partition("```yaml\n")[2].partition("```")[0]
    rendered = rendering(yaml.safe_load(text))
    assert config_of(rendered).names == ["qwen3-8b", "Qwen/Qwen3-32B", "small"]
    counts = {name: group["replicas"] for name, group in groups_of(rendered).items()}
    assert counts == {"prefill": 1, "decode": 1, "prefill-chat": 2, "decode-chat": 4, "decode-small": 1}


def test_sixteen_entries_are_the_most() -> None:
    entries = [{"name": f"m{number}", "model": {"path": f"/models/m{number}"}} for number in range(16)]
    values = {"config": {"model": {"path": "/models/m"}, "models": entries}, "model": VALUES["model"]}
    rendered = rendering(values)
    assert len(groups_of(rendered)) == 34
    assert len(applications_of(rendered)) == 17
    assert len(config_of(rendered).models) == 16
