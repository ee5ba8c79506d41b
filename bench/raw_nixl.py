"""Raw NIXL: one process that owns pages, one that pulls them, nothing around them.

The source and the reader allocate and register what an engine's connector does: one tensor a layer, `num_pages` rows
of `row_bytes`. The reader prepares its descriptor lists once, as vLLM does, and then does nothing but post a read and
look at its state until it is done. Neither has a progress thread: NIXL's default, a thread that spins, gave 0.4 to
1.0 GB/s on two cores where none gave 2.3 to 3.1. With thousands of descriptors four threads were faster once (3.3
against 2.6 GB/s) and slower once (2.6 against 3.1).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from bench.results import BenchFailed

START_TIMEOUT_S = 120.0
PULL_TIMEOUT_S = 60.0
SOURCE_PERIOD_S = 0.001


@dataclass(frozen=True)
class Layout:
    """An engine's KV memory: `num_layers` ranges of `num_pages` rows of `row_bytes`, on a GPU or not."""

    num_layers: int
    num_pages: int
    row_bytes: int
    on_gpu: bool = False

    @property
    def memory(self) -> str:
        """NIXL's kind."""
        return "VRAM" if self.on_gpu else "DRAM"


@dataclass(frozen=True)
class Transfer:
    """Size and times of a transfer. `transfer_s` and `post_s` are NIXL's own, from posting to noticing the end."""

    size_bytes: int
    num_descriptors: int
    transfer_s: float
    post_s: float
    wall_s: float


def page_ids(num_pages: int, num_runs: int, start: int, total: int) -> list[int]:
    """`num_pages` pages in `num_runs` runs of adjacent ones, as even as can be, with a page left out between two runs.

    NIXL merges adjacent descriptors, so this many runs give as many descriptors a layer. Raises ValueError where they
    do not fit between `start` and `total`.
    """
    if not 1 <= num_runs <= num_pages:
        raise ValueError(f"{num_pages} pages cannot make {num_runs} runs")
    ids, page = [], start
    for run in range(num_runs):
        length = num_pages // num_runs + (run < num_pages % num_runs)
        ids.extend(range(page, page + length))
        page += length + 1
    if ids[-1] >= total:
        raise ValueError(f"{num_pages} pages in {num_runs} runs from page {start} on do not fit into {total} pages")
    return ids


def descriptor_ids(pages: Sequence[int], layout: Layout) -> list[int]:
    """Rows of the descriptor lists: all pages of the first layer, then of the second, as vLLM orders them."""
    return [layer * layout.num_pages + page for layer in range(layout.num_layers) for page in pages]


@dataclass
class _Agent:
    nixl: Any
    tensors: list[Any]
    rows: Any  # (address, length, device) of every page of every layer

    @classmethod
    def make(cls, name: str, layout: Layout) -> _Agent:
        import numpy
        import torch
        from nixl._api import nixl_agent, nixl_agent_config

        nixl = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, capture_telemetry=True))
        size = layout.num_pages * layout.row_bytes
        device = "cuda:0" if layout.on_gpu else "cpu"
        tensors = [torch.zeros(size, dtype=torch.int8, device=device) for _ in range(layout.num_layers)]
        for i, tensor in enumerate(tensors):
            tensor.fill_(i + 1)  # touched: nobody measures page faults here
        if layout.on_gpu:
            torch.cuda.synchronize()
        regions = [(tensor.data_ptr(), size, 0, "") for tensor in tensors]
        nixl.register_memory(regions, layout.memory, backends=["UCX"])
        rows = numpy.array(
            [
                (tensor.data_ptr() + page * layout.row_bytes, layout.row_bytes, 0)
                for tensor in tensors
                for page in range(layout.num_pages)
            ],
            dtype=numpy.uint64,
        )
        return cls(nixl, tensors, rows)


def _source(pipe: Connection, layout: Layout) -> None:
    agent = _Agent.make("source", layout)
    pipe.send_bytes(agent.nixl.get_agent_metadata())
    pipe.send_bytes(agent.rows.tobytes())
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while not pipe.poll(SOURCE_PERIOD_S):
            agent.nixl.get_new_notifs()  # connections are made while somebody looks


def _reader(pipe: Connection, layout: Layout) -> None:
    import numpy

    agent = _Agent.make("reader", layout)
    nixl = agent.nixl
    remote = nixl.add_remote_agent(pipe.recv_bytes())
    remote_rows = numpy.frombuffer(pipe.recv_bytes(), dtype=numpy.uint64).reshape(-1, 3)
    here = nixl.prep_xfer_dlist("NIXL_INIT_AGENT", nixl.get_xfer_descs(agent.rows, layout.memory))
    there = nixl.prep_xfer_dlist(remote, nixl.get_xfer_descs(remote_rows, layout.memory))
    pipe.send_bytes(b"ready")
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            source_pages, reader_pages = json.loads(pipe.recv_bytes())
            begin_s = time.perf_counter()
            handle = nixl.make_prepped_xfer(
                "READ", here, descriptor_ids(reader_pages, layout), there, descriptor_ids(source_pages, layout)
            )
            state = nixl.transfer(handle)
            while state == "PROC":
                state = nixl.check_xfer_state(handle)
            wall_s = time.perf_counter() - begin_s
            if state != "DONE":
                raise RuntimeError(f"NIXL ended a transfer with {state}")
            seen = nixl.get_xfer_telemetry(handle)
            nixl.release_xfer_handle(handle)
            pipe.send_bytes(
                json.dumps(
                    [seen.totalBytes, seen.descCount, seen.xferDuration / 1e6, seen.postDuration / 1e6, wall_s]
                ).encode()
            )


class RawReader:
    """Pulls pages through the reader process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def pull(self, source_pages: Sequence[int], reader_pages: Sequence[int]) -> Transfer:
        self._pipe.send_bytes(json.dumps([list(source_pages), list(reader_pages)]).encode())
        return Transfer(*json.loads(_receive(self._pipe, PULL_TIMEOUT_S)))


def _receive(pipe: Connection, timeout_s: float) -> bytes:
    if not pipe.poll(timeout_s):
        raise BenchFailed(f"a raw NIXL process said nothing for {timeout_s:g} s")
    try:
        return pipe.recv_bytes()
    except EOFError:
        raise BenchFailed("a raw NIXL process ended") from None


@contextlib.contextmanager
def raw_pair(layout: Layout) -> Iterator[RawReader]:
    """Both processes, ended on leaving; they inherit UCX's environment. Raises BenchFailed when one does not start."""
    spawn = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for target in (_source, _reader):
            ours, theirs = spawn.Pipe()
            pipes.append(ours)
            process = spawn.Process(target=target, args=(theirs, layout), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        source, reader = pipes
        for _ in ("metadata", "rows"):
            reader.send_bytes(_receive(source, START_TIMEOUT_S))
        if _receive(reader, START_TIMEOUT_S) != b"ready":
            raise BenchFailed("the raw NIXL reader did not start")
        yield RawReader(reader)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in pipes:
            pipe.close()
