"""Chunks of writers that are gone, and the order of evictions over restarts and writers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.errors import TierError
from kvferry.keeper.layout import ChunkId
from kvferry_keeper.store import adoption, folder, fsck
from kvferry_keeper.store.adoption import ADOPT_AFTER_S, REMOVE_AFTER_S
from kvferry_keeper.store.folder import FoundChunk
from kvferry_keeper.store.fsck import key_usage
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import CHUNK_BYTES, LAYOUT, chunk, chunk_files, empty, flip, payload, truth
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest
MINE, OTHER = SecretsKeyring({"*": b"m" * 32}), SecretsKeyring({"*": b"o" * 32})


class Clock:
    def __init__(self) -> None:
        self.now_s = time.time()

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:
        clocks = {"clock": clock, "monotonic": clock}
        yield lambda writer, **values: open_volume(writer=writer, **{"shared": True, **clocks, **values})


def put(target: Volume, *numbers: int) -> None:
    for number in numbers:
        assert target.write(DIGEST, chunk(number), payload(chunk(number))) is Outcome.OK


def get(source: Volume, of: ChunkId) -> Outcome:
    into = empty()
    outcome = source.read(DIGEST, of, into)
    assert outcome is not Outcome.OK or bytes(into) == truth(of)
    return outcome


def readable(source: Volume, numbers: range) -> list[int]:
    return [number for number in numbers if get(source, chunk(number)) is Outcome.OK]


def gone(clock: Clock, living: Volume, for_s: float) -> None:
    """Let a writer that ended long ago be seen as gone for so long."""
    living.rescan()
    clock.now_s += ADOPT_AFTER_S
    living.rescan()
    clock.now_s += for_s
    living.rescan()


def writers(of: Volume) -> list[str]:
    return folder.writers(of.path)


def test_chunks_of_a_writer_that_is_gone_are_taken_over(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    living, dead = opened("living"), opened("dead")
    put(dead, 1, 2, 3)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S - 1)
    assert (writers(living), living.stats.bytes_used) == (["dead", "living"], 0)
    clock.now_s += 1
    living.rescan()
    assert (writers(living), living.stats.bytes_used) == (["living"], 3 * CHUNK_BYTES)
    assert readable(living, range(5)) == [1, 2, 3]
    living.check()
    assert sorted(file.name for file in (tmp_path / "v" / "tmp").iterdir()) == ["living", "living.lock"]


def test_volumes_do_not_grow_with_every_writer_that_was(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    """On Kubernetes every pod may be a new one."""
    living = opened("living", chunks=8)
    put(living, *range(4))
    for i in range(6):
        pod = opened(f"pod-{i}")
        put(pod, *range(100 * (i + 1), 100 * (i + 1) + 8))
        pod.close()
        gone(clock, living, ADOPT_AFTER_S)
        gone(clock, living, REMOVE_AFTER_S)
        assert len(chunk_files(tmp_path / "v")) <= 8
        living.check()
    assert writers(living) == ["living"]
    assert readable(living, range(4)) == [0, 1, 2, 3]  # its own ones went for none of theirs


def test_the_newest_chunks_are_kept_where_room_is_short(opened: Opened, clock: Clock) -> None:
    living, dead = opened("living", chunks=5), opened("dead")
    put(living, 1, 2, 3)
    put(dead, 11, 12, 13, 14)
    now_ns = time.time_ns()
    for age, number in enumerate((13, 11, 14, 12)):
        (file,) = living.path.rglob(f"dead/**/{chunk(number).key.hex()}-*")
        os.utime(file, ns=(now_ns - age * 10**9, now_ns - age * 10**9))
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    # The others stay where they are: another writer may have room.
    assert living.stats.bytes_used == 5 * CHUNK_BYTES
    assert writers(living) == ["dead", "living"]
    clock.now_s += REMOVE_AFTER_S - ADOPT_AFTER_S
    living.rescan()
    assert writers(living) == ["living"]
    assert [number for number in range(20) if living.contains(DIGEST, chunk(number).key)] == [1, 2, 3, 11, 13]
    # Adopted ones are evicted first, the older one before the newer.
    put(living, 4)
    assert not living.contains(DIGEST, chunk(11).key)
    put(living, 5)
    assert not living.contains(DIGEST, chunk(13).key)


def test_a_writer_that_returns_keeps_its_chunks(opened: Opened, clock: Clock) -> None:
    living, back = opened("living"), opened("back")
    put(back, 1)
    back.close()
    gone(clock, living, ADOPT_AFTER_S - 1)
    back = opened("back")
    gone(clock, living, ADOPT_AFTER_S)
    assert back.stats.bytes_used == CHUNK_BYTES
    back.close()
    gone(clock, living, ADOPT_AFTER_S - 1)
    assert writers(living) == ["back", "living"]


def test_one_writer_takes_over(opened: Opened, clock: Clock) -> None:
    one, two, dead = opened("one"), opened("two"), opened("dead")
    put(dead, 1, 2)
    dead.close()
    clock.now_s += ADOPT_AFTER_S
    for _ in range(3):
        one.rescan()
        two.rescan()
        clock.now_s += ADOPT_AFTER_S
    assert (one.stats.bytes_used, two.stats.bytes_used) == (2 * CHUNK_BYTES, 0)
    assert readable(two, range(4)) == readable(one, range(4)) == [1, 2]


def test_what_is_no_chunk_or_a_second_copy_is_removed(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    living, dead = opened("living"), opened("dead")
    put(dead, 1, 2, 3)
    put(living, 1) if not living.contains(DIGEST, chunk(1).key) else None
    (short,) = living.path.rglob(f"dead/**/{chunk(2).key.hex()}-*")
    os.truncate(short, 100)
    (tmp_path / "v" / "tmp" / "dead" / "7.page").write_bytes(b"half")
    dead.add_layout(LAYOUT)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    assert writers(living) == ["living"]
    assert readable(living, range(5)) == [1, 3]
    living.check()


def test_bytes_that_were_taken_over_are_verified_like_others(opened: Opened, clock: Clock) -> None:
    living, dead = opened("living"), opened("dead")
    put(dead, 1)
    flip(chunk_files(living.path)[0], 8 * 5000)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    assert get(living, chunk(1)) is Outcome.CORRUPT_PAYLOAD
    assert living.stats.quarantined == 1


def test_a_call_adopts_a_limited_number(opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "MAX_FILES", 2)
    living, dead = opened("living"), opened("dead")
    put(dead, 1, 2, 3, 4, 5)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    used = [living.stats.bytes_used]
    for _ in range(2):
        living.rescan()
        used.append(living.stats.bytes_used)
    assert used == [2 * CHUNK_BYTES, 4 * CHUNK_BYTES, 5 * CHUNK_BYTES]
    assert writers(living) == ["living"]


def test_a_rescan_during_another_one_leaves_gone_writers_gone(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adoption, "MAX_FILES", 1)
    living, dead = opened("living"), opened("dead")
    put(dead, 1, 2)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S - 1)
    clock.now_s += 1
    is_taking, may_take = threading.Event(), threading.Event()

    def wait(found: FoundChunk) -> bool:
        is_taking.set()
        return may_take.wait(30)

    with monkeypatch.context() as patched:
        patched.setattr(living._adopter, "_has_right_size", wait)
        first = threading.Thread(target=living.rescan)
        first.start()
        assert is_taking.wait(30)
        living.rescan()
        assert living._adopter.num_adopted == 0
        may_take.set()
        first.join(30)
    assert living._adopter.num_adopted == 1
    living.rescan()
    assert readable(living, range(5)) == [1, 2]
    assert writers(living) == ["living"]


def test_a_writer_may_be_taken_over_by_another_node_meanwhile(
    opened: Opened, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead = opened("living"), opened("dead")
    put(living, 1)
    put(dead, 2)
    dead.close()
    listed = folder.writers(living.path)
    gone(clock, opened("second"), ADOPT_AFTER_S)
    assert "dead" not in folder.writers(living.path)
    monkeypatch.setattr(folder, "writers", lambda path: listed)
    living.rescan()
    clock.now_s += ADOPT_AFTER_S
    living.rescan()
    assert readable(living, range(4)) == [1]
    living.check()
    assert not [file.name for file in (living.path / "tmp").iterdir() if file.name.startswith("dead")]


def test_chunks_are_not_forgotten_while_the_drive_is_not_mounted(opened: Opened) -> None:
    living = opened("living")
    put(living, 1)
    (living.path / "pages").rename(living.path / "aside")
    with pytest.raises(TierError):
        living.rescan()
    (living.path / "aside").rename(living.path / "pages")
    assert get(living, chunk(1)) is Outcome.OK


def test_a_file_that_cannot_be_moved_stays(opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    living, dead = opened("living"), opened("dead")
    put(dead, 1)
    dead.close()
    with monkeypatch.context() as patched:

        def refuse(source: str, target: str) -> None:
            raise OSError(5, "no", source)

        patched.setattr(living._files, "rename", refuse)
        gone(clock, living, ADOPT_AFTER_S)
        assert living.stats.bytes_used == 0
        living.check()
    living.rescan()
    assert living.stats.bytes_used == CHUNK_BYTES


def test_a_folder_that_cannot_be_removed_is_not_taken_over(
    opened: Opened, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvferry_keeper.store.adoption")
    living, dead = opened("living", keyring=MINE), opened("dead", keyring=MINE)
    put(dead, 1)
    dead.close()
    foreign = living.path / "pages" / "dead" / "elsewhere"
    foreign.symlink_to(living.path.parent)
    counts = living.path / "keys" / "dead.json"
    gone(clock, living, ADOPT_AFTER_S)
    living.rescan()
    assert readable(living, range(3)) == [1]
    assert counts.exists()
    assert "taken over" not in caplog.text
    foreign.unlink()
    for _ in range(2):
        living.rescan()
    assert not counts.exists()
    assert caplog.text.count("taken over") == 1


def test_a_lock_that_its_holder_removed_is_not_held(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    held = folder.lock(file, shared=False)
    assert held is not None
    file.unlink()
    again = folder.lock(file, shared=False)
    assert again is not None
    assert os.fstat(again).st_ino == file.stat().st_ino
    assert folder.lock(file, shared=False) is None
    os.close(held)
    os.close(again)


def test_the_order_of_uses_outlives_a_restart(opened: Opened) -> None:
    """The chunk that is used most is written first."""
    before = opened("local", shared=False, chunks=4)
    put(before, 1, 2, 3, 4)
    assert get(before, chunk(1)) is get(before, chunk(3)) is Outcome.OK
    before.record()
    before.close()
    after = opened("local", shared=False, chunks=4)
    put(after, 5, 6)
    assert readable(after, range(9)) == [1, 3, 5, 6]


def test_uses_by_other_writers_count(opened: Opened) -> None:
    owner, reader = opened("owner", chunks=3), opened("reader")
    put(owner, 1, 2, 3)
    assert get(reader, chunk(1)) is Outcome.OK
    reader.record()
    owner.rescan()
    put(owner, 4, 5)
    assert readable(owner, range(9)) == [1, 4, 5]


def test_a_recorded_use_is_no_use(opened: Opened) -> None:
    """Else owners would record again what they see recorded, and every chunk would stay in use for ever."""
    owner, reader = opened("owner", chunks=3), opened("reader")
    put(owner, 1)
    get(reader, chunk(1))
    reader.record()
    owner.rescan()
    assert not owner._index.take_uses()


def test_uses_that_wait_to_be_recorded_have_a_limit(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry_keeper.store.index.chunk_table.MAX_USES", 2)
    local = opened("local", shared=False)
    put(local, 1, 2, 3)
    for number in (1, 2, 3, 1):
        get(local, chunk(number))
    assert [entry.chunk.route_key for entry in local._index.take_uses()] == [3, 1]
    local.remove(DIGEST, chunk(1))
    local.record()


def test_a_use_changes_neither_bytes_nor_the_time_of_writing(opened: Opened) -> None:
    local = opened("local", shared=False)
    put(local, 1)
    (file,) = chunk_files(local.path)
    before = file.stat()
    assert get(local, chunk(1)) is Outcome.OK
    local.record()
    after = file.stat()
    assert after.st_mtime_ns == before.st_mtime_ns
    assert after.st_atime_ns > before.st_mtime_ns
    assert get(local, chunk(1)) is Outcome.OK


def test_a_foreign_key_takes_nothing_over_but_space(opened: Opened, clock: Clock) -> None:
    """The chunks of a gone writer with another key are kept, and evicted like others."""
    living, dead = opened("living", keyring=MINE, chunks=2), opened("dead", keyring=OTHER)
    put(dead, 1)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    assert living.stats.bytes_used == CHUNK_BYTES
    put(living, 2, 3)
    assert readable(living, range(5)) == [2, 3]


def test_a_writer_that_says_it_lives_keeps_its_chunks_where_locks_are_not_shared(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS that is mounted with `nolock`."""
    living, other = opened("living"), opened("other")
    put(other, 1)
    real = folder.lock
    monkeypatch.setattr(folder, "lock", lambda file, *, shared: os.open(os.devnull, os.O_RDONLY))
    for _ in range(5):
        gone(clock, living, ADOPT_AFTER_S / 2)
        other.record()
        os.utime(living.path / "tmp" / "other.lock", (clock.now_s, clock.now_s))
        living.rescan()
    assert (other.stats.bytes_used, living.stats.bytes_used) == (CHUNK_BYTES, 0)
    put(other, 2)
    gone(clock, living, ADOPT_AFTER_S)
    monkeypatch.setattr(folder, "lock", real)
    assert living.stats.bytes_used == 2 * CHUNK_BYTES
    other.close()  # it counts files that were taken over


