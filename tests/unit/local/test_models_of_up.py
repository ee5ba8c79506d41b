"""`kvferry up` finds models and their draft models before it starts anything."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import ClusterConfig, parse
from kvferry.errors import ConfigError
from kvferry_local import cluster
from kvferry_local.child import StartFailed


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of models: `m` and `draft`."""
    for name in ("m", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({}), encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="kvf-", dir="/tmp") as short:
        monkeypatch.setenv("KVFERRY_RUN_DIR", f"{short}/r")
        yield tmp_path


def drafted(model: str) -> dict[str, Any]:
    drafts = {"method": "draft_model", "model": model, "num_speculative_tokens": 3}
    return {"args": {"speculative_config": drafts}}


def config(folder: Path, **sections: Any) -> ClusterConfig:
    gateway = {"http_port": 0, "grpc_port": None}
    # Nothing listens on the discard port: what gets there has found its models.
    membership = {"endpoints": ["127.0.0.1:9"]}
    values = {"model": {"path": str(folder / "m")}, "gateway": gateway, "membership": membership, **sections}
    return parse({"name": "models-of-up", **values})


def test_a_draft_model_that_is_missing_is_named_with_its_key(folder: Path) -> None:
    missing, key = str(folder / "none"), "engine.args.speculative_config.model"
    with pytest.raises(ConfigError) as caught:
        cluster.up(config(folder, engine=drafted(missing)))
    assert caught.value.message.startswith(f"{key}: {missing!r} is not a folder with a config.json; allowed: ")
    entry = {"name": "chat", "model": {"path": str(folder / "m")}, "engine": drafted(missing)}
    with pytest.raises(ConfigError) as caught:
        cluster.up(config(folder, models=[entry]))
    assert caught.value.message.startswith(f"models[chat].{key}: {missing!r} is not a folder with a config.json")
    entry["model"] = {"path": missing}
    with pytest.raises(ConfigError) as caught:
        cluster.up(config(folder, models=[entry]))
    assert caught.value.message.startswith(f"models[chat].model.path: {missing!r} is not a folder with a config.json")
    assert not Path(os.environ["KVFERRY_RUN_DIR"]).exists(), "nothing is left"


def test_workers_get_the_folder_of_a_draft_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    own = {"name": "own", "model": {"path": str(folder / "m")}, "engine": drafted("./draft")}
    inherited = {"name": "inherited", "model": {"path": str(folder / "m")}}
    without = {**inherited, "name": "without", "engine": {"args": {"speculative_config": None}}}
    models = [own, inherited, without]
    made = cluster.with_model_folders(config(folder, engine=drafted("./draft"), models=models), cluster.NoProgress())
    found = [
        made.of_model(name).engine.args.get("speculative_config", {}).get("model")
        for name in ["", *(entry.name for entry in made.models)]
    ]
    draft = str((folder / "draft").resolve())
    assert found == [draft, draft, draft, None]


def test_a_cluster_whose_models_are_found_goes_on(folder: Path) -> None:
    with pytest.raises(StartFailed, match=r"membership\.endpoints: etcd cannot be reached"):
        cluster.up(config(folder, engine=drafted(str(folder / "draft"))))
