"""Work of engines for each request, in files that outlast a SIGKILL of the process."""

from __future__ import annotations

import contextlib
import enum
import mmap
import struct
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.engine.base import Engine, EngineOutput, EngineRequest, PromptSources
from kvferry.membership.base import MemberKind

SUFFIX = ".work"
MAX_ROWS = 1 << 16  # of one process; the file is sparse
_ROW = struct.Struct("<64s24sddIIIIIB3x")
_SOURCES = struct.Struct("<III")
_SOURCES_AT = struct.calcsize("<64s24sddI")
_GENERATED = struct.Struct("<I")
_GENERATED_AT = struct.calcsize("<64s24sddIIII")
_ENDED = struct.Struct("<d")
_ENDED_AT = struct.calcsize("<64s24sd")
_END_AT = struct.calcsize("<64s24sddIIIII")


class End(enum.IntEnum):
    """How a request left its engine."""

    DIED = 0  # it has not: the process was killed under it, or hangs
    FINISHED = 1
    STOPPED = 2  # removed by the worker: preempted, or the gateway or its client has gone
    FAILED = 3  # the engine died, and its process lived on for a moment


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request on one engine. Prompt tokens are known from the first output on, and 0 before."""

    worker: str
    request_id: str
    tenant: str
    begun_s: float  # since the epoch
    ended_s: float  # 0 where it did not end
    num_prompt: int
    num_computed: int
    num_cached: int
    num_transferred: int
    num_generated: int
    end: End

    @property
    def answer_id(self) -> str:
        # PREFIX-HEX-CHOICE, and -cATTEMPT where it goes on.
        return "-".join(self.request_id.split("-", 2)[:2])

    @property
    def is_prefill(self) -> bool:
        return self.worker.startswith(MemberKind.PREFILL.value)


class WorkFile:
    """A row per request of one worker's engine, written in place. Raises OSError for a file that exists."""

    # Pages of a shared mapping belong to the kernel: they outlive the process, though not the machine.

    def __init__(self, folder: Path, worker: str) -> None:
        with (folder / f"{worker}{SUFFIX}").open("x+b") as file:
            file.truncate(MAX_ROWS * _ROW.size)
            self._rows = mmap.mmap(file.fileno(), MAX_ROWS * _ROW.size)
        self._num_rows = 0

    def record(self, engine: Engine) -> None:
        """Write down what `engine` does from now on."""
        generate = engine.generate

        async def generate_and_write(request: EngineRequest, **of_worker: Any) -> AsyncIterator[EngineOutput]:
            row, num_generated, end = self._begin(request), 0, End.FAILED
            try:
                async with contextlib.aclosing(generate(request, **of_worker)) as outputs:  # type: ignore[type-var]
                    async for output in outputs:
                        if not num_generated and output.sources is not None:
                            self._write_sources(row, output.sources)
                        num_generated += len(output.token_ids)
                        _GENERATED.pack_into(self._rows, row + _GENERATED_AT, num_generated)
                        if output.finish_reason is not None:
                            end = End.FINISHED
                        yield output
            except BaseException as error:
                if end is not End.FINISHED and not isinstance(error, Exception):
                    end = End.STOPPED  # cancelled, or closed
                raise
            finally:
                _ENDED.pack_into(self._rows, row + _ENDED_AT, time.time())
                self._rows[row + _END_AT] = end

        engine.generate = generate_and_write  # type: ignore[method-assign]

    def _begin(self, request: EngineRequest) -> int:
        row = self._num_rows * _ROW.size
        self._num_rows += 1
        tenant = "" if request.turn is None else request.turn.tenant
        num_prompt = len(request.prompt_token_ids)
        _ROW.pack_into(
            *(self._rows, row, request.request_id.encode(), tenant.encode(), time.time(), 0.0),
            *(num_prompt, 0, 0, 0, 0, End.DIED),
        )
        return row

    def _write_sources(self, row: int, sources: PromptSources) -> None:
        _SOURCES.pack_into(
            *(self._rows, row + _SOURCES_AT),
            *(sources.local_compute, sources.local_cache_hit, sources.external_kv_transfer),
        )


def read_attempts(folder: Path) -> Iterator[Attempt]:
    """Yield the rows of all files in a folder, also of processes that run."""
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            while (row := file.read(_ROW.size)) and row[0]:
                request_id, tenant, *numbers = _ROW.unpack(row)
                numbers[-1] = End(numbers[-1])
                yield Attempt(path.stem, _text(request_id), _text(tenant), *numbers)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()
