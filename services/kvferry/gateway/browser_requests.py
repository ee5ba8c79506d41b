"""Refusals of requests that a web page may make its reader's browser send to a gateway without keys."""

# A page cannot show a key, but it reaches a listener on loopback: under the page's own name, where its DNS answers with
# 127.0.0.1 (`Host`), or blindly, as a form does (`Origin`, `Content-Type`).

from __future__ import annotations

from collections.abc import Sequence

from kvferry.addresses import is_loopback
from kvferry.errors import InvalidRequest, PermissionDenied, UnsupportedMediaType

Headers = Sequence[tuple[bytes, bytes]]

# What a browser sends without asking the server first.
_FORM_TYPES = frozenset({"text/plain", "application/x-www-form-urlencoded", "multipart/form-data"})


def require_local_page(headers: Headers, allowed_hosts: Sequence[str]) -> None:
    """Raises PermissionDenied unless `Host` and `Origin`, where sent, are loopback or in `allowed_hosts`."""
    for name, value in headers:
        if name == b"host":
            host = _host_of(value.decode("latin-1"))
            if not (is_loopback(host) or host in allowed_hosts):
                raise PermissionDenied(
                    f"this gateway has no keys and answers to loopback names only, not to {host!r} "
                    "(gateway.allowed_hosts)"
                )
        elif name == b"origin":
            origin = value.decode("latin-1")
            host = _host_of(origin.partition("://")[2])
            if not (is_loopback(host) or host in allowed_hosts):
                raise PermissionDenied(
                    f"this gateway has no keys and answers no pages of {origin!r} (gateway.allowed_hosts)"
                )


def require_one_host(headers: Headers) -> None:
    """Raises InvalidRequest for several `Host` lines, of which every reader may choose another."""
    is_seen = False
    for name, _ in headers:
        if name == b"host":
            if is_seen:
                raise InvalidRequest("more than one host header")
            is_seen = True


def require_json(headers: Headers) -> None:
    """Raises UnsupportedMediaType for a body that says that it is a form's or plain text."""
    for name, value in headers:
        if name == b"content-type":
            kind = value.decode("latin-1").partition(";")[0].strip().lower()
            if kind in _FORM_TYPES:
                raise UnsupportedMediaType(f"content-type {kind!r} is not read here; send application/json")


def _host_of(authority: str) -> str:
    """Return the host of `host`, `host:port` or `[address]:port`, in lower case."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
