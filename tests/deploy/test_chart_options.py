"""Options of the chart for what others run in a cluster: hosts' network, operators of secrets, the Gateway API."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from support.chart import chart_rules, helm_check, newest_helm, one, write_values
from support.kuberay_model import written_back

HOSTS = [{"ipBlock": {"cidr": "10.0.0.0/16"}}]
ON_HOSTS: dict[str, Any] = {
    "roles": {"prefill": {"hostNetwork": True}, "decode": {"hostNetwork": True}},
    "networkPolicy": {"hostNetworkFrom": HOSTS},
}


def rendered(folder: Path, *layers: dict[str, Any]) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = newest_helm().documents(values=write_values(folder, helm_check.merged(*layers)))
    for document in documents:
        helm_check.validate(document)
    assert chart_rules.faults(documents) == []
    return documents


def groups(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    service = one(documents, "RayService")
    assert written_back(service) == service
    return {each["groupName"]: each["template"] for each in service["spec"]["rayClusterConfig"]["workerGroupSpecs"]}


def test_pods_on_their_host_s_network_share_no_host(tmp_path: Path) -> None:
    found = groups(rendered(tmp_path, ON_HOSTS, {"gateway": {"mode": "serve"}}))
    for name in ("prefill", "decode"):
        pod = found[name]["spec"]
        assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert apart["topologyKey"] == "kubernetes.io/hostname"
        # Pods of either role, as both want the same ports.
        for other in ("prefill", "decode"):
            assert apart["labelSelector"]["matchLabels"].items() <= found[other]["metadata"]["labels"].items()
        (port,) = pod["containers"][0]["ports"]
        assert port["hostPort"] == port["containerPort"]
        assert port["containerPort"] == pod["containers"][0]["livenessProbe"]["httpGet"]["port"]
    assert "hostNetwork" not in found["gateway"]["spec"]
    assert "kvferry.io/host-network" not in found["gateway"]["metadata"]["labels"]


def test_volumes_of_hosts_keep_their_own_rule_beside_it(tmp_path: Path) -> None:
    volume = {"name": "nvme0", "capacityGiB": 10, "hostPath": "/mnt/nvme0"}
    pod = groups(rendered(tmp_path, ON_HOSTS, {"tier": {"enabled": True, "volumes": [volume]}}))["decode"]["spec"]
    rules = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = [rule["labelSelector"]["matchLabels"] for rule in rules]
    assert [set(each) - {"kvferry.io/release"} for each in labels] == [
        {"kvferry.io/host-network"},
        {"kvferry.io/component"},
    ]


def test_an_affinity_of_the_values_that_keeps_pods_apart_is_taken(tmp_path: Path) -> None:
    apart = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"kvferry.io/host-network": "true"}},
    }
    own = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    found = groups(rendered(tmp_path, ON_HOSTS, {"roles": {"decode": {"affinity": own}}}))
    assert found["decode"]["spec"]["affinity"] == own


def test_hosts_reach_ray_and_etcd(tmp_path: Path) -> None:
    def peers(*layers: dict[str, Any]) -> dict[str, list[str]]:
        documents = rendered(tmp_path, *layers)
        return {
            policy["metadata"]["name"]: [
                peer["ipBlock"]["cidr"]
                for rule in policy["spec"].get("ingress", [])
                for peer in rule.get("from", [])
                if "ipBlock" in peer
            ]
            for policy in documents
            if policy["kind"] == "NetworkPolicy"
        }

    assert {name for name, found in peers(ON_HOSTS).items() if found} == {"trial-ray", "trial-etcd"}
    assert not any(peers().values())
    assert all(ipaddress.ip_network(cidr) for found in peers(ON_HOSTS).values() for cidr in found)


def test_the_notes_say_what_no_policy_fences(tmp_path: Path) -> None:
    notes = newest_helm().notes(values=write_values(tmp_path, ON_HOSTS))
    assert "Network policies do not hold for them" in notes
    assert "Network policies do not hold" not in newest_helm().notes(values=write_values(tmp_path, {}))


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_a_pool_is_of_gateways_and_the_route_leads_to_it(tmp_path: Path, mode: str) -> None:
    gateway = {
        "mode": mode,
        "gatewayApi": {"enabled": True, "parentRefs": [{"name": "public"}]},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    }
    documents = rendered(tmp_path, {"gateway": gateway})
    pool = one(documents, "InferencePool")
    pods = groups(documents)
    if mode == "deployment":
        pods["gateway"] = one(documents, "Deployment", "trial-gateway")["spec"]["template"]
    selector = pool["spec"]["selector"]["matchLabels"].items()
    assert {name for name, pod in pods.items() if selector <= pod["metadata"]["labels"].items()} == {"gateway"}
    (container,) = pods["gateway"]["spec"]["containers"]
    assert pool["spec"]["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    (backend,) = one(documents, "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "trial"}
    # gRPC goes to the service: a pool's endpoints speak HTTP.
    (backend,) = one(documents, "GRPCRoute")["spec"]["rules"][0]["backendRefs"]
    assert backend == {"name": "trial", "port": 9000}


def test_certificates_make_the_secrets_that_pods_mount(tmp_path: Path) -> None:
    issuer = {"issuerRef": {"name": "ca"}}
    values = {
        "gateway": {"tls": {"secretName": "edge", "certificate": {**issuer, "dnsNames": ["llm.example.com"]}}},
        "internalTls": {"secretName": "inside", "certificate": issuer},
    }
    documents = rendered(tmp_path, values)
    made = {each["spec"]["secretName"]: each["spec"] for each in documents if each["kind"] == "Certificate"}
    pod = one(documents, "Deployment", "trial-gateway")["spec"]["template"]["spec"]
    mounted = {each["secret"]["secretName"] for each in pod["volumes"] if "secret" in each}
    assert {"edge", "inside"} <= mounted
    assert made.keys() == {"edge", "inside"}
    (config, *_) = helm_check.parse_configs(documents)
    assert made["inside"]["dnsNames"] == [config.worker.tls.server_name]
    assert "client auth" in made["inside"]["usages"]
    assert "client auth" not in made["edge"]["usages"]
    assert not [each for each in documents if each["kind"] == "Secret" and each["metadata"]["name"] in made]


def test_external_secrets_make_what_values_name(tmp_path: Path) -> None:
    values = {
        "auth": {"keysSecret": "api-keys"},
        "config": {"model": {"revision": "v1"}},
        "model": {"weights": {"enabled": True}, "hubToken": {"secretName": "hub"}},
        "externalSecrets": {
            "store": {"name": "vault"},
            "secrets": [
                {"name": "api-keys", "entries": {"keys.yaml": {"key": "serving/keys"}}},
                {"name": "hub", "entries": {"token": {"key": "hub", "property": "token"}}},
            ],
        },
    }
    documents = rendered(tmp_path, values)
    made = {each["spec"]["target"]["name"]: each for each in documents if each["kind"] == "ExternalSecret"}
    assert made.keys() == {"api-keys", "hub"}
    (entry,) = made["hub"]["spec"]["data"]
    assert entry == {"secretKey": "token", "remoteRef": {"key": "hub", "property": "token"}}
    (job,) = (each for each in documents if "-weights-" in each["metadata"]["name"] and each["kind"] == "Job")
    (token,) = (each for each in job["spec"]["template"]["spec"]["containers"][0]["env"] if each["name"] == "HF_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
