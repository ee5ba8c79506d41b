#!/usr/bin/env python3
"""Verified reads and writes of chunks beside fio and vLLM's own file loader, on one drive.

    make bench-tier
    make bench-tier ARGS="--folder /mnt/nvme --threads 8 --mib 4096"

Everything is O_DIRECT, at the same size and depth (threads with one chunk each in progress), in the same folder, in
turns: a volume reads chunks into a region like an engine's, verifying each; fio reads its one file at random places;
vLLM's C loader reads the volume's own files, unverified. The volume writes new chunks, evicting old ones, and fio
overwrites its file. Bytes are payload bytes. Figures are medians over the rounds; ratios are medians of the ratios of
each round, since a drive's speed changes by the minute. Last, the time to index existing files is measured.

With --device gpu, `gpu_read` reads a chunk into a pinned row and copies it to a page of the GPU, and `gpu_write` goes
the way back; the bytes of some pages are compared.

`cpu_s_per_gib` is the processor time of this process for verified reads, `write_cpu_s_per_gib` for writes. `sealed_*`
is the same with AES-256-GCM. Each measurement (`gb_s_of_rounds`) is a line of JSON on stdout, and the last line has
all. The first read or write that fails ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.gpu_pages import GpuPages
from bench.results import BenchFailed, Results, run_benchmark
from kvferry.keeper.layout import ALIGNMENT, ChunkId, ChunkKey, ChunkLayout
from kvferry_keeper.store import chunk_file, paths
from kvferry_keeper.store.direct_io import aligned_buffer
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume
from kvferry_loadtest.machine import machine_line

LAYOUT = ChunkLayout("bench", "main", "x", "bfloat16", "auto", 16, 4, 24, 8, 128, "avx512", 1, 1, "NHD", 3 << 19)
NUM_ROWS = 32
# Chunks per call of vLLM's loader: those of one request.
VLLM_BATCH = 8
NUM_SCANS = 5
_SHOWN = (
    "read", "fio_read", "vllm_fs_read", "write", "fio_write", "sealed_read", "sealed_write", "gpu_read", "gpu_write",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    gb_s: float
    cpu_s_per_gib: float


class Region:
    """Rows like those of an engine's CPU tier, with random bytes."""

    def __init__(self, row_bytes: int) -> None:
        memory = aligned_buffer(NUM_ROWS * row_bytes)
        self.rows = [memory[i * row_bytes : (i + 1) * row_bytes] for i in range(NUM_ROWS)]
        for row in self.rows:
            row[:] = random.randbytes(row_bytes)


