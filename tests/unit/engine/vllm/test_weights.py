"""The name of weights: the same for the same bytes, another for any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvferry.cli import main
from kvferry.engine.vllm.start import weights
from kvferry.engine.vllm.start.weights import MANIFEST, weights_named, weights_revision, write_manifest
from kvferry.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    (folder / "model-00001.safetensors").write_bytes(os.urandom(3000))
    (folder / "model-00002.safetensors").write_bytes(os.urandom(3000))
    (folder / "README.md").write_text("about")
    return folder


def test_copies_have_the_same_name_wherever_they_lie(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "under-another-name"
    copy.mkdir(parents=True)
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "README.md").write_text("something else")
    revision = weights_revision(folder, tmp_path / "cache")
    assert weights_revision(copy, tmp_path / "cache") == revision
    assert len(bytes.fromhex(revision)) == 16


def swap(folder: Path) -> None:
    one, two = folder / "model-00001.safetensors", folder / "model-00002.safetensors"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def flip_one_bit(folder: Path) -> None:
    file = folder / "model-00002.safetensors"
    content = bytearray(file.read_bytes())
    content[2999] ^= 1
    status = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as copying tools do


@pytest.mark.parametrize(
    "change",
    [
        flip_one_bit,
        swap,
        lambda folder: (folder / "config.json").write_text('{"num_hidden_layers": 3}'),
        lambda folder: (folder / "modeling.py").write_text("pass"),
        lambda folder: (folder / "model-00002.safetensors").unlink(),
    ],
    ids=["one-bit", "swapped", "config", "code", "one-less"],
)
def test_any_change_is_another_name(folder: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    before = weights_revision(folder, tmp_path / "cache")
    change(folder)
    assert weights_revision(folder, tmp_path / "cache") != before


def test_what_did_not_change_is_not_read_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = weights_revision(folder, tmp_path / "cache")
    monkeypatch.setattr(weights.xxhash, "xxh3_128", _of_names_only(weights.xxhash.xxh3_128))
    assert weights_revision(folder, tmp_path / "cache") == before


def _of_names_only(plain: Callable[[], object]) -> Callable[[], object]:
    """One digest, that of the whole, may be made."""
    left = [plain()]
    return left.pop


def test_a_cache_that_cannot_be_used_costs_a_reading(folder: Path, tmp_path: Path) -> None:
    before = weights_revision(folder, tmp_path / "cache")
    (record,) = (tmp_path / "cache").glob("*.json")
    record.write_text("{")
    assert weights_revision(folder, tmp_path / "cache") == before
    (tmp_path / "file").touch()
    assert weights_revision(folder, tmp_path / "file") == before


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*holds no model files"):
        weights_revision(tmp_path, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"model\.path.*nowhere.*No such file"):
        weights_revision(tmp_path / "nowhere", tmp_path / "cache")


def test_weights_of_a_manifest_are_not_read(folder: Path, tmp_path: Path) -> None:
    file = folder / "model-00002.safetensors"
    os.truncate(file, 32 << 20)
    read = weights_revision(folder, tmp_path / "cache")
    write_manifest(folder)
    with file.open("r+b") as opened:
        opened.seek(100 << 10)  # between the samples that are compared with a manifest
        opened.write(b"x")
    assert weights_revision(folder, tmp_path / "another") == read
    (folder / MANIFEST).unlink()
    # Digests of a manifest are not remembered as if the files had been read.
    assert weights_revision(folder, tmp_path / "another") != read


def test_other_files_are_read_beside_a_manifest(folder: Path, tmp_path: Path) -> None:
    write_manifest(folder)
    before = weights_revision(folder, tmp_path / "cache")
    (folder / "config.json").write_text('{"num_hidden_layers": 3}')
    assert weights_revision(folder, tmp_path / "cache") != before


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda folder: (folder / "model-00002.safetensors").unlink(), "does not fit.*model-00002"),
        (lambda folder: (folder / "model-00003.safetensors").write_bytes(b"x"), "does not fit.*model-00003"),
        (lambda folder: (folder / "model-00001.safetensors").write_bytes(b"x"), "does not fit.*model-00001"),
        (lambda folder: flip_one_bit(folder), "does not fit.*model-00002"),
        (lambda folder: (folder / MANIFEST).write_text("{"), "is no manifest"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {}, "version": 3}'), "version 3, not 2: write it"),
        (lambda folder: (folder / MANIFEST).write_text('{"files": {}}'), "version 1, not 2: write it anew"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[Path], object], named: str
) -> None:
    write_manifest(folder)
    change(folder)
    with pytest.raises(ConfigError, match=named):
        weights_revision(folder, tmp_path / "cache")


@pytest.mark.parametrize("name", ["model-00001.safetensors", "model-00002.safetensors"])
def test_other_weights_of_the_same_size_do_not_fit_a_manifest(folder: Path, tmp_path: Path, name: str) -> None:
    """All fine-tuned models of a base have its names and sizes, and some differ in few layers."""
    file = folder / name
    file.write_bytes(bytes(16 << 20))
    write_manifest(folder)
    with file.open("r+b") as opened:
        opened.seek(9 << 20)
        opened.write(os.urandom(1 << 20))
    with pytest.raises(ConfigError, match=f"does not fit.*{name}"):
        weights_revision(folder, tmp_path / "cache")


def test_samples_of_large_weights_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model-00001.safetensors"
    os.truncate(file, 1 << 40)
    pread, reads = os.pread, list[int]()

    def counted(fd: int, num_bytes: int, start: int) -> bytes:
        reads.append(num_bytes)
        return pread(fd, num_bytes, start)

    monkeypatch.setattr(os, "pread", counted)
    weights._digest_samples(file)
    assert sum(reads) <= 66 * 65536


def without_weights(folder: Path) -> Path:
    """What is left of a model for a gateway."""
    copy = folder.with_name("tokenizer-only")
    copy.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (copy / file.name).write_bytes(file.read_bytes())
    return copy


def test_a_manifest_names_the_weights_that_a_gateway_lacks(folder: Path, tmp_path: Path) -> None:
    write_manifest(folder)
    revision = weights_revision(folder, tmp_path / "cache")
    of_gateway = without_weights(folder)
    assert weights_named(of_gateway) == revision
    # As with weights: each other file counts.
    (of_gateway / "config.json").write_text('{"num_hidden_layers": 3}')
    assert weights_named(of_gateway) != revision


def test_without_a_manifest_nothing_names_them(folder: Path) -> None:
    assert weights_named(without_weights(folder)) == ""


def test_a_gateway_refuses_a_manifest_that_it_cannot_read(folder: Path) -> None:
    write_manifest(folder)
    of_gateway = without_weights(folder)
    (of_gateway / MANIFEST).write_text('{"files": {}}')
    with pytest.raises(ConfigError, match="version 1, not 2: write it anew"):
        weights_named(of_gateway)


def test_a_manifest_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weights"):
        write_manifest(tmp_path)


def test_a_manifest_that_cannot_be_written_is_named_with_the_reason(folder: Path) -> None:
    (folder / MANIFEST).mkdir()
    with pytest.raises(ConfigError, match=f"{MANIFEST} cannot be written: Is a directory"):
        write_manifest(folder)


def test_a_manifest_that_cannot_be_put_in_its_place_leaves_nothing(folder: Path) -> None:
    (folder / MANIFEST / "in the way").mkdir(parents=True)
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigError, match=MANIFEST):
        write_manifest(folder)
    assert sorted(folder.iterdir()) == before


def test_one_process_of_a_machine_reads(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines start at once."""
    reads: list[str] = []
    digest = weights._digest

    def counted(file: Path, before: object, *rest: object) -> object:
        entry = digest(file, before, *rest)  # type: ignore[arg-type]
        if entry is not before:
            reads.append(file.name)
        return entry

    monkeypatch.setattr(weights, "_digest", counted)
    with ThreadPoolExecutor(4) as threads:
        revisions = set(threads.map(lambda _: weights_revision(folder, tmp_path / "cache"), range(4)))
    assert len(revisions) == 1
    assert len(reads) == 3


def test_progress_is_logged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights, "_PROGRESS_S", 0.0)
    with caplog.at_level("INFO"):
        weights_revision(folder, tmp_path / "cache")
    assert "digest of the weights: 0.0 of 0.0 GB are read" in caplog.text


def test_the_command_writes_a_manifest(folder: Path, tmp_path: Path) -> None:
    before = weights_revision(folder, tmp_path / "cache")
    result = CliRunner().invoke(main, ["model", "manifest", str(folder)])
    assert result.exit_code == 0, result.output
    assert str(folder / MANIFEST) in result.output
    assert (folder / MANIFEST).stat().st_mode & 0o777 == 0o644
    assert weights_revision(folder, tmp_path / "another") == before
    assert CliRunner().invoke(main, ["model", "manifest", str(tmp_path / "cache")]).exit_code == 2
