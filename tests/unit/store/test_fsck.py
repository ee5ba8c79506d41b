"""A volume's folder looked at from outside, and the commands that do it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvferry.cli import main
from kvferry.errors import TierError
from kvferry.tenancy.namespace import Namespace
from kvferry_keeper.store import fsck
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
)

ACME = Namespace("acme", 2)
KEYRING = SecretsKeyring({"*": SECRET})
NUM_CHUNKS = 9


def made(path: Path, keyring: SecretsKeyring | None = None) -> Path:
    """A volume of nine chunks, closed again."""
    volume = Volume(path, capacity_bytes=64 * CHUNK_BYTES, keyring=keyring)
    volume.open()
    volume.add_layout(LAYOUT)
    for number in range(6):
        assert volume.write(LAYOUT.digest, chunk(number), payload(chunk(number))) is Outcome.OK
    for number in range(3):
        of = chunk(number, ACME)
        assert volume.write(LARGER.digest, of, payload(of, LARGER.digest)) is Outcome.OK
    volume.close()
    return path


def spoiled(path: Path) -> dict[str, int]:
    """Six faults; returns cause -> count."""
    small = [file for file in chunk_files(path) if file.stat().st_size == CHUNK_BYTES]
    flip(small[0], 8 * 20)
    flip(small[1], 8 * 5000)
    os.truncate(small[2], 4096)
    small[3].write_bytes(small[4].read_bytes())
    (small[5].parent / "notes.txt").write_text("mine")
    (path / "pages" / "local" / "lost+found").mkdir()
    return {"corrupt_header": 1, "corrupt_payload": 1, "truncated": 1, "wrong_key": 1, "foreign": 2}


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["tier", *map(str, arguments)])


@pytest.mark.parametrize("keyring", [None, KEYRING], ids=["plain", "sealed"])
def test_a_clean_volume_has_no_faults(tmp_path: Path, keyring: SecretsKeyring | None) -> None:
    looked: list[None] = []
    report = fsck.verify_volume(made(tmp_path / "v", keyring), keyring=keyring, advance=lambda: looked.append(None))
    assert (report.num_chunks, report.num_unchecked, report.faults) == (NUM_CHUNKS, 0, [])
    assert report.num_bytes == sum(file.stat().st_size for file in chunk_files(tmp_path / "v"))
    assert len(looked) == NUM_CHUNKS == fsck.count_files(tmp_path / "v")


def test_every_fault_is_named_and_nothing_is_touched(tmp_path: Path) -> None:
    path = made(tmp_path / "v")
    causes = spoiled(path)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    report = fsck.verify_volume(path)
    assert report.by_cause == causes
    assert not any(fault.mended_to for fault in report.faults)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_mending_moves_what_is_bad_and_leaves_a_clean_volume(tmp_path: Path) -> None:
    path = made(tmp_path / "v")
    causes = spoiled(path)
    (path / "tmp" / "local" / "5.page").write_bytes(b"half")
    report = fsck.verify_volume(path, mend=True)
    assert report.by_cause == causes | {"left_over": 1}
    assert all(fault.mended_to for fault in report.faults)
    again = fsck.verify_volume(path)
    assert (again.num_chunks, again.faults) == (5, [])
    assert len(quarantined(path)) == 5  # four chunks, and what was written beside them
    assert any(file.read_bytes() == b"mine" for file in quarantined(path))
    volume = Volume(path, capacity_bytes=64 * CHUNK_BYTES)
    volume.open()
    volume.check()
    assert volume.stats.num_chunks == 5
    volume.close()


def test_without_its_key_a_sealed_chunk_is_checked_by_its_header(tmp_path: Path) -> None:
    path = made(tmp_path / "v", KEYRING)
    files = chunk_files(path)
    flip(files[0], 8 * 100)
    flip(files[1], 8 * 6000)
    report = fsck.verify_volume(path)
    assert report.by_cause == {"corrupt_header": 1}
    assert report.num_unchecked == NUM_CHUNKS - 1
    assert fsck.verify_volume(path, keyring=KEYRING).by_cause == {"corrupt_header": 1, "corrupt_payload": 1}
    others = [file for file in files if not any(part.startswith("acme.") for part in file.parts)]
    num_unchecked = fsck.verify_volume(path, keyring=SecretsKeyring({"acme": SECRET})).num_unchecked
    assert num_unchecked == len(others) - (files[0] in others) > 0
    another = SecretsKeyring({"*": SECRET[::-1]})
    assert fsck.verify_volume(path, keyring=another).by_cause == {"corrupt_header": 1, "undecryptable": NUM_CHUNKS - 1}


def test_a_plain_chunk_where_chunks_are_sealed_is_a_fault(tmp_path: Path) -> None:
    assert fsck.verify_volume(made(tmp_path / "v"), keyring=KEYRING).by_cause == {"undecryptable": NUM_CHUNKS}


def test_mending_with_another_key_file_moves_no_sealed_chunk(tmp_path: Path) -> None:
    path = made(tmp_path / "v", KEYRING)
    plain = chunk_files(made(tmp_path / "plain"))[0]
    (path / plain.relative_to(tmp_path / "plain")).write_bytes(plain.read_bytes())
    another = SecretsKeyring({"*": SECRET[::-1]})
    report = fsck.verify_volume(path, keyring=another, mend=True)
    assert report.by_cause == {"undecryptable": NUM_CHUNKS}
    assert [Path(fault.path).name for fault in report.faults if fault.mended_to] == [plain.name]
    again = fsck.verify_volume(path, keyring=KEYRING)
    assert (again.num_chunks, again.faults) == (NUM_CHUNKS - 1, [])


def test_a_volume_in_use_is_read_and_no_file_of_it_moved(tmp_path: Path) -> None:
    path = made(tmp_path / "v")
    for shared in (False, True):
        keeper = Volume(path, capacity_bytes=64 * CHUNK_BYTES, shared=shared)
        keeper.open()
        assert fsck.verify_volume(path).faults == []
        with pytest.raises(TierError, match="served by a keeper"):
            fsck.verify_volume(path, mend=True)
        assert keeper.read(LAYOUT.digest, chunk(1), empty()) is Outcome.OK
        keeper.close()
    assert fsck.verify_volume(path, mend=True).faults == []


@pytest.mark.parametrize("tool", [fsck.verify_volume, lambda path: fsck.key_usage(path, None)], ids=["fsck", "keys"])
def test_tools_leave_the_order_of_evictions(tmp_path: Path, tool: Callable[[Path], object]) -> None:
    path = made(tmp_path / "v")
    days_ago_ns = time.time_ns() - 3 * 86400 * 10**9  # so that relatime would count the tool's reads
    for number, file in enumerate(chunk_files(path)):
        os.utime(file, ns=(days_ago_ns + number, 0))
    tool(path)
    assert [file.stat().st_atime_ns for file in chunk_files(path)] == [days_ago_ns + n for n in range(NUM_CHUNKS)]


def test_what_is_no_volume_is_said(tmp_path: Path) -> None:
    for look in (fsck.verify_volume, fsck.count_files, fsck.disk_usage, lambda path: list(fsck.list_chunks(path))):
        with pytest.raises(TierError, match="no volume"):
            look(tmp_path)


# The commands


def test_fsck_exits_with_0_1_or_2(tmp_path: Path) -> None:
    path = made(tmp_path / "v")
    clean = run("fsck", path)
    assert (clean.exit_code, clean.output) == (0, "9 chunks, 132.0 KiB: all whole\n")
    causes = spoiled(path)
    bad = run("fsck", path)
    assert bad.exit_code == 1
    for cause in causes:
        assert cause in bad.output
    assert "notes.txt" in bad.output
    mended = run("fsck", "--mend", "--json", path)
    assert mended.exit_code == 1
    report = json.loads(mended.output)
    assert report["by_cause"] == causes
    assert report["faults"] == len(report["files"]) == 6
    assert run("fsck", path).exit_code == 0


@pytest.mark.parametrize("command", ["fsck", "ls", "du"])
def test_asked_for_wrongly_is_2(tmp_path: Path, command: str) -> None:
    for path, said in ((tmp_path, "no volume"), (tmp_path / "absent", "does not exist")):
        result = run(command, path)
        assert result.exit_code == 2
        assert said in result.output
        assert "Traceback" not in result.output
    assert run(command).exit_code == 2


def test_mending_a_volume_in_use_is_2(tmp_path: Path) -> None:
    keeper = Volume(made(tmp_path / "v"), capacity_bytes=64 * CHUNK_BYTES)
    keeper.open()
    result = run("fsck", "--mend", tmp_path / "v")
    assert result.exit_code == 2
    assert "served by a keeper" in result.output
    keeper.close()


def test_fsck_takes_a_file_of_keys(tmp_path: Path) -> None:
    path = made(tmp_path / "v", KEYRING)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"*": SECRET.hex()}))
    keys.chmod(0o600)
    assert "9 sealed ones by their headers only" in run("fsck", path).output
    checked = run("fsck", "--keys", keys, path)
    assert (checked.exit_code, "headers only" in checked.output) == (0, False)
    keys.chmod(0o644)
    assert run("fsck", "--keys", keys, path).exit_code == 2


def test_ls_lists_chunks_newest_first(tmp_path: Path) -> None:
    path = made(tmp_path / "v")
    listed = [json.loads(line) for line in run("ls", "--json", "--limit", "0", path).output.splitlines()]
    assert len(listed) == NUM_CHUNKS
    assert [one["modified_s"] for one in listed] == sorted((one["modified_s"] for one in listed), reverse=True)
    assert {(one["key"], one["tenant"], one["epoch"]) for one in listed} >= {(chunk(1).key.hex(), "acme", 2)}
    assert all(Path(one["path"]).stat().st_size == one["bytes"] for one in listed)
    shown = run("ls", "--limit", "4", path)
    assert "and 5 more" in shown.output
    assert "acme.2" in run("ls", path).output


def test_ls_shows_both_ends_of_keys(tmp_path: Path) -> None:
    # Keys of the simulated engine begin with zeros.
    shown = run("ls", made(tmp_path / "v")).output
    for number in range(6):
        key = chunk(number).key.hex()
        assert f"{key[:8]}…{key[-16:]}" in shown


def test_du_adds_up(tmp_path: Path) -> None:
    path = made(tmp_path / "v")
    flip(chunk_files(path)[0], 77)
    fsck.verify_volume(path, mend=True)
    used = json.loads(run("du", "--json", path).output)
    assert sum(use["pages"] for use in used["uses"]) == NUM_CHUNKS - 1
    assert sum(use["bytes"] for use in used["uses"]) == sum(file.stat().st_size for file in chunk_files(path))
    assert used["layouts"][LAYOUT.digest.hex()]["model"] == "smollm2"
    assert used["quarantined_bytes"] == sum(file.stat().st_size for file in quarantined(path))
    shown = run("du", path).output
    for word in ("smollm2", "acme.2", "default.0", "in quarantine", "all"):
        assert word in shown
