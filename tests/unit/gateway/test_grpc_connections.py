"""Ending one of several connections, named as gRPC names peers."""

from __future__ import annotations

import socket

import pytest

from kvferry.gateway.grpc import grpc_connections
from kvferry.gateway.grpc.grpc_connections import ConnectionEnder, end_connections
from support.waiting import until


def end_connection(peer: str, local_port: int) -> bool:
    return end_connections([peer], local_port) == 1


def connected(host: str) -> tuple[socket.socket, socket.socket, int]:
    """A client, the server's socket, and the server's port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port: int = listener.getsockname()[1]
        client = socket.create_connection((host, port))
        server, _ = listener.accept()
    return client, server, port


@pytest.mark.parametrize(("host", "peer"), [("127.0.0.1", "ipv4:127.0.0.1:{}"), ("::1", "ipv6:%5B::1%5D:{}")])
def test_the_named_connection_ends_and_no_other(host: str, peer: str) -> None:
    client, server, port = connected(host)
    other_client, other_server, other_port = connected(host)
    with client, server, other_client, other_server:
        number = client.getsockname()[1]
        assert not end_connection(peer.format(number), other_port)
        assert end_connection(peer.format(number), port)
        assert client.recv(1) == b""
        other_server.send(b"x")
        assert other_client.recv(1) == b"x"


def test_an_ipv4_client_of_a_listener_for_both_is_found() -> None:
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, listener.accept()[0]:
            assert end_connection(f"ipv4:127.0.0.1:{client.getsockname()[1]}", port)
            assert client.recv(1) == b""


@pytest.mark.parametrize(
    "peer", ["", "unix:/tmp/x", "ipv4:127.0.0.1", "ipv4:127.0.0.1:1", "ipv6:%5B::1%5D:1", "ipv4:x:y"]
)
def test_other_peers_are_not_found(peer: str) -> None:
    assert not end_connection(peer, 1)


def test_without_a_descriptor_for_the_folder_all_numbers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server, port = connected("127.0.0.1")
    monkeypatch.setattr(grpc_connections, "_FDS", "/proc/self/none")
    with client, server:
        assert end_connection(f"ipv4:127.0.0.1:{client.getsockname()[1]}", port)
        assert client.recv(1) == b""


async def test_what_is_asked_for_during_a_pass_is_one_more_pass() -> None:
    clients = [connected("127.0.0.1") for _ in range(2)]
    (first, server, port), (second, other, _) = clients
    ender = ConnectionEnder(port)
    with first, server, second, other:
        for _ in range(50):
            for client, *_ in clients:
                ender.end(f"ipv4:127.0.0.1:{client.getsockname()[1]}")
        await until(lambda: ender._passing is None)
        assert first.recv(1) == b""
        assert ender.num_passes == 1
    await ender.close()
