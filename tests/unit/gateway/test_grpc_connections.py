"""Ending one of several connections, named as gRPC names peers."""

from __future__ import annotations

import socket

import pytest

from kvferry.gateway.grpc_connections import end_connection


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
