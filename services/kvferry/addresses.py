"""Host and port arithmetic: what is loopback, which port is free."""

from __future__ import annotations

import ipaddress
import socket

from kvferry.errors import ConfigError


def is_loopback(host: str) -> bool:
    """True for `localhost` and addresses of the loopback range; a name that is not an address is not trusted."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_loopback(key: str, host: str, *, insecure: bool, remedy: str = "") -> None:
    """Refuse an unauthenticated listener that others can reach.

    Raises ConfigError naming `key` unless `host` is loopback or the operator said `insecure`. `remedy` is what else
    would help.
    """
    if not insecure and not is_loopback(host):
        raise ConfigError(
            f"{key}: {host!r} can be reached from other machines and this listener has no authentication; "
            f"use a loopback address such as 127.0.0.1, {f'{remedy}, ' if remedy else ''}"
            f"or say insecure: [{key}] (--insecure: for all listeners)",
            param=key,
        )


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port nobody listens on now.

    Another process may take it before the caller binds: bind port 0 where possible.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with brackets round an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
