"""Refusals of requests that a web page may make its reader's browser send."""

# A page cannot show a key, but its reader's browser shows a client certificate, and reaches a listener on loopback:
# under the page's own name, where its DNS answers with 127.0.0.1 (`Host`), or blindly, as a form does (`Origin`,
# `Content-Type`).

from __future__ import annotations

import re
from collections.abc import Sequence

from kvferry.errors import InvalidRequest, PermissionDenied, UnsupportedMediaType
from kvferry.util.addresses import is_loopback

Headers = Sequence[tuple[bytes, bytes]]

_TYPE = b"content-type"
_JSON_TYPE = re.compile(r"application/([a-z0-9!#$&^_.-]+\+)?json")


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


def require_host(headers: Headers, url: bytes, *, is_needed: bool) -> None:
    """Raises InvalidRequest for several `Host` lines, one that is needed and missing, and a URL of another host."""
    # Given several of these, a proxy in front may read another host than the checks here (RFC 9112, 3.2).
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) > 1:
        raise InvalidRequest("more than one host header")
    if is_needed and not hosts:
        raise InvalidRequest("no host header, which HTTP/1.1 requires")
    _, scheme_ends, rest = url.partition(b"?")[0].partition(b"://")
    if scheme_ends and not url.startswith(b"/"):
        authority = rest.partition(b"/")[0].decode("latin-1")
        if not hosts or _host_of(authority) != _host_of(hosts[0]):
            raise InvalidRequest("the request line's URL has another host than the host header")


def require_json(headers: Headers) -> None:
    """Raises UnsupportedMediaType unless a body's type is JSON's."""
    # As vLLM does. A page may send forms, plain text and bodies without a type to any host without asking it first: one
    # that takes client certificates would spend the reader's tokens.
    kinds = [value.decode("latin-1").partition(";")[0].strip().lower() for name, value in headers if name == _TYPE]
    for kind in kinds or [""]:
        if not _JSON_TYPE.fullmatch(kind):
            named = f"content-type {kind[:64]!r} is not read here" if kind else "the body has no content-type"
            raise UnsupportedMediaType(f"{named}; send content-type: application/json")


def _host_of(authority: str) -> str:
    """Return the host of `host`, `host:port` or `[address]:port`, in lower case."""
    authority = authority.strip().lower()
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
