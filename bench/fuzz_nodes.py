"""Three nodes that write, damage, read and take over chunks on one shared volume at once.

Each node is a writer with its own folders, capacity and thread. Nodes vanish in the middle of an operation on files and
come back, or are replaced by nodes of another name; sealing keys rotate, on each node at another time; the clock jumps,
so that others adopt chunks of vanished nodes, and chunks expire. Half of the nodes keep contracts of tenants, which
change.

Every file operation of a node is watched: its files never have more bytes than its capacity, and it never moves or
removes a chunk of another living node that can still be opened with any key.
"""

from __future__ import annotations

import os
import random
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.fuzzed_chunks import NAMESPACES, SMALL, Tally, truth
from kvferry.keeper.layout import ChunkId, ChunkKey
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.terms import TierContract
from kvferry_keeper.store import chunk_file, folder, paths
from kvferry_keeper.store.adoption import ADOPT_AFTER_S, REMOVE_AFTER_S
from kvferry_keeper.store.chunk_file import HEADER_BYTES
from kvferry_keeper.store.direct_io import DirectIo, aligned_buffer
from kvferry_keeper.store.index.eviction import TenantRetention
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume

NUM_NODES = 3
NUM_CHUNKS = 24
# Chunks of each node: all three together have room for three quarters of the chunks.
CAPACITY_BYTES = NUM_CHUNKS // 4 * chunk_file.chunk_file_bytes(SMALL.payload_bytes)
OPERATIONS_AT_ONCE = 40  # of each node, between two checks
MAX_GENERATIONS = 3  # of sealing keys that a node has
MAX_JUMP_S = 150.0
VANISH_SHARE = 0.2  # of nodes, between two checks

OPERATIONS = {"read": 45, "write": 30, "damage": 9, "rescan": 8, "remove": 5, "record": 3, "configure": 1, "expire": 1}


class Vanished(BaseException):
    """A node is gone in the middle of an operation. No handler of Exception sees it."""


