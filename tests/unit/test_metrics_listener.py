"""The listener for Prometheus: a port of its own, on which nothing else is answered; TLS that asks who scrapes."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx
import pytest

from bench.etcd_server import Authority
from kvferry.config import ClusterConfig, MetricsConfig, TlsConfig, parse
from kvferry.errors import ConfigError
from kvferry.observability.metrics_listener import NUM_PORTS, MetricsListener
from support.waiting import until


async def page() -> bytes:
    return b"# nothing\n"


async def test_it_answers_metrics_and_nothing_else() -> None:
    listener = MetricsListener(MetricsConfig(), 0, page)
    assert listener.address == ""
    await listener.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{listener.address}") as http:
            answer = await http.get("/metrics")
            assert (answer.status_code, answer.content) == (200, b"# nothing\n")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert (await http.get("/")).status_code == 404
            refused = await http.post("/metrics")
            assert (refused.status_code, refused.headers["allow"]) == (405, "GET")
    finally:
        await listener.stop()
        await listener.stop()
    host, _, port = listener.address.rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


async def test_a_client_that_does_not_read_is_cut_when_it_stops() -> None:
    async def large() -> bytes:
        return bytes(16 << 20)

    listener = MetricsListener(MetricsConfig(), 0, large)
    await listener.start()
    assert listener._server is not None
    state = listener._server.state
    host, _, port = listener.address.rpartition(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: any(each.transport.get_write_buffer_size() for each in state.connections))
        await listener.stop()
        assert not state.connections


async def test_a_fixed_port_is_the_first_of_several() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        listener = MetricsListener(MetricsConfig(), first, page)
        await listener.start()
        try:
            assert first < int(listener.address.rpartition(":")[2]) < first + NUM_PORTS
        finally:
            await listener.stop()


async def test_an_address_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host: cannot listen on '192\.0\.2\.1'"):
        await MetricsListener(MetricsConfig(host="192.0.2.1"), 0, page).start()


async def test_with_tls_only_those_with_a_certificate_scrape(tmp_path: Path) -> None:
    ours, others = certificates(tmp_path, "ours"), certificates(tmp_path, "others")
    listener = MetricsListener(MetricsConfig(tls=ours), 0, page)
    await listener.start()
    try:
        assert ours.ca_file is not None
        for shown, is_let_in in ((ours, True), (others, False), (None, False)):
            context = ssl.create_default_context(cafile=str(ours.ca_file))
            if shown is not None:
                context.load_cert_chain(str(shown.cert_file), str(shown.key_file))
            async with httpx.AsyncClient(verify=context) as http:
                if is_let_in:
                    assert (await http.get(f"https://{listener.address}/metrics")).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await http.get(f"https://{listener.address}/metrics")
    finally:
        await listener.stop()
    broken = ours.model_copy(update={"key_file": others.key_file})
    with pytest.raises(ConfigError, match=r"metrics\.tls"):
        await MetricsListener(MetricsConfig(tls=broken), 0, page).start()


def test_off_loopback_it_needs_tls_or_a_word_of_the_operator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.host: '0\.0\.0\.0'.*configure metrics\.tls"):
        parse({"metrics": {"host": "0.0.0.0"}})
    tls = certificates(tmp_path, "ours").model_dump(mode="json", exclude={"server_name"})
    assert parse({"metrics": {"host": "0.0.0.0", "tls": tls}}).metrics.tls.enabled
    with pytest.raises(ConfigError, match=r"metrics\.tls\.server_name: unknown key"):  # nothing of kvferry's dials it
        parse({"metrics": {"tls": tls | {"server_name": "x"}}})
    assert parse({"metrics": {"host": "0.0.0.0"}, "insecure": ["metrics.host"]}).metrics.host == "0.0.0.0"


@pytest.mark.parametrize("endpoint", ["collector", "collector:4317/v1", "ftp://collector:4317", "a b:1"])
def test_an_endpoint_that_is_none_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint"):
        parse({"tracing": {"endpoint": endpoint}})


@pytest.mark.parametrize(
    "endpoint", ["collector:4317", "http://127.0.0.1:4317", "https://c.example:4317", "[::1]:4317"]
)
def test_an_endpoint_may_be_written_in_these_ways(endpoint: str) -> None:
    config: ClusterConfig = parse({"tracing": {"endpoint": endpoint}})
    assert config.tracing.uses_tls == endpoint.startswith("https")


def test_what_makes_no_sense_for_traces_is_refused() -> None:
    with pytest.raises(ConfigError, match="need an endpoint"):
        parse({"tracing": {"prompts": True}})
    with pytest.raises(ConfigError, match="needs an endpoint with https"):
        parse({"tracing": {"endpoint": "http://c:4317", "ca_file": "/ca.crt"}})
    with pytest.raises(ConfigError, match=r"tracing\.sample_ratio"):
        parse({"tracing": {"endpoint": "c:4317", "sample_ratio": 1.5}})


def certificates(folder: Path, name: str) -> TlsConfig:
    """An authority of its own, and a certificate that it signed."""
    authority = Authority(folder, name)
    cert_file, key_file = authority.issue(f"{name}-node")
    return TlsConfig(cert_file=cert_file, key_file=key_file, ca_file=authority.ca_file)
