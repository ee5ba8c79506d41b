"""The drawing of the packages in docs/contributor/architecture.md says what the import contract says."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def drawn_layers() -> list[set[str]]:
    page = (ROOT / "docs" / "contributor" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Packages\n")[2].partition("\n## ")[0]
    block = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert block is not None
    names = [re.split(r"\s{2,}", line, maxsplit=1)[0] for line in block[1].splitlines()]
    return [{name.strip() for name in line.split("|")} for line in names]


def contract_layers() -> list[set[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract.get("containers") == ["kvferry"]
    )
    return [{name.strip() for name in re.split(r"[|:]", layer)} for layer in layers]


def test_the_drawing_is_the_contract() -> None:
    drawn, contract = drawn_layers(), contract_layers()
    assert drawn[-1] == {"leaves"}
    assert drawn[:-1] == contract[:-1]


def test_every_package_is_in_the_drawing() -> None:
    packages = {
        folder.name for folder in (ROOT / "services" / "kvferry").iterdir() if (folder / "__init__.py").exists()
    }
    leaves = contract_layers()[-1]
    assert packages - leaves <= set().union(*drawn_layers())


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/.]+\.(?:py|proto))`", text)
    assert len(named) >= 100
    folders = (ROOT / "services" / "kvferry", ROOT / "services", ROOT)
    assert [name for name in named if not any((folder / name).is_file() for folder in folders)] == []


def test_a_request_is_explained_by_five_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Five files explain a request\n")[2].partition("\n## ")[0]
    items = re.findall(r"(?m)^(\d)\. `([\w/]+\.py)`: ", section)
    assert [number for number, _ in items] == ["1", "2", "3", "4", "5"]
    assert all((ROOT / "services" / "kvferry" / name).is_file() for _, name in items)
