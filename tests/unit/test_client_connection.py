"""Where a client's key may go without TLS."""

from __future__ import annotations

import socket
import time

import pytest

from kvferry_client import Client, DeadlineExceeded, Unavailable
from kvferry_client.connection import Tls, metadata_of
from support.waiting import SOON_S


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:9000",
        "localhost:9000",
        "[::1]:9000",
        "dns:///localhost:9000",
        "ipv4:127.0.0.1:1,127.0.0.2:1",
        "unix:/x",
    ],
)
def test_a_key_goes_to_this_machine_in_clear(target: str) -> None:
    assert metadata_of("k", target, None, key_in_clear=False) == (("authorization", "Bearer k"),)


@pytest.mark.parametrize(
    "target", ["gateway:9000", "10.0.0.1:9000", "dns:///gateway:9000", "ipv4:127.0.0.1:1,10.0.0.1:1", "xds:///x", "x"]
)
def test_a_key_goes_elsewhere_over_tls_or_where_it_is_said(target: str) -> None:
    with pytest.raises(ValueError, match="key_in_clear") as refused:
        metadata_of("secret", target, None, key_in_clear=False)
    assert "secret" not in str(refused.value)
    assert metadata_of("k", target, Tls(), key_in_clear=False)
    assert metadata_of("k", target, None, key_in_clear=True)
    assert metadata_of(None, target, None, key_in_clear=False) == ()
    with pytest.raises(ValueError, match="key_in_clear"):
        Client(target, api_key="secret")


def test_texts_that_no_connection_has_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"target: 'host\\ud800:1' has characters"):
        Client("host\ud800:1")
    with pytest.raises(ValueError, match=r"server_name: '\\ud800' has characters"):
        Tls(server_name="\ud800")
    for key in ("secret\ud800", "secret\n", "secr\u00e9t"):
        with pytest.raises(ValueError, match="api_key: expected printable ASCII") as refused:
            Client("127.0.0.1:1", api_key=key)
        assert "secr" not in str(refused.value)


def test_a_key_in_clear_passes_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        with Client("localhost:1", api_key="secret", timeout_s=SOON_S) as client, pytest.raises(Unavailable):
            client.models()
        proxy.settimeout(0.1)
        with pytest.raises(TimeoutError):
            proxy.accept()


@pytest.mark.parametrize("model", ["", "m"])
@pytest.mark.parametrize("timeout_s", [0.0, 0.1])
def test_a_deadline_counts_also_where_it_is_over_and_where_the_model_is_looked_up(model: str, timeout_s: float) -> None:
    begun_s = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=SOON_S) as client,
        pytest.raises(DeadlineExceeded),
    ):
        client.generate("x", model=model, timeout_s=timeout_s)
    assert time.monotonic() - begun_s < SOON_S / 2
