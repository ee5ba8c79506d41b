"""docs/operator/configuration.md names every key of the configuration, and which of them the chart decides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvferry.config import ClusterConfig
from support.chart import helm_check, load_tool

generate_config_doc = load_tool("generate_config_doc")


def rows() -> dict[str, bool]:
    """Path of each key -> whether the page says that the chart decides it."""
    found: dict[str, bool] = {}
    section = ""
    for line in generate_config_doc.page().splitlines():
        if title := re.fullmatch(r"## (?:`(.+)`|.+)", line):
            section = title[1] or ""
        elif row := re.match(r"\| `([\w.]+)`( †)? \|", line):
            key = f"{section}.{row[1]}".lstrip(".")
            assert key not in found, "no key stands twice"
            found[key] = bool(row[2])
    return found


def keys(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, below in schema["properties"].items():
        here = f"{path}.{name}".lstrip(".")
        target = below
        for mark, inner in (("[]", below.get("items")), (".NAME", below.get("additionalProperties"))):
            if isinstance(inner, dict) and "$ref" in inner:
                yield here
                target, here = inner, here + mark
        if "$ref" in target:
            yield from keys(definitions[target["$ref"].rpartition("/")[2]], definitions, here)
        else:
            yield here


def test_every_key_is_in_the_page() -> None:
    schema = ClusterConfig.model_json_schema()
    assert set(rows()) == set(keys(schema, schema["$defs"]))


def test_the_page_begins_with_the_keys_that_most_clusters_set() -> None:
    common = generate_config_doc.COMMON
    assert tuple(rows())[: len(common)] == common


def test_keys_that_the_chart_decides_are_those_that_its_schema_does_not_take() -> None:
    taken = helm_check.config_schema()

    def is_taken(path: str) -> bool:
        here = taken
        for part in path.split("."):
            entries = here.get("additionalProperties")
            if part == "NAME" and isinstance(entries, dict):
                here = entries  # of a mapping
                continue
            if part.startswith(("pools", "models")) or part not in here.get("properties", {}):
                return False
            here = here["properties"][part]
        return True

    # A volume's keys stand below a key that is decided.
    wrong = [path for path, decided in rows().items() if "[]" not in path and decided == is_taken(path)]
    assert wrong == []
