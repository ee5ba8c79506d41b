from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kvferry.config import ImagesConfig
from kvferry.errors import InvalidRequest, Overloaded
from kvferry.gateway.bodies.image_fetch import MAX_URL_CHARS, ImageFetcher, is_public
from kvferry_local.authority import SERVER_NAME, make_certificates
from support.waiting import until

WHERE = "messages[0].content[1]"
FILE = b"\x89PNG\r\n\x1a\n" + bytes(1000)


@dataclass
class Host:
    """A web server that answers every request with `answer`, and keeps what it was asked."""

    answer: bytes
    port: int = 0
    asked: list[str] = field(default_factory=list)
    num_open: int = 0
    is_silent: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            self.asked.append((await reader.readuntil(b"\r\n\r\n")).decode())
            writer.write(self.answer)
            await writer.drain()
            if self.is_silent:
                await reader.read()  # until the other side ends
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.num_open -= 1
            writer.close()


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def host(answer: bytes = ok(FILE), tls: ssl.SSLContext | None = None, **values: Any) -> AsyncIterator[Host]:
    serving = Host(answer, **values)
    server = await asyncio.start_server(serving.serve, "127.0.0.1", 0, ssl=tls)
    serving.port = server.sockets[0].getsockname()[1]
    async with server:
        yield serving


@asynccontextmanager
async def fetcher(
    port: int,
    resolve: Callable[[str, int], Sequence[str]] = lambda *_: ["127.0.0.1"],
    limits: Mapping[str, Any] = MappingProxyType({}),
    **values: Any,
) -> AsyncIterator[ImageFetcher]:
    values = {"allowed_hosts": (f"images.example:{port}",), "allow_private_addresses": True, **values}
    made = ImageFetcher(ImagesConfig.model_validate(values), resolve=resolve, **limits)
    yield made
    await made.close()


async def refusal(fetching: Awaitable[Any]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        await fetching
    assert refused.value.param == WHERE
    assert refused.value.message.startswith(f"{WHERE}: ")
    return refused.value.message


async def test_files_come_in_their_order_from_the_address_that_the_name_has() -> None:
    async with host() as one, fetcher(one.port) as images:
        url = f"http://images.example:{one.port}/a%20b?c=d"
        assert await images.fetch([(url, WHERE), (url + "e", WHERE)]) == [FILE, FILE]
    first, second = sorted(one.asked, key=len)
    assert first.startswith("GET /a%20b?c=d HTTP/1.1\r\n")
    assert second.startswith("GET /a%20b?c=de HTTP/1.1\r\n")
    assert f"host: images.example:{one.port}\r\n" in first.lower()
    assert "authorization" not in first.lower()


@pytest.mark.parametrize(
    ("allowed", "url", "is_allowed"),
    [
        ("images.example", "https://images.example/a.png", True),
        ("images.example", "http://images.example/a.png", True),
        ("images.example", "HTTPS://IMAGES.EXAMPLE/a.png", True),
        ("images.example", "https://images.example:8443/a.png", False),
        ("images.example:8443", "https://images.example:8443/a.png", True),
        ("images.example:8443", "https://images.example/a.png", False),
        ("images.example", "https://a.images.example/a.png", False),
        ("images.example", "https://images.example.evil.example/a.png", False),
        ("images.example", "https://evilimages.example/a.png", False),
        ("images.example", "https://evil.example/images.example", False),
        ("images.example", "https://evil.example#images.example", False),
        ("images.example", "https://evil.example\\@images.example/", False),
        ("*.images.example", "https://a.b.images.example/a.png", True),
        ("*.images.example", "https://images.example/a.png", False),
        ("*.images.example", "https://aimages.example/a.png", False),
        ("[2001:db8::1]:80", "http://[2001:db8::1]/a.png", True),
        ("127.0.0.1", "http://2130706433/", False),
    ],
)
async def test_only_allowed_hosts_are_asked(allowed: str, url: str, is_allowed: bool) -> None:
    resolved: list[str] = []

    def resolve(name: str, _: int) -> list[str]:
        resolved.append(name)
        return []

    async with fetcher(0, resolve, allowed_hosts=(allowed,)) as images:
        text = await refusal(images.fetch([(url, WHERE)]))
    assert ("has no address" in text) == is_allowed == bool(resolved)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://user:secret@images.example/a.png", "user name or a password"),
        ("https://", "not a valid"),
        ("ftp://images.example/a.png", "not a valid http or https URL"),
        ("https://images.example/" + "a" * MAX_URL_CHARS, f"at most {MAX_URL_CHARS}"),
        ("https://ex\x00ample/", "not a valid"),
        ("https://xn--a/", "images of 'xn--a' are not allowed here"),
    ],
)
async def test_urls_that_say_something_else_are_refused(url: str, reason: str) -> None:
    async with fetcher(0, allowed_hosts=("images.example",)) as images:
        text = await refusal(images.fetch([(url, WHERE)]))
    assert reason in text
    assert "secret" not in text


PRIVATE = [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254",
    "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "fe80::1%eth0", "240.0.0.1",
    "fec0::1",
    # Of clouds, and what the tables of some versions of Python do not have.
    "192.0.0.192", "192.0.0.10", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254", "3fff::1",
    "3fff:fff::1", "192.88.99.1", "5f00::1", "2001:20::1", "64:ff9b:1::808:808", "::ffff:168.63.129.16",
    "2002:a83f:8110::", "64:ff9b::c000:c0",
]  # fmt: skip


