"""Requests that a web page may make a browser send, and those of everybody else."""

from __future__ import annotations

import pytest

from kvferry.errors import InvalidRequest, PermissionDenied, UnsupportedMediaType
from kvferry.gateway.browser_requests import require_json, require_local_page, require_one_host


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


def test_two_hosts_are_refused() -> None:
    require_one_host([(b"host", b"a")])
    with pytest.raises(InvalidRequest, match="more than one host"):
        require_one_host([(b"host", b"localhost"), (b"host", b"evil.example")])


@pytest.mark.parametrize("kind", [b"text/plain", b"Text/Plain;charset=UTF-8", b"multipart/form-data; boundary=x"])
def test_forms_are_refused(kind: bytes) -> None:
    with pytest.raises(UnsupportedMediaType, match="application/json"):
        require_json([(b"content-type", kind)])


@pytest.mark.parametrize("kind", [b"application/json", b"application/json; charset=utf-8", b"application/problem+json"])
def test_json_is_not(kind: bytes) -> None:
    require_json([(b"content-type", kind)])
    require_json([])
