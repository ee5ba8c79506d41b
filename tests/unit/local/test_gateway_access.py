"""How commands get into the gateway of their cluster."""

from __future__ import annotations

import asyncio
import ssl
import tempfile
from pathlib import Path

import httpx
import pytest

from bench.etcd_server import Authority
from kvferry.config import GatewayConfig, ServerTlsConfig
from kvferry.gateway.tls import GatewayTls
from kvferry_local.child import child_environment
from kvferry_local.gateway_access import KEY_VARIABLE, context_of, headers_of, url_of, why_not_to_ask
from kvferry_local.run_folder import RunFolder


def test_the_address_says_whether_there_is_tls() -> None:
    assert url_of(GatewayConfig(http_port=8001)) == "http://127.0.0.1:8001"
    tls = ServerTlsConfig(cert_file=Path("c"), key_file=Path("k"))
    assert url_of(GatewayConfig(tls=tls, host="::1")) == "https://[::1]:8000"
    assert url_of(GatewayConfig(tls=tls), "10.0.0.1:80") == "https://10.0.0.1:80"


def test_a_key_is_shown_where_one_is_given() -> None:
    assert headers_of({}) == {}
    assert headers_of({KEY_VARIABLE: "kvf_x"}) == {"authorization": "Bearer kvf_x"}


def test_no_process_of_the_cluster_inherits_the_key() -> None:
    # Not tmp_path: its names are longer than a run folder may be.
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as short:
        folder = RunFolder(Path(short).resolve() / "run")
        folder.prepare()
        folder.new_tokens()
        inherited = child_environment(folder, {KEY_VARIABLE: "kvf_secret", "HOME": "/root"})
    assert inherited["HOME"] == "/root"
    assert "kvf_secret" not in str(inherited)


def test_no_question_is_asked_that_would_be_refused() -> None:
    keys = GatewayConfig(keys_file=Path("keys.yaml"))
    assert why_not_to_ask(GatewayConfig(), {}) == ""
    assert KEY_VARIABLE in why_not_to_ask(keys, {})
    assert why_not_to_ask(keys, {KEY_VARIABLE: "kvf_x"}) == ""
    mutual = ServerTlsConfig(cert_file=Path("c"), key_file=Path("k"), client_ca_file=Path("ca"))
    assert "certificate" in why_not_to_ask(GatewayConfig(tls=mutual), {KEY_VARIABLE: "kvf_x"})


@pytest.mark.parametrize("shown", ["configured", "another"])
async def test_the_configured_certificate_is_believed_and_no_other(tmp_path: Path, shown: str) -> None:
    """Whatever name it carries, and though nobody here knows who signed it."""
    authority = Authority(tmp_path, "somebody")
    cert, key = authority.issue("gateway")
    configured = GatewayConfig(tls=ServerTlsConfig(cert_file=cert, key_file=key))
    served = configured.tls
    if shown == "another":
        other_cert, other_key = authority.issue("other")
        served = ServerTlsConfig(cert_file=other_cert, key_file=other_key)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    context = GatewayTls(served).http_context()
    async with await asyncio.start_server(answer, "127.0.0.2", 0, ssl=context) as listening:
        port = listening.sockets[0].getsockname()[1]
        verify = context_of(configured)
        assert isinstance(verify, ssl.SSLContext)
        async with httpx.AsyncClient(verify=verify, trust_env=False) as http:
            asking = http.get(f"https://127.0.0.2:{port}/readyz")
            if shown == "configured":
                assert (await asking).status_code == 204
            else:
                with pytest.raises(httpx.ConnectError, match="certificate"):
                    await asking
