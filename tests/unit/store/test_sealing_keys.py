"""Rotation of sealing keys, what each has sealed, and the removal of a tenant's chunks."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvferry.cli import main
from kvferry.errors import TierError
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import fsck, seal_counts
from kvferry_keeper.store.keyring import SecretsKeyring
from kvferry_keeper.store.seal_counts import SealCounts
from kvferry_keeper.store.volume import Outcome, Volume
from support.tier_chunks import LAYOUT, chunk, chunk_files, empty, payload, quarantined, truth
from support.tier_volumes import Opened, opened_volumes

DIGEST = LAYOUT.digest
OLD, NEW = b"o" * 32, b"n" * 32
ACME = Namespace("acme")
KEY = b"12345678"


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    with opened_volumes(tmp_path) as open_volume:

        def open_sealed(*secrets: bytes, **values: Any) -> Volume:
            return open_volume(chunks=16, keyring=SecretsKeyring({"*": secrets}) if secrets else None, **values)

        yield open_sealed


def put(volume: Volume, *numbers: int, namespace: Namespace = ACME) -> list[Outcome]:
    return [volume.write(DIGEST, chunk(number, namespace), payload(chunk(number, namespace))) for number in numbers]


def get(volume: Volume, number: int, namespace: Namespace = ACME) -> Outcome:
    into = empty()
    outcome = volume.read(DIGEST, chunk(number, namespace), into)
    assert outcome is not Outcome.OK or bytes(into) == truth(chunk(number, namespace))
    return outcome


def test_after_a_rotation_old_chunks_are_read_and_new_ones_are_sealed_anew(opened: Opened, tmp_path: Path) -> None:
    before = opened(OLD)
    put(before, 1, 2)
    before.close()
    during = opened(NEW, OLD)
    put(during, 3)
    assert get(during, 1) is get(during, 3) is Outcome.OK
    usages = fsck.key_usage(tmp_path / "v", SecretsKeyring({"*": [NEW, OLD]}))
    assert [(usage.num_chunks, usage.secret) for usage in usages] == [(2, 2), (1, 1)]
    during.close()
    after = opened(NEW)
    assert get(after, 2) is Outcome.UNDECRYPTABLE
    assert get(after, 3) is Outcome.OK


def test_a_chunk_of_another_volume_has_another_key(opened: Opened, tmp_path: Path) -> None:
    """Else nonces of all volumes would count together, and files could be moved between volumes."""
    volume = opened(OLD)
    put(volume, 1)
    (file,) = chunk_files(tmp_path / "v")
    volume.close()
    (tmp_path / "v" / "volume.json").unlink()
    other = opened(OLD)
    assert file.exists()
    assert get(other, 1) is Outcome.UNDECRYPTABLE


def test_seals_are_counted_over_restarts_and_writers(opened: Opened, tmp_path: Path) -> None:
    one, two = opened(OLD, writer="one", shared=True), opened(OLD, writer="two", shared=True)
    put(one, 1, 2)
    put(two, 3)
    put(two, 3)  # exists
    for volume in (one, two):
        volume.close()
    again = opened(OLD, writer="one", shared=True)
    put(again, 4)
    again.record()
    (usage,) = fsck.key_usage(tmp_path / "v", None)
    assert (usage.num_sealed, usage.num_chunks, usage.namespaces) == (4, 4, (ACME,))


def test_a_key_that_has_sealed_too_many_seals_no_more(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seal_counts, "WARN_AT", 2)
    monkeypatch.setattr(seal_counts, "MAX_SEALS", 4)
    volume = opened(OLD)
    assert put(volume, *range(6)) == [Outcome.OK] * 4 + [Outcome.REFUSED] * 2
    assert caplog.text.count("put a new secret before its secret") == 2
    assert get(volume, 1) is Outcome.OK
    volume.close()
    volume = opened(OLD)
    assert put(volume, 7) == [Outcome.REFUSED]
    volume.close()
    assert put(opened(NEW, OLD), 7) == [Outcome.OK]


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": "b"}', b"[]", b'{"\xff": 1}', b'{"a": 1, "b": -1}'])
@pytest.mark.parametrize("writer", ["w", "other"])
def test_nothing_is_sealed_while_counts_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, writer: str, content: bytes
) -> None:
    file = tmp_path / "keys" / f"{writer}.json"
    file.parent.mkdir()
    file.write_bytes(content)
    counts = SealCounts(tmp_path, "w")
    counts.load()
    for _ in range(2):
        assert not counts.may_seal(KEY)
    assert caplog.text.count(f"{file} cannot be read") == 1
    counts.absorb("other")
    assert counts.save() is (writer == "other")
    assert file.read_bytes() == content
    assert not seal_counts.read_all(tmp_path)
    assert f"{file} cannot be read: its seals are not counted" in caplog.text
    # As the log says: its operator takes it away.
    file.unlink()
    assert counts.save()
    counts.load_others()
    assert counts.may_seal(KEY)
    counts.add(KEY)
    assert counts.save()
    assert json.loads((tmp_path / "keys" / "w.json").read_bytes()) == {KEY.hex(): 1}


def test_counts_outlive_a_full_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "gone.json").write_text(json.dumps({KEY.hex(): seal_counts.MAX_SEALS - 1}))
    counts = SealCounts(tmp_path, "w")
    counts.load()
    counts.add(KEY)
    with monkeypatch.context() as patched:
        # At the end of a write, and before the file has its name: else a power failure could leave an empty one.
        patched.setattr(os, "fsync", fail)
        counts.absorb("gone")
        assert not counts.save()
    counts.load_others()
    assert seal_counts.read_all(tmp_path) == {KEY.hex(): seal_counts.MAX_SEALS - 1}
    assert not counts.may_seal(KEY)
    assert counts.save()
    assert seal_counts.read_all(tmp_path) == {KEY.hex(): seal_counts.MAX_SEALS}
    counts.absorb("gone")
    assert [file.name for file in keys.iterdir()] == ["w.json"]
    again = SealCounts(tmp_path, "w")
    again.load()
    assert not again.may_seal(KEY)


class Drive:
    """Takes counts, or not, at the end of a write."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.num_writes = 0
        self.on_write = lambda: None
        (folder / "keys").mkdir()
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        self.num_writes += 1
        self.on_write()
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Drive:
    return Drive(tmp_path, monkeypatch)