@pytest.mark.parametrize("address", PRIVATE)
async def test_a_host_with_a_private_address_is_refused(address: str) -> None:
    async with fetcher(80, lambda *_: ["93.184.215.14", address], allow_private_addresses=False) as images:
        text = await refusal(images.fetch([("http://images.example/a.png", WHERE)]))
    assert "private, loopback or link-local" in text
    assert address not in text


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "2606:2800:21f:cb07:6820:80da:af6b:8b2c", "64:ff9b::5db8:d70e", "168.63.129.17", "192.0.1.1"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


async def test_the_checked_address_is_asked_whatever_the_name_means_later() -> None:
    answers = iter([["127.0.0.1"]])  # a second look would raise
    async with host() as one, fetcher(one.port, lambda *_: next(answers)) as images:
        assert await images.fetch([(f"http://images.example:{one.port}/", WHERE)]) == [FILE]


async def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    async with host() as one, fetcher(one.port, lambda *_: ["127.0.0.9", "127.0.0.1"]) as images:
        assert await images.fetch([(f"http://images.example:{one.port}/", WHERE)]) == [FILE]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 6\r\n\r\nsecret", "'images.example' answers with status 404"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "status 204"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1/\r\ncontent-length: 0\r\n\r\n", "redirect (302)"),
        (b"HTTP/1.1 301 Moved\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n", "redirect (301)"),
        (ok(b"x" * 2000, "content-encoding: gzip"), "content encoding"),
        (ok(b"x" * 5000), "over 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"800\r\n" + b"x" * 2048 + b"\r\n" +
         b"801\r\n" + b"x" * 2049 + b"\r\n0\r\n\r\n", "over 4096 bytes"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", "cannot be fetched"),
        (b"no HTTP at all\r\n\r\n", "cannot be fetched"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000 + b"\r\n\r\n", "cannot be fetched"),
    ],
)  # fmt: skip
async def test_other_answers_are_refused_without_their_text(answer: bytes, reason: str) -> None:
    async with host(answer) as one, fetcher(one.port, max_bytes=4096) as images:
        text = await refusal(images.fetch([(f"http://images.example:{one.port}/", WHERE)]))
        assert len(one.asked) == 1
    assert reason in text
    assert "secret" not in text


async def test_cookies_are_neither_kept_nor_sent() -> None:
    answer = ok(FILE, "set-cookie: session=of-another-tenant; path=/; max-age=9999")
    async with host(answer) as one:
        names = {"allowed_hosts": (f"images.example:{one.port}", f"other.example:{one.port}")}
        async with fetcher(one.port, **names) as images:
            for name in ("images.example", "images.example", "other.example"):
                assert await images.fetch([(f"http://{name}:{one.port}/", WHERE)]) == [FILE]
    assert len(one.asked) == 3
    assert "cookie" not in "".join(one.asked).lower()


async def test_an_image_of_the_largest_size_is_taken() -> None:
    async with host(ok(b"x" * 4096)) as one, fetcher(one.port, max_bytes=4096) as images:
        assert await images.fetch([(f"http://images.example:{one.port}/", WHERE)]) == [b"x" * 4096]


async def test_slow_hosts_are_left_after_a_time_and_count_until_then() -> None:
    slow = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf"
    limits = {"timeout_s": 1.0, "max_fetches": 2}
    async with host(slow, is_silent=True) as one, fetcher(one.port, limits=limits) as images:
        url = f"http://images.example:{one.port}/"
        held = asyncio.create_task(images.fetch([(url, WHERE), (url, WHERE)]))
        await until(lambda: one.num_open == 2)
        with pytest.raises(Overloaded, match="at most 2 at once"):
            await images.fetch([(url, WHERE)])
        assert "did not arrive within 1 s" in await refusal(held)
        await until(lambda: not one.num_open)
        one.is_silent, one.answer = False, ok(FILE)
        assert await images.fetch([(url, WHERE)]) == [FILE]
        assert images.outcomes == {"ok": 1, "refused": 1, "overloaded": 1}


async def test_a_client_that_leaves_ends_its_fetch() -> None:
    async with host(b"HTTP/1.1 200 OK\r\n", is_silent=True) as one, fetcher(one.port) as images:
        held = asyncio.create_task(images.fetch([(f"http://images.example:{one.port}/", WHERE)]))
        await until(lambda: one.num_open == 1)
        held.cancel()
        await until(lambda: not one.num_open)
        with pytest.raises(asyncio.CancelledError):
            await held


async def test_certificates_are_checked_for_the_host_and_not_for_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_certificates(tmp_path / "tls")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    assert files.cert_file is not None
    assert files.key_file is not None
    context.load_cert_chain(files.cert_file, files.key_file)
    async with host(tls=context) as one:
        names = {"allowed_hosts": (f"{SERVER_NAME}:{one.port}", f"other.example:{one.port}")}
        async with fetcher(one.port, **names) as images:
            text = await refusal(images.fetch([(f"https://{SERVER_NAME}:{one.port}/", WHERE)]))
            assert "certificate is not valid" in text
        monkeypatch.setenv("SSL_CERT_FILE", str(files.ca_file))
        async with fetcher(one.port, **names) as images:
            assert await images.fetch([(f"https://{SERVER_NAME}:{one.port}/", WHERE)]) == [FILE]
            text = await refusal(images.fetch([(f"https://other.example:{one.port}/", WHERE)]))
            assert "certificate is not valid" in text


@pytest.mark.parametrize(
    "name", ["", "images.example/", "https://images.example", "*", "*example", "a.*.b", "Ä.example"]
)
def test_names_that_cannot_be_hosts_fail_the_configuration(name: str) -> None:
    with pytest.raises(ValueError, match=r"expected NAME, \*\.DOMAIN"):
        ImagesConfig(allowed_hosts=(name,))
