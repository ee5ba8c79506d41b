"""A volume on real files: what it delivers, what it keeps, and what it does when a drive misbehaves."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkId, LayoutDigest
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.terms import TierContract
from kvferry_keeper.store.direct_io import DirectIo, Fault, FaultyIo, Operation, aligned_buffer
from kvferry_keeper.store.index.eviction import TenantRetention
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import (
    CHUNK_BYTES,
    LARGER,
    LAYOUT,
    SECRET,
    chunk,
    chunk_files,
    empty,
    flip,
    payload,
    quarantined,
    truth,
)
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest
KEYRING = SecretsKeyring({"*": SECRET})


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:
        yield open_volume


def put(volume: Volume, *chunks: ChunkId, layout: LayoutDigest = DIGEST) -> None:
    for of in chunks:
        assert volume.write(layout, of, payload(of, layout)) is Outcome.OK


def get(volume: Volume, of: ChunkId, layout: LayoutDigest = DIGEST) -> Outcome:
    """The outcome of reading a chunk; what is delivered is compared with the truth."""
    into = empty(layout)
    outcome = volume.read(layout, of, into)
    if outcome is Outcome.OK:
        assert bytes(into) == truth(of, layout)
    return outcome


class ChunkMirror:
    """A listener, as a keeper is one."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self.chunks: set[tuple[LayoutDigest, ChunkId]] = set()
        volume.on_change = self
        for layout in volume.layouts():
            self.chunks.update((layout, of) for of in volume.keys(layout))

    def __call__(self, layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
        self.chunks.update((layout, of) for of in added)
        self.chunks.difference_update((layout, of) for of in removed)

    def is_true(self) -> bool:
        volume = self._volume
        return self.chunks == {(layout, of) for layout in volume.layouts() for of in volume.keys(layout)}


# What it delivers


@pytest.mark.parametrize("keyring", [None, KEYRING], ids=["plain", "sealed"])
def test_a_chunk_comes_back_from_this_volume_and_from_the_next_on_its_folder(
    opened: Opened, keyring: SecretsKeyring | None
) -> None:
    volume = opened(keyring=keyring)
    put(volume, chunk(1), chunk(2, Namespace("acme", 5)))
    put(volume, chunk(3), layout=LARGER.digest)
    for _ in range(2):
        assert get(volume, chunk(1)) is Outcome.OK
        assert get(volume, chunk(2, Namespace("acme", 5))) is Outcome.OK
        assert get(volume, chunk(3), LARGER.digest) is Outcome.OK
        assert get(volume, chunk(4)) is Outcome.MISSING
        assert get(volume, chunk(1), LARGER.digest) is Outcome.MISSING
        assert set(volume.layouts()) == {DIGEST, LARGER.digest}
        assert set(volume.keys(DIGEST)) == {chunk(1), chunk(2, Namespace("acme", 5))}
        assert volume.contains(DIGEST, chunk(1).key)
        assert not volume.contains(DIGEST, chunk(3).key)
        identity = volume.volume_id
        volume.check()
        volume.close()
        volume = opened(keyring=keyring)
        assert volume.volume_id == identity


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["write", "read", "remove", "purge", "reopen", "touch"]), st.integers(0, 11)),
        max_size=60,
    ),
    is_sealed=st.booleans(),
    has_tenants=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_what_is_delivered_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], is_sealed: bool, has_tenants: bool
) -> None:
    """Any sequence of operations on twelve chunks of two layouts, tenants and epochs, with space for about five."""
    path = tmp_path_factory.mktemp("volume")

    def opened() -> tuple[Volume, ChunkMirror]:
        eviction = TenantRetention(5 * CHUNK_BYTES) if has_tenants else None
        keyring = KEYRING if is_sealed else None
        volume = Volume(path, capacity_bytes=5 * CHUNK_BYTES, eviction=eviction, keyring=keyring)
        volume.open()
        return volume, ChunkMirror(volume)

    volume, mirror = opened()
    for verb, number in steps:
        layout = DIGEST if number % 3 else LARGER.digest
        # Two epochs of one tenant share their keys here, which real ones do not.
        of = chunk(number // 2, Namespace("ab"[number % 4 // 2], number % 2))
        match verb:
            case "write":
                assert volume.write(layout, of, payload(of, layout)) in (Outcome.OK, Outcome.EXISTS)
                assert volume.contains(layout, of.key)
                assert get(volume, of, layout) is Outcome.OK
            case "read":
                is_kept = of in volume.keys(layout)
                is_another = volume.contains(layout, of.key) and not is_kept
                expected = Outcome.OK if is_kept else Outcome.WRONG_NAMESPACE if is_another else Outcome.MISSING
                assert get(volume, of, layout) is expected
            case "remove":
                is_kept = of in volume.keys(layout)
                assert volume.remove(layout, of) == is_kept
                assert of not in volume.keys(layout)
            case "purge":
                volume.purge(of.namespace)
                assert not any(
                    other.namespace == of.namespace for one in volume.layouts() for other in volume.keys(one)
                )
            case "touch":
                volume.touch(layout, [of.key])
            case "reopen":
                before = {one: set(volume.keys(one)) for one in volume.layouts()}
                volume.close()
                volume, mirror = opened()
                assert {one: set(volume.keys(one)) for one in volume.layouts()} == before
        volume.check()
        assert mirror.is_true()
        assert volume.stats.bytes_used <= volume.stats.capacity_bytes
    volume.close()


def test_a_chunk_is_found_whatever_route_key_is_asked_for(opened: Opened) -> None:
    volume = opened()
    put(volume, chunk(1))
    into = empty()
    assert volume.read(DIGEST, ChunkId(chunk(1).key), into) is Outcome.OK
    assert bytes(into) == truth(chunk(1))


def test_a_chunk_of_another_tenant_or_epoch_is_not_delivered(opened: Opened) -> None:
    volume = opened()
    put(volume, chunk(1, Namespace("acme", 1)))
    for namespace in (Namespace("acme", 2), Namespace("other", 1), Namespace()):
        assert get(volume, chunk(1, namespace)) is Outcome.WRONG_NAMESPACE
    assert get(volume, chunk(1, Namespace("acme", 1))) is Outcome.OK


def test_memory_that_is_not_aligned_works_too(opened: Opened) -> None:
    volume = opened()
    skewed = aligned_buffer(2 * LAYOUT.payload_bytes)[16 : 16 + LAYOUT.payload_bytes]
    skewed[:] = truth(chunk(1))
    assert volume.write(DIGEST, chunk(1), skewed) is Outcome.OK
    skewed[:] = bytes(LAYOUT.payload_bytes)
    assert volume.read(DIGEST, chunk(1), skewed) is Outcome.OK
    assert bytes(skewed) == truth(chunk(1))


def test_a_payload_of_the_wrong_length_is_the_callers_fault(opened: Opened) -> None:
    volume = opened()
    volume.add_layout(LAYOUT)
    put(volume, chunk(1))
    for num_bytes in (LARGER.payload_bytes, 4096, 100):
        with pytest.raises(ValueError, match="payload"):
            volume.read(DIGEST, chunk(1), aligned_buffer(num_bytes))
        with pytest.raises(ValueError, match="payload"):
            volume.write(DIGEST, chunk(2), aligned_buffer(num_bytes))
    assert get(volume, chunk(1)) is Outcome.OK


# Bad chunks


def spoil(volume: Volume, how: Callable[[Path], None]) -> None:
    [file] = chunk_files(volume.path)
    how(file)


@pytest.mark.parametrize("keyring", [None, KEYRING], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        (lambda file: flip(file, 100), Outcome.CORRUPT_HEADER),
        (lambda file: flip(file, 8 * 3000), Outcome.CORRUPT_HEADER),
        (lambda file: flip(file, 8 * 4095), Outcome.CORRUPT_HEADER),
        (lambda file: flip(file, 8 * 4096), Outcome.CORRUPT_PAYLOAD),
        (lambda file: flip(file, 8 * CHUNK_BYTES - 1), Outcome.CORRUPT_PAYLOAD),
        (lambda file: os.truncate(file, 0), Outcome.TRUNCATED),
        (lambda file: os.truncate(file, CHUNK_BYTES - 1), Outcome.TRUNCATED),
        (lambda file: os.truncate(file, CHUNK_BYTES + 4096), Outcome.TRUNCATED),
        (lambda file: file.write_bytes(bytes(CHUNK_BYTES)), Outcome.CORRUPT_HEADER),
        (lambda file: (file.unlink(), file.symlink_to("/dev/zero")), Outcome.TRUNCATED),
    ],
)
def test_a_bad_chunk_is_a_miss_and_quarantined(
    opened: Opened, keyring: SecretsKeyring | None, how: Callable[[Path], None], outcome: Outcome
) -> None:
    volume = opened(keyring=keyring)
    mirror = ChunkMirror(volume)
    put(volume, chunk(1))
    spoil(volume, how)
    assert get(volume, chunk(1)) is outcome
    assert get(volume, chunk(1)) is Outcome.MISSING
    assert not mirror.chunks
    assert chunk_files(volume.path) == []
    [bad] = quarantined(volume.path)
    assert f".{outcome}." in bad.name
    assert volume.stats.quarantined == 1
    assert volume.stats.reads == {outcome: 1, Outcome.MISSING: 1}
    put(volume, chunk(1))
    assert get(volume, chunk(1)) is Outcome.OK


