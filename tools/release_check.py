"""Do everything of a release but publish it: `make release-check` (docs/operator/release.md).

    python tools/release_check.py [--unreleased] [--offline] [--image BASE]

Artefacts go to dist/: wheels, source archives, chart, notes and SHA256SUMS. Every check runs; the exit code is 1 when
one failed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import helm_check
import yaml
from distributions import CORE, SATELLITES

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "deploy" / "helm" / "kvferry"
DIST = ROOT / "dist"


class CheckFailed(Exception):
    """The message says what to fix."""


def run(*command: str | Path, environ: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Return a command's output. Raises CheckFailed with the end of it."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise CheckFailed(f"{' '.join(map(str, command[:4]))} ended with {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout.strip()


def package_version(file: Path = ROOT / "services" / "kvferry" / "__init__.py") -> str:
    text = file.read_text(encoding="utf-8")
    found = re.search(r'(?m)^__version__ = "([^"]+)"$', text)
    assert found is not None
    return found[1]


def notes_of(changelog: str, heading: str) -> str:
    """Return the text below `## heading`. Raises CheckFailed where it is missing or empty."""
    found = re.search(rf"(?ms)^## {re.escape(heading)}(?: [^\n]*)?\n(.*?)(?=^## |\Z)", changelog)
    if found is None or not found[1].strip():
        raise CheckFailed(f"CHANGELOG.md has nothing under `## {heading}`")
    return found[1].strip() + "\n"


def check_tree() -> str:
    if changed := run("git", "status", "--porcelain"):
        raise CheckFailed(f"the tree is not clean:\n{changed}")
    return run("git", "rev-parse", "--short", "HEAD")


def check_versions(unreleased: bool) -> str:
    """The packages, the chart and the changelog name one version, whose tag is free or here."""
    version = package_version()
    for each in SATELLITES:
        if package_version(each / "__init__.py") != version:
            raise CheckFailed(f"{each.name} has another version than kvferry, {version}")
        if f'"kvferry=={version}"' not in (each / "pyproject.toml").read_text(encoding="utf-8"):
            raise CheckFailed(f"{each.name}/pyproject.toml does not ask for kvferry=={version}")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    for key in ("version", "appVersion"):
        if str(chart[key]) != version:
            raise CheckFailed(f"Chart.yaml's {key} is {chart[key]}, the package's version {version}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    notes = notes_of(changelog, "Unreleased" if unreleased else version)
    if not unreleased and re.search(r"(?m)^## Unreleased\n+[^#\s]", changelog):
        raise CheckFailed(f"CHANGELOG.md has entries under `## Unreleased`: move them under `## {version}`")
    tag = f"v{version}"
    if run("git", "tag", "--list", tag) and run("git", "rev-list", "-n1", tag) != run("git", "rev-parse", "HEAD"):
        raise CheckFailed(f"the tag {tag} is another commit's")
    (DIST / f"kvferry-{version}.notes.md").write_text(notes, encoding="utf-8")
    return version


def build_packages() -> str:
    """Build wheels and source archives twice: equal commits make equal files."""
    digests = []
    epoch = run("git", "log", "-1", "--format=%ct")
    for _ in range(2):
        with tempfile.TemporaryDirectory() as folder:
            environ = os.environ | {"SOURCE_DATE_EPOCH": epoch}
            for each in (CORE, *SATELLITES):
                run(sys.executable, "-m", "hatchling", "build", "--directory", folder, environ=environ, cwd=each)
            files = sorted(Path(folder).iterdir())
            digests.append([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])
            for file in files:
                shutil.copy(file, DIST)
    if digests[0] != digests[1]:
        raise CheckFailed(f"two builds differ: {digests}")
    return ", ".join(name for name, _ in digests[0])


def install_packages() -> str:
    """Install the files of each kind into an empty environment, which borrows the dependencies of this one."""
    version = package_version()
    names = [f"kvferry-{version}", *(f"{each.name}-{version}" for each in SATELLITES)]
    for ending in ("-py3-none-any.whl", ".tar.gz"):
        with tempfile.TemporaryDirectory() as folder:
            install_and_run([DIST / f"{name}{ending}" for name in names], Path(folder), version)
    return "wheels and source archives answer --version and --help"


def install_and_run(files: Sequence[Path], folder: Path, version: str) -> None:
    """Raises CheckFailed when an installed program does not start, or is not the files'."""
    # Build isolation would fetch hatchling, which is here.
    options = ("--no-deps", "--no-index", "--disable-pip-version-check", "--quiet")
    wheels = files
    if files[0].suffix != ".whl":
        built = folder / "built"
        run(sys.executable, "-m", "pip", "wheel", *options, "--no-build-isolation", "--wheel-dir", built, *files)
        wheels = list(built.iterdir())
    venv.create(folder / "env", with_pip=False, symlinks=True)
    python = folder / "env" / "bin" / "python"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *wheels, environ=environ)
    # After pip, which would take this environment's kvferry for an older one; .pth files that lead to this checkout
    # do not count in folders that a .pth file names.
    (site,) = (folder / "env").glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if path.endswith("site-packages")]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed), encoding="utf-8")
    for name in ("kvferry", *(each.name for each in SATELLITES)):
        where = run(python, "-c", f"import {name}; print({name}.__file__)", environ=environ)
        if not where.startswith(str(folder.resolve())):
            raise CheckFailed(f"{files[0].name}: {name} was imported from {where}")
    program = folder / "env" / "bin" / "kvferry"
    if version not in (said := run(program, "--version", environ=environ)):
        raise CheckFailed(f"{files[0].name}: --version said {said}")
    run(program, "--help", environ=environ)
    run(program, "plan", "--help", environ=environ)
    run(python, "-m", "kvferry_operator", "--help", environ=environ)