class Keys:
    """A node's sealing keys: those of some generations, newest first."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self._set([generation])

    def keys(self, namespace: Namespace, volume_id: str) -> tuple[bytes, ...]:
        return self._keyring.keys(namespace, volume_id)

    def rotate(self, generation: int, num_kept: int) -> None:
        self.generation = generation
        self._set(range(generation, max(-1, generation - 1 - num_kept), -1))

    def _set(self, generations: Sequence[int]) -> None:
        self._keyring = SecretsKeyring({"*": [secret_of(generation) for generation in generations]})


def secret_of(generation: int) -> bytes:
    return random.Random(generation).randbytes(32)


class WatchedIo(DirectIo):
    """A node's file operations. Raises Vanished in or before the `dies_in`th one from now."""

    def __init__(self, stage: NodesStage, writer: str) -> None:
        super().__init__()
        self.dies_in = 0
        self.is_asked_to_remove = False
        self._stage = stage
        self._writer = writer

    def open(self, path: str, flags: int) -> int:
        self._step()
        return super().open(path, flags)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._step()
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.dies_in == 1:
            super().pwritev(fd, [buffers[0], buffers[-1][: len(buffers[-1]) // 2]], offset)
        self._step()
        moved = super().pwritev(fd, buffers, offset)
        self._stage.check_capacity(self._writer)
        return moved

    def rename(self, source: str, target: str) -> None:
        self._step()
        self._stage.check_right(self._writer, source)
        super().rename(source, target)
        self._stage.check_capacity(self._writer)

    def unlink(self, path: str) -> None:
        self._step()
        if not self.is_asked_to_remove:
            self._stage.check_right(self._writer, path)
        super().unlink(path)

    def _step(self) -> None:
        if self.dies_in:
            self.dies_in -= 1
            if not self.dies_in:
                raise Vanished


class Node:
    def __init__(self, stage: NodesStage, volume_class: type[Volume], writer: str, generation: int) -> None:
        self.writer = writer
        self.keys = Keys(generation)
        self.io = WatchedIo(stage, writer)
        self.volume = volume_class(
            stage.folder,
            capacity_bytes=CAPACITY_BYTES,
            shared=True,
            writer=writer,
            keyring=self.keys,
            eviction=TenantRetention(CAPACITY_BYTES) if sum(writer.encode()) % 2 else None,
            io=self.io,
            clock=stage.clock,
            monotonic=stage.clock,
        )
        self.buffer = aligned_buffer(SMALL.payload_bytes)
        self.volume.open()
        self.volume.add_layout(SMALL)

    def vanish(self) -> None:
        """Release its locks, as the kernel does for a dead process, and nothing else."""
        while self.volume._locks:
            os.close(self.volume._locks.pop())


class NodesStage:
    def __init__(self, folder: Path, seed: int, tally: Tally, volume_class: type[Volume]) -> None:
        self.folder = folder
        self._random = random.Random(seed)
        self._tally = tally
        self._volume_class = volume_class
        self._lock = threading.Lock()
        self._ahead_s = 0.0
        self._generation = 0
        self._num_nodes = 0
        self._gone: set[str] = set()
        self._chunks = [shared_chunk(number) for number in range(NUM_CHUNKS)]
        self._truths = {chunk: truth(SMALL, chunk) for chunk in self._chunks}
        self._volume_id = ""

    def clock(self) -> float:
        return time.time() + self._ahead_s

    def run(self, num_mutations: int) -> Iterator[None]:
        """Each operation of a node is a mutation."""
        nodes: list[Node] = []
        try:
            nodes = [self._new_node() for _ in range(NUM_NODES)]
            self._volume_id = nodes[0].volume.volume_id
            with ThreadPoolExecutor(NUM_NODES) as threads:
                left = num_mutations
                while left > 0:
                    counts = [min(OPERATIONS_AT_ONCE, left // NUM_NODES + (i < left % NUM_NODES)) for i in range(3)]
                    seeds = [self._random.randrange(1 << 30) for _ in nodes]
                    done = sum(threads.map(self._operate, nodes, counts, seeds))
                    left -= done
                    for _ in range(done):
                        yield
                    nodes = self._after_round(nodes)
            self._end(nodes)
        except Exception:
            self._tally.crashes.append(f"three nodes: {traceback.format_exc()}")
        finally:
            for node in nodes:
                node.volume.close()

    # What a node does, in its thread

    def _operate(self, node: Node, count: int, seed: int) -> int:
        """Return the number of operations."""
        seeded = random.Random(seed)
        if seeded.random() < VANISH_SHARE:
            node.io.dies_in = seeded.randrange(1, 3 * OPERATIONS_AT_ONCE)
        for i in range(count):
            (operation,) = seeded.choices(list(OPERATIONS), list(OPERATIONS.values()))
            try:
                outcome = self._apply(operation, node, seeded)
            except Vanished:
                with self._lock:
                    self._gone.add(node.writer)
                    self._tally.count("three nodes: vanish", operation)
                node.vanish()
                return i + 1
            except Exception:
                outcome = "crash"
                with self._lock:
                    self._tally.crashes.append(f"three nodes, {operation}: {traceback.format_exc()}")
            with self._lock:
                self._tally.count(f"three nodes: {operation}", outcome)
        node.io.dies_in = 0
        return count

    def _apply(self, operation: str, node: Node, seeded: random.Random) -> str:
        volume, chunk, buffer = node.volume, seeded.choice(self._chunks), node.buffer
        match operation:
            case "read":
                buffer[:64] = bytes(64)
                outcome = volume.read(SMALL.digest, chunk, buffer)
                if outcome is Outcome.OK and bytes(buffer) != self._truths[chunk]:
                    with self._lock:
                        self._tally.num_wrong_chunks += 1
                return outcome
            case "write":
                buffer[:] = self._truths[chunk]
                return volume.write(SMALL.digest, chunk, buffer)
            case "remove":
                node.io.is_asked_to_remove = True
                is_removed = volume.remove(SMALL.digest, chunk)
                node.io.is_asked_to_remove = False
                return "removed" if is_removed else "absent"
            case "rescan":
                volume.rescan()
            case "record":
                volume.record()
            case "configure":
                volume.configure(contracts(seeded))
            case "expire":
                # Not a wrong removal: the chunks are the node's own.
                volume.expire()
            case _:
                return self._damage(seeded)
        return "done"

    def _damage(self, seeded: random.Random) -> str:
        """Change some bytes of any node's chunk."""
        files = [file for writer in folder.writers(self.folder) for file in folder.walk(self.folder, writer)]
        if not files:
            return "absent"
        path = Path(seeded.choice(files).path)
        try:
            with path.open("r+b", buffering=0) as file:
                file.seek(seeded.randrange(HEADER_BYTES + SMALL.payload_bytes))
                file.write(seeded.randbytes(seeded.randrange(1, 9)))
        except FileNotFoundError:
            return "absent"
        return "changed"

    # Watching, in a node's thread

    def check_capacity(self, writer: str) -> None:
        roots = [self.folder / name / writer for name in paths.OF_WRITERS]
        files = [Path(where, name) for root in roots for where, _, names in os.walk(root) for name in names]
        num_bytes = sum(map(size_of, files))
        if num_bytes > CAPACITY_BYTES:
            with self._lock:
                self._tally.num_over_capacity += 1

    def check_right(self, writer: str, path: str) -> None:
        """Count a chunk of another living node that `writer` is about to move or remove although it is good."""
        part, owner, *_ = path.removeprefix(f"{self.folder}/").split("/")
        if part == paths.CHUNKS and owner != writer and owner not in self._gone and self._is_good(Path(path)):
            with self._lock:
                self._tally.num_destroyed_chunks += 1

    def _is_good(self, file: Path) -> bool:
        try:
            raw = memoryview(bytearray(file.read_bytes()))
        except OSError:
            return False
        header = chunk_file.parse_header(raw[:HEADER_BYTES]) if len(raw) > HEADER_BYTES else None
        if header is None or paths.chunk_name(header.chunk) != file.name:
            return False
        namespace, payload = header.chunk.namespace, raw[HEADER_BYTES:]
        for generation in range(self._generation + 1):
            keys = Keys(generation).keys(namespace, self._volume_id)
            if chunk_file.unseal(header, raw[:HEADER_BYTES], payload, payload, keys) is Outcome.OK:
                return bytes(payload) == self._truths[header.chunk]
        return False

    # Between rounds, while no node does anything

    def _after_round(self, nodes: list[Node]) -> list[Node]:
        seeded = self._random
        self._ahead_s += seeded.uniform(0.0, MAX_JUMP_S)
        if seeded.random() < 0.15:
            self._generation += 1
        after = []
        for node in nodes:
            if node.writer in self._gone:
                after.append(self._new_node(node.writer if seeded.random() < 0.5 else ""))
                continue
            if node.keys.generation < self._generation and seeded.random() < 0.5:
                node.keys.rotate(self._generation, seeded.randrange(MAX_GENERATIONS))
            if seeded.random() < 0.05:
                node.volume.close()
                node = self._new_node(node.writer)
            after.append(node)
        for node in after:
            node.volume.rescan()
        for node in after:
            node.volume.rescan()  # the first one of another node may have taken over or removed files
            node.volume.check()
        return after

    def _new_node(self, writer: str = "") -> Node:
        if not writer:
            self._num_nodes += 1
            writer = f"node-{self._num_nodes}"
        self._gone.discard(writer)
        return Node(self, self._volume_class, writer, self._generation)

    def _end(self, nodes: list[Node]) -> None:
        """Check that the files of all vanished nodes find owners, or go."""
        for ahead_s in (0.0, ADOPT_AFTER_S, REMOVE_AFTER_S, 0.0):
            self._ahead_s += ahead_s
            for node in nodes:
                node.volume.rescan()
        names = {node.writer for node in nodes}
        for part in paths.OF_WRITERS:
            left = {entry.name.removesuffix(".lock") for entry in (self.folder / part).iterdir()} - names
            if left:
                raise AssertionError(f"{part} of vanished nodes: {sorted(left)}")
        for node in nodes:
            node.volume.check()


def contracts(seeded: random.Random) -> dict[str, TierContract]:
    """Return contracts of some tenants, whose floors fit."""
    names = sorted({namespace.tenant for namespace in NAMESPACES})
    return {
        name: TierContract(
            floor=(floor := seeded.randrange(CAPACITY_BYTES // len(names))),
            cap=seeded.randrange(floor, CAPACITY_BYTES),
            borrow=seeded.random() < 0.8,
            ttl_s=seeded.choice((None, 10.0, 1000.0)),
        )
        for name in seeded.sample(names, seeded.randrange(len(names) + 1))
    }


def shared_chunk(number: int) -> ChunkId:
    seeded = random.Random(number)
    return ChunkId(ChunkKey(seeded.randbytes(36)), seeded.randrange(1 << 64), NAMESPACES[number % len(NAMESPACES)])


def size_of(file: Path) -> int:
    try:
        return file.lstat().st_size
    except FileNotFoundError:
        return 0
