"""KV transfer between simulators: pages are offered under a key, pulled, verified and released.

Frames on TCP: 4 bytes of length, big-endian, then msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import hashlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from kvferry.engine.base import TransferParams
from kvferry.util.task_set import TaskSet
from kvferry_sim.block_pool import PageHash, PageId

log = logging.getLogger(__name__)

LayoutDigest = int


def layout_digest(model: str, block_size: int, page_bytes: int) -> LayoutDigest:
    """Digest of everything that gives a page's bytes their meaning."""
    return xxhash.xxh3_64_intdigest(f"{len(model)}:{model}:{block_size}:{page_bytes}".encode())


class PageMemory:
    def __init__(self, page_bytes: int, layout: LayoutDigest) -> None:
        self.page_bytes = page_bytes
        self.layout = layout
        # Contents of written pages only: clearing megabytes took most of an engine's start.
        self._contents: dict[PageId, bytes] = {}
        self._blank = bytes(page_bytes)
        # A page is this fixed noise times an odd number that is the page's own: every byte depends on the tokens, and
        # a page costs one long multiplication (1-2 us for 4 KiB) instead of a generator run.
        noise = hashlib.shake_128(layout.to_bytes(8, "little")).digest(page_bytes)
        self._noise = int.from_bytes(noise, "little") | 1
        self._mask = (1 << (8 * page_bytes)) - 1

    def __repr__(self) -> str:
        return f"<PageMemory {len(self._contents)} pages of {self.page_bytes} bytes>"

    def expected(self, page_hash: PageHash) -> bytes:
        multiplier = xxhash.xxh3_64_intdigest(page_hash.to_bytes(8, "little"), self.layout) | 1
        return ((self._noise * multiplier) & self._mask).to_bytes(self.page_bytes, "little")

    def write(self, page: PageId, content: bytes) -> None:
        self._contents[page] = content

    def read(self, page: PageId) -> bytes:
        return self._contents.get(page, self._blank)


MAX_REQUEST_BYTES = 4096
RESPONSE_OVERHEAD_BYTES = 4096  # beside the page itself
CONNECT_TIMEOUT_S = 2.0
PULL_TIMEOUT_S = 10.0  # a whole pull; then the puller computes the rest itself
IDLE_TIMEOUT_S = 60.0  # a connection that asks for nothing


class KvTransferError(Exception):
    """Refused, cut off or wrong pages."""


