"""What a process says of the model that it serves, for the other end of a link to compare."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvferry import config as configuration
from kvferry.link.identity import Identity, why_incompatible
from kvferry.link.served_model import has_mistral_tokenizer, identity


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))


def folder_with(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}", encoding="utf-8")
    return folder


def identity_of(folder: Path) -> Identity:
    model = {"path": str(folder), "served_name": "m", "revision": "1"}
    return identity(configuration.parse({"model": model}), str(folder))


TOKENIZERS = ("config.json", "tokenizer.json", "tekken.json")


def test_a_gateway_without_weights_does_not_take_another_tokenizer_unnoticed(tmp_path: Path) -> None:
    gateway = folder_with(tmp_path / "gateway", *TOKENIZERS)
    worker = folder_with(tmp_path / "worker", *TOKENIZERS, "consolidated.safetensors")
    reason = why_incompatible(identity_of(gateway), identity_of(worker))
    assert reason.startswith("its tokenizer is ")
    assert "of mistral_common', and here it is" in reason
    # As elsewhere, and where one kind is left.
    other = shutil.copytree(worker, tmp_path / "other")
    assert why_incompatible(identity_of(other), identity_of(worker)) == ""
    (worker / "consolidated.safetensors").rename(worker / "model.safetensors")
    assert why_incompatible(identity_of(gateway), identity_of(worker)) == ""


@pytest.mark.parametrize(
    ("names", "is_mistrals"),
    [
        ((), False),
        (("tekken.json",), False),
        (("consolidated.safetensors", "tokenizer.model"), False),
        (("consolidated.safetensors", "tokenizer.model.v3"), True),
        (("consolidated-00001-of-2.safetensors", "tekken.json"), True),
        (("original/consolidated.safetensors", "tekken.json"), True),
        (("consolidated.pth", "tekken.json"), False),
    ],
)
def test_kinds_of_tokenizers_are_told_by_names(names: tuple[str, ...], is_mistrals: bool, tmp_path: Path) -> None:
    assert has_mistral_tokenizer(folder_with(tmp_path, *names)) is is_mistrals
    assert identity_of(tmp_path).model.tokenizer.endswith(" of mistral_common") is is_mistrals


def test_a_folder_without_a_tokenizer_is_not_compared(tmp_path: Path) -> None:
    assert identity_of(tmp_path).model.tokenizer == identity_of(tmp_path / "none").model.tokenizer == ""