def test_a_chunk_under_another_name_is_seen(opened: Opened) -> None:
    volume = opened()
    put(volume, chunk(1), chunk(2))
    first, second = chunk_files(volume.path)
    swapped = second.read_bytes()
    second.write_bytes(first.read_bytes())
    first.write_bytes(swapped)
    assert {get(volume, chunk(1)), get(volume, chunk(2))} == {Outcome.WRONG_KEY}


def test_a_chunk_of_another_layout_tenant_or_epoch_under_a_name_is_seen(opened: Opened) -> None:
    volume = opened()
    put(volume, chunk(1, Namespace("acme", 1)))
    [file] = chunk_files(volume.path)
    image = file.read_bytes()
    volume.close()
    digest = LayoutDigest(bytes(16))
    for part, other, ask, outcome in (
        (DIGEST.hex(), digest.hex(), (digest, chunk(1, Namespace("acme", 1))), Outcome.WRONG_LAYOUT),
        ("acme.1", "acme.2", (DIGEST, chunk(1, Namespace("acme", 2))), Outcome.WRONG_NAMESPACE),
        ("acme.1", "emca.1", (DIGEST, chunk(1, Namespace("emca", 1))), Outcome.WRONG_NAMESPACE),
    ):
        file.unlink(missing_ok=True)
        moved = Path(str(file).replace(part, other))
        moved.parent.mkdir(parents=True)
        moved.write_bytes(image)
        volume = opened()
        assert volume.read(*ask, empty()) is outcome
        volume.check()
        volume.close()


