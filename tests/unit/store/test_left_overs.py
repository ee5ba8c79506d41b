"""Files of keepers that were killed, and tools beside keepers of other nodes."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.errors import TierError
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import folder, fsck, paths
from kvferry_keeper.store.folder import ALIVE_FOR_S
from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import LAYOUT, chunk, flip, payload
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest
ACME, OTHER = Namespace("acme"), Namespace("other")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:
        yield open_volume


def killed(volume: Volume, namespace: Namespace, *, silent_for_s: float = 0.0) -> Path:
    """Close a volume as if its keeper had been killed before it renamed a chunk that it had written."""
    of = chunk(1, namespace)
    assert volume.write(DIGEST, of, payload(of)) is Outcome.OK
    file = volume.path / paths.chunk_path(volume.writer, DIGEST, of)
    volume._index.forget(volume._index.entries()[0])
    volume.close()
    left = volume.path / paths.TEMPORARY / volume.writer / "0.page"
    file.rename(left)
    say_alive(volume, silent_for_s)
    return left


def say_alive(volume: Volume, ago_s: float = 0.0) -> None:
    said_s = time.time() - ago_s
    os.utime(volume.path / paths.TEMPORARY / f"{volume.writer}.lock", (said_s, said_s))


def without_shared_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "lock", lambda file, *, shared: os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    monkeypatch.setattr(folder, "_BOOT_ID", Path("/proc/none"))  # as if all else ran on other machines


@pytest.mark.parametrize("silent_for_s", [0.0, ALIVE_FOR_S + 1])
def test_a_purge_finds_what_a_killed_keeper_was_writing(opened: Opened, silent_for_s: float) -> None:
    left = killed(opened(), ACME, silent_for_s=silent_for_s)
    fsck.purge(left.parents[2], "acme")
    assert not left.exists()


def test_a_purge_finds_the_rest_of_a_recycled_file(opened: Opened) -> None:
    """Its header names the tenant whose chunk was to replace another's."""
    left = killed(opened(), OTHER, silent_for_s=ALIVE_FOR_S + 1)
    fsck.purge(left.parents[2], "acme")
    assert not left.exists()


def test_a_purge_finds_the_files_of_a_writer_with_nothing_else(opened: Opened) -> None:
    left = killed(opened(shared=True, writer="gone"), ACME)
    (left.parents[1] / "gone.lock").unlink()
    opened(shared=True, writer="living").purge(ACME)
    assert not left.exists()
    assert not (left.parents[1] / "gone.lock").exists()


@pytest.mark.parametrize("header", [OTHER, None], ids=["another tenant", "not written yet"])
def test_a_purge_leaves_unfinished_writes_of_another_node(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, header: Namespace | None
) -> None:
    left = killed(opened(shared=True, writer="elsewhere"), OTHER)
    if header is None:
        left.write_bytes(b"")
    without_shared_locks(monkeypatch)
    fsck.purge(left.parents[2], "acme")
    assert left.exists()


def test_a_purge_leaves_unfinished_writes_of_this_node(opened: Opened) -> None:
    volume = opened()
    unfinished = volume.path / paths.TEMPORARY / "local" / "5.page"
    unfinished.write_bytes(b"half")
    say_alive(volume, 2 * ALIVE_FOR_S)
    fsck.purge(volume.path, "acme")
    unfinished.unlink()  # it was there