class Ticket(msgspec.Struct, frozen=True):
    """The content of `transfer_params`; its pages cover `num_tokens`."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    engine_id: str
    offer_id: str
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]

    def to_params(self) -> TransferParams:
        params: dict[str, object] = msgspec.to_builtins(self)
        return params

    @staticmethod
    def from_params(params: TransferParams) -> Ticket:
        try:
            return msgspec.convert(dict(params), Ticket)
        except msgspec.ValidationError as error:
            raise KvTransferError(f"not a sim engine's transfer parameters: {error}") from None


class Pull(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    offer_id: str
    layout: LayoutDigest
    first_page: int
    num_pages: int


class Release(msgspec.Struct, frozen=True, tag=True):
    engine_id: str
    offer_id: str


class Page(msgspec.Struct, frozen=True, tag=True):
    content: bytes


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


_request_decoder = msgspec.msgpack.Decoder(Pull | Release)
_response_decoder = msgspec.msgpack.Decoder(Page | Refusal)
_encoder = msgspec.msgpack.Encoder()


def frame(message: Pull | Release | Page | Refusal) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(4, "big") + payload


async def read_payload(reader: asyncio.StreamReader, max_bytes: int) -> bytes | None:
    """Return None if the peer closed between frames. Raises KvTransferError for a cut or oversized frame."""
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > max_bytes:
            raise KvTransferError(f"a frame of {length} bytes; at most {max_bytes} are allowed")
        return await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        if not error.partial and error.expected == 4:
            return None
        raise KvTransferError("the peer broke off within a frame") from None


class PullFault(enum.StrEnum):
    NONE = "none"
    REFUSE = "refuse"
    CORRUPT = "corrupt"  # one byte of every page is wrong
    BREAK_OFF = "break_off"  # the connection ends after the first page
    HANG = "hang"


@dataclass(slots=True, eq=False)
class _Offer:
    pages: Sequence[PageId]
    expiry: asyncio.TimerHandle
    num_pulls: int = 0
    released: bool = False


class KvTransferServer:
    """Owns offered pages. `free_pages` gets them after release or lease end, never during a pull."""

    def __init__(
        self,
        engine_id: str,
        layout: LayoutDigest,
        *,
        host: str,
        lease_s: float,
        read_page: Callable[[PageId], bytes],
        free_pages: Callable[[Sequence[PageId]], None],
    ) -> None:
        self.engine_id = engine_id
        self._layout = layout
        self._host = host
        self._lease_s = lease_s
        self._read_page = read_page
        self._free_pages = free_pages
        self._server: asyncio.Server | None = None
        self._connections = TaskSet()
        self._id_to_offer: dict[str, _Offer] = {}
        self.port = 0
        self.fault = PullFault.NONE

    def __repr__(self) -> str:
        return (
            f"<KvTransferServer {self._host}:{self.port} offers={self.num_offers} connections={len(self._connections)}>"
        )

    @property
    def num_offers(self) -> int:
        return len(self._id_to_offer)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def offer(self, pages: Sequence[PageId], num_tokens: int) -> Ticket:
        # Random: the listener has no other authentication.
        offer_id = secrets.token_hex(16)
        expiry = asyncio.get_running_loop().call_later(self._lease_s, self._expire, offer_id)
        self._id_to_offer[offer_id] = _Offer(pages, expiry)
        return Ticket(self._host, self.port, self.engine_id, offer_id, num_tokens)

    def release(self, offer_id: str) -> None:
        offer = self._id_to_offer.pop(offer_id, None)
        if offer is not None:
            offer.expiry.cancel()
            offer.released = True
            self._free_if_unused(offer)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for offer in self._id_to_offer.values():
            offer.expiry.cancel()
        self._id_to_offer.clear()
        self._connections.cancel()

    async def wait_closed(self) -> None:
        await self._connections.wait_until_empty()

    def _expire(self, offer_id: str) -> None:
        log.warning("pages offered as %s were not pulled within %g s", offer_id[:8], self._lease_s)
        self.release(offer_id)

    def _free_if_unused(self, offer: _Offer) -> None:
        if offer.released and offer.num_pulls == 0:
            self._free_pages(offer.pages)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:  # accepted before `close`
            writer.transport.abort()
            return
        connection = self._connections.spawn(self._serve(reader, writer))
        # A task that is cancelled before its first step does not close the writer.
        connection.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    payload = await read_payload(reader, MAX_REQUEST_BYTES)
                if payload is None:
                    break
                request = _request_decoder.decode(payload)
                if isinstance(request, Pull):
                    await self._serve_pull(request, writer)
                elif request.engine_id == self.engine_id:
                    self.release(request.offer_id)
        except (KvTransferError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            log.debug("a KV transfer connection ended: %s", error)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _serve_pull(self, pull: Pull, writer: asyncio.StreamWriter) -> None:
        offer = self._id_to_offer.get(pull.offer_id)
        refusal = self._refusal_reason(pull, offer)
        if refusal is not None or offer is None:
            writer.write(frame(Refusal(refusal or "")))
            await writer.drain()
            return
        if self.fault is PullFault.HANG:
            return
        offer.num_pulls += 1
        try:
            for page in offer.pages[pull.first_page : pull.first_page + pull.num_pages]:
                content = self._read_page(page)
                if self.fault is PullFault.CORRUPT:
                    content = bytes([content[0] ^ 1]) + content[1:]
                writer.write(frame(Page(content)))
                await writer.drain()
                if self.fault is PullFault.BREAK_OFF:
                    raise KvTransferError("broken off, as asked")
        finally:
            offer.num_pulls -= 1
            self._free_if_unused(offer)

    def _refusal_reason(self, pull: Pull, offer: _Offer | None) -> str | None:
        if self.fault is PullFault.REFUSE:
            return "refused, as asked"
        if pull.engine_id != self.engine_id:
            return "another engine answers here now"
        if pull.layout != self._layout:
            return "pages have another layout here"
        if offer is None:
            return "no such offer: pulled before, released, or its lease ended"
        if pull.first_page < 0 or pull.num_pages < 0 or pull.first_page + pull.num_pages > len(offer.pages):
            return f"only {len(offer.pages)} pages are offered"
        return None


async def pull_pages(
    ticket: Ticket, layout: LayoutDigest, *, page_bytes: int, first_page: int, num_pages: int
) -> AsyncGenerator[bytes, None]:
    """Yield pages in order; always release the offer, even when cancelled.

    Raises KvTransferError when pages cannot be had, OSError when the server does not answer.
    """
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(ticket.host, ticket.port)
    except ValueError as error:
        raise KvTransferError(f"{ticket.host!r} is not a host: {error}") from None
    try:
        if num_pages:
            writer.write(frame(Pull(ticket.engine_id, ticket.offer_id, layout, first_page, num_pages)))
        for _ in range(num_pages):
            payload = await read_payload(reader, page_bytes + RESPONSE_OVERHEAD_BYTES)
            if payload is None:
                raise KvTransferError("the peer closed the connection")
            try:
                response = _response_decoder.decode(payload)
            except msgspec.MsgspecError as error:
                raise KvTransferError(f"not a KV transfer response: {error}") from None
            if isinstance(response, Refusal):
                raise KvTransferError(response.reason)
            if len(response.content) != page_bytes:
                raise KvTransferError(f"a page of {len(response.content)} bytes; ours have {page_bytes}")
            yield response.content
    finally:
        # Writing and closing do not wait: this part is done even when the puller was cancelled.
        if not writer.is_closing():
            writer.write(frame(Release(ticket.engine_id, ticket.offer_id)))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def release_offer(ticket: Ticket) -> None:
    """Failures are left to the lease."""
    try:
        async for _ in pull_pages(ticket, 0, page_bytes=0, first_page=0, num_pages=0):
            pass
    except (KvTransferError, OSError) as error:
        log.debug("offer %s was not released: %s", ticket.offer_id[:8], error)