def test_a_chunk_that_was_replaced_while_it_was_read_is_gone_and_not_quarantined(
    opened: Opened, tmp_path: Path
) -> None:
    """As when its writer, on another node, recycles it."""

    def replace(operation: Operation, path: str) -> Fault | None:
        if operation is Operation.READ and is_armed:
            flip(Path(path), 8 * 5000)
            (tmp_path / "whole").write_bytes(whole)
            (tmp_path / "whole").replace(path)
        return None

    is_armed = False
    volume = opened(io=FaultyIo(replace))
    put(volume, chunk(1))
    whole = chunk_files(volume.path)[0].read_bytes()
    is_armed = True
    assert get(volume, chunk(1)) is Outcome.GONE
    is_armed = False
    assert get(volume, chunk(1)) is Outcome.OK
    assert not quarantined(volume.path)


def test_what_is_wrong_once_and_right_again_is_delivered(opened: Opened) -> None:
    """As when its writer, on another node, recycles it into the same chunk."""
    reads = 0

    def overwrite(operation: Operation, path: str) -> Fault | None:
        nonlocal reads
        if operation is Operation.READ:
            reads += 1
            flip(Path(path), 8 * 5000)
        return None

    volume = opened(io=FaultyIo(overwrite))
    put(volume, chunk(1))
    reads = 0
    assert get(volume, chunk(1)) is Outcome.OK
    assert reads == 2


def test_a_removed_file_is_gone(opened: Opened) -> None:
    volume = opened()
    mirror = ChunkMirror(volume)
    put(volume, chunk(1))
    spoil(volume, Path.unlink)
    assert get(volume, chunk(1)) is Outcome.GONE
    assert get(volume, chunk(1)) is Outcome.MISSING
    assert not mirror.chunks
    assert volume.stats.bytes_used == 0


def test_quarantine_is_bounded(opened: Opened) -> None:
    volume = opened(chunks=32)
    for number in range(12):
        put(volume, chunk(number))
        spoil(volume, lambda file: flip(file, 9))
        assert get(volume, chunk(number)) is Outcome.CORRUPT_HEADER
    assert len(quarantined(volume.path)) == 2
    assert volume.stats.quarantined == 12


# Capacity, recycling, pins


