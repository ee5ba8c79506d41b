"""The chart's own secrets over the life of a release, with real Helms on an imitated API server."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chart import helm_check, newest_helm, write_values
from support.fake_api_server import ApiServer, release_server

MONITORED = {
    "monitoring": {"members": {"enabled": True}},
    "networkPolicy": {"monitoringNamespace": "monitoring"},
}
KEPT = {"trial-etcd-tls", "trial-etcd-users"}
SECRETS = {*KEPT, "trial-internal-tls", "trial-first-key", "trial-keys"}


@dataclass
class Site:
    """A namespace on a server, and a Helm."""

    helm: Any
    server: ApiServer
    folder: Path
    chart: Path = field(default_factory=lambda: helm_check.CHART)

    def run(self, *arguments: str, values: dict[str, Any] | None = None) -> str:
        """A command with the release and, with values, the chart. Raises AssertionError with what Helm says."""
        what = [arguments[0], helm_check.RELEASE, *arguments[1:]]
        if values is not None:
            what += [
                str(self.chart),
                "--disable-openapi-validation",
                "--values",
                str(write_values(self.folder, values)),
            ]
        return self._run(*what)

    def manifest(self) -> str:
        return self._run("get", "manifest", helm_check.RELEASE)

    def _run(self, *arguments: str) -> str:
        place = ("--namespace", helm_check.NAMESPACE, "--kubeconfig", str(self.server.kubeconfig))
        result = self.helm.run(*arguments, *place)
        assert result.returncode == 0, result.stderr
        return str(result.stdout)


@pytest.fixture(params=[3, 4])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    newest_helm()
    found = [helm for helm in helm_check.helms() if helm.major == request.param]
    if not found:
        pytest.skip(f"no Helm {request.param} here")
    with release_server([], tmp_path, helm_check.NAMESPACE) as server:
        yield Site(found[0], server, tmp_path)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def test_a_rollback_keeps_secrets_of_now(site: Site) -> None:
    site.run("install", values=MONITORED)
    first = site.server.secrets()
    # As docs/operator/rotate-secrets.md says to rotate them.
    for name in first.keys() - {"trial-etcd-users"}:
        site.server.delete_secret(name)
    site.run("upgrade", values=MONITORED)
    site.server.edit_secret("trial-etcd-users", {"password": encoded("new")})
    now = site.server.secrets()
    assert now.keys() == first.keys() >= SECRETS
    assert all(now[name] != first[name] for name in first)
    site.run("rollback", "1")
    assert site.server.secrets() == now
    site.run("upgrade", values=MONITORED)
    assert site.server.secrets() == now


def test_a_rollback_keeps_keys_that_were_edited(site: Site) -> None:
    site.run("install", values={})
    site.run("upgrade", values={"gateway": {"replicas": 2}})
    added = encoded("- {tenant: acme, name: ci, sha256: " + "0" * 64 + "}\n")
    site.server.edit_secret("trial-keys", {"keys.yaml": added})
    site.run("rollback", "1")
    assert site.server.secrets()["trial-keys"] == {"keys.yaml": added}
    site.run("upgrade", values={})
    assert site.server.secrets()["trial-keys"] == {"keys.yaml": added}


def test_no_secret_is_in_the_manifest_of_a_release(site: Site) -> None:
    site.run("install", values=MONITORED)
    assert "kind: Secret" not in site.manifest()


def test_an_upgrade_makes_what_is_missing_and_a_rollback_does_not(site: Site) -> None:
    site.run("install", values={})
    first = site.server.secrets()
    site.server.delete_secret("trial-internal-tls")
    site.run("rollback", "1")
    assert "trial-internal-tls" not in site.server.secrets()
    site.run("upgrade", values={})
    now = site.server.secrets()
    assert now.pop("trial-internal-tls") != first.pop("trial-internal-tls")
    assert now == first


def test_the_first_key_and_the_hashes_are_made_anew_together(site: Site) -> None:
    site.run("install", values={})
    site.server.delete_secret("trial-first-key")
    before = site.server.secrets()
    site.run("upgrade", values={})
    now = site.server.secrets()
    assert hashes(now) == {key_hash(now["trial-first-key"]), key_hash(now["trial-metrics-key"])}
    assert now["trial-metrics-key"] == before["trial-metrics-key"]


def test_a_new_key_for_prometheus_is_added_to_the_others(site: Site) -> None:
    """Its old line stays until it is removed, and stays away then."""
    site.run("install", values={})
    first = site.server.secrets()
    site.server.edit_secret("trial-keys", {"keys.yaml": encoded(f"# from the vault\n{keys_text(first)}")})
    site.server.delete_secret("trial-metrics-key")
    site.run("upgrade", values={})
    now = site.server.secrets()
    assert hashes(now) == hashes(first) | {key_hash(now["trial-metrics-key"])}
    assert keys_text(now).startswith("# from the vault\n")
    lines = [line for line in keys_text(now).splitlines(keepends=True) if "prometheus" not in line]
    site.server.edit_secret("trial-keys", {"keys.yaml": encoded("".join(lines))})
    site.run("upgrade", values={})
    assert hashes(site.server.secrets()) == {key_hash(first["trial-first-key"])}
    # Without any key, too, the file stays one of keys.
    site.server.edit_secret("trial-keys", {"keys.yaml": encoded("[]\n")})
    site.server.delete_secret("trial-metrics-key")
    site.run("upgrade", values={})
    now = site.server.secrets()
    assert hashes(now) == {key_hash(now["trial-metrics-key"])}


@pytest.mark.parametrize("keep", [True, False])
def test_an_uninstall_leaves_what_opens_etcd_s_claims(site: Site, keep: bool) -> None:
    values = {**MONITORED, "etcd": {"persistence": {"keep": keep}}}
    site.run("install", values=values)
    first = site.server.secrets()
    site.run("upgrade", values=values)
    site.run("uninstall")
    left = site.server.secrets()
    assert left == ({name: first[name] for name in KEPT} if keep else {})
    site.run("install", values=values)
    again = site.server.secrets()
    assert again.keys() == first.keys()
    assert {name for name in first if again[name] == first[name]} == left.keys()


def test_a_release_of_the_chart_before_keeps_its_secrets(site: Site) -> None:
    """Its secrets are part of the manifest, and Helm deletes what a later manifest lacks."""
    site.chart = chart_with_secrets_in_its_manifest(site.folder)
    site.run("install", values=MONITORED)
    assert "kind: Secret" in site.manifest()
    added = {"keys.yaml": encoded("- {tenant: acme, name: ci, sha256: " + "0" * 64 + "}\n")}
    site.server.edit_secret("trial-keys", added)
    first = site.server.secrets()
    site.chart = helm_check.CHART
    for _ in range(2):
        site.run("upgrade", values=MONITORED)
        assert site.server.secrets() == first
    site.run("rollback", "2")
    assert site.server.secrets() == first
    site.run("uninstall")
    assert site.server.secrets().keys() == KEPT


def chart_with_secrets_in_its_manifest(folder: Path) -> Path:
    chart = folder / "kvferry"
    shutil.copytree(helm_check.CHART, chart)
    file = chart / "templates" / "secrets.yaml"
    text, count = re.subn(r'(?s)(\{\{- define "kvferry.ownSecret" -}}).*?({{- end -}})', _in_manifest, file.read_text())
    assert count == 1
    file.write_text(text)
    return chart


def _in_manifest(definition: re.Match[str]) -> str:
    return f"""{definition[1]}{{{{ "" }}}}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{{{ .name }}}}
  {{{{- if .kept }}}}
  annotations:
    helm.sh/resource-policy: keep
  {{{{- end }}}}
type: {{{{ .type }}}}
data:
  {{{{- toYaml .data | nindent 2 }}}}
{definition[2]}"""


def keys_text(secrets: dict[str, dict[str, str]]) -> str:
    return base64.b64decode(secrets["trial-keys"]["keys.yaml"]).decode()


def hashes(secrets: dict[str, dict[str, str]]) -> set[str]:
    """What gateways know of keys."""
    return {each["sha256"] for each in yaml.safe_load(keys_text(secrets))}


def key_hash(secret: dict[str, str]) -> str:
    return hashlib.sha256(base64.b64decode(secret["key"])).hexdigest()
