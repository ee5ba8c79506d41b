"""The files of a model, as the hub lists them."""

# By a request of its own: huggingface_hub (2.4) reads and unpacks an answer of any length, for any time.

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from kvferry.engine.vllm.start.weights import MANIFEST
from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model.marker import MARKER, MAX_FILES

_OWN_FILES = (MARKER, MANIFEST)
MAX_RETRY_AFTER_S = 300  # that is waited for at most, whatever the hub asks for
MAX_LISTING_BYTES = 64 << 20
_MAX_PATH_CHARACTERS = 500
_NAME_PATTERN = r"(?!.*(--|\.\.))([A-Za-z0-9_][A-Za-z0-9._-]*/)?[A-Za-z0-9_][A-Za-z0-9._-]*"
# Encoded bytes would have to be unpacked, to any length.
PLAIN_HEADERS = {"user-agent": "kvferry", "accept-encoding": "identity"}


@dataclass(frozen=True, slots=True)
class HubFile:
    path: str  # below the model's folder
    size_bytes: int
    sha256: str = ""  # of large files
    git_sha1: str = ""  # of the others: git's blob id

    def new_digest(self) -> Any:
        """Return a hash object for the file's bytes."""
        if self.sha256:
            return hashlib.sha256()
        # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, Object Storage
        return hashlib.sha1(f"blob {self.size_bytes}\0".encode(), usedforsecurity=False)

    @property
    def digest(self) -> str:
        """Hexadecimal."""
        return self.sha256 or self.git_sha1