def test_evicted_files_are_recycled_and_others_removed(opened: Opened) -> None:
    volume = opened(chunks=4)
    put(volume, *map(chunk, range(4)))
    inodes = {file.stat().st_ino for file in chunk_files(volume.path)}
    put(volume, *map(chunk, range(4, 8)))
    assert {file.stat().st_ino for file in chunk_files(volume.path)} == inodes
    assert set(volume.keys(DIGEST)) == set(map(chunk, range(4, 8)))
    put(volume, chunk(9), layout=LARGER.digest)  # five units of 4096 where chunks of three were
    assert len(volume.keys(DIGEST)) == 2
    assert volume.stats.evicted == 6


def test_the_least_recently_used_chunk_goes_first(opened: Opened) -> None:
    volume = opened(chunks=4)
    put(volume, *map(chunk, range(4)))
    assert get(volume, chunk(0)) is Outcome.OK
    volume.touch(DIGEST, [chunk(1).key, chunk(77).key])
    put(volume, chunk(4), chunk(5))
    assert set(volume.keys(DIGEST)) == {chunk(0), chunk(1), chunk(4), chunk(5)}


def test_the_order_survives_a_restart(opened: Opened) -> None:
    volume = opened(chunks=4)
    put(volume, *map(chunk, (3, 1, 2, 0)))
    for age, number in enumerate((0, 2, 1, 3)):
        [file] = [file for file in chunk_files(volume.path) if chunk(number).key.hex() in file.name]
        os.utime(file, (1000 - age, 1000 - age))
    volume.close()
    volume = opened(chunks=2)
    assert set(volume.keys(DIGEST)) == {chunk(0), chunk(2)}


def test_time_to_live_counts_over_restarts(opened: Opened) -> None:
    now_s = time.time()
    volume = opened()
    put(volume, *(chunk(number, Namespace("acme")) for number in range(4)))
    for number, file in enumerate(chunk_files(volume.path)):
        os.utime(file, (now_s - 100 * number, now_s - 100 * number))
    volume.close()
    volume = opened(eviction=TenantRetention(8 * CHUNK_BYTES))
    volume.configure({"acme": TierContract(ttl_s=150.0)})
    assert volume.expire() == 2
    assert len(chunk_files(volume.path)) == 2
    assert volume.usages()["acme"].used == 2 * CHUNK_BYTES
    assert volume.expire() == 0


def test_a_volume_that_shrank_below_floors_gives_up_the_least_used(opened: Opened) -> None:
    volume = opened(chunks=4, eviction=TenantRetention(4 * CHUNK_BYTES))
    put(volume, *(chunk(number, Namespace("ab"[number % 2])) for number in range(4)))
    volume.close()
    volume = opened(chunks=2, eviction=TenantRetention(2 * CHUNK_BYTES))
    assert len(volume.keys(DIGEST)) == 2
    with pytest.raises(ValueError, match="floors sum to"):
        volume.configure({"a": TierContract(floor=3 * CHUNK_BYTES)})


def stalled_read(volume: Volume, stalled: threading.Event, of: ChunkId) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    reader = threading.Thread(target=lambda: outcomes.append(get(volume, of)))
    reader.start()
    assert stalled.wait(10)
    return reader, outcomes


@pytest.fixture
def slow() -> Iterator[tuple[FaultyIo, threading.Event, threading.Event]]:
    """I/O whose first read after `stalled` is cleared waits for `end`; it starts armed."""
    stalled, end = threading.Event(), threading.Event()

    def stall(operation: Operation, path: str) -> Fault | None:
        if operation is Operation.READ and path.endswith(".page") and not stalled.is_set():
            stalled.set()
            return Fault(until=end)
        return None

    yield FaultyIo(stall), stalled, end
    end.set()


def test_a_chunk_being_read_is_no_victim(
    opened: Opened, slow: tuple[FaultyIo, threading.Event, threading.Event]
) -> None:
    io, stalled, end = slow
    volume = opened(chunks=4, io=io)
    put(volume, *map(chunk, range(4)))
    reader, outcomes = stalled_read(volume, stalled, chunk(0))
    put(volume, *map(chunk, range(10, 20)))
    assert volume.contains(DIGEST, chunk(0).key)
    end.set()
    reader.join(10)
    assert outcomes == [Outcome.OK]