def check_chart() -> str:
    if not helm_check.helms():
        raise CheckFailed("helm was not found: run tools/fetch_helm.py")
    # Both Helms lint and render every example there.
    run(sys.executable, "tools/helm_check.py")
    run(helm_check.helms()[0].program, "package", CHART, "--destination", DIST)
    return f"kvferry-{package_version()}.tgz"


def check_locks() -> str:
    """Without find-links: where files of this machine stand in for the index, they would for the GPU too."""
    for engine in ("cpu", "build", "gpu"):
        environ = dict(os.environ)
        if engine != "cpu":
            environ.pop("PIP_FIND_LINKS", None)
            environ["PIP_CONFIG_FILE"] = environ.get("KVFERRY_LOCK_PIP_CONFIG", os.devnull)
        run(sys.executable, "tools/lock_image.py", engine, "--check", environ=environ)
    return "cpu, build and gpu are up to date"


def build_image(base: str) -> str:
    said = run(sys.executable, "tools/build_image.py", "--engine", "cpu", "--base", base)
    return " ".join(said.splitlines()[-5:])


def write_sums() -> str:
    version = package_version()
    files = sorted(file for file in DIST.glob(f"kvferry*-{version}*") if file.is_file())
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (DIST / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    return f"{len(files)} files"


def main() -> int:
    parser = argparse.ArgumentParser(description="Do everything of a release but publish it.")
    parser.add_argument("--unreleased", action="store_true", help="take the notes from the unreleased part")
    parser.add_argument("--offline", action="store_true", help="leave out the check of the locks, which asks the index")
    parser.add_argument("--image", metavar="BASE", help="build the CPU image too, on this base")
    chosen = parser.parse_args()
    DIST.mkdir(exist_ok=True)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("clean tree", check_tree),
        ("versions", lambda: check_versions(chosen.unreleased)),
        ("build", build_packages),
        ("install", install_packages),
        ("chart", check_chart),
    ]
    if not chosen.offline:
        checks.append(("image locks", check_locks))
    if chosen.image:
        checks.append(("image", lambda: build_image(chosen.image)))
    checks.append(("checksums", write_sums))
    num_failed = 0
    for name, check in checks:
        started_s = time.monotonic()
        try:
            said = check()
        except CheckFailed as failure:
            num_failed += 1
            print(f"✗ {name}: {failure}", flush=True)
        else:
            print(f"✓ {name}: {said}  {time.monotonic() - started_s:.0f} s", flush=True)
    if num_failed:
        print(f"\n{num_failed} of {len(checks)} checks failed", file=sys.stderr)
        return 1
    print(f"\n{package_version()} can be released: dist/, docs/operator/release.md says how to publish")
    return 0


if __name__ == "__main__":
    sys.exit(main())
