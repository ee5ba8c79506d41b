"""The name of weights: the same for the same bytes, another for any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.engine.vllm import weights
from kvferry.engine.vllm.weights import weights_revision
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
    (record,) = (tmp_path / "cache").iterdir()
    record.write_text("{")
    assert weights_revision(folder, tmp_path / "cache") == before
    (tmp_path / "file").touch()
    assert weights_revision(folder, tmp_path / "file") == before


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path.*holds no model files"):
        weights_revision(tmp_path, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"model\.path.*nowhere.*No such file"):
        weights_revision(tmp_path / "nowhere", tmp_path / "cache")