@pytest.mark.parametrize("how", ["remove", "purge", "another epoch"])
def test_a_chunk_that_goes_while_it_is_read_is_right_or_gone(
    opened: Opened, slow: tuple[FaultyIo, threading.Event, threading.Event], how: str
) -> None:
    io, stalled, end = slow
    volume = opened(chunks=2, io=io)
    put(volume, chunk(0))
    reader, outcomes = stalled_read(volume, stalled, chunk(0))
    match how:
        case "remove":
            assert volume.remove(DIGEST, chunk(0))
        case "purge":
            assert volume.purge(Namespace()) == 1
        case _:
            put(volume, chunk(0, Namespace("default", 1)))
    put(volume, chunk(1), chunk(2))
    end.set()
    reader.join(10)
    assert outcomes[0] in (Outcome.OK, Outcome.GONE)
    assert not quarantined(volume.path)


def test_of_two_writers_of_one_chunk_one_writes(opened: Opened) -> None:
    begun, end = threading.Event(), threading.Event()

    def stall(operation: Operation, path: str) -> Fault | None:
        if operation is Operation.WRITE and path.endswith(".page"):
            begun.set()
            return Fault(until=end)
        return None

    volume = opened(io=FaultyIo(stall))
    writer = threading.Thread(target=put, args=(volume, chunk(1)))
    writer.start()
    assert begun.wait(10)
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.EXISTS
    assert get(volume, chunk(1)) is Outcome.MISSING
    end.set()
    writer.join(10)
    assert get(volume, chunk(1)) is Outcome.OK
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.EXISTS


def test_a_volume_smaller_than_a_chunk_refuses_it(opened: Opened) -> None:
    volume = opened(chunks=0)
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.REFUSED


# Drives that misbehave


def fails(operation: Operation, error: int, *, at: str = ".page") -> Callable[[Operation, str], Fault | None]:
    return lambda seen, path: Fault(error) if seen is operation and at in path else None


@pytest.mark.parametrize("operation", [Operation.OPEN, Operation.WRITE, Operation.RENAME])
@pytest.mark.parametrize(("error", "outcome"), [("EIO", Outcome.IO_ERROR), ("ENOSPC", Outcome.NO_SPACE)])
def test_a_write_that_fails_leaves_nothing(opened: Opened, operation: Operation, error: str, outcome: Outcome) -> None:
    io = FaultyIo(fails(operation, getattr(errno, error)))
    volume = opened(io=io)
    mirror = ChunkMirror(volume)
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is outcome
    assert volume.stats.bytes_used == 0
    assert volume.stats.writes == {outcome: 1}
    volume.check()
    io.choose = lambda operation, path: None
    put(volume, chunk(1))
    assert get(volume, chunk(1)) is Outcome.OK
    assert mirror.is_true()


@pytest.mark.parametrize("operation", [Operation.OPEN, Operation.READ])
def test_a_chunk_that_cannot_be_read_now_may_be_read_later(opened: Opened, operation: Operation) -> None:
    io = FaultyIo(lambda operation, path: None)
    volume = opened(io=io)
    put(volume, chunk(1))
    io.choose = fails(operation, errno.EIO)
    assert get(volume, chunk(1)) is Outcome.IO_ERROR
    io.choose = lambda operation, path: None
    assert get(volume, chunk(1)) is Outcome.OK


def test_a_drive_that_is_full_before_the_volume_is_recycles(opened: Opened) -> None:
    """As far as overwriting needs no more blocks."""

    def full(operation: Operation, path: str) -> Fault | None:
        if operation is Operation.WRITE and "/tmp/local/" in path and Path(path).stat().st_size == 0:
            return Fault(errno.ENOSPC, 4096)
        return None

    io = FaultyIo(lambda operation, path: None)
    volume = opened(io=io)
    put(volume, chunk(1), chunk(2))
    io.choose = full
    put(volume, chunk(3))
    assert set(volume.keys(DIGEST)) == {chunk(2), chunk(3)}
    assert get(volume, chunk(3)) is Outcome.OK
    assert volume.write(LARGER.digest, chunk(4), payload(chunk(4), LARGER.digest)) is Outcome.NO_SPACE
    volume.check()


