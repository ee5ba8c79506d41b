"""Load formats that would read other files than `auto`, or need a package, end the start with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.engine.vllm.start import weights
from kvferry.engine.vllm.start.weights import check_load_format
from kvferry.errors import ConfigError

KEYS = {"load_format": "models[chat].decode.engine.args.load_format"}
FORMATS = ("safetensors", "runai_streamer")


def folder_with(folder: Path, *names: str, index: object = None) -> Path:
    for name in names:
        (folder / name).write_bytes(b"x")
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is there."""
    monkeypatch.setattr(weights, "_MODULE", "json")


def why_refused(load_format: str, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        check_load_format({"load_format": load_format}, folder, KEYS)
    assert caught.value.message.startswith(f"models[chat].decode.engine.args.load_format: {load_format}")
    assert len(caught.value.message) < 500
    return caught.value.message


@pytest.mark.parametrize("load_format", FORMATS)
def test_files_that_auto_reads_too_are_taken(load_format: str, tmp_path: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    check_load_format({"load_format": load_format}, folder_with(tmp_path, "1.safetensors", "2.safetensors"), KEYS)
    check_load_format({"load_format": load_format}, folder_with(tmp_path, index=index), KEYS)


@pytest.mark.parametrize("load_format", FORMATS)
def test_folders_of_which_auto_reads_other_files_are_refused(load_format: str, tmp_path: Path) -> None:
    assert "has none" in why_refused(load_format, folder_with(tmp_path, "model.bin"))
    folder_with(tmp_path, "model.safetensors", f"consolidated{'x' * 200}.safetensors")
    assert "than auto, which takes consolidatedx" in why_refused(load_format, tmp_path)
    check_load_format({}, tmp_path, KEYS)
    # At the operator's risk, and with another digest.
    check_load_format({"load_format": "dummy"}, tmp_path, KEYS)


def test_a_file_that_the_index_leaves_out_is_refused_where_vllm_does_not_read_the_index(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "1.safetensors"}}
    folder_with(tmp_path, "1.safetensors", "2.safetensors", index=index)
    assert "also 2.safetensors, which model.safetensors.index.json leaves out" in why_refused(
        "runai_streamer", tmp_path
    )
    check_load_format({"load_format": "safetensors"}, tmp_path, KEYS)
    for broken in ([], {"weight_map": 3}, {"weight_map": {"a": []}}):
        folder_with(tmp_path, index=broken)
        with pytest.raises(ConfigError, match="no index of weights"):
            check_load_format({"load_format": "runai_streamer"}, tmp_path, KEYS)


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_MODULE", "no_such_module")
    assert "needs the package runai-model-streamer" in why_refused("runai_streamer", tmp_path)
