"""From a model's name to its folder; the conversion itself is run by `make setup` and by the model tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import model_folder
from kvferry.errors import ConfigError
from kvferry.model_folder import cache_folder, from_hub, main, resolve
from support.child_imports import import_environment
from support.hub_server import MODEL, hub_server
from support.waiting import PATIENCE_S


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_cache_is_where_it_is_told() -> None:
    assert cache_folder({"KVFERRY_CACHE": "/c", "XDG_CACHE_HOME": "/x"}) == Path("/c")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/kvferry")
    assert cache_folder({"XDG_CACHE_HOME": "relative"}) == Path("~/.cache/kvferry").expanduser()
    assert cache_folder({}) == Path("~/.cache/kvferry").expanduser()


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "mine")
    assert resolve(str(folder)) == folder


def test_every_way_to_name_a_folder_gives_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Engines compare the model's path as a string before they exchange pages.
    folder = make_model(tmp_path / "mine")
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path)
    assert {resolve(name) for name in ("mine", "./mine/", "link", str(tmp_path / "x" / ".." / "mine"))} == {folder}


@pytest.mark.parametrize("name", ["/absent/model", "./absent", "~/absent-model"])
def test_a_path_without_a_model_is_not_taken_for_a_hub_id(name: str) -> None:
    with pytest.raises(ConfigError, match=r"not a folder with a config\.json") as caught:
        resolve(name)
    assert name in caught.value.message
    assert "`default`" in caught.value.message


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("x" * 300, "File name too long"),
        ("/" + "x" * 5000, "File name too long"),
        ("~no-such-user/m", "Could not determine home directory"),
    ],
)
def test_a_name_that_no_path_can_have_is_refused(name: str, reason: str) -> None:
    for find in (resolve, model_folder.is_folder, model_folder.read_config):
        with pytest.raises(ConfigError, match=f"is no folder: {reason}") as found:
            find(name)
        assert len(found.value.message) < 400


def test_a_folder_without_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'empty' is not a folder with a config\.json"):
        resolve("empty")


def test_a_prepared_default_is_not_prepared_again(cache: Path) -> None:
    folder = make_model(cache / "models" / model_folder.DEFAULT_SERVED_NAME)
    said: list[str] = []
    assert resolve("default", report=said.append) == folder
    assert said == []


def test_the_default_is_put_in_place_at_once(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = cache / "models" / model_folder.DEFAULT_SERVED_NAME
    seen_half_made: list[bool] = []

    def convert(_gguf: Path, into: Path) -> None:
        seen_half_made.append(target.exists())
        (into / "config.json").write_text("{}")

    monkeypatch.setattr(model_folder, "_shipped_gguf", lambda: tmp_path / "file.gguf")
    monkeypatch.setattr(model_folder, "_convert", convert)
    said: list[str] = []
    assert resolve("default", report=said.append) == target
    assert seen_half_made == [False]
    assert "converting" in said[0]
    assert [entry.name for entry in target.parent.iterdir()] == [target.name]


def test_a_failed_conversion_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(_gguf: Path, into: Path) -> None:
        (into / "half").write_text("")
        raise OSError("disk full")

    monkeypatch.setattr(model_folder, "_shipped_gguf", lambda: tmp_path / "file.gguf")
    monkeypatch.setattr(model_folder, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        resolve("default")
    assert list((cache / "models").iterdir()) == []


def test_who_comes_second_uses_what_the_first_made(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = cache / "models" / model_folder.DEFAULT_SERVED_NAME

    def convert(_gguf: Path, into: Path) -> None:
        (into / "config.json").write_text("second")
        make_model(target)

    monkeypatch.setattr(model_folder, "_shipped_gguf", lambda: tmp_path / "file.gguf")
    monkeypatch.setattr(model_folder, "_convert", convert)
    assert resolve("default") == target
    assert (target / "config.json").read_text() == "{}"


def test_a_missing_package_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_folder, "_PACKAGE", "kvferry_no_such_package")
    with pytest.raises(ConfigError, match="make setup"):
        resolve("default")
    assert not (cache / "models").exists()


def test_a_hub_id_that_cannot_be_had_is_one_clear_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'owner/thing' is not a folder here and could not be fetched"):
        resolve("owner/thing")
    key = "adapters.served.sql.path"
    with pytest.raises(ConfigError, match=f"^{key}: 'owner/thing' .* could not be fetched") as caught:
        from_hub("owner/thing", lambda _: None, only=["a.json"], revision="v1", key=key)
    assert caught.value.param == key


_FETCH = "import sys; from kvferry import model_folder; print(model_folder.resolve(sys.argv[1], with_weights=%s))"


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_gateway_fetches_no_weights_of_a_hub_model(tmp_path: Path, with_weights: bool) -> None:
    pytest.importorskip("huggingface_hub")
    text = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer.model": b"m", "chat_template.jinja": b"t"}
    weights = {
        f"{stem}{suffix}": b"w" * 2000
        for stem in ("model", "original/consolidated.00")
        for suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".h5", ".msgpack", ".onnx")
    }
    with hub_server(text | weights) as hub:
        done = subprocess.run(
            [sys.executable, "-c", _FETCH % with_weights, MODEL],
            env=import_environment()
            | {
                "HF_ENDPOINT": hub.url,
                "KVFERRY_CACHE": str(tmp_path),
                "HF_HUB_OFFLINE": "0",
                "HF_HUB_DISABLE_XET": "1",
            },
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        there = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        assert there == set(text) | (set(weights) if with_weights else set())
        assert with_weights == any(hub.num_gets(path) for path in weights)


_FETCH_WITHIN = """import sys
from kvferry.errors import ConfigError
from kvferry.model_folder import from_hub
try:
    print(from_hub(sys.argv[1], lambda _: None, key="a.path", limit=(int(sys.argv[2]), "a.max_gib")))
except ConfigError as error:
    print(error.message)
"""


def test_files_above_a_limit_are_not_fetched(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    environment = {"KVFERRY_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}

    def fetch(max_bytes: int, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _FETCH_WITHIN, MODEL, str(max_bytes)],
            env=import_environment() | environment | more,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=True,
        )
        return done.stdout.strip()

    with hub_server({"config.json": b"{}", "model.safetensors": b"w" * 2000}) as hub:
        said = fetch(2001, HF_ENDPOINT=hub.url)
        assert said.startswith("a.path: "), said
        assert "2002 bytes, more than 2001, the limit (a.max_gib)" in said
        assert not hub.num_gets("model.safetensors")
        folder = fetch(2002, HF_ENDPOINT=hub.url)
        assert (Path(folder) / "model.safetensors").stat().st_size == 2000
    assert fetch(1, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") == folder, "it is there already"


def test_a_name_that_cannot_be_a_hub_id_lists_what_is_allowed(cache: Path) -> None:
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ConfigError, match=r"allowed: `default`, a folder with a config\.json, or a hub id"):
        resolve("a/b/c d")


def test_the_program_prints_the_folder_or_the_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "mine")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder}{os.linesep}"
    assert main(["/absent/model"]) == 2
    assert "/absent/model" in capsys.readouterr().err