def test_files_that_cannot_be_removed_count_until_they_can(opened: Opened) -> None:
    io = FaultyIo(fails(Operation.UNLINK, errno.EIO))
    volume = opened(chunks=3, io=io)
    put(volume, chunk(1), chunk(2), chunk(3))
    assert volume.remove(DIGEST, chunk(1))
    assert volume.stats.bytes_used == 3 * CHUNK_BYTES
    volume.check()
    put(volume, chunk(4))  # into the file that could not be removed
    assert set(volume.keys(DIGEST)) == {chunk(2), chunk(3), chunk(4)}
    assert volume.remove(DIGEST, chunk(2))
    put(volume, chunk(2))  # to where one stands that could not be removed
    volume.check()
    assert volume.remove(DIGEST, chunk(3))
    io.choose = lambda operation, path: None
    volume.rescan()
    assert volume.stats.bytes_used == 2 * CHUNK_BYTES


def test_where_no_victim_can_be_moved_a_write_fails_and_capacity_holds(opened: Opened) -> None:
    io = FaultyIo(lambda operation, path: None)
    volume = opened(chunks=3, io=io)
    put(volume, chunk(1), chunk(2), chunk(3))
    io.choose = lambda operation, path: Fault(errno.EIO) if operation in (Operation.RENAME, Operation.UNLINK) else None
    assert volume.write(DIGEST, chunk(4), payload(chunk(4))) is Outcome.IO_ERROR
    assert volume.write(LARGER.digest, chunk(5), payload(chunk(5), LARGER.digest)) is Outcome.IO_ERROR
    assert volume.stats.bytes_used == 3 * CHUNK_BYTES
    volume.check()
    io.choose = lambda operation, path: None
    put(volume, *map(chunk, range(10, 13)))
    assert all(get(volume, chunk(number)) is Outcome.OK for number in range(10, 13))


def test_a_drive_that_disappears_and_comes_back_keeps_its_chunks(opened: Opened, tmp_path: Path) -> None:
    volume = opened(chunks=4)
    put(volume, *map(chunk, range(4)))
    volume.path.rename(tmp_path / "away")
    assert get(volume, chunk(1)) is Outcome.IO_ERROR
    assert volume.write(DIGEST, chunk(9), payload(chunk(9))) is Outcome.IO_ERROR
    assert not volume.path.exists(), "a folder was made where the drive should be"
    with pytest.raises(TierError, match="No such file"):
        volume.rescan()
    assert volume.remove(DIGEST, chunk(3))
    (tmp_path / "away").rename(volume.path)
    volume.rescan()
    volume.check()
    assert get(volume, chunk(1)) is Outcome.OK
    assert get(volume, chunk(2)) is Outcome.OK
    put(volume, chunk(9))
    assert get(volume, chunk(9)) is Outcome.OK


def test_one_that_stalls_keeps_nobody_else_waiting(
    opened: Opened, slow: tuple[FaultyIo, threading.Event, threading.Event]
) -> None:
    io, stalled, end = slow
    volume = opened(io=io)
    put(volume, chunk(0), chunk(1))
    reader, outcomes = stalled_read(volume, stalled, chunk(0))
    assert get(volume, chunk(1)) is Outcome.OK
    assert get(volume, chunk(0)) is Outcome.OK
    put(volume, chunk(2))
    assert volume.stats.num_chunks == 3
    end.set()
    reader.join(10)
    assert outcomes == [Outcome.OK]


def test_a_listener_that_fails_stops_nothing(opened: Opened) -> None:
    volume = opened()

    def fail(layout: LayoutDigest, added: Sequence[ChunkId], removed: Sequence[ChunkId]) -> None:
        raise RuntimeError("told")

    volume.on_change = fail
    put(volume, chunk(1))
    assert get(volume, chunk(1)) is Outcome.OK


# Opening


def test_an_unshared_volume_has_one_keeper(opened: Opened) -> None:
    volume = opened()
    for shared, writer in ((False, "local"), (False, "other"), (True, "other")):
        with pytest.raises(TierError, match="in use"):
            opened(shared=shared, writer=writer)
    volume.close()
    opened()


def test_a_shared_volume_has_one_keeper_of_each_name(opened: Opened) -> None:
    opened(shared=True, writer="a")
    opened(shared=True, writer="b")
    for shared, writer in ((True, "a"), (False, "c")):
        with pytest.raises(TierError, match="in use"):
            opened(shared=shared, writer=writer)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="file"):
        Volume(tmp_path / "file", capacity_bytes=0).open()
    with pytest.raises(TierError, match="file"):
        Volume(tmp_path / "file" / "v", capacity_bytes=0).open()


