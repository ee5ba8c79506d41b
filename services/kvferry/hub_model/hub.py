"""The hub as huggingface_hub reaches it: listings and downloads with limits, and errors in words.

huggingface_hub takes seconds to import: only a process that downloads imports this module.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import httpx2
from huggingface_hub import HfApi, _local_folder, constants, file_download, set_client_factory, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from kvferry.engine.vllm.start.weights import MANIFEST
from kvferry.errors import ConfigError, KvferryError, UnavailableError
from kvferry.hub_model.marker import MARKER, MAX_FILES

MAX_LISTING_BYTES = 64 << 20  # of one answer that is held in memory
LIST_TIMEOUT_S = 60.0
MAX_RETRY_AFTER_S = 300  # that is waited for at most, whatever the hub asks for
_TIMEOUT_S = 60.0  # until a connection, and between two chunks
_NUM_AT_ONCE = 4
MAX_GETS = 100  # of one file in one try: huggingface_hub goes on for as long as each answer has a byte
_MAX_PATH_CHARACTERS = 500
OWN_FOLDER = ".cache/huggingface"  # of huggingface_hub, in the folder to which it downloads
_SETTINGS: tuple[tuple[Any, str, object], ...] = (
    # Files come over plain HTTPS, also those over 50 GB: Xet has hosts and a protocol of its own.
    (constants, "HF_HUB_DISABLE_XET", True),
    (constants, "MAX_HTTP_DOWNLOAD_SIZE", sys.maxsize),
    # Locks of single files: where a file system has no locks, filelock waits for ever. The folder has one owner.
    (file_download, "WeakFileLock", lambda *_, **__: contextlib.nullcontext()),
    (_local_folder, "WeakFileLock", lambda *_, **__: contextlib.nullcontext()),
)


class Hub:
    """A model at a revision; use it in a `with`. Raises ConfigError where another try is in vain, UnavailableError
    elsewhere, and OSErrors of the drive. No message has the token.
    """

    def __init__(self, model: str, revision: str, *, endpoint: str, token: str) -> None:
        self._model = model
        self._revision = revision
        self._endpoint = endpoint.rstrip("/")
        self._token = token
        self._api = HfApi(endpoint=self._endpoint, token=token or False)
        self._num_gets: Counter[str] = Counter()
        self._saved = [(module, name, getattr(module, name)) for module, name, _ in _SETTINGS]

    def __enter__(self) -> Hub:
        # Its warnings have addresses, with passwords and signatures.
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL + 1)
        disable_progress_bars()
        for module, name, value in _SETTINGS:
            setattr(module, name, value)
        set_client_factory(self._client)
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, value in self._saved:
            setattr(module, name, value)
        set_client_factory(default_client_factory)

    def files(self) -> tuple[str, list[RepoFile]]:
        """Return the commit of the revision, and its files."""
        with self._in_words():
            commit = str(self._api.model_info(self._model, revision=self._revision).sha)
            if not re.fullmatch(r"[0-9a-f]{40}", commit):
                said = f"{self._endpoint} names no commit for {self._model} at {self._revision}: it is no hub"
                raise ConfigError(said)
            entries = self._api.list_repo_tree(self._model, recursive=True, revision=commit)
            found = list(itertools.islice(entries, 2 * MAX_FILES + 1))
            if len(found) > 2 * MAX_FILES:
                raise ConfigError(f"{self._model} has more than {2 * MAX_FILES} files and folders")
            return commit, checked(self._model, [each for each in found if isinstance(each, RepoFile)])

    def download(self, commit: str, folder: Path) -> None:
        """Fetch each file that is not in `folder` yet. Sizes are verified, hashes are not."""
        self._num_gets.clear()
        with self._in_words(uses_drive=True):
            snapshot_download(
                self._model,
                revision=commit,
                local_dir=folder,
                cache_dir=folder / OWN_FOLDER / "none",  # else the library copies files from any cache
                endpoint=self._endpoint,
                token=self._token or False,
                ignore_patterns=[OWN_FOLDER, f"{OWN_FOLDER}/*"],
                max_workers=_NUM_AT_ONCE,
            )

    @staticmethod
    def has_hash(file: RepoFile, path: Path) -> bool:
        """Return whether `path` has the hash that the hub lists. Writes it to the drive. Raises OSError."""
        with path.open("rb", buffering=0) as opened:
            # https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, Object Storage
            head = f"blob {os.fstat(opened.fileno()).st_size}\0".encode()
            new = hashlib.sha256 if file.lfs else functools.partial(hashlib.sha1, head, usedforsecurity=False)
            digest = hashlib.file_digest(opened, new).hexdigest()
            os.fsync(opened.fileno())
        return digest == _hash(file)

    def _client(self) -> httpx2.Client:
        return httpx2.Client(
            follow_redirects=True,
            headers={"accept-encoding": "identity"},
            event_hooks={"request": [self._limit], "response": [self._check]},
        )

    def _limit(self, request: httpx2.Request) -> None:
        # huggingface_hub asks for listings without any, and gives a mirror's token to huggingface.co.
        request.extensions["timeout"] = httpx2.Timeout(_TIMEOUT_S).as_dict()
        url, hub = request.url, httpx2.URL(self._endpoint)
        if url.host != hub.host or (url.scheme, url.port) not in {(hub.scheme, hub.port), ("https", None)}:
            request.headers.pop("authorization", None)

    def _check(self, response: httpx2.Response) -> None:
        # Before huggingface_hub sees it, which waits as long as any Retry-After says, and reads pages as files.
        if response.has_redirect_location:
            return
        status, host = response.status_code, response.url.host
        # Not all below /api/: an endpoint may lie there, and the hub has small files at /api/resolve-cache/.
        is_file = not response.url.path.startswith(httpx2.URL(f"{self._endpoint}/api/models/").path)
        if is_file and response.request.method == "GET":
            self._num_gets[response.url.path] += 1
        encoding = response.headers.get("content-encoding", "identity").lower()[:40]
        if response.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/html":
            # The hub sends HTML files as text.
            said = f"{host} answers {status} with an HTML page for {self._model}: a proxy's, or one of a login"
        elif host != httpx2.URL(self._endpoint).host and status >= 400:
            said = f"{host}, to which the hub leads, answers {status} for {self._model}"
        elif status >= 400:
            if status not in (408, 429) and status < 500:
                raise self._final(response)
            said = f"the hub answers {status} for {self._model}"
        elif encoding != "identity":
            # Unpacked, it may have any length.
            said = f"{host} answers for {self._model} with Content-Encoding {encoding!r}, not asked for"
        elif self._num_gets[response.url.path] > MAX_GETS:
            said = f"{host} has cut {MAX_GETS} answers with a file of {self._model}"
        else:
            if not is_file:
                response.stream = _Listing(response.stream, f"{self._endpoint} lists {self._model}")
            return
        again = response.headers.get("retry-after", "")  # in seconds, as the hub sends it; a date counts as none
        again_s = min(int(again), MAX_RETRY_AFTER_S) if re.fullmatch(r"[0-9]{1,9}", again) else None
        raise UnavailableError(said, retry_after_s=again_s)

    def _final(self, response: httpx2.Response) -> ConfigError:
        status, code = response.status_code, response.headers.get("x-error-code")
        what = f"{self._model} at {self._endpoint}"
        if code == "RevisionNotFound":
            return ConfigError(f"{self._model} has no revision {self._revision!r} at {self._endpoint}")
        said = {401: "401 Unauthorized", 403: "403 Forbidden", 404: "404 Not Found"}.get(status)
        if said is None:
            return ConfigError(f"the hub answers {status} for {what}")
        why = (
            "the token in HF_TOKEN is not accepted, or its owner has no access to it"
            if self._token
            else "it may be private or gated, and no token was given (HF_TOKEN)"
        )
        if code == "GatedRepo":
            why = f"it is gated: accept its terms on the hub; {why}"
        return ConfigError(f"the hub answers {said} for {what}: {why}, or there is no model of that name")

    @contextlib.contextmanager
    def _in_words(self, *, uses_drive: bool = False) -> Iterator[None]:
        try:
            yield
        except KvferryError:
            raise
        except HFValidationError:
            raise ConfigError(f"{self._model[:200]!r} is not the name of a model on the hub: owner/name") from None
        except (httpx2.HTTPError, httpx2.InvalidURL, LocalEntryNotFoundError) as error:
            cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else error
            raise UnavailableError(f"{self._endpoint} does not answer: {self._words(cause or error)}") from None
        except Exception as error:
            if uses_drive and isinstance(error, OSError):
                if error.errno is not None:
                    raise
                raise UnavailableError(self._words(error)) from None  # a file of another length than was said
            # Wrong answers, proxies and certificates; the text may contain parts of the answer, or a password.
            said = f"{self._endpoint} answers something else than a list of {self._model}"
            raise UnavailableError(f"{said}, or cannot be asked: {type(error).__name__}") from None

    def _words(self, error: BaseException) -> str:
        # Remove queries from addresses: they may be signatures.
        text = re.sub(r"\?\S+", "?...", " ".join(str(error).split()))
        text = text.replace(self._token, "***") if self._token else text
        return f"{type(error).__name__}: {text[:300]}".rstrip(": ")


class _Listing(httpx2.SyncByteStream):
    """An answer that is held in memory: of at most MAX_LISTING_BYTES, within LIST_TIMEOUT_S."""

    def __init__(self, stream: object, what: str) -> None:
        assert isinstance(stream, httpx2.SyncByteStream)
        self._stream = stream
        self._what = what

    def __iter__(self) -> Iterator[bytes]:
        started_s, num_bytes = time.monotonic(), 0
        for chunk in self._stream:
            num_bytes += len(chunk)
            if num_bytes > MAX_LISTING_BYTES:
                raise ConfigError(f"{self._what} in more than {MAX_LISTING_BYTES >> 20} MiB: it is no hub")
            if time.monotonic() - started_s > LIST_TIMEOUT_S:
                raise UnavailableError(f"{self._what}, and is not done after {LIST_TIMEOUT_S:g} s")
            yield chunk

    def close(self) -> None:
        self._stream.close()


def _hash(file: RepoFile) -> str:
    # Git's blob id, or what the pointer of a large file says.
    return str(file.lfs.sha256 if file.lfs else file.blob_id)


def checked(model: str, files: Sequence[RepoFile]) -> list[RepoFile]:
    """Return the files that belong to the model. Raises ConfigError for files that cannot be verified or stored."""
    files = [each for each in files if not f"{each.path}/".startswith(f"{OWN_FOLDER}/")]
    if not files:
        raise ConfigError(f"{model} has no files")
    if len(files) > MAX_FILES:
        raise ConfigError(f"{model} has more than {MAX_FILES} files")
    if len({each.path for each in files}) != len(files):
        raise ConfigError(f"the hub lists a file of {model} twice")
    for file in files:
        path, size = file.path, file.size
        parts = PurePosixPath(path).parts if isinstance(path, str) and path.isprintable() else ()
        is_inside = parts and path == "/".join(parts) and parts[0] != "/" and ".." not in parts
        if not is_inside or len(path) > _MAX_PATH_CHARACTERS or path in (MARKER, MANIFEST, ".cache"):
            raise ConfigError(f"the hub lists a file of {model} that cannot be one of a folder: {str(path)[:200]!r}")
        is_hash = re.fullmatch(r"[0-9a-f]{64}" if file.lfs else r"[0-9a-f]{40}", _hash(file))
        if not is_hash or not (size is None or (type(size) is int and size >= 0)):
            raise ConfigError(f"the hub says no hash of {path[:200]!r} of {model}: it cannot be verified")
    return list(files)