def timed(num_bytes: int, num_threads: int, work: Iterable[Any], do: Callable[[int, Any], None]) -> Measured:
    """Run `do(thread, item)` for all of `work` on several threads; return the seconds from the common start to the last
    end.
    """
    shared = iter(list(work))
    lock = threading.Lock()
    barrier = threading.Barrier(num_threads + 1)
    failures: list[BaseException] = []

    def run(thread: int) -> None:
        barrier.wait()
        try:
            while True:
                with lock:
                    item = next(shared, None)
                if item is None:
                    return
                do(thread, item)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(thread,)) for thread in range(num_threads)]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin_s, begin_cpu_s = time.perf_counter(), cpu_s()
    for thread in threads:
        thread.join()
    wall_s, used_s = time.perf_counter() - begin_s, cpu_s() - begin_cpu_s
    if failures:
        raise failures[0]
    return Measured(num_bytes / wall_s / 1e9, used_s / (num_bytes / 2**30))


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Chunks:
    """A full volume: every write recycles a file."""

    def __init__(
        self,
        folder: Path,
        layout: ChunkLayout,
        num_chunks: int,
        num_threads: int,
        *,
        is_sealed: bool = False,
        device: str = "",
    ) -> None:
        """`device` is torch's, for pages beside the rows."""
        self._layout = layout
        self._num_threads = num_threads
        self._num_bytes = num_chunks * layout.payload_bytes
        self._region = Region(layout.payload_bytes)
        self._pages = GpuPages(self._region.rows, device) if device else None
        self.volume = Volume(
            folder,
            capacity_bytes=num_chunks * chunk_file.chunk_file_bytes(layout.payload_bytes),
            keyring=SecretsKeyring({"*": os.urandom(32)}) if is_sealed else None,
        )
        self.volume.open()
        self.volume.add_layout(layout)
        self._chunks: list[ChunkId] = []
        self._num_chunks = num_chunks

    def write(self) -> Measured:
        chunks = [ChunkId(ChunkKey(os.urandom(36)), random.randrange(1 << 64)) for _ in range(self._num_chunks)]

        def write(thread: int, chunk: ChunkId) -> None:
            outcome = self.volume.write(self._layout.digest, chunk, random.choice(self._region.rows))
            if outcome is not Outcome.OK:
                raise BenchFailed(f"writing page {chunk.key.hex()}: {outcome}")

        measured = timed(self._num_bytes, self._num_threads, chunks, write)
        self._chunks = chunks
        return measured

    def read(self) -> Measured:
        def read(thread: int, chunk: ChunkId) -> None:
            row = self._region.rows[thread % NUM_ROWS]
            outcome = self.volume.read(self._layout.digest, chunk, row)
            if outcome is not Outcome.OK:
                raise BenchFailed(f"reading page {chunk.key.hex()}: {outcome}")

        return timed(self._num_bytes, self._num_threads, self._shuffled(), read)

    def write_from_pages(self) -> Measured:
        """As `write`, of pages of a GPU: each thread has a row of its own."""
        pages = self._pages
        assert pages is not None
        chunks = [ChunkId(ChunkKey(os.urandom(36)), random.randrange(1 << 64)) for _ in range(self._num_chunks)]

        def write(thread: int, chunk: ChunkId) -> None:
            pages.store(thread)
            outcome = self.volume.write(self._layout.digest, chunk, self._region.rows[thread])
            if outcome is not Outcome.OK:
                raise BenchFailed(f"writing page {chunk.key.hex()}: {outcome}")

        measured = timed(self._num_bytes, self._num_threads, chunks, write)
        self._chunks = chunks
        return measured

    def read_to_pages(self) -> Measured:
        """As `read`, to pages of a GPU. Raises BenchFailed where one has other bytes than its row."""
        pages = self._pages
        assert pages is not None

        def read(thread: int, chunk: ChunkId) -> None:
            outcome = self.volume.read(self._layout.digest, chunk, self._region.rows[thread])
            if outcome is not Outcome.OK:
                raise BenchFailed(f"reading page {chunk.key.hex()}: {outcome}")
            pages.load(thread)

        measured = timed(self._num_bytes, self._num_threads, self._shuffled(), read)
        if not all(pages.is_equal(thread) for thread in range(self._num_threads)):
            raise BenchFailed("a page of the GPU has other bytes than the row that was copied to it")
        return measured

    def close(self) -> None:
        self.volume.check()
        self.volume.close()
        if self._pages is not None:
            self._pages.close()

    def read_with(self, load: Callable[[list[str], list[memoryview], bool], Any]) -> Measured:
        """Read the same files with vLLM's loader: header and payload into one buffer."""
        file_bytes = chunk_file.chunk_file_bytes(self._layout.payload_bytes)
        buffers = [[aligned_buffer(file_bytes) for _ in range(VLLM_BATCH)] for _ in range(self._num_threads)]
        files = [
            str(self.volume.path / paths.chunk_path("local", self._layout.digest, chunk)) for chunk in self._shuffled()
        ]
        batches = [files[i : i + VLLM_BATCH] for i in range(0, len(files), VLLM_BATCH)]

        def read(thread: int, batch: list[str]) -> None:
            load(batch, buffers[thread][: len(batch)], True)

        return timed(self._num_bytes, self._num_threads, batches, read)

    def _shuffled(self) -> list[ChunkId]:
        return random.sample(self._chunks, len(self._chunks))