def test_no_file_is_moved_beside_a_keeper_of_another_node(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    without_shared_locks(monkeypatch)
    elsewhere = opened(shared=True, writer="elsewhere")
    unfinished = elsewhere.path / paths.TEMPORARY / "elsewhere" / "5.page"
    unfinished.write_bytes(b"half")
    with pytest.raises(TierError, match="the keeper of elsewhere lived less than 300 s ago"):
        fsck.verify_volume(elsewhere.path, mend=True)
    assert unfinished.exists()
    assert fsck.verify_volume(elsewhere.path).faults == []
    elsewhere.close()
    assert fsck.verify_volume(elsewhere.path, mend=True).by_cause == {"left_over": 1}


def test_a_keeper_that_starts_during_a_mending_keeps_its_writes(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_shared_locks(monkeypatch)
    volume = opened(shared=True, writer="a")
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.OK
    volume.close()
    unfinished: list[Path] = []

    def start() -> None:
        unfinished.append(volume.path / paths.TEMPORARY / opened(shared=True, writer="b").writer / "0.page")
        unfinished[0].write_bytes(b"half")

    with pytest.raises(TierError, match="the keeper of b lived less than"):
        fsck.verify_volume(volume.path, mend=True, advance=start)
    assert unfinished[0].exists()
    unfinished[0].unlink()


def vanished(volume: Volume, silent_for_s: float) -> Path:
    """Kill a volume's keeper, which last said so long ago that it lives; return a bad chunk."""
    assert volume.write(DIGEST, chunk(1), payload(chunk(1))) is Outcome.OK
    file = volume.path / paths.chunk_path(volume.writer, DIGEST, chunk(1))
    flip(file, 8 * 5000)
    while volume._locks:
        os.close(volume._locks.pop())
    say_alive(volume, silent_for_s)
    return file


def test_a_keeper_that_was_killed_on_this_machine_delays_no_mending(opened: Opened) -> None:
    volume = opened(shared=True)
    vanished(volume, 0.0)
    assert fsck.verify_volume(volume.path, mend=True).by_cause == {"corrupt_payload": 1}


@pytest.mark.parametrize("how", ["another machine", "another mount", "an earlier release"])
def test_a_keeper_that_may_live_elsewhere_delays_a_mending(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    volume = opened()
    file = vanished(volume, ALIVE_FOR_S - 60)
    lock_file = volume.path / paths.TEMPORARY / f"{volume.writer}.lock"
    if how == "another machine":
        (tmp_path / "boot_id").write_text("another machine")
        monkeypatch.setattr(folder, "_BOOT_ID", tmp_path / "boot_id")
    elif how == "another mount":
        boot_id, _, device = lock_file.read_text().partition(" ")
        lock_file.write_text(f"{boot_id} {int(device) + 1}")
    else:
        lock_file.write_text("")
    say_alive(volume, ALIVE_FOR_S - 60)
    with pytest.raises(TierError, match="the keeper of local lived"):
        fsck.verify_volume(volume.path, mend=True)
    assert file.exists()
    say_alive(volume, ALIVE_FOR_S + 60)
    assert fsck.verify_volume(volume.path, mend=True).by_cause == {"corrupt_payload": 1}


def mounted_as(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    """Let all mounts be of one kind of file system."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    (tmp_path / "mountinfo").write_text(
        "\n".join(f"{mount.partition(' - ')[0]} - {kind} /dev/x rw,local_lock=all" for mount in mounts)
    )
    monkeypatch.setattr(folder, "_MOUNTS", tmp_path / "mountinfo")


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "fuse.gcsfuse", "ceph", "lustre", "virtiofs", "fuseblk", "9p"])
def test_where_other_machines_may_have_the_volume_a_killed_keeper_may_live(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    """Its note may be of a clone of this machine with the same boot id, whose locks are not seen here."""
    volume = opened(shared=True)
    file = vanished(volume, 0.0)
    mounted_as(monkeypatch, tmp_path, kind)
    with pytest.raises(TierError, match=r"lived less than 300 s ago"):
        fsck.verify_volume(volume.path, mend=True)
    assert file.exists()
    mounted_as(monkeypatch, tmp_path, "ext4")
    assert fsck.verify_volume(volume.path, mend=True).by_cause == {"corrupt_payload": 1}


def test_a_mount_that_is_not_known_may_be_anywhere(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    volume = opened()
    vanished(volume, 0.0)
    for name, where in (("_MOUNTS", "none"), ("_MOUNTS", "empty"), ("_DESCRIPTORS", "none")):
        (tmp_path / "empty").touch()
        with monkeypatch.context() as patched:
            patched.setattr(folder, name, tmp_path / where)
            assert folder.living_writers(volume.path) == {"local"}
    assert folder.living_writers(volume.path) == set()


@pytest.mark.parametrize("how", ["the same file", "a new file"])
def test_a_keeper_that_starts_between_the_look_at_a_lock_and_its_taking_lives(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    volume = opened()
    vanished(volume, 0.0)
    lock_file = volume.path / paths.TEMPORARY / f"{volume.writer}.lock"
    take, held = fcntl.flock, []

    def start_keeper_first(fd: int, operation: int) -> None:
        if not held:
            if how == "a new file":
                lock_file.unlink()
                held.append(os.open(lock_file, os.O_RDWR | os.O_CREAT, 0o600))
                take(held[0], operation)
                folder.note_holder(held[0])
            else:  # of a machine whose locks are not seen
                held.append(os.open(lock_file, os.O_RDWR))
                os.pwrite(held[0], b"elsewhere 1", 0)
        take(fd, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", start_keeper_first)
        assert folder.living_writers(volume.path) == {"local"}
    os.close(held[0])


def test_an_error_names_a_limited_number_of_keepers(opened: Opened) -> None:
    volume = opened()
    volume.close()
    for number in range(fsck.MAX_NAMED + 1):
        (volume.path / paths.TEMPORARY / f"w{number:02}.lock").touch()
    with pytest.raises(TierError, match=r"w09 and 1 more lived"):
        fsck.verify_volume(volume.path, mend=True)
