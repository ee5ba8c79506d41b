"""Rules in CEL of custom resources are evaluated as an API server does, and every one of them can be broken."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chart import cel_rules, helm_check, newest_helm, one, write_values

OPTIONS: dict[str, Any] = {
    "gateway": {
        "gatewayApi": {"enabled": True, "parentRefs": [{"name": "a", "sectionName": "s"}, {"name": "b"}]},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
    },
    "internalTls": {"secretName": "inside", "certificate": {"issuerRef": {"name": "ca"}}},
    "externalSecrets": {
        "store": {"name": "vault"},
        "secrets": [{"name": "api-keys", "entries": {"keys.yaml": {"key": "a"}, "more.yaml": {"key": "b"}}}],
    },
    "auth": {"keysSecret": "api-keys"},
    "monitoring": {"alerts": {"enabled": True}, "serviceMonitor": {"enabled": True}, "keySecret": "scrape"},
}
BACKEND = ["spec", "rules", 0, "backendRefs", 0]

# Kind, where, the spoilt value, what is said: one for each rule of tools/resource_schemas.
SPOILT: list[tuple[str, list[Any], Any, str]] = [
    ("HTTPRoute", ["spec", "parentRefs"], [{"name": "a"}, {"name": "a"}], "its section and its port are named once"),
    ("HTTPRoute", ["spec", "parentRefs", 1], {"name": "a"}, "who names a section of a gateway names one"),
    ("HTTPRoute", BACKEND, {"name": "x"}, "a service is called at a port"),
    ("HTTPRoute", ["spec", "rules", 0, "matches", 0, "path", "value"], "v1", "a path begins with a slash"),
    ("GRPCRoute", ["spec", "parentRefs"], [{"name": "a"}, {"name": "a"}], "its section and its port are named once"),
    ("GRPCRoute", ["spec", "parentRefs", 1], {"name": "a"}, "who names a section of a gateway names one"),
    ("GRPCRoute", BACKEND, {"name": "x"}, "a service is called at a port"),
    ("InferencePool", ["spec", "targetPorts"], [{"number": 1}, {"number": 1}], "a port is named once"),
    ("InferencePool", ["spec", "endpointPickerRef"], {"name": "x"}, "a service is called at a port"),
    ("Certificate", ["spec", "renewBefore"], "99999h", "a certificate is renewed before it ends"),
    ("ExternalSecret", ["spec", "data", 1, "secretKey"], "keys.yaml", "an entry of the secret is named once"),
    ("PrometheusRule", ["spec", "groups"], None, "a group is named once"),
]


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = write_values(tmp_path_factory.mktemp("values"), OPTIONS)
    documents: list[dict[str, Any]] = newest_helm().documents(values=file)
    return documents


@pytest.mark.parametrize(("kind", "path", "value", "message"), SPOILT)
def test_a_broken_rule_is_seen(
    rendered: list[dict[str, Any]], kind: str, path: list[Any], value: Any, message: str
) -> None:
    document = copy.deepcopy(one(rendered, kind))
    helm_check.validate(document)
    here = document
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value if value is not None else [*here[path[-1]], here[path[-1]][0]]
    with pytest.raises(helm_check.CheckFailed, match=re.escape(message)):
        helm_check.validate(document)


def test_every_rule_is_broken_once() -> None:
    broken = {(kind, message) for kind, _, _, message in SPOILT}
    num_rules = 0
    for (_, kind), schemas in helm_check.rule_schemas().items():
        for _, rule in cel_rules.rules(schemas[0]):
            num_rules += 1
            said = _message(schemas[0], rule)
            assert any(kind == each and message in said for each, message in broken), f"{kind}: {rule}"
    assert num_rules == len(SPOILT)


def _message(schema: Any, rule: str) -> str:
    if isinstance(schema, dict):
        for each in schema.get(cel_rules.RULES, ()):
            if each["rule"] == rule:
                return str(each["message"])
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return next((found for part in parts if (found := _message(part, rule))), "")


# As a CRD states it


CRD = yaml.safe_load("""
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
spec:
  group: ray.io
  names: {kind: RayService}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          x-kubernetes-preserve-unknown-fields: true
          properties:
            spec:
              type: object
              x-kubernetes-preserve-unknown-fields: true
              properties:
                upgradeStrategy:
                  type: object
                  properties: {type: {type: string}}
                  x-kubernetes-validations:
                    - {rule: "self.type != 'None'", message: a rule of a CRD}
