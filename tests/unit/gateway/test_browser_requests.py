"""Requests that a web page may make a browser send, and those of everybody else."""

from __future__ import annotations

import pytest

from kvferry.errors import InvalidRequest, PermissionDenied, UnsupportedMediaType
from kvferry.gateway.http.browser_requests import require_host, require_json, require_local_page


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"host", b"localhost:8000")],
        [(b"host", b"LOCALHOST")],
        [(b"host", b"127.0.0.1:8000"), (b"origin", b"http://localhost:3000")],
        [(b"host", b"[::1]:8000")],
        [(b"host", b"models.internal:443"), (b"origin", b"https://models.internal")],
    ],
)
def test_names_of_this_machine_and_allowed_ones_pass(headers: list[tuple[bytes, bytes]]) -> None:
    require_local_page(headers, ["models.internal"])


@pytest.mark.parametrize(
    "header",
    [
        (b"host", b"evil.example"),
        (b"host", b"127.0.0.1.evil.example:8000"),
        (b"host", b"localhost.evil.example"),
        (b"host", b"0.0.0.0:8000"),
        (b"host", b""),
        (b"host", b"[::1.evil"),
        (b"origin", b"null"),
        (b"origin", b"https://evil.example"),
        (b"origin", b"http://localhost.evil.example:8000"),
    ],
)
def test_names_of_others_are_refused(header: tuple[bytes, bytes]) -> None:
    with pytest.raises(PermissionDenied, match=r"gateway\.allowed_hosts"):
        require_local_page([(b"accept", b"*/*"), header], ["models.internal"])


@pytest.mark.parametrize(
    ("url", "hosts", "is_needed"),
    [
        (b"/v1/models", [b"a"], True),
        (b"/v1/models", [], False),  # HTTP/1.0, as of some health checks
        (b"http://A.example:80/v1/models", [b"a.example"], True),
        (b"https://[::1]:8000?x", [b"[::1]:8000"], True),
        (b"/v1/models?next=http://b/", [b"a"], True),
        (b"//b/v1/models", [b"a"], True),
        (b"/http://b/", [b"a"], True),
        (b"*", [b"a"], True),
    ],
)
def test_requests_name_one_host(url: bytes, hosts: list[bytes], is_needed: bool) -> None:
    require_host([(b"host", host) for host in hosts], url, is_needed=is_needed)


@pytest.mark.parametrize(
    ("url", "hosts", "is_needed", "reason"),
    [
        (b"/", [b"localhost", b"evil.example"], True, "more than one host"),
        (b"/", [b"localhost", b"localhost"], False, "more than one host"),
        (b"/", [], True, "no host header"),
        (b"http://evil.example/v1/models", [b"localhost"], True, "another host"),
        (b"http://localhost/v1/models", [b"evil.example"], True, "another host"),
        (b"HTTP://evil.example?", [b"localhost"], True, "another host"),
        (b"http://localhost@evil.example/", [b"localhost"], True, "another host"),
        (b"http://evil.example/", [], False, "another host"),
    ],
)
def test_requests_that_name_several_hosts_or_none_are_refused(
    url: bytes, hosts: list[bytes], is_needed: bool, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        require_host([(b"host", host) for host in hosts], url, is_needed=is_needed)


@pytest.mark.parametrize(
    "lines",
    [
        [b"text/plain"],
        [b"Text/Plain;charset=UTF-8"],
        [b"multipart/form-data; boundary=x"],
        [b"application/x-www-form-urlencoded"],  # `curl -d`
        [b"text/plain; application/json"],
        [b"text/plain, application/json"],
        [b"text/json"],
        [b"application/jsonp"],
        [b"application/+json"],
        [b""],
        [],  # `fetch` with `mode: "no-cors"` and a Blob without a type
        [b"application/json", b"text/plain"],
    ],
)
def test_bodies_that_pages_send_unasked_and_those_that_are_no_json_are_refused(lines: list[bytes]) -> None:
    with pytest.raises(UnsupportedMediaType, match="send content-type: application/json"):
        require_json([(b"accept", b"application/json"), *((b"content-type", line) for line in lines)])


@pytest.mark.parametrize("kind", [b"application/json", b"application/json; charset=utf-8", b"application/problem+json"])
def test_json_is_not(kind: bytes) -> None:
    require_json([(b"content-type", kind)])