def test_seals_of_a_writer_that_is_gone_are_counted(opened: Opened, clock: Clock, tmp_path: Path) -> None:
    living, dead = opened("living", keyring=MINE), opened("dead", keyring=MINE)
    put(dead, 1, 2)
    put(living, 3)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    living.record()
    assert [file.name for file in (tmp_path / "v" / "keys").iterdir()] == ["living.json"]
    (usage,) = key_usage(tmp_path / "v", MINE)
    assert (usage.num_sealed, usage.num_chunks) == (3, 3)


def test_a_writer_that_returns_says_so_before_it_scans(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    back = opened("back")
    lock = back.path / "tmp" / "back.lock"
    back.close()
    os.utime(lock, (0, 0))
    said_s: list[float] = []
    scan = Volume._scan
    monkeypatch.setattr(Volume, "_scan", lambda volume: (said_s.append(lock.stat().st_mtime), scan(volume)))
    opened("back")
    assert said_s[0] > 0


def test_a_living_writer_makes_its_folders_again(opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks are kept on one node only, a keeper that was suspended seems gone."""
    living, other = opened("living"), opened("other")
    put(other, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "lock", lambda file, *, shared: os.open(os.devnull, os.O_RDONLY))
        gone(clock, living, ADOPT_AFTER_S)
    assert writers(living) == ["living"]
    assert get(other, chunk(1)) is Outcome.GONE  # and not a failure of the drive
    put(other, 3, 4)
    other.rescan()
    assert readable(other, range(5)) == readable(living, range(5)) == [1, 2, 3, 4]
    assert folder.lock(other.path / "tmp" / "other.lock", shared=False) is None
    other.check()


@pytest.mark.parametrize("left", [[], ["volume.json"]], ids=["empty", "another volume"])
def test_nothing_is_written_below_a_mount_point(opened: Opened, tmp_path: Path, left: list[str]) -> None:
    volume = opened("a")
    put(volume, 1)
    (tmp_path / "v").rename(tmp_path / "unmounted")
    (tmp_path / "v").mkdir()
    if left:
        opened("b", name="below").close()
        (tmp_path / "below" / "volume.json").rename(tmp_path / "v" / "volume.json")
    assert get(volume, chunk(1)) is Outcome.IO_ERROR
    assert volume.write(DIGEST, chunk(2), payload(chunk(2))) is Outcome.IO_ERROR
    volume.record()
    assert [file.name for file in (tmp_path / "v").rglob("*")] == left
    (tmp_path / "v").rename(tmp_path / "aside")
    (tmp_path / "unmounted").rename(tmp_path / "v")
    assert get(volume, chunk(1)) is Outcome.OK
    volume.rescan()  # the file that was not written counts until then


def test_chunks_of_a_key_not_known_yet_are_kept_until_they_are_written(opened: Opened, clock: Clock) -> None:
    """A gone writer had the new key file already."""
    both = SecretsKeyring({"*": [b"o" * 32, b"m" * 32]})
    living, dead = opened("living", keyring=MINE), opened("dead", keyring=both)
    put(dead, 1, 2, 3)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S)
    assert [get(living, chunk(number)) for number in (1, 2)] == [Outcome.UNDECRYPTABLE] * 2
    assert living.stats.quarantined == 0
    assert [living.contains(DIGEST, chunk(number).key) for number in (1, 2, 3)] == [False, False, True]
    assert living.keys(DIGEST) == [chunk(3)]
    put(living, 1)  # in place of the other one
    assert get(living, chunk(1)) is Outcome.OK
    assert living.stats.bytes_used == 3 * CHUNK_BYTES
    living.check()
    living.close()
    assert readable(opened("living", keyring=both), range(5)) == [1, 2, 3]


def test_a_purge_finds_chunks_that_are_taken_over_meanwhile(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, dead = opened("a"), opened("b")
    put(dead, 1, 2, 3)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S - 1)
    clock.now_s += 1
    walk = folder.walk

    def walk_during_a_rescan(path: Path, writer: str, **values: Any) -> Iterator[FoundChunk | folder.ForeignFile]:
        yield from walk(path, writer, **values)
        if writer == "a" and values and not living._adopter.num_adopted:
            living.rescan()

    with monkeypatch.context() as patched:
        patched.setattr(folder, "walk", walk_during_a_rescan)
        assert fsck.purge(living.path, "default") == 3
    assert living._adopter.num_adopted == 3
    assert not chunk_files(living.path)
    living.rescan()
    living.close()  # it counts files that were purged


def test_a_purge_without_an_end_is_an_error(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = opened("a")
    with monkeypatch.context() as patched:
        patched.setattr(folder, "_remove_once", lambda path, is_wanted: (1, 1))
        with pytest.raises(TierError, match="try again"):
            fsck.purge(volume.path, "default")


@pytest.mark.parametrize("name", ["quarantine", "tmp"])
def test_links_are_not_followed_out_of_a_volume(opened: Opened, clock: Clock, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (outside / "empty").mkdir(parents=True)
    of = Path(LAYOUT.digest.hex()) / "default.0" / f"{chunk(9).key.hex()}-0000000000000009.page.corrupt_header.1"
    for file in (outside / "1.page", outside / of):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"mine")
    before = sorted(outside.rglob("*"))
    living, dead = opened("living"), opened("dead")
    put(dead, 1)
    dead.close()
    link = living.path / name / "dead"

    def make_link() -> None:
        link.rmdir()
        link.symlink_to(outside)

    make_link()
    assert fsck.disk_usage(living.path)[2] == 0
    fsck.purge(living.path, "default")
    dead = opened("dead")
    assert not link.is_symlink()
    put(dead, 2)
    dead.close()
    make_link()
    gone(clock, living, ADOPT_AFTER_S)
    assert readable(living, range(4)) == [2]
    assert writers(living) == ["living"]
    assert not link.is_symlink()
    living.close()
    link.symlink_to(outside)
    fsck.verify_volume(living.path, mend=True)
    assert sorted(outside.rglob("*")) == before


@pytest.mark.parametrize("jump_s", [-1e6, 1e6])
def test_a_jump_of_the_wall_clock_makes_no_writer_gone(opened: Opened, clock: Clock, jump_s: float) -> None:
    wall = Clock()
    living, dead = opened("living", clock=wall), opened("dead")
    put(dead, 1)
    dead.close()
    gone(clock, living, ADOPT_AFTER_S - 1)
    wall.now_s += jump_s
    living.rescan()
    assert writers(living) == ["dead", "living"]
    clock.now_s += 1
    living.rescan()
    assert writers(living) == ["living"]


def test_a_lock_written_in_the_future_keeps_no_writer_alive(opened: Opened, clock: Clock) -> None:
    living, dead = opened("living"), opened("dead")
    put(dead, 1)
    dead.close()
    os.utime(living.path / "tmp" / "dead.lock", (clock.now_s + 1e9, clock.now_s + 1e9))
    gone(clock, living, ADOPT_AFTER_S)
    assert (writers(living), readable(living, range(3))) == (["living"], [1])


def test_a_writer_on_a_node_whose_clock_is_late_keeps_its_chunks(
    opened: Opened, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    living, late = opened("living"), opened("late")
    put(late, 1)
    with monkeypatch.context() as patched:
        patched.setattr(folder, "lock", lambda file, *, shared: os.open(os.devnull, os.O_RDONLY))
        for said_s in range(20):
            os.utime(late.path / "tmp" / "late.lock", (said_s, said_s))
            living.rescan()
            clock.now_s += ADOPT_AFTER_S / 2
    assert writers(living) == ["late", "living"]
