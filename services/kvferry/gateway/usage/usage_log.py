"""Usage records for billing: a line of JSON per request, in files that are only appended to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from kvferry.errors import ConfigError

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.5
# Between records of a request that goes on, of which a gateway that is killed loses the last 10 s.
UNFINISHED_S: Final = 9.0
UNFINISHED: Final = "unfinished"
MAX_WAITING: Final = 20_000  # records; about 6 MB
MAX_FILE_BYTES: Final = 256 << 20
MAX_LINE_BYTES: Final = 4096
WARN_EVERY_S: Final = 60.0
PATTERN: Final = "usage-*.jsonl"


class UsageRecord(msgspec.Struct, frozen=True):
    """One request of a tenant that was identified. It has no text, key or salt."""

    # A request that goes on has records too, each with all that it used so far; its last one takes their place.

    unix_s: float  # its end, or now
    tenant: str
    request_id: str  # empty where nothing was dispatched
    endpoint: str
    outcome: str  # as in kvferry_tenant_requests_total, or UNFINISHED
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    seconds: float  # from its arrival
    model: str = ""  # that answered: an entry of `models`, or `default`; empty where none was chosen
    adapter: str = ""  # of `adapters.served`; empty for the model itself


class UsageLog:
    """Belongs to one event loop; files are written in a thread. A drive that fails or lags costs records, counted.

    Raises ConfigError as `check_folder`.
    """

    def __init__(
        self,
        folder: Path,
        gateway_id: str,
        clock: Callable[[], float] = time.time,
        read_unfinished: Callable[[], Iterable[UsageRecord]] = tuple,
    ) -> None:
        check_folder(folder)
        self.num_lost = 0
        self._read_unfinished = read_unfinished
        self._folder = folder
        self._gateway_id = gateway_id
        self._clock = clock
        self._waiting: deque[UsageRecord] = deque()
        self._part = 0  # of today's files
        self._task: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[None] | None = None  # the last one that `_task` began
        self._warned_s = -WARN_EVERY_S

    def __repr__(self) -> str:
        return f"<UsageLog {self._folder} waiting={len(self._waiting)} lost={self.num_lost}>"

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="write usage records")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._flushing is not None:
            await self._flushing
        await self._flush()

    def add(self, record: UsageRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self._lose(1, "the drive does not keep up")
        else:
            self._waiting.append(record)

    async def _run(self) -> None:
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            try:
                if time.monotonic() - looked_s >= UNFINISHED_S:
                    looked_s = time.monotonic()
                    for record in self._read_unfinished():
                        self.add(record)
                # A flush that is cancelled would not know what was written: close() waits for it.
                self._flushing = asyncio.create_task(self._flush())
                await asyncio.shield(self._flushing)
            except Exception as error:
                self._warn(f"usage records wait: {type(error).__name__}: {error}")

    async def _flush(self) -> None:
        if not self._waiting:
            return
        records = list(self._waiting)
        try:
            writing = asyncio.get_running_loop().run_in_executor(None, self._write, records)
        except RuntimeError as error:  # no thread can be started now
            self._warn(f"usage records wait: {error}")
            return
        self._waiting.clear()
        try:
            await writing
        except OSError as error:
            self._lose(len(records), f"{error.filename or self._folder}: {error.strerror}")
        except Exception as error:
            self._lose(len(records), f"{type(error).__name__}: {error}")

    def _write(self, records: list[UsageRecord]) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        while True:
            fd = os.open(self._path(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(fd).st_size
                if size >= MAX_FILE_BYTES:
                    self._part += 1
                    continue
                written = 0
                while written < len(lines):
                    written += os.write(fd, memoryview(lines)[written:])
                return
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)  # no torn line in the middle of a file
                raise
            finally:
                os.close(fd)

    def _path(self) -> Path:
        day = datetime.fromtimestamp(self._clock(), UTC).date()
        part = f"-{self._part}" if self._part else ""
        return self._folder / f"usage-{day}-{self._gateway_id}{part}.jsonl"

    def _lose(self, num_records: int, why: str) -> None:
        self.num_lost += num_records
        self._warn(f"usage records are lost, {self.num_lost} so far: {why}")

    def _warn(self, what: str) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            log.error("%s", what)


def check_folder(folder: Path) -> None:
    """Raise ConfigError for a folder to which every user may write."""
    # Its group may: volumes of Kubernetes belong to one. Others that only read it see no more than names of files.
    with contextlib.suppress(OSError):  # one that cannot be used is found at the first write
        if folder.stat().st_mode & stat.S_IWOTH:
            raise ConfigError(
                f"gateway.usage_dir: every user may write to {str(folder)!r}, also usage records: take that right away "
                "(chmod o-w), or name a folder in it that does not exist, which the gateway makes for itself"
            )


def read(folder: Path, on_bad: Callable[[Path, int], None]) -> Iterator[UsageRecord]:
    """Read the records of all gateways, file by file. `on_bad` gets file and line of each that is no record.

    Raises OSError for an unreadable folder or file.
    """
    decoder = msgspec.json.Decoder(UsageRecord)
    if not folder.is_dir():
        raise NotADirectoryError(20, "is no folder", str(folder))
    for file in sorted(folder.glob(PATTERN), key=_order):
        with file.open("rb") as lines:
            for number, line in enumerate(_lines(lines), start=1):
                try:
                    yield decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    on_bad(file, number)


def _order(file: Path) -> tuple[str, int, str]:
    # By day, and for a gateway as it wrote them: usage-DAY-GATEWAY.jsonl, then usage-DAY-GATEWAY-1.jsonl.
    return file.name[: len("usage-2026-01-01")], len(file.name), file.name


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines, empty ones for those that are too long to be read whole."""
    while line := file.readline(MAX_LINE_BYTES):
        if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
            yield line
            continue
        while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
            pass
        yield b""