@dataclass(frozen=True, slots=True)
class Listing:
    commit: str
    files: tuple[HubFile, ...]

    def key(self, model: str) -> str:
        # Of all that decides the bytes: a tree begun for one listing is of no use to another.
        lines = [model, self.commit, *(f"{file.path}\0{file.size_bytes}\0{file.digest}" for file in self.files)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


class _Lfs(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct, rename={"blob_id": "blobId"}):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None
    blob_id: str | None = None


class _ModelInfo(msgspec.Struct):
    """What is read of the hub's answer; it has more."""

    sha: str | None = None
    siblings: list[_Sibling] | None = None


def list_model(model: str, revision: str, *, endpoint: str, token: str, timeout_s: float) -> Listing:
    """Reads at most MAX_LISTING_BYTES, in `timeout_s` in all.

    Raises ConfigError where another try is in vain, UnavailableError elsewhere.
    """
    if not re.fullmatch(_NAME_PATTERN, model) or len(model) > 200:
        raise ConfigError(f"{model[:200]!r} is not the name of a model on the hub: owner/name")
    try:
        info = asyncio.run(_within(timeout_s, _model_info(model, revision, endpoint, token)))
    except TimeoutError:
        raise UnavailableError(f"{endpoint} has not listed {model} after {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        raise UnavailableError(f"{endpoint} does not answer: {words(error)}") from None
    except (httpx.InvalidURL, ValueError, OSError) as error:
        # Of an address, a proxy or a certificate in the environment. Its text may hold a password.
        raise UnavailableError(f"{endpoint} does not answer: {type(error).__name__}") from None
    if not re.fullmatch(r"[0-9a-f]{6,64}", info.sha or ""):
        raise ConfigError(f"{endpoint} names no commit for {model} at {revision}: it is no hub")
    return Listing(str(info.sha), checked(model, info.siblings or ()))


async def _within(timeout_s: float, coroutine: Any) -> Any:
    async with asyncio.timeout(timeout_s):
        return await coroutine


async def _model_info(model: str, revision: str, endpoint: str, token: str) -> _ModelInfo:
    what = f"{model} at {endpoint}"
    url = f"{endpoint.rstrip('/')}/api/models/{model}/revision/{quote(revision, safe='')}"
    headers = PLAIN_HEADERS | ({"authorization": f"Bearer {token}"} if token else {})
    body = bytearray()
    async with (
        # Without limits of single steps: there is one of all.
        httpx.AsyncClient(headers=headers, timeout=None, follow_redirects=True, verify=ssl_context()) as client,
        client.stream("GET", url, params={"blobs": "true"}) as response,
    ):
        if response.status_code == 404 and response.headers.get("x-error-code") == "RevisionNotFound":
            raise ConfigError(f"{model} has no revision {revision!r} at {endpoint}")
        if response.status_code != 200 or is_page(response):
            raise refusal(response, what, endpoint=endpoint, has_token=bool(token))
        if (encoding := encoding_of(response)) != "identity":
            raise _busy(response, f"{endpoint} lists {model} with Content-Encoding {encoding!r}, not asked for")
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_LISTING_BYTES:
                raise ConfigError(f"{endpoint} lists {model} in more than {MAX_LISTING_BYTES >> 20} MiB: it is no hub")
    try:
        return msgspec.json.decode(body, type=_ModelInfo)
    except msgspec.MsgspecError as error:
        raise _busy(response, f"{endpoint} answers something else than a list of {model}: {error}") from None


@functools.cache
def ssl_context() -> ssl.SSLContext:
    """Read the certificates that httpx trusts."""
    return httpx.create_ssl_context()


def words(error: httpx.HTTPError) -> str:
    """Return an error's kind and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(": ")


def is_page(response: httpx.Response) -> bool:
    """Return whether an answer is an HTML page, as of a proxy; the hub sends HTML files as text."""
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower() == "text/html"


def encoding_of(response: httpx.Response) -> str:
    """Return an answer's Content-Encoding in lower case, at most 40 characters; `identity` where it has none."""
    return str(response.headers.get("content-encoding", "identity")).lower()[:40]


def refusal(response: httpx.Response, what: str, *, endpoint: str, has_token: bool) -> ConfigError | UnavailableError:
    """Return the error for an answer that is none.

    The hub's own 4xx is final. A page, and the answer of a host that the hub redirected to, may be another one soon.
    """
    status = response.status_code
    if is_page(response):
        said = f"{response.url.host} answers {status} with an HTML page for {what}: a proxy's, or one of a login"
        return _busy(response, said)
    if response.url.host != httpx.URL(endpoint).host:
        return _busy(response, f"{response.url.host}, to which the hub leads, answers {status} for {what}")
    if status in (401, 403, 404):
        said = {401: "401 Unauthorized", 403: "403 Forbidden", 404: "404 Not Found"}[status]
        why = (
            "the token in HF_TOKEN is not accepted, or its owner has no access to it"
            if has_token
            else "it may be private or gated, and no token was given (HF_TOKEN)"
        )
        if response.headers.get("x-error-code") == "GatedRepo":
            why = f"it is gated: accept its terms on the hub; {why}"
        return ConfigError(f"the hub answers {said} for {what}: {why}, or there is no model of that name")
    if 400 <= status < 500 and status not in (408, 429):
        return ConfigError(f"the hub answers {status} for {what}")
    return _busy(response, f"the hub answers {status} for {what}")


def _busy(response: httpx.Response, message: str) -> UnavailableError:
    # In seconds, as the hub sends it; a date counts as none.
    again = response.headers.get("retry-after", "")
    again_s = min(int(again), MAX_RETRY_AFTER_S) if re.fullmatch(r"[0-9]{1,9}", again) else None
    return UnavailableError(message, retry_after_s=again_s)


def checked(model: str, siblings: Sequence[Any]) -> tuple[HubFile, ...]:
    """Raises ConfigError for an answer with files that cannot be verified or stored."""
    if not siblings:
        raise ConfigError(f"{model} has no files")
    if len(siblings) > MAX_FILES:
        raise ConfigError(f"{model} has {len(siblings)} files; at most {MAX_FILES} are downloaded")
    files = [_checked_file(model, each) for each in siblings]
    if len({file.path for file in files}) != len(files):
        raise ConfigError(f"the hub lists a file of {model} twice")
    return tuple(sorted(files, key=lambda file: (file.size_bytes, file.path)))


def _checked_file(model: str, sibling: Any) -> HubFile:
    path, size = sibling.rfilename, sibling.size
    parts = PurePosixPath(path).parts if isinstance(path, str) and path.isprintable() else ()
    is_inside = (
        parts and path == "/".join(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
    )
    if not is_inside or len(path) > _MAX_PATH_CHARACTERS or path in _OWN_FILES:
        raise ConfigError(f"the hub lists a file of {model} that cannot be one of a folder: {str(path)[:200]!r}")
    sha256 = sibling.lfs.sha256 if sibling.lfs is not None else ""
    git_sha1 = "" if sha256 else sibling.blob_id or ""
    # A hash becomes part of a file's name.
    is_hash = re.fullmatch(r"[0-9a-f]{64}" if sha256 else r"[0-9a-f]{40}", str(sha256 or git_sha1))
    if type(size) is not int or size < 0 or is_hash is None:
        raise ConfigError(f"the hub says no size or no hash of {path[:200]!r} of {model}: it cannot be verified")
    return HubFile(path, size, sha256, git_sha1)
