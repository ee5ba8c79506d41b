"""Whether a rendering's network policies let one pod reach another, by the rules of Kubernetes for ingress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Peer:
    """A pod: its namespace, its labels."""

    namespace: str
    labels: Mapping[str, str]


def allows(policies: Sequence[Document], *, namespace: str, source: Peer, target: Peer, port: int) -> bool:
    """Whether a connection to a TCP port gets through. Policies are those of `namespace`."""
    selecting = [
        policy["spec"]
        for policy in policies
        if target.namespace == namespace and _selects(policy["spec"]["podSelector"], target.labels)
    ]
    if not selecting:
        return True
    return any(
        _port_matches(rule, port) and _source_matches(rule, namespace, source)
        for spec in selecting
        for rule in spec.get("ingress", [])
    )


def _port_matches(rule: Document, port: int) -> bool:
    ports = rule.get("ports")
    return not ports or any(each["port"] <= port <= each.get("endPort", each["port"]) for each in ports)


def _source_matches(rule: Document, namespace: str, source: Peer) -> bool:
    if not rule.get("from"):
        return True
    for peer in rule["from"]:
        if "ipBlock" in peer:
            continue
        if "namespaceSelector" in peer:
            is_there = _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": source.namespace})
        else:
            is_there = source.namespace == namespace
        if is_there and _selects(peer.get("podSelector", {}), source.labels):
            return True
    return False


def _selects(selector: Document, labels: Mapping[str, str]) -> bool:
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()