def counts_at(path: Path, **sealed: int) -> SealCounts:
    """Return the counts of a writer `w` beside those that other writers have saved."""
    for writer, num in sealed.items():
        (path / "keys" / f"{writer}.json").write_text(json.dumps({KEY.hex(): num}))
    counts = SealCounts(path, "w")
    counts.load()
    return counts


def test_nothing_is_sealed_before_counts_were_read(drive: Drive, tmp_path: Path) -> None:
    counts = SealCounts(tmp_path, "w")
    assert repr(counts) == "<SealCounts of 0 keys>"
    assert not counts.may_seal(KEY)
    counts.load()
    assert counts.may_seal(KEY)


def test_counts_are_saved_only_when_they_changed(drive: Drive, tmp_path: Path) -> None:
    counts = counts_at(tmp_path, w=0)
    assert counts.save()
    assert drive.num_writes == 0
    counts.add(KEY)
    for _ in range(2):
        assert counts.save()
        assert drive.num_writes == 1


def test_ones_own_seals_count_once_and_those_of_others_too(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seal_counts, "WARN_AT", 4)
    monkeypatch.setattr(seal_counts, "MAX_SEALS", 5)
    counts = counts_at(tmp_path, other=2)
    counts.add(KEY)
    assert counts.save()
    counts.load_others()
    assert counts.may_seal(KEY)
    assert not caplog.messages
    said = f"volume {tmp_path}: the key {KEY.hex()} has sealed %s; put a new secret before its secret in the key file"
    for consequence, may_seal in (
        ("4 chunks, at most 5 are", True),
        ("5 chunks, no chunk is sealed with it any more", False),
    ):
        counts.add(KEY)
        for _ in range(2):
            assert counts.may_seal(KEY) is may_seal
        assert caplog.messages[-1] == said % consequence
    assert len(caplog.messages) == 2


