"""Fetches images that chats name by http and https URLs, from hosts that the configuration allows."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from kvferry.config import ImagesConfig
from kvferry.engine.vllm.rendering.render_loop import RenderLoop
from kvferry.errors import InvalidRequest, Overloaded
from kvferry.observability.telemetry import FETCH_OUTCOMES

MAX_URL_CHARS = 2048
MAX_FETCHES = 16  # at once
TIMEOUT_S = 10.0  # of all images of a request
_MAX_ADDRESSES = 4  # of a host, that are tried one after the other
_RESOLVERS = 4  # threads: a resolver that does not answer holds no other work of the gateway
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Beside the tables of `ipaddress`, which differ by version of Python and do not know what clouds serve to their own
# machines: Azure's wire server lies in a public network.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # IETF protocols; Oracle's metadata of machines, 192.0.0.192
            "192.88.99.0/24",  # relays of 6to4, which are no more
            "100.64.0.0/10",  # shared by carriers; Alibaba's metadata, 100.100.100.200
            "168.63.129.16/32",  # Azure's wire server
            "64:ff9b:1::/48",  # local translation to IPv4
            "100::/64",  # discarded
            "2001::/23",  # IETF protocols
            "2001:db8::/32",  # documentation, as the next
            "3fff::/20",
            "5f00::/16",  # segment routing
        ),
    )
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Returns the addresses of a host and port as texts. Raises OSError.
Resolve = Callable[[str, int], Sequence[str]]


def resolve(host: str, port: int) -> list[str]:
    """Ask the machine's resolver. Blocks."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class ImageFetcher:
    """Owns a thread until `close`."""

    # With an event loop, so that TLS does not hold up the streams on the gateway's.

    def __init__(
        self,
        config: ImagesConfig,
        *,
        resolve: Resolve = resolve,
        timeout_s: float = TIMEOUT_S,
        max_fetches: int = MAX_FETCHES,
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self.max_fetches = max_fetches
        self._resolve = resolve
        self.outcomes = Counter(dict.fromkeys(FETCH_OUTCOMES, 0))
        self.num_fetches = 0
        self._client: httpx.AsyncClient | None = None
        self._loop = RenderLoop()
        self._resolvers = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve-image-host")

    def __repr__(self) -> str:
        return f"<ImageFetcher {self.num_fetches} fetches>"

    async def fetch(self, urls: Sequence[tuple[str, str]]) -> list[bytes]:
        """Return the files of URLs, each with its place in the body. Raises InvalidRequest and Overloaded."""
        try:
            files = await self._all(urls)
        except Overloaded:
            self.outcomes["overloaded"] += len(urls)
            raise
        except InvalidRequest:
            self.outcomes["refused"] += 1  # the first; others of the request may have come
            raise
        self.outcomes["ok"] += len(files)
        return files

    async def _all(self, urls: Sequence[tuple[str, str]]) -> list[bytes]:
        targets = [(self._target(url, where), where) for url, where in urls]
        if self.num_fetches + len(targets) > self.max_fetches:
            raise Overloaded(
                f"this gateway has no room to fetch the {len(targets)} images of this request now; "
                f"it fetches at most {self.max_fetches} at once"
            )
        self.num_fetches += len(targets)
        try:
            return await self._loop.run(self._fetch_all(targets))
        finally:
            self.num_fetches -= len(targets)

    async def close(self) -> None:
        """Idempotent."""
        self._resolvers.shutdown(wait=False, cancel_futures=True)
        if self._loop.is_running:
            if self._client is not None:
                await self._loop.run(self._client.aclose())
            self._loop.close()

    def _target(self, url: str, where: str) -> httpx.URL:
        """Raises InvalidRequest."""
        if len(url) > MAX_URL_CHARS:
            raise _refused(where, f"a URL of {len(url)} characters is too long; at most {MAX_URL_CHARS} are allowed")
        try:
            target = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            raise _refused(where, "not a valid URL") from None
        # Never its `host`, which decodes a name in punycode and raises for one that is none.
        if target.scheme not in _PORTS or not target.raw_host:
            raise _refused(where, "not a valid http or https URL")
        if target.userinfo:
            raise _refused(where, "a URL with a user name or a password is not allowed")
        if not self._is_allowed(target):
            raise _refused(
                where, f"images of {_named(target)} are not allowed here; gateway.images.allowed_hosts has the hosts"
            )
        return target

    def _is_allowed(self, target: httpx.URL) -> bool:
        host = target.raw_host.decode("ascii").lower()
        port = target.port or _PORTS[target.scheme]
        for allowed in self._config.allowed_hosts:
            name, _, own_port = _split_port(allowed)
            if port != (int(own_port) if own_port else _PORTS[target.scheme]):
                continue
            # "*.example.org" is not for example.org itself.
            if host == name or (name.startswith("*.") and host.endswith(name[1:]) and host != name[1:]):
                return True
        return False

    async def _fetch_all(self, targets: Sequence[tuple[httpx.URL, str]]) -> list[bytes]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._fetch(target, where)) for target, where in targets]
        results = [task.result() for task in tasks]
        for result in results:
            if isinstance(result, InvalidRequest):
                raise result
        return [result for result in results if isinstance(result, bytes)]

    async def _fetch(self, target: httpx.URL, where: str) -> bytes | InvalidRequest:
        # Errors are returned: a task group would wrap them.
        limit_s = self._timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._fetch_in_time(target, where)
        except TimeoutError:
            return _refused(
                where,
                f"the image of {_named(target)} did not arrive within {limit_s:g} s",
            )
        except InvalidRequest as error:
            return error

    async def _fetch_in_time(self, target: httpx.URL, where: str) -> bytes:
        addresses = await self._addresses(target, where)
        for address in addresses[:_MAX_ADDRESSES]:
            try:
                return await self._fetch_from(address, target, where)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
            except httpx.HTTPError as error:
                raise _refused(
                    where, f"the image cannot be fetched from {_named(target)}: {type(error).__name__}"
                ) from None
        raise _refused(where, f"no connection to {_named(target)}, or its certificate is not valid")

    async def _addresses(self, target: httpx.URL, where: str) -> list[Address]:
        """Raises InvalidRequest for a host with a forbidden address."""
        host = target.raw_host.decode("ascii")
        port = target.port or _PORTS[target.scheme]
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._resolvers, self._resolve, host, port)
            addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in found]
        except (OSError, ValueError):
            addresses = []
        if not addresses:
            raise _refused(where, f"the name {_named(target)} has no address")
        if not self._config.allow_private_addresses and not all(map(is_public, addresses)):
            raise _refused(
                where,
                f"{_named(target)} has a private, loopback or link-local address; "
                "gateway.images.allow_private_addresses is false",
            )
        return addresses

    async def _fetch_from(self, address: Address, target: httpx.URL, where: str) -> bytes:
        # To the address that was checked, whatever the name means by now. Connections are not kept: one of another
        # host at the same address would be used, whose certificate was checked for that host.
        if self._client is None:
            self._client = httpx.AsyncClient(
                verify=httpx.create_ssl_context(),
                trust_env=False,  # a proxy would resolve the name again
                follow_redirects=False,
                # A host's cookies would go with others' requests to all hosts at its address, and would pile up.
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                timeout=self._timeout_s,
                limits=httpx.Limits(max_connections=self.max_fetches, max_keepalive_connections=0),
            )
        most = self._config.max_bytes
        request = self._client.build_request(
            "GET",
            target.copy_with(host=str(address)),
            headers={
                "host": target.netloc.decode("ascii"),
                "accept": "image/png, image/jpeg, image/webp, image/gif",
                "accept-encoding": "identity",
                "user-agent": "kvferry",
                "connection": "close",
            },
            extensions={"sni_hostname": target.raw_host.decode("ascii")},
        )
        response = await self._client.send(request, stream=True)
        try:
            if response.is_redirect:
                raise _refused(
                    where, f"{_named(target)} answers with a redirect ({response.status_code}), which is not followed"
                )
            if response.status_code != httpx.codes.OK:
                raise _refused(where, f"{_named(target)} answers with status {response.status_code}")
            if response.headers.get("content-encoding", "identity").lower() != "identity":
                raise _refused(where, f"{_named(target)} answers in a content encoding, which was not asked for")
            pieces: list[bytes] = []
            num_bytes = 0
            async for piece in response.aiter_raw():
                pieces.append(piece)
                num_bytes += len(piece)
                if num_bytes > most:
                    raise _refused(
                        where, f"the image of {_named(target)} is over {most} bytes; gateway.images.max_bytes is {most}"
                    )
            return b"".join(pieces)
        finally:
            await response.aclose()


def is_public(address: Address) -> bool:
    """Return whether an address is of the internet. Looks also at an IPv4 address in one of IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        carried = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if carried is None and address in _NAT64:
            carried = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if carried is not None:
            return is_public(carried)
        if address.is_site_local:  # private networks before 2004; `is_global` counts them as public
            return False
    if any(address in network for network in _NOT_PUBLIC):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _split_port(allowed: str) -> tuple[str, str, str]:
    # IPv6 addresses come in brackets.
    if allowed.startswith("["):
        name, _, rest = allowed[1:].partition("]")
        return name, rest[:1], rest[1:]
    name, colon, port = allowed.partition(":")
    return name, colon, port


def _named(target: httpx.URL) -> str:
    return repr(target.raw_host.decode("ascii")[:100])


def _refused(where: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {reason}", param=where)
