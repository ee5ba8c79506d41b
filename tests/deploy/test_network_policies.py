"""Who may reach whom in a release, over all kinds of pods and the ports that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.chart import chart_rules, helm_check, newest_helm, write_values
from support.network_policies import Peer, allows

HERE = helm_check.NAMESPACE
OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
OTHERS = {
    "anybody elsewhere": Peer("elsewhere", {"app": "x"}),
    "anybody in the namespace": Peer(HERE, {"app": "x"}),
    "another release": Peer(HERE, {"kvferry.io/release": "other", "kvferry.io/ray": "true"}),
    "the operator": Peer("kuberay-system", OPERATOR),
    "the operator in default": Peer("default", OPERATOR),
    "the operator here": Peer(HERE, OPERATOR),
    "Prometheus": Peer("monitoring", {"app.kubernetes.io/name": "prometheus"}),
}
PORTS = {
    "gateway": {"http": 8000, "grpc": 9000, "metrics": 9400},
    "head": {"dashboard": 8265, "gcs": 6379},
    "prefill": {"link": 31000, "metrics": 9420},
    "decode": {"link": 31000, "metrics": 9420},
    "etcd": {"client": 2379, "peer": 2380, "metrics": 2381},
}
RAY = {"head", "prefill", "decode"}


def members(rendered: list[dict[str, Any]]) -> dict[str, Peer]:
    """Component -> a pod of it."""
    templates = []
    for document in rendered:
        templates += [template for _, template in helm_check._pod_templates(document)]
        if document["kind"] == "Pod":
            templates.append(document)
        elif "template" in document.get("spec", {}):
            templates.append(document["spec"]["template"])
    labels = [template["metadata"]["labels"] for template in templates]
    return {each["kvferry.io/component"]: Peer(HERE, each) for each in labels}


def matrix(rendered: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    """(component, port) -> who may reach it."""
    policies = [each for each in rendered if each["kind"] == "NetworkPolicy"]
    there = members(rendered)
    sources = {**OTHERS, **there}
    return {
        (component, port): {
            name
            for name, source in sources.items()
            if allows(policies, namespace=HERE, source=source, target=there[component], port=number)
        }
        for component, ports in PORTS.items()
        for port, number in ports.items()
    }


@pytest.mark.parametrize("mode", ["deployment", "serve"])
def test_who_may_reach_whom(tmp_path: Path, mode: str) -> None:
    values = {
        "gateway": {"mode": mode},
        "monitoring": {"members": {"enabled": True}},
        "networkPolicy": {"monitoringNamespace": "monitoring"},
    }
    rendered = newest_helm().documents(values=write_values(tmp_path, values))
    assert chart_rules.faults(rendered) == []
    release = set(members(rendered))
    everybody = {*OTHERS, *release}
    operators = {"the operator", "the operator in default", "the operator here"}
    # Gateways of Serve are Ray's pods: those of Ray, and other gateways, reach every port of theirs.
    ray = RAY | {"gateway"}
    assert release == {"gateway", "head", "prefill", "decode", "etcd", "etcd-users", "rollout", "test"}
    assert matrix(rendered) == {
        ("gateway", "http"): everybody,
        ("gateway", "grpc"): everybody,
        ("gateway", "metrics"): {"Prometheus"} | (ray if mode == "serve" else set()),
        ("head", "dashboard"): ray | operators,
        ("head", "gcs"): ray,
        ("prefill", "link"): ray,
        ("prefill", "metrics"): ray | {"Prometheus"},
        ("decode", "link"): ray,
        ("decode", "metrics"): ray | {"Prometheus"},
        ("etcd", "client"): release,
        ("etcd", "peer"): {"etcd"},
        ("etcd", "metrics"): {"Prometheus"},
    }


def test_few_may_call_gateways_and_one_operator_the_head(tmp_path: Path) -> None:
    few = {"gatewayFrom": [{"podSelector": {"matchLabels": {"app": "x"}}}], "operatorNamespace": "kuberay-system"}
    found = matrix(newest_helm().documents(values=write_values(tmp_path, {"networkPolicy": few})))
    assert found["gateway", "http"] == found["gateway", "grpc"] == {"anybody in the namespace", "test"}
    assert found["head", "dashboard"] == RAY | {"gateway", "the operator"}
    assert found["etcd", "metrics"] == set()


def test_without_policies_all_reach_all(tmp_path: Path) -> None:
    rendered = newest_helm().documents(values=write_values(tmp_path, {"networkPolicy": {"enabled": False}}))
    assert all(names == {*OTHERS, *members(rendered)} for names in matrix(rendered).values())