""")


def test_rules_of_crds_are_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendered: list[dict[str, Any]]
) -> None:
    (tmp_path / "crd.yaml").write_text(yaml.safe_dump(CRD))
    monkeypatch.setenv("KVFERRY_SCHEMAS", str(tmp_path))
    cached = (helm_check.rule_schemas, helm_check.resource_schemas, helm_check._validate)
    try:
        for each in cached:
            each.cache_clear()
        with pytest.raises(helm_check.CheckFailed, match=r"spec\.upgradeStrategy: a rule of a CRD"):
            helm_check.validate(one(rendered, "RayService"))
    finally:
        for each in cached:
            each.cache_clear()


def test_rules_of_kuberay_s_crds_hold_and_can_be_broken(rendered: list[dict[str, Any]]) -> None:
    schemas = helm_check.rule_schemas()["ray.io/v1", "RayService"]
    if len(schemas) == 1:
        pytest.skip("no CRDs of KubeRay here: KVFERRY_SCHEMAS names a folder of them")
    service = one(rendered, "RayService")
    assert list(cel_rules.faults(schemas[1], service)) == []
    assert {rule for _, rule in cel_rules.rules(schemas[1])} >= {"self == oldSelf"}
    other = copy.deepcopy(service)
    other["spec"]["managedBy"] = "somebody/else"
    assert [each.partition(":")[0] for each in cel_rules.faults(schemas[1], other)] == ["spec.managedBy"]
    queued = copy.deepcopy(service)
    queued["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert list(cel_rules.faults(schemas[1], queued)) == []
    before = copy.deepcopy(queued)
    before["spec"]["managedBy"] = "ray.io/kuberay-operator"
    (fault,) = cel_rules.faults(schemas[1], queued, before)
    assert "immutable" in fault


# The evaluator


def evaluate(rule: str, value: Any, old: Any = None, **schema: Any) -> list[str]:
    return list(cel_rules.faults({cel_rules.RULES: [{"rule": rule}], **schema}, value, old))


def test_rules_see_defaults_and_escaped_names() -> None:
    reference = {"properties": {"kind": {"default": "Service"}, "namespace": {}, "a-b": {}, "c__d": {}}}
    rule = "self.kind == 'Service' && self.__namespace__ == 'n' && self.a__dash__b == 1 && self.c__underscores__d == 2"
    assert evaluate(rule, {"namespace": "n", "a-b": 1, "c__d": 2}, **reference) == []
    assert evaluate(rule, {"namespace": "m", "a-b": 1, "c__d": 2}, **reference) == [f"(root): {rule}"]
    assert evaluate("self[0].kind == 'Service'", [{}], items=reference) == []


def test_a_rule_about_changes_needs_what_was_before() -> None:
    assert evaluate("self == oldSelf", 1) == []
    assert evaluate("self == oldSelf", 1, 1) == []
    assert len(evaluate("self == oldSelf", 1, 2)) == 1


@pytest.mark.parametrize("rule", ["self.missing == 1", "self +", "unknown(self)", "1"])
def test_a_rule_that_cannot_be_evaluated_is_broken(rule: str) -> None:
    assert len(evaluate(rule, {})) == 1


def test_rules_of_elements_and_of_mappings_are_evaluated() -> None:
    small = {cel_rules.RULES: [{"rule": "self < 3", "message": "too large"}]}
    assert evaluate("true", [1, 5], items=small) == ["[1]: too large"]
    assert evaluate("true", {"a": {"x": 5}}, additionalProperties={"additionalProperties": small}) == ["a.x: too large"]
