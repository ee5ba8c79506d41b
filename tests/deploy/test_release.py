"""What a release consists of: packages that install from a file, versions that agree, notes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from support.chart import load_tool

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "operator" / "release.md"


@pytest.fixture
def release_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = load_tool("release_check")
    monkeypatch.setattr(module, "DIST", tmp_path)
    return module


def test_wheels_and_source_archives_are_reproducible_and_run_in_an_empty_environment(
    release_check: ModuleType, tmp_path: Path
) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the time of the build is the commit's, and this is no checkout")
    said = release_check.build_packages()
    version = release_check.package_version()
    beside = ("keeper", "local", "operator", "plan", "sim", "tenants")
    names = [f"kvferry-{version}", *(f"kvferry_{name}-{version}" for name in beside)]
    assert sorted(said.split(", ")) == sorted(
        f"{name}{end}" for name in names for end in ("-py3-none-any.whl", ".tar.gz")
    )
    assert {file.name for file in tmp_path.iterdir()} == set(said.split(", "))
    release_check.install_packages()


def test_package_and_chart_have_one_version(release_check: ModuleType) -> None:
    if (ROOT / ".git").exists():
        assert release_check.check_versions(unreleased=True) == release_check.package_version()


def test_notes_are_the_part_of_their_version(release_check: ModuleType) -> None:
    changelog = "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2026-12-01)\n\n### Added\n- One.\n\n## 0.1.0\n- Two.\n"
    assert release_check.notes_of(changelog, "0.2.0") == "### Added\n- One.\n"
    assert release_check.notes_of(changelog, "0.1.0") == "- Two.\n"
    for heading in ("Unreleased", "0.3.0", "0.2"):
        with pytest.raises(release_check.CheckFailed, match=re.escape(heading)):
            release_check.notes_of(changelog, heading)


def test_a_file_of_another_version_is_refused(release_check: ModuleType, tmp_path: Path) -> None:
    release_check.build_packages()
    wheels = [*tmp_path.glob("*.whl")]
    with pytest.raises(release_check.CheckFailed, match="--version said"):
        release_check.install_and_run(wheels, tmp_path / "other", "9.9.9")


def test_the_page_names_targets_and_files_that_exist() -> None:
    text = PAGE.read_text()
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    asked = set(re.findall(r"\bmake ([a-z][a-z-]+)", text))
    assert asked <= targets
    assert "release-check" in asked
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (PAGE.parent / link).exists(), link
