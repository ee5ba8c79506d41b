"""What the chart gives to Prometheus opens metrics, and nothing else."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.config import ClusterConfig, GatewayConfig, MetricsConfig, MutualTlsConfig, TlsConfig, WorkerConfig
from kvferry.errors import PermissionDenied
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.tenants import Tenants
from kvferry.link.worker_link import WorkerLink
from kvferry.observability.metrics_listener import MetricsListener
from support.chart import helm_check, one, rendering
from support.link_peers import member_of, serving, simulated
from support.waiting import until

MONITORED: dict[str, Any] = {
    "monitoring": {"members": {"enabled": True}},
    "networkPolicy": {"monitoringNamespace": "monitoring"},
}
GATEWAY_TLS = {"tls": {"secretName": "edge"}}


class Site:
    """Secrets of a rendering, as files where pods of it have them."""

    def __init__(self, folder: Path, rendered: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.rendered = rendered
        config: ClusterConfig = next(iter(helm_check.parse_configs(rendered)))
        for mounted in one(rendered, "Deployment", "trial-gateway")["spec"]["template"]["spec"]["volumes"]:
            if "secret" not in mounted:
                continue
            data = one(rendered, "Secret", mounted["secret"]["secretName"])["data"]
            names = [item["key"] for item in mounted["secret"].get("items", [])] or list(data)
            for name in names:
                self.write(mounted["name"], name, data[name])
        self.internal = self.local(config.worker.tls, config.worker.tls.server_name)
        self.metrics = self.local(config.metrics.tls)

    def write(self, folder: str, name: str, content: str) -> Path:
        (self.folder / folder).mkdir(exist_ok=True)
        file = self.folder / folder / name
        file.write_bytes(base64.b64decode(content))
        return file

    def local(self, tls: MutualTlsConfig, server_name: str = "") -> TlsConfig:
        def moved(file: Path | None) -> Path:
            assert file is not None
            return self.folder / f"{file.parent.name}-tls" / file.name

        return TlsConfig(
            cert_file=moved(tls.cert_file),
            key_file=moved(tls.key_file),
            ca_file=moved(tls.ca_file),
            server_name=server_name,
        )

    def prometheus(self) -> TlsConfig:
        """What the ScrapeConfig names."""
        config = one(self.rendered, "ScrapeConfig")["spec"]["tlsConfig"]
        references = {
            "cert_file": config["cert"]["secret"],
            "key_file": config["keySecret"],
            "ca_file": config["ca"]["secret"],
        }
        files = {
            name: self.write("prometheus", name, one(self.rendered, "Secret", each["name"])["data"][each["key"]])
            for name, each in references.items()
        }
        return TlsConfig(**files, server_name=config["serverName"])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path, rendering(MONITORED))


async def scraped(listener: MetricsListener, tls: TlsConfig) -> int:
    context = ssl.create_default_context(cafile=str(tls.ca_file))
    context.load_cert_chain(str(tls.cert_file), str(tls.key_file))
    async with httpx.AsyncClient(verify=context, trust_env=False) as http:
        asked = http.build_request(
            "GET", f"https://{listener.address}/metrics", extensions={"sni_hostname": tls.server_name}
        )
        return (await http.send(asked)).status_code


async def test_metrics_listeners_take_prometheus_and_not_members(site: Site) -> None:
    async def page() -> bytes:
        return b"# nothing\n"

    listener = MetricsListener(MetricsConfig(tls=site.metrics), 0, page)
    await listener.start()
    try:
        assert await scraped(listener, site.prometheus()) == 200
        with pytest.raises(httpx.TransportError):
            await scraped(listener, site.internal)
    finally:
        await listener.stop()


async def test_members_refuse_the_certificate_of_prometheus(site: Site) -> None:
    async with simulated() as engine, serving(engine, tls=site.internal) as worker:

        def link(tls: TlsConfig) -> WorkerLink:
            return WorkerLink(member_of(worker), "g", lambda: None, WorkerConfig(tls=tls))

        refused, taken = link(site.prometheus()), link(site.internal)
        try:
            await until(lambda: taken.usable)
            await until(lambda: bool(refused._why_not), what="the dial came to nothing")
            assert not refused.connected
            assert len(worker.sessions) == 1
        finally:
            await refused.close()
            await taken.close()


def test_pods_have_no_key_of_prometheus(site: Site) -> None:
    """A member that is broken into must not be able to scrape the others."""
    assert [file.name for file in (site.folder / "metrics-tls").iterdir()] == ["ca.crt"]
    for document in site.rendered:
        assert "trial-metrics-key" not in str(document.get("spec", {})) or document["kind"] == "ScrapeConfig"


@pytest.mark.parametrize("kind", ["ScrapeConfig", "ServiceMonitor"])
def test_the_key_of_prometheus_reads_metrics_and_nothing_else(tmp_path: Path, kind: str) -> None:
    rendered = rendering(MONITORED if kind == "ScrapeConfig" else {"monitoring": {"serviceMonitor": {"enabled": True}}})
    spec = one(rendered, kind)["spec"]
    (caller,) = spec["httpSDConfigs"] if kind == "ScrapeConfig" else spec["endpoints"]
    named = caller["authorization"]["credentials"]
    key = base64.b64decode(one(rendered, "Secret", named["name"])["data"][named["key"]]).decode()
    first = base64.b64decode(one(rendered, "Secret", "trial-first-key")["data"]["key"]).decode()
    file = tmp_path / "keys.yaml"
    file.write_bytes(base64.b64decode(one(rendered, "Secret", "trial-keys")["data"]["keys.yaml"]))
    access = Access(GatewayConfig(host="0.0.0.0", keys_file=file), Tenants(b"s" * 32))
    access.require_metrics(f"Bearer {key}", None)
    with pytest.raises(PermissionDenied, match="metrics and targets, and nothing else"):
        access.identify(f"Bearer {key}", None)
    assert not access.is_operator(f"Bearer {key}", None)
    assert access.identify(f"Bearer {first}", None).name == "default"


@pytest.mark.parametrize("kind", ["ScrapeConfig", "ServiceMonitor"])
def test_prometheus_verifies_gateways_before_it_sends_its_key(kind: str) -> None:
    monitored = MONITORED if kind == "ScrapeConfig" else {"monitoring": {"serviceMonitor": {"enabled": True}}}

    def tls_config(**gateway_tls: str) -> dict[str, Any]:
        values = helm_check.merged(monitored, {"gateway": GATEWAY_TLS, "monitoring": {"gatewayTls": gateway_tls}})
        document = one(rendering(values), kind)
        helm_check.validate(document)
        spec = document["spec"]
        (caller,) = spec["httpSDConfigs"] if kind == "ScrapeConfig" else spec["endpoints"]
        found: dict[str, Any] = caller["tlsConfig"]
        return found

    assert tls_config(serverName="llm.example") == {"serverName": "llm.example"}
    assert tls_config(serverName="llm.example", caSecret="edge") == {
        "serverName": "llm.example",
        "ca": {"secret": {"name": "edge", "key": "ca.crt"}},
    }
    with pytest.raises(helm_check.CheckFailed, match=r"needs monitoring\.gatewayTls\.serverName"):
        tls_config()


def test_the_name_of_gateways_is_one_that_cert_manager_certifies() -> None:
    certificate = {"issuerRef": {"name": "ca"}, "dnsNames": ["llm.example", "*.example"]}
    values = helm_check.merged(MONITORED, {"gateway": {"tls": {"secretName": "edge", "certificate": certificate}}})
    (caller,) = one(rendering(values), "ScrapeConfig")["spec"]["httpSDConfigs"]
    assert caller["tlsConfig"] == {"serverName": "llm.example"}
    certificate["dnsNames"] = ["*.example"]
    with pytest.raises(helm_check.CheckFailed, match=r"needs monitoring\.gatewayTls\.serverName"):
        rendering(values | {"gateway": {"tls": {"secretName": "edge", "certificate": certificate}}})


def test_members_certificate_is_not_for_prometheus() -> None:
    values = helm_check.merged(MONITORED, {"monitoring": {"members": {"tlsSecret": "inside"}}})
    with pytest.raises(helm_check.CheckFailed, match="Name one of another authority"):
        rendering({**values, "internalTls": {"secretName": "inside"}})
    rendered = rendering({**values, "internalTls": {"secretName": "other"}})
    assert one(rendered, "ScrapeConfig")["spec"]["tlsConfig"]["keySecret"] == {"name": "inside", "key": "tls.key"}
    assert not [each for each in rendered if each["metadata"]["name"] == "trial-metrics-tls"]


def test_pods_of_ray_have_no_token_of_kubernetes() -> None:
    cluster = one(rendering({"gateway": {"mode": "serve"}}), "RayService")["spec"]["rayClusterConfig"]
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len(pods) == 4
    assert [pod["automountServiceAccountToken"] for pod in pods] == [False] * 4


def test_an_operator_of_any_namespace_is_admitted_without_an_empty_map() -> None:
    """The API server drops one, so that each apply would be a change."""
    policy = one(rendering({}), "NetworkPolicy", "trial-operator")
    (peer,) = policy["spec"]["ingress"][0]["from"]
    assert peer["namespaceSelector"] == {}
