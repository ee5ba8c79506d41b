"""The Containerfile, without building it: what it copies is there, and what it installs is pinned and asked for."""

from __future__ import annotations

import importlib.util
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
    return dict(line.split(" ")[0].split("==") for line in lines if not line.startswith("#"))


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
    asked = [Requirement(text) for text in (*PROJECT["dependencies"], *PROJECT["optional-dependencies"][engine])]
    for requirement in asked:
        version = installed.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is missing: run tools/lock_image.py {engine}"
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


@pytest.mark.parametrize("engine", [*ENGINES, "build"])
def test_every_package_is_pinned_by_its_hash(engine: str) -> None:
    lines = (IMAGE / f"requirements-{engine}.txt").read_text().splitlines()
    for line in lines:
        assert re.fullmatch(r"#.*|[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line), line
    # pip looks at hashes in every install of the build but one: that of the wheel which the build itself has made.
    assert "PIP_REQUIRE_HASHES=1" in TEXT
    unchecked = [line for line in TEXT.splitlines() if "PIP_REQUIRE_HASHES= " in line]
    assert len(unchecked) == 1
    assert "--no-index dist/*.whl" in unchecked[0]


def test_the_build_s_own_tool_is_the_package_s() -> None:
    hatchling = f"hatchling=={pins('build')['hatchling']}"
    assert hatchling in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]


def test_torch_is_a_cpu_build_or_pytorchs_own_cuda_with_its_compiler() -> None:
    assert pins("cpu")["torch"].endswith("+cpu")
    gpu = pins("gpu")
    assert "+" not in gpu["torch"]
    # A compiler newer than the driver's CUDA writes code that the driver may refuse.
    releases = {name: ".".join(gpu[name].split(".")[:2]) for name in ("nvidia-cuda-nvcc", "nvidia-cuda-runtime")}
    assert set(releases.values()) == {".".join(gpu["cuda-toolkit"].split(".")[:2])}


def test_the_bill_of_materials_has_debian_packages_and_no_files_of_the_builder() -> None:
    specification = importlib.util.spec_from_file_location("sbom", IMAGE / "sbom.py")
    assert specification is not None
    assert specification.loader is not None
    sbom = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(sbom)
    status = (
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9+deb12u13\n"
        "Description: C library\n Status: not a field\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    )
    python = {
        "bomFormat": "CycloneDX",
        "components": [
            {"name": "kvferry", "externalReferences": [{"type": "distribution", "url": "file:///build/dist/k.whl"}]}
        ],
    }
    assert sbom.merged(python, status)["components"] == [
        {"name": "kvferry"},
        {
            "type": "library",
            "bom-ref": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64",
            "name": "libc6",
            "version": "2.36-9+deb12u13",
            "purl": "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64",
        },
    ]


def test_the_base_is_an_argument_with_a_pinned_default_and_no_registry() -> None:
    base = re.search(r"(?m)^ARG BASE=(\S+)$", TEXT)
    assert base is not None
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base[1])
    stages = [instruction for instruction in INSTRUCTIONS if instruction.startswith("FROM ")]
    assert stages == ["FROM ${BASE} AS runtime", "FROM runtime AS build", "FROM runtime"]
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
        of_the_shell = set(re.findall(r"\b(\w+)=\"", instruction)) | set(re.findall(r"\bfor (\w+) in", instruction))
        used = set(re.findall(r"\$\{(\w+)", instruction)) - {"PATH"} - of_the_shell
        assert used <= declared, instruction
        if instruction.startswith("ARG "):
            declared.add(instruction.split()[1].partition("=")[0])
