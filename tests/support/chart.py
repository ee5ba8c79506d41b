"""tools/helm_check.py for tests, and what they ask of renderings."""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    """A tool as a module, once."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


generated_pages = load_tool("generated_pages")  # before their users
distributions = load_tool("distributions")
chart_rules = load_tool("chart_rules")
cel_rules = load_tool("cel_rules")
helm_check = load_tool("helm_check")


def newest_helm() -> Any:
    """The newest Helm that is found. Skips the test where there is none."""
    found = helm_check.helms()
    if not found:
        pytest.skip("no Helm: tools/fetch_helm.py fetches it, or name one in KVFERRY_HELM")
    return found[0]


def write_values(folder: Path, values: dict[str, Any]) -> Path:
    """A file of values, with a registry where they name none."""
    file = folder / "values.yaml"
    image = {"registry": "registry.example", **values.get("image", {})}
    file.write_text(yaml.safe_dump({**values, "image": image}))
    return file


def rendering(values: Mapping[str, Any] | Path) -> list[dict[str, Any]]:
    """Return the objects for values, with a registry where they name none, or for a file. Raises CheckFailed.

    Helm runs once for equal values, so secrets that it makes anew are the same.
    """
    if isinstance(values, Path):
        return list(helm_check.documents(_rendered(values.read_text())))
    image = {"registry": "registry.example", **values.get("image", {})}
    return list(helm_check.documents(_rendered(json.dumps({**values, "image": image}))))


@functools.cache
def _rendered(text: str) -> str:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return str(newest_helm().template(values=Path(file.name)))


def one(rendered: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The one object of that kind, and name, that an install makes."""
    made = (each for each in rendered if helm_check.hooks(each) != "post-delete")
    (found,) = (each for each in made if each["kind"] == kind and name in (None, each["metadata"]["name"]))
    return found