class Fio:
    """fio with as many threads, each with one read or write of a chunk's size in progress, all over one file."""

    def __init__(self, program: str, file: Path, chunk_bytes: int, num_chunks: int, num_threads: int) -> None:
        self._program = program
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._part_bytes = num_chunks // num_threads * chunk_bytes
        self._num_threads = num_threads

    def run(self, kind: str) -> Measured:
        """`kind` is randread, randwrite, or write to make the file."""
        arguments = {
            "name": kind,
            "filename": str(self._file),
            "rw": kind,
            "bs": self._chunk_bytes,
            "size": self._part_bytes,
            "offset_increment": self._part_bytes,
            "numjobs": self._num_threads,
            "ioengine": "psync",
            "direct": 1,
            "randrepeat": 0,
            "output-format": "json",
        }
        done = subprocess.run(
            [
                self._program,
                "--thread",
                "--group_reporting",
                *(f"--{name}={value}" for name, value in arguments.items()),
            ],
            check=False,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise BenchFailed(f"fio: {(done.stderr or done.stdout).strip()[-300:]}")
        # It may say something before.
        [job] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
        side = job["read" if kind == "randread" else "write"]
        wall_s = side["io_bytes"] / side["bw_bytes"]
        used_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * wall_s * self._num_threads
        return Measured(side["bw_bytes"] / 1e9, used_s / (side["io_bytes"] / 2**30))


def vllm_loader() -> Callable[[list[str], list[memoryview], bool], Any] | None:
    """Return vLLM's C loader without importing the rest of vLLM."""
    package = importlib.util.find_spec("vllm")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for file in Path(folder).glob("fs_io_C*.so"):
            loader = importlib.machinery.ExtensionFileLoader("vllm.fs_io_C", str(file))
            spec = importlib.util.spec_from_file_location("vllm.fs_io_C", file, loader=loader)
            assert spec is not None
            import torch  # noqa: F401 - what it is linked with

            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
            load: Callable[[list[str], list[memoryview], bool], Any] = module.batch_load_block
            return load
    return None


def measure(
    things: dict[str, Callable[[], Measured]], num_rounds: int, advance: Callable[[str, Measured], None]
) -> dict[str, list[Measured]]:
    """Run each measurement once per round, in a new order each time, and pass it to `advance`."""
    measured: dict[str, list[Measured]] = {name: [] for name in things}
    names = list(things)
    for round_number in range(num_rounds):
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            measured[name].append(things[name]())
            advance(name, measured[name][-1])
    return measured


def ratio(ours: Sequence[Measured], theirs: Sequence[Measured]) -> float:
    return statistics.median(a.gb_s / b.gb_s for a, b in zip(ours, theirs, strict=True))


def summarize(measured: dict[str, list[Measured]]) -> dict[str, Any]:
    """Return medians of each figure, and of its ratios to another in the same round."""
    figures: dict[str, float | None] = {
        f"{name}_gb_s": statistics.median(one.gb_s for one in runs) for name, runs in measured.items()
    }
    for name, ours, theirs in (
        ("read_ratio", "read", "fio_read"),
        ("write_ratio", "write", "fio_write"),
        ("vllm_fs_read_ratio", "read", "vllm_fs_read"),
        ("sealed_read_ratio", "sealed_read", "fio_read"),
        ("sealed_write_ratio", "sealed_write", "fio_write"),
        ("gpu_read_ratio", "gpu_read", "read"),
        ("gpu_write_ratio", "gpu_write", "write"),
    ):
        figures[name] = ratio(measured[ours], measured[theirs]) if {ours, theirs} <= measured.keys() else None
    for name, runs in measured.items():
        label = "cpu_s_per_gib" if name == "read" else f"{name}_cpu_s_per_gib"
        figures[label] = statistics.median(one.cpu_s_per_gib for one in runs)
    return {name: None if value is None else round(value, 3) for name, value in figures.items()}


def time_scan(folder: Path, layout: ChunkLayout, num_chunks: int) -> float:
    """Return the seconds that a volume takes to index so many chunks, by names and sizes only."""
    volume = Volume(folder, capacity_bytes=1 << 60)
    volume.open()
    volume.add_layout(layout)
    volume.close()
    file_bytes = chunk_file.chunk_file_bytes(layout.payload_bytes)
    for number in range(256):
        first = ChunkId(ChunkKey(bytes([number]) + bytes(35)))
        (folder / paths.chunk_folder("local", layout.digest, first)).mkdir(parents=True)
    for _ in range(num_chunks):
        chunk = ChunkId(ChunkKey(os.urandom(36)), random.randrange(1 << 64))
        fd = os.open(folder / paths.chunk_path("local", layout.digest, chunk), os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(fd, file_bytes)
        os.close(fd)
    times_s = []
    for _ in range(NUM_SCANS):
        volume = Volume(folder, capacity_bytes=1 << 60)
        begin_s = time.perf_counter()
        volume.open()
        times_s.append(time.perf_counter() - begin_s)
        if volume.stats.num_chunks != num_chunks:
            raise BenchFailed(f"a scan found {volume.stats.num_chunks} of {num_chunks} pages")
        volume.close()
    return statistics.median(times_s)


def drive_of(folder: Path) -> str:
    """Return file system and device of a folder."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        device, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, f"{kind} on {device}")
    return best[1]


def bench(options: argparse.Namespace, fio_program: str, folder: Path, results: Results, console: Console) -> None:
    layout = dataclasses.replace(LAYOUT, payload_bytes=options.chunk_kib * 1024)
    num_chunks = options.mib * 2**20 // layout.payload_bytes // options.threads * options.threads
    if num_chunks < 2 * options.threads:
        raise BenchFailed(f"--mib {options.mib} are too few pages for {options.threads} threads")
    load_before = os.getloadavg()[0]
    if options.device == "gpu" and options.threads > NUM_ROWS:
        raise BenchFailed(f"--threads {options.threads}: at most {NUM_ROWS} with --device gpu")
    device = "cuda:0" if options.device == "gpu" else ""
    chunks = Chunks(folder / "plain", layout, num_chunks, options.threads, device=device)
    sealed = Chunks(folder / "sealed", layout, num_chunks, options.threads, is_sealed=True) if options.sealed else None
    fio = Fio(fio_program, folder / "fio", layout.payload_bytes, num_chunks, options.threads)
    things: dict[str, Callable[[], Measured]] = {
        "read": chunks.read,
        "fio_read": lambda: fio.run("randread"),
        "write": chunks.write,
        "fio_write": lambda: fio.run("randwrite"),
    }
    load = vllm_loader()
    if load is not None:
        vllm_load = load
        things["vllm_fs_read"] = lambda: chunks.read_with(vllm_load)
    else:
        console.print("vLLM is not installed here: vllm_fs_read_ratio is left out")
    if sealed is not None:
        things |= {"sealed_read": sealed.read, "sealed_write": sealed.write}
    if device:
        things |= {"gpu_read": chunks.read_to_pages, "gpu_write": chunks.write_from_pages}
    if not chunks.volume.stats.is_direct:
        console.print("O_DIRECT does not work here: what follows measures memory", style="yellow")
    with console.status("making files"):
        fio.run("write")
        for made in (chunks, sealed):
            if made is not None:
                made.write()
                made.write()
    results.add(
        {
            "page_bytes": layout.payload_bytes,
            "queue_depth": options.threads,
            "rounds": options.rounds,
            "mib_per_run": num_chunks * layout.payload_bytes // 2**20,
            "is_direct": chunks.volume.stats.is_direct,
            "drive": drive_of(folder),
            "machine": machine_line(),
        }
    )
    with Progress(console=console) as bar:
        task = bar.add_task("rounds", total=options.rounds * len(things))

        def advance(name: str, one: Measured) -> None:
            results.add({"gb_s_of_rounds": {name: [round(one.gb_s, 3)]}})
            bar.advance(task)

        measured = measure(things, options.rounds, advance)
    results.add(summarize(measured))
    for made in (chunks, sealed):
        if made is not None:
            made.close()
    with console.status(f"finding {options.scan_chunks:,} pages"):
        scan_s = time_scan(folder / "scan", layout, options.scan_chunks)
    results.add(
        {
            "scan_s_per_100k_pages": round(scan_s * 100_000 / options.scan_chunks, 2),
            "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        }
    )
    show(results.figures, console)


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(title=f"Pages of {results['page_bytes'] / 2**20:g} MiB, {results['queue_depth']} under way")
    for column in ("", "GB/s", "CPU s per GiB", "of fio"):
        table.add_column(column, justify="right" if column else "left")
    ratios = {"read": "read_ratio", "write": "write_ratio", "sealed_read": "sealed_read_ratio",
              "sealed_write": "sealed_write_ratio"}  # fmt: skip
    for name in _SHOWN:
        if f"{name}_gb_s" in results:
            cpu = results["cpu_s_per_gib" if name == "read" else f"{name}_cpu_s_per_gib"]
            of_fio = f"{results[ratios[name]]:.2f}" if name in ratios else ""
            table.add_row(name, f"{results[f'{name}_gb_s']:.2f}", f"{cpu:.3f}", of_fio)
    console.print(table)
    if results["vllm_fs_read_ratio"] is not None:
        console.print(f"Verified reads are {results['vllm_fs_read_ratio']:.2f} of vLLM's unverified ones.")
    console.print(
        f"An index of 100,000 pages takes {results['scan_s_per_100k_pages']} s. {results['machine']}; "
        f"{results['drive']}; load average {results['load_average']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="on the drive to measure (default: the system's temporary folder)")
    parser.add_argument(
        "--page-kib", dest="chunk_kib", type=int, default=1536, help="payload of a page (default: %(default)s)"
    )
    parser.add_argument("--mib", type=int, default=768, help="read or written in one run (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=4, help="pages under way (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="of everything, in turns (default: %(default)s)")
    parser.add_argument(
        "--scan-pages", dest="scan_chunks", type=int, default=100_000, help="to find again (default: %(default)s)"
    )
    parser.add_argument(
        "--device", choices=["cpu", "gpu"], default="cpu", help="gpu: with copies to and from its pages"
    )
    parser.add_argument("--no-sealed", dest="sealed", action="store_false", help="leave AES-256-GCM out")
    options = parser.parse_args()
    console = Console(stderr=True)
    if not console.is_terminal:
        console = Console(stderr=True, width=120)
    if min(options.threads, options.rounds, options.scan_chunks) < 1 or options.chunk_kib * 1024 % ALIGNMENT:
        console.print("bench-tier: numbers are at least 1, pages a multiple of 4 KiB", style="red")
        return 2
    fio_program = shutil.which("fio")
    if fio_program is None:
        console.print("bench-tier needs fio, which is not installed here (Debian: apt-get install fio)", style="red")
        return 2
    folder = Path(tempfile.mkdtemp(prefix="kvferry-bench-tier-", dir=options.folder))
    try:
        return run_benchmark("bench-tier", lambda results: bench(options, fio_program, folder, results, console))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