def test_so_many_seals_that_no_drive_has_written_down_are_the_last_ones(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A restart forgets them, and a nonce could repeat."""
    monkeypatch.setattr(seal_counts, "MAX_UNSAVED", 3)
    counts = counts_at(tmp_path)

    def seal(num: int) -> list[bool]:
        may_seal = []
        for _ in range(num):
            may_seal.append(counts.may_seal(KEY))
            counts.add(KEY)
        return may_seal

    assert seal(5) == [True] * 5, "the drive was not asked yet"
    assert counts.save()
    drive.is_full = True
    assert seal(1) == [True]
    for _ in range(2):
        assert not counts.save()
        error = os.strerror(errno.ENOSPC)
        assert caplog.messages[-1].startswith(
            f"volume {tmp_path}: it is not written down how many chunks were sealed: "
        )
        assert error in caplog.messages[-1]
    assert seal(3) == [True, True, False]
    assert f"the key {KEY.hex()} has sealed 8 chunks, of which 3 cannot be written down: none is sealed" in caplog.text
    drive.is_full = False
    assert counts.save()
    assert seal(5) == [True] * 5
    assert counts.save()
    assert seal_counts.read_all(tmp_path) == {KEY.hex(): 14}


def test_seals_that_were_added_while_counts_were_written_are_unsaved_too(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seal_counts, "MAX_UNSAVED", 3)
    counts = counts_at(tmp_path)
    counts.add(KEY)
    drive.is_full, drive.on_write = True, lambda: counts.add(KEY)
    assert not counts.save()
    assert counts.may_seal(KEY)
    counts.add(KEY)
    assert not counts.may_seal(KEY)


def test_a_file_that_another_keeper_absorbed_first_is_no_fault(drive: Drive, tmp_path: Path) -> None:
    counts = counts_at(tmp_path, gone=2)
    drive.on_write = lambda: (tmp_path / "keys" / "gone.json").unlink()
    counts.absorb("gone")
    assert seal_counts.read_all(tmp_path) == {KEY.hex(): 2}


def test_a_tenant_is_purged_from_all_writers_and_from_quarantine(opened: Opened, tmp_path: Path) -> None:
    one, two = opened(writer="one", shared=True), opened(writer="two", shared=True)
    put(one, 1, 2)
    put(one, 3, namespace=Namespace("acme", 1))
    put(one, 4, namespace=Namespace("acme-2"))
    put(two, 5)
    (bad,) = (tmp_path / "v").rglob(f"one/**/{chunk(2).key.hex()}-*")
    bad.write_bytes(bytes(bad.stat().st_size))
    assert get(one, 2) is Outcome.CORRUPT_HEADER
    assert quarantined(tmp_path / "v")
    assert fsck.purge(tmp_path / "v", "acme", epoch=1) == 1
    assert fsck.purge(tmp_path / "v", "acme") == 2
    assert not quarantined(tmp_path / "v")
    # Keepers that serve the volume find nothing there, and go on.
    assert get(one, 1) in (Outcome.GONE, Outcome.MISSING)
    assert get(two, 5) in (Outcome.GONE, Outcome.MISSING)
    assert get(one, 4, Namespace("acme-2")) is Outcome.OK
    assert put(one, 1) == [Outcome.OK]
    for volume in (one, two):
        volume.rescan()
        volume.close()  # the ledger still counts files that were in quarantine


def test_commands(opened: Opened, tmp_path: Path) -> None:
    volume = opened(OLD)
    put(volume, 1, 2)
    volume.close()
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"*": [NEW.hex(), OLD.hex()]}))
    keys.chmod(0o600)
    where = str(tmp_path / "v")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["tier", *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    (row,) = json.loads(run("keys", where, "--keys", str(keys), "--json"))["keys"]
    assert (row["pages"], row["sealed"], row["secret"], row["tenants"]) == (2, 2, 2, ["acme.0"])
    assert "acme.0" in run("keys", where, "--keys", str(keys))
    assert OLD.hex() not in run("keys", where, "--keys", str(keys))
    assert "removed 2 chunks of acme" in run("purge", where, "--tenant", "acme")
    assert json.loads(run("purge", where, "--tenant", "acme", "--json")) == {"removed": 0}
    assert "no chunks of acme" in run("purge", where, "--tenant", "acme")
    with pytest.raises(TierError, match="'Bad/Name': lower-case"):
        fsck.purge(Path(where), "Bad/Name")
    with pytest.raises(TierError):
        fsck.purge(tmp_path, "acme")
