"""Images of chats: from the URLs of a body to files."""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvferry.config import ImagesConfig
from kvferry.engine.base import ChatImage
from kvferry.errors import InvalidRequest

IMAGE_PART = "image_url"

_IN_LOOP_BYTES = 64 << 10  # of base64: decoding these takes 0.1 ms
# A multiple of four. Decoding holds the interpreter from the event loop: 0.5 ms at a time.
_PIECE_CHARS = 128 << 10
_MAX_MEDIA_TYPE_CHARS = 256  # of a data URL, up to its comma

# What files begin with; of WebP and its container, the part before and after the size.
_SIGNATURES = {
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "JPEG": (b"\xff\xd8\xff",),
    "GIF": (b"GIF87a", b"GIF89a"),
}


class Fetcher(Protocol):
    max_fetches: int  # at once

    @property
    def num_fetches(self) -> int:
        """How many run now."""
        ...

    async def fetch(self, urls: Sequence[tuple[str, str]]) -> list[bytes]:
        """Return the files of URLs, each with its place in the body, for errors. Raises as `load`."""
        ...


class Holder(Protocol):
    def hold_images(self, num_bytes: int) -> None:
        """Raises Overloaded and InvalidRequest."""
        ...

    def fetching(self, num_images: int, num_running: int, most: int) -> AbstractContextManager[None]:
        """Return a context for a fetch beside those that run. Raises TenantOverloaded and InvalidRequest."""
        ...


def image_parts(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield images with their places in the body."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            for j, part in enumerate(content):
                if part["type"] == IMAGE_PART:
                    yield f"messages[{i}].content[{j}]", part


class ChatImages:
    """Loads images within the limits of `gateway.images`."""

    def __init__(self, config: ImagesConfig, fetcher: Fetcher | None) -> None:
        """Without `fetcher`, URLs other than data URLs are refused."""
        self._config = config
        self._fetcher = fetcher

    async def load(
        self, messages: Sequence[Mapping[str, Any]], holder: Holder, *, takes_images: bool
    ) -> list[ChatImage]:
        """Return the files of a body's images in their order, and take the URLs out of `messages`.

        Raises InvalidRequest, and Overloaded where too many images are in flight.
        """
        parts = list(image_parts(messages))
        if not parts:
            return []
        first, _ = parts[0]
        if not takes_images:
            raise InvalidRequest(f"{first}: this model takes no images", param=first)
        most = self._config.max_per_request
        if len(parts) > most:
            raise InvalidRequest(
                f"messages: {len(parts)} images are too many; gateway.images.max_per_request is {most}",
                param="messages",
            )
        urls = [(str(part[IMAGE_PART]["url"]), where) for where, part in parts]
        for _, part in parts:
            del part[IMAGE_PART]
        sizes = [self._size_at_most(url, where) for url, where in urls]
        holder.hold_images(sum(sizes))
        to_fetch = [(url, where) for url, where in urls if not is_data_url(url)]
        to_decode = [(url, where) for url, where in urls if is_data_url(url)]
        if sum(len(url) for url, _ in to_decode) <= _IN_LOOP_BYTES:
            decoded = list(map(_decoded, to_decode))
        else:
            decoded = await asyncio.to_thread(lambda: list(map(_decoded, to_decode)))
        fetched: list[bytes] = []
        if to_fetch:
            assert self._fetcher is not None
            with holder.fetching(len(to_fetch), self._fetcher.num_fetches, self._fetcher.max_fetches):
                fetched = await self._fetcher.fetch(to_fetch)
        files = {where: data for (_, where), data in zip((*to_decode, *to_fetch), (*decoded, *fetched), strict=True)}
        images = [ChatImage(files[where], where) for _, where in urls]
        for image in images:
            require_format(image)
        holder.hold_images(sum(len(image.data) for image in images))
        return images

    def _size_at_most(self, url: str, where: str) -> int:
        """Return the bytes that a file may have. Raises InvalidRequest for a URL that is not allowed."""
        most = self._config.max_bytes
        if is_data_url(url):
            num_bytes = (len(url) - _data_start(url, where)) // 4 * 3 - (url[-2:].count("="))
            if num_bytes > most:
                raise InvalidRequest(
                    f"{where}: an image of {num_bytes} bytes is too large; gateway.images.max_bytes is {most}",
                    param=where,
                )
            return num_bytes
        scheme = url.partition(":")[0].lower()
        if scheme not in ("http", "https"):
            named = repr(scheme[:20]) if ":" in url else "none"
            raise InvalidRequest(
                f"{where}: expected a data, http or https URL; this one's scheme is {named}", param=where
            )
        if self._fetcher is None:
            raise InvalidRequest(
                f"{where}: only data URLs are accepted here; gateway.images.allowed_hosts names no host",
                param=where,
            )
        return most


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def require_format(image: ChatImage) -> None:
    """Raises InvalidRequest for a file that begins as none of the formats."""
    data = image.data
    is_known = any(data.startswith(beginning) for each in _SIGNATURES.values() for beginning in each)
    if not is_known and not (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        raise InvalidRequest(
            f"{image.where}: the file's content is none of {', '.join(_SIGNATURES)} or WebP", param=image.where
        )


def _data_start(url: str, where: str) -> int:
    """Return where the base64 begins. Raises InvalidRequest."""
    comma = url.find(",", 0, _MAX_MEDIA_TYPE_CHARS)
    kind = url[5:comma].lower() if comma > 0 else ""
    if not kind.endswith(";base64"):
        raise InvalidRequest(f"{where}: expected a data URL data:image/TYPE;base64,DATA", param=where)
    if not kind.startswith("image/"):
        raise InvalidRequest(f"{where}: the data URL is of {kind[:40]!r}; expected an image", param=where)
    return comma + 1


def _decoded(url_and_place: tuple[str, str]) -> bytes:
    url, where = url_and_place
    start = _data_start(url, where)
    try:
        if url.find("=", start, len(url) - 2) >= 0:
            raise ValueError("padding before the end")
        pieces = (url[i : i + _PIECE_CHARS] for i in range(start, len(url), _PIECE_CHARS))
        return b"".join(binascii.a2b_base64(piece, strict_mode=True) for piece in pieces)
    except ValueError as error:
        raise InvalidRequest(f"{where}: not valid base64: {error}", param=where) from None