def test_a_volume_of_another_cluster_is_refused_and_stays(opened: Opened, tmp_path: Path) -> None:
    volume = opened(cluster="blue", shared=True, writer="a")
    volume.add_layout(LAYOUT)
    put(volume, chunk(1))
    files = chunk_files(volume.path)
    refused = (
        "is of the cluster 'blue', and this one is 'red': give each cluster a folder of its own.* empty the folder"
    )
    with pytest.raises(TierError, match=refused):
        opened(cluster="red", shared=True, writer="b")
    assert chunk_files(volume.path) == files
    opened(cluster="blue", shared=True, writer="b")


def test_a_volume_that_names_no_cluster_is_that_of_the_first_that_opens_it(opened: Opened, tmp_path: Path) -> None:
    volume = opened()
    volume.close()
    file = tmp_path / "v" / "volume.json"
    old = json.loads(file.read_text())
    del old["cluster"]  # as an earlier release wrote it
    file.write_text(json.dumps(old))
    adopted = opened(cluster="blue")
    assert adopted.volume_id == volume.volume_id
    assert json.loads(file.read_text()) == {**old, "cluster": "blue"}
    adopted.close()
    with pytest.raises(TierError, match="is of the cluster 'blue'"):
        opened(cluster="red")
    assert [path.name for path in file.parent.glob(".*")] == []


@pytest.mark.parametrize("text", ["", "{}", '{"volume_id": 5}', '{"volume_id": "v", "version": 9, "created_s": 1}'])
def test_a_description_that_is_none_is_named(opened: Opened, tmp_path: Path, text: str) -> None:
    opened().close()
    (tmp_path / "v" / "volume.json").write_text(text)
    with pytest.raises(TierError, match=r"volume\.json"):
        opened()


def test_what_a_killed_keeper_left_is_cleared_away(opened: Opened) -> None:
    volume = opened()
    volume.add_layout(LAYOUT)
    put(volume, *map(chunk, range(5)))
    volume.close()
    files = chunk_files(volume.path)
    (volume.path / "tmp" / "local" / "7.page").write_bytes(bytes(100))
    os.truncate(files[0], 0)
    os.truncate(files[1], CHUNK_BYTES - 4096)
    (files[2].parent / "foreign").write_bytes(b"")
    (volume.path / "pages" / "local" / "lost+found").mkdir()
    volume = opened()
    assert len(volume.keys(DIGEST)) == 3
    assert volume.stats.quarantined == 2
    assert not list((volume.path / "tmp" / "local").iterdir())
    (files[2].parent / "foreign").unlink()
    for file in quarantined(volume.path):
        assert ".truncated." in file.name


@pytest.mark.parametrize("text", [b"", b"{", b'{"model": "another"}'])
def test_a_layout_file_that_cannot_be_read_is_written_again(opened: Opened, text: bytes) -> None:
    volume = opened()
    volume.add_layout(LAYOUT)
    (file,) = (volume.path / "layouts").iterdir()
    whole = file.read_bytes()
    file.write_bytes(text)
    volume.close()
    volume = opened()
    volume.add_layout(LAYOUT)
    assert [each.read_bytes() for each in (volume.path / "layouts").iterdir()] == [whole]


def test_two_files_of_one_chunk_are_one_chunk(opened: Opened) -> None:
    volume = opened()
    put(volume, chunk(1, Namespace("a", 1)))
    volume.close()
    [file] = chunk_files(volume.path)
    newer = Path(str(file).replace("a.1", "a.2"))
    newer.parent.mkdir(parents=True)
    newer.write_bytes(file.read_bytes())
    os.utime(file, (1000, 1000))
    volume = opened()
    assert volume.keys(DIGEST) == [chunk(1, Namespace("a", 2))]
    assert chunk_files(volume.path) == [newer]


def test_a_smaller_capacity_is_kept_from_the_start(opened: Opened) -> None:
    volume = opened(chunks=8)
    put(volume, *map(chunk, range(8)))
    volume.close()
    volume = opened(chunks=3)
    assert len(volume.keys(DIGEST)) == 3
    assert volume.stats.bytes_used == 3 * CHUNK_BYTES


def test_thousands_of_chunks_are_found_again(opened: Opened) -> None:
    volume = opened(chunks=2000)
    put(volume, *map(chunk, range(2000)))
    volume.close()
    volume = opened(chunks=2000)
    assert set(volume.keys(DIGEST)) == set(map(chunk, range(2000)))


# Tenants and keys


