"""Host and port arithmetic."""

from __future__ import annotations

import errno
import ipaddress
import socket
from pathlib import Path

import pytest

from kvferry.errors import ConfigError
from kvferry.util import addresses
from kvferry.util.addresses import (
    NODE_ADDRESS_VARIABLE,
    free_port,
    is_loopback,
    join_host_port,
    node_address,
    reachable_host,
    require_loopback,
    ucx_environment,
)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "localhost", "::1", "[::1]"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)
    require_loopback("worker.host", host, insecure=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "10.1.2.3", "::", "[::]", "192.168.0.1", "localhost.example.com", "example.com", "", "127.1"]
)
def test_everything_else_is_refused_by_name_of_its_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=r"^worker\.host: ") as refused:
        require_loopback("worker.host", host, insecure=False)
    assert refused.value.param == "worker.host"
    assert "insecure" in refused.value.message
    require_loopback("worker.host", host, insecure=True)


@pytest.mark.parametrize(
    ("host", "port", "joined"),
    [("127.0.0.1", 80, "127.0.0.1:80"), ("::1", 8000, "[::1]:8000"), ("node-3.rack", 0, "node-3.rack:0")],
)
def test_join_host_port(host: str, port: int, joined: str) -> None:
    assert join_host_port(host, port) == joined


def test_a_free_port_can_be_bound_and_is_given_to_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_first_ephemeral_port", lambda: 32768)
    port = free_port()
    assert 20_000 <= port < 30_000
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_a_free_port_is_ephemeral_where_all_ports_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_first_ephemeral_port", lambda: 1024)
    port = free_port()
    assert not 20_000 <= port < 30_000
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_first_ephemeral_port", lambda: 32768)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        taken = listener.getsockname()[1]
        offers = [taken, taken, *range(20_000, 30_000)]
        monkeypatch.setattr(addresses.secrets, "randbelow", lambda limit: offers.pop(0) - 20_000)
        assert free_port() != taken


@pytest.mark.parametrize(
    ("host", "number"),
    # 192.0.2.1 is reserved for documentation: no interface has it.
    [("192.0.2.1", errno.EADDRNOTAVAIL), ("name.invalid", socket.EAI_NONAME)],
)
def test_an_address_that_is_not_ours_is_tried_once(host: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[int] = []
    monkeypatch.setattr(addresses.secrets, "randbelow", lambda limit: bound.append(limit) or 0)
    with pytest.raises(OSError, match=host) as refused:
        free_port(host)
    assert refused.value.errno == number
    assert len(bound) == 1


def test_a_node_s_address_is_what_was_said_or_the_way_out() -> None:
    assert node_address({NODE_ADDRESS_VARIABLE: "10.1.2.3"}) == "10.1.2.3"
    assert reachable_host("10.9.9.9") == "10.9.9.9"
    assert ipaddress.ip_address(reachable_host("0.0.0.0"))
    assert not ipaddress.ip_address(node_address({})).is_unspecified


@pytest.mark.parametrize(
    ("vendor", "kind", "has_gpu"),
    [
        ("0x10de", "0x030200", True),
        ("0x10de", "0x030000", True),
        ("0x10de", "0x040300", False),  # the sound of a graphics card
        ("0x1002", "0x030000", False),
        ("nonsense", "0x030000", False),
        ("", "0x030000", False),
    ],
)
def test_ucx_has_cuda_where_the_machine_has_a_gpu(tmp_path: Path, vendor: str, kind: str, has_gpu: bool) -> None:
    for device, values in (("0000:00:00.0", ("0x8086", "0x060000")), ("0000:01:00.0", (vendor, kind))):
        (tmp_path / device).mkdir()
        for name, value in zip(("vendor", "class"), values, strict=True):
            (tmp_path / device / name).write_text(value)
    environment = ucx_environment("127.0.0.1", tmp_path)
    assert environment == {"UCX_TLS": "tcp,cma,sm,self" + ",cuda_copy" * has_gpu, "UCX_NET_DEVICES": "lo"}
    assert "UCX_NET_DEVICES" not in ucx_environment("10.1.2.3", tmp_path)
    assert ucx_environment("localhost", tmp_path / "absent")["UCX_TLS"] == "tcp,cma,sm,self"
