"""What the chart does where a release is already there: it looks objects up in the cluster."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.chart import helm_check, newest_helm, one, write_values
from support.fake_api_server import api_server

MAJORS = [3, 4]


def rendered_over(
    there: Sequence[dict[str, Any]], values: dict[str, Any], folder: Path, major: int
) -> list[dict[str, Any]]:
    """The chart's objects where a namespace has these objects. Raises CheckFailed."""
    newest_helm()
    found = [helm for helm in helm_check.helms() if helm.major == major]
    if not found:
        pytest.skip(f"no Helm {major} here")
    namespaced = copy.deepcopy(list(there))
    for each in namespaced:
        each["metadata"]["namespace"] = helm_check.NAMESPACE
        # As an install leaves them; without these Helm does not take an object for the release's.
        each["metadata"].setdefault("annotations", {}).update(
            {
                "meta.helm.sh/release-name": helm_check.RELEASE,
                "meta.helm.sh/release-namespace": helm_check.NAMESPACE,
            }
        )
    with api_server(namespaced, folder) as kubeconfig:
        documents: list[dict[str, Any]] = found[0].documents(
            "--dry-run=server",
            "--disable-openapi-validation",
            f"--kubeconfig={kubeconfig}",
            values=write_values(folder, values),
        )
    return documents


def installed(values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    documents: list[dict[str, Any]] = newest_helm().documents(values=write_values(folder, values))
    return documents


@pytest.mark.parametrize("major", MAJORS)
def test_members_of_etcd_do_not_change_in_number(tmp_path: Path, major: int) -> None:
    there = installed({}, tmp_path)
    with pytest.raises(helm_check.CheckFailed, match=r"etcd\.replicas is 3 and this release's etcd has 1"):
        rendered_over(there, {"etcd": {"replicas": 3}}, tmp_path, major)
    assert rendered_over(there, {"etcd": {"replicas": 1}}, tmp_path, major)


@pytest.mark.parametrize("major", MAJORS)
def test_the_size_of_etcd_s_claims_does_not_change(tmp_path: Path, major: int) -> None:
    there = installed({"etcd": {"persistence": {"sizeGiB": 0.5}}}, tmp_path)
    with pytest.raises(helm_check.CheckFailed, match=r"sizeGiB is 4 and this release's claims are of 512Mi"):
        rendered_over(there, {"etcd": {"persistence": {"sizeGiB": 4}}}, tmp_path, major)


@pytest.mark.parametrize("major", MAJORS)
def test_switching_autoscaling_on_keeps_the_gateways_there_are(tmp_path: Path, major: int) -> None:
    there = installed({"gateway": {"replicas": 5}}, tmp_path)
    scaled = {"gateway": {"autoscaling": {"enabled": True}}}
    assert one(rendered_over(there, scaled, tmp_path, major), "Deployment", "trial-gateway")["spec"]["replicas"] == 5
    assert one(installed(scaled, tmp_path), "Deployment", "trial-gateway")["spec"]["replicas"] == 2


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(("had", "wanted"), [(1, 3), (3, 1)])
def test_claims_of_another_number_of_members_are_not_opened(tmp_path: Path, major: int, had: int, wanted: int) -> None:
    claims = [
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": f"data-trial-etcd-{number}"}}
        for number in range(had)
    ]
    with pytest.raises(helm_check.CheckFailed, match=f"etcd.replicas is {wanted} and claims of another number"):
        rendered_over(claims, {"etcd": {"replicas": wanted}}, tmp_path, major)
    assert rendered_over(claims, {"etcd": {"replicas": had}}, tmp_path, major)


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storageClassName": "other"}, 'storageClassName is "other" and the claim trial-weights has "shared"'),
        ({"accessMode": "ReadWriteOnce"}, "accessMode is ReadWriteOnce and the claim trial-weights has ReadWriteMany"),
        ({"sizeGiB": 99.5}, "sizeGiB is 99.5 and the claim trial-weights has 100Gi: a claim can grow, and not shrink"),
    ],
)
def test_what_a_claim_of_weights_keeps_is_not_changed(
    tmp_path: Path, major: int, changes: dict[str, Any], message: str
) -> None:
    def values(**claim: Any) -> dict[str, Any]:
        weights = {"enabled": True, "claim": {"storageClassName": "shared", "sizeGiB": 100, **claim}}
        return {"config": {"model": {"path": "acme/tiny", "revision": "v1"}}, "model": {"weights": weights}}

    there = installed(values(), tmp_path)
    with pytest.raises(helm_check.CheckFailed, match=re.escape(message)):
        rendered_over(there, values(**changes), tmp_path, major)
    grown = one(rendered_over(there, values(sizeGiB=2048), tmp_path, major), "PersistentVolumeClaim")
    assert grown["spec"]["resources"]["requests"]["storage"] == "2Ti"