def test_purging_a_namespace_leaves_nothing_of_it(opened: Opened) -> None:
    volume = opened(chunks=32)
    mirror = ChunkMirror(volume)
    put(volume, *(chunk(number, Namespace("acme", 1)) for number in range(5)))
    put(volume, *(chunk(number + 100, Namespace("acme", 2)) for number in range(3)))
    flip(chunk_files(volume.path)[0], 5)
    assert Counter(get(volume, of) for of in volume.keys(DIGEST))[Outcome.CORRUPT_HEADER] == 1
    num_chunks = volume.purge(Namespace("acme", 1))
    assert num_chunks in (4, 5)
    assert {of.namespace for of in volume.keys(DIGEST)} == {Namespace("acme", 2)}
    assert not [file for file in volume.path.rglob("*") if "acme.1" in str(file) and file.is_file()]
    assert not list((volume.path / "pages").rglob("acme.1"))
    assert mirror.is_true()
    put(volume, chunk(0, Namespace("acme", 1)))


def test_plain_text_never_touches_the_drive(opened: Opened) -> None:
    volume = opened(chunks=4, keyring=KEYRING)
    marked = aligned_buffer(LAYOUT.payload_bytes)
    marked[:] = b"nothing to see here, go on with your life." * 195 + b"..  "[:2]
    for number in range(8):
        assert volume.write(DIGEST, chunk(number), marked) is Outcome.OK
    for file in volume.path.rglob("*"):
        if file.is_file():
            assert b"nothing to see" not in file.read_bytes()


def test_without_a_key_nothing_is_written_or_read(opened: Opened) -> None:
    volume = opened(keyring=SecretsKeyring({"bank": SECRET}))
    put(volume, chunk(1, Namespace("bank")))
    assert volume.write(DIGEST, chunk(2), payload(chunk(2))) is Outcome.REFUSED
    volume.close()
    volume = opened(keyring=SecretsKeyring({"other": SECRET}))
    assert get(volume, chunk(1, Namespace("bank"))) is Outcome.UNDECRYPTABLE
    # Not the chunk's fault: it can be read with the key.
    volume.check()
    volume.close()
    volume = opened(keyring=SecretsKeyring({"bank": SECRET}))
    assert get(volume, chunk(1, Namespace("bank"))) is Outcome.OK


def test_plain_and_sealed_chunks_are_not_taken_for_each_other(opened: Opened) -> None:
    volume = opened("plain")
    put(volume, chunk(1))
    volume.close()
    volume = opened("plain", keyring=KEYRING)
    assert get(volume, chunk(1)) is Outcome.UNDECRYPTABLE
    put(volume, chunk(1))
    assert get(volume, chunk(1)) is Outcome.OK
    volume.check()
    volume.close()
    volume = opened("plain")
    assert get(volume, chunk(1)) is Outcome.UNDECRYPTABLE
    put(volume, chunk(1))
    assert get(volume, chunk(1)) is Outcome.OK


def test_where_direct_io_is_refused_chunks_come_back_all_the_same(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectIo, "probe", lambda self, folder: False)
    volume = opened()
    put(volume, chunk(1))
    assert not volume.stats.is_direct
    assert get(volume, chunk(1)) is Outcome.OK


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errno.EIO, Outcome.IO_ERROR),
        (errno.EMFILE, Outcome.NO_RESOURCES),
        (errno.ENFILE, Outcome.NO_RESOURCES),
        (errno.ENOMEM, Outcome.NO_RESOURCES),
        (errno.ESTALE, Outcome.GONE),
    ],
)
@pytest.mark.parametrize("operation", [Operation.OPEN, Operation.READ])
def test_only_a_drives_own_errors_are_its_errors(
    opened: Opened, error: int, outcome: Outcome, operation: Operation
) -> None:
    fault: list[Fault] = []
    volume = opened(io=FaultyIo(lambda at, path: fault[0] if fault and at is operation else None))
    put(volume, chunk(1))
    into = aligned_buffer(LAYOUT.payload_bytes)
    fault.append(Fault(error=error))
    assert volume.read(DIGEST, chunk(1), into) is outcome
    fault.clear()
    assert volume.read(DIGEST, chunk(1), into) is Outcome.OK, "the chunk is where it was"
    assert volume.stats.quarantined == 0


def test_a_capacity_beyond_the_drive_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drive = os.statvfs(tmp_path)
    for capacity_bytes in (1 << 20, 2 * drive.f_blocks * drive.f_frsize):
        volume = Volume(tmp_path / "v", capacity_bytes=capacity_bytes)
        volume.open()
        volume.close()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"volume {tmp_path}/v: capacity_gib is ")
