"""Downloads files of the hub, each verified before it gets its name, and resumed where a process ended."""

# By HTTP ranges: huggingface_hub (2.4) starts a file anew in each process.

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import quote

import httpx

from kvferry.errors import ConfigError, UnavailableError
from kvferry.hub_model.listing import PLAIN_HEADERS, HubFile, encoding_of, is_page, refusal, ssl_context, words
from kvferry.hub_model.staging import Staging, open_to_append

NUM_AT_ONCE = 4
# Of one file, each without a new byte; and times that a whole file had another hash than the hub says.
MAX_FAILURES = 6
MAX_MISMATCHES = 3
MAX_TRIES = 100  # of one file, with or without new bytes
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0  # until the connection, and between two chunks
FIRST_PAUSE_S = 1.0  # after a failure; each further one doubles it
_LONGEST_PAUSE_S = 30.0

# Before another try, unless the event is set; returns whether it is.
Pause = Callable[[threading.Event, float], bool]


class Downloads:
    """Files of one commit, into `tree`; unfinished ones lie in `parts`."""

    def __init__(
        self,
        files: Sequence[HubFile],
        tree: Path,
        parts: Path,
        staging: Staging,
        *,
        endpoint: str,
        path: str,
        token: str,
        pause: Pause,
    ) -> None:
        """`path` is of the commit below `endpoint`."""
        self.num_bytes = sum(file.size_bytes for file in files)
        self._files = files
        self._tree = tree
        self._parts = parts
        self._staging = staging
        self._endpoint = endpoint
        self._base_url = f"{endpoint.rstrip('/')}/{path}"
        self._token = token
        self._pause = pause
        self._stopping = threading.Event()
        for file in files:
            self._adopt(file)

    def missing_bytes(self) -> int:
        """Of the files, those that are not there yet."""
        there = 0
        for file in self._files:
            for path in (self._tree / file.path, self._part(file)):
                try:
                    there += min(path.stat().st_size, file.size_bytes)
                    break
                except OSError:
                    continue
        return self.num_bytes - there

    def part_files(self) -> set[Path]:
        return {self._part(file) for file in self._files}

    def run(self) -> None:
        """Raises ConfigError where another try is in vain, UnavailableError elsewhere."""
        headers = PLAIN_HEADERS | ({"authorization": f"Bearer {self._token}"} if self._token else {})
        # Other hosts, to which the hub redirects, do not get the token: httpx drops it.
        with (
            httpx.Client(headers=headers, timeout=_TIMEOUT_S, follow_redirects=True, verify=ssl_context()) as client,
            ThreadPoolExecutor(NUM_AT_ONCE) as pool,
        ):
            futures = [pool.submit(self._fetch, client, file) for file in self._files]
            try:
                ended, _ = wait(futures, return_when=FIRST_EXCEPTION)
                faults = [error for future in ended if (error := future.exception()) is not None]
                for error in sorted(faults, key=lambda each: not isinstance(each, ConfigError)):
                    raise error
            except OSError as error:
                self._staging.check()  # its files have other names by now
                raise _words(error, self._tree) from error
            finally:
                self._stopping.set()
                pool.shutdown(cancel_futures=True)

    def _part(self, file: HubFile) -> Path:
        return self._parts / f"{_stem(file)}.{self._staging.token}.part"

    def _adopt(self, file: HubFile) -> None:
        """Goes on with what other processes left of a file."""
        there = sorted(self._parts.glob(f"{_stem(file)}*.part"), key=_size)
        if there:
            self._staging.adopt(there[-1], self._part(file))

    def _fetch(self, client: httpx.Client, file: HubFile) -> None:
        target, part = self._tree / file.path, self._part(file)
        if target.is_file() and target.stat().st_size == file.size_bytes:
            return  # verified when it got this name
        num_failures = num_mismatches = 0
        most_bytes = _size(part)  # ever: a server that ignores ranges shortens the part
        for num_tries in range(1, MAX_TRIES + 1):
            again_s = 0
            try:
                self._append(client, file, part)
                if _digest(file, part) == file.digest:
                    break
                part.unlink()
                most_bytes = 0
                raise _MismatchError(f"{file.path} does not have the hash that the hub says ({file.digest})")
            except _MismatchError as error:
                fault = str(error)
                num_mismatches += 1
                if num_mismatches >= MAX_MISMATCHES:
                    raise ConfigError(f"{fault}, {num_mismatches} times: the hub, or a proxy, changes it") from None
            except (httpx.HTTPError, UnavailableError) as error:
                fault = error.message if isinstance(error, UnavailableError) else words(error)
                again_s = error.retry_after_s or 0 if isinstance(error, UnavailableError) else 0
                num_failures = 1 if _size(part) > most_bytes else num_failures + 1
                most_bytes = max(most_bytes, _size(part))
                if num_failures >= MAX_FAILURES:
                    raise UnavailableError(
                        f"{file.path}: {num_failures} tries without a new byte, the last one: {fault}"
                    ) from None
            if num_tries == MAX_TRIES:
                raise UnavailableError(f"{file.path}: {MAX_TRIES} tries, the last one: {fault}")
            pause_s = min(_LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, num_failures - 1))
            if self._pause(self._stopping, max(pause_s, again_s)):
                raise UnavailableError("another file failed")
        self._staging.check()
        target.parent.mkdir(parents=True, exist_ok=True)
        part.chmod(0o644)
        part.rename(target)

    def _check(self, response: httpx.Response, file: HubFile, start: int) -> None:
        # Before what is there already may be given up for it.
        if response.status_code not in (200, 206) or is_page(response):
            raise refusal(response, file.path, endpoint=self._endpoint, has_token=bool(self._token))
        if (encoding := encoding_of(response)) != "identity":
            raise _MismatchError(f"{file.path} is sent with Content-Encoding {encoding!r}, which was not asked for")
        if response.status_code == 200:
            start = 0
        elif not response.headers.get("content-range", "").startswith(f"bytes {start}-"):
            raise UnavailableError(f"{file.path}: asked from byte {start}, and got other bytes")
        length = response.headers.get("content-length", "")
        if length.isdecimal() and start + int(length) != file.size_bytes:
            raise _MismatchError(
                f"{file.path} is sent with {start + int(length)} bytes, and the hub says {file.size_bytes}"
            )

    def _append(self, client: httpx.Client, file: HubFile, part: Path) -> None:
        start = _size(part)
        if start > file.size_bytes:
            part.unlink()
            start = 0
        with open_to_append(part) as opened:
            if start < file.size_bytes:
                headers = {"range": f"bytes={start}-"} if start else {}
                with client.stream("GET", f"{self._base_url}/{quote(file.path)}", headers=headers) as response:
                    self._check(response, file, start)
                    if response.status_code == 200:
                        opened.truncate(0)  # the range was ignored
                        start = 0
                    for chunk in response.iter_raw():
                        if self._stopping.is_set():
                            raise UnavailableError("another file failed")
                        if self._staging.is_lost:
                            self._staging.check()
                        start += len(chunk)
                        if start > file.size_bytes:
                            opened.truncate(0)
                            raise _MismatchError(f"{file.path} is longer than the hub says ({file.size_bytes} bytes)")
                        opened.write(chunk)
            opened.flush()
            os.fsync(opened.fileno())
        if start < file.size_bytes:
            raise UnavailableError(f"{file.path} ended after {start} of {file.size_bytes} bytes")


class _MismatchError(Exception):
    """Another file than was asked for; a few times may be by chance. Never leaves this module."""


def _stem(file: HubFile) -> str:
    # By content: what another revision left is of no use to this one. By path: files may have equal contents.
    return f"{file.digest}-{hashlib.sha256(file.path.encode()).hexdigest()[:16]}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


def _digest(file: HubFile, part: Path) -> str:
    digest = file.new_digest()
    with part.open("rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return str(digest.hexdigest())


def _words(error: OSError, folder: Path) -> ConfigError | UnavailableError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ConfigError(f"{folder} is full ({error.strerror}): give its volume more space, and start this again")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ConfigError(f"{folder} cannot be written by user {os.geteuid()}: {error.strerror}")
    return UnavailableError(f"{folder}: {error.strerror or error}")
