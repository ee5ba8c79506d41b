"""Build the image with buildah or podman and state its size and digest.

    python tools/build_image.py --engine cpu|gpu [--base BASE] [--archive FILE]

pip fetches the pinned wheels on this machine, with its configuration (index, proxy, certificates), and the build takes
them from a folder: no setting and no secret of this machine enters the image. The build sees tracked files only.
BASE is an image's name, a folder with an OCI layout, or an archive of a root filesystem with Python 3.11 and venv.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGE = Path("deploy") / "image"
CONTEXT = ("pyproject.toml", "README.md", "LICENSE", "services", str(IMAGE))
SBOM = "/usr/share/kvferry/sbom.json"
PYTHON = "3.11"
# glibc 2.36 is bookworm's. Wheels of the lock are for these; pip takes nothing else.
NEWEST_GLIBC = 36
PLATFORMS = (
    *("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in range(5, NEWEST_GLIBC + 1)),
)


class BuildFailed(Exception):
    """The message is for the user."""


def run(*command: str, cwd: Path = ROOT) -> None:
    """Run a command with its output shown. Raises BuildFailed."""
    if subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, check=False).returncode != 0:
        raise BuildFailed(f"failed: {' '.join(command[:4])} ...")


def answer(*command: str) -> str:
    """Return a command's output. Raises BuildFailed with its errors."""
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildFailed(f"failed: {' '.join(command[:4])} ...\n{done.stderr.strip()}")
    return done.stdout.strip()


def find_builder(wanted: str | None) -> str:
    """Return buildah or podman. Raises BuildFailed without either."""
    for name in (wanted,) if wanted else ("buildah", "podman"):
        if shutil.which(name):
            return name
    raise BuildFailed(
        f"{wanted or 'neither buildah nor podman'} was not found; Debian and Fedora have packages of both"
    )


def isolation(builder: str) -> list[str]:
    """Options of builds and runs where no OCI runtime is there, as in most containers."""
    has_runtime = any(map(shutil.which, ("crun", "runc")))
    is_chosen = builder == "podman" or "BUILDAH_ISOLATION" in os.environ
    return [] if is_chosen or has_runtime else ["--isolation", "chroot"]


def version() -> str:
    text = (ROOT / "services" / "kvferry" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'(?m)^__version__ = "([^"]+)"$', text)
    assert found is not None
    return found[1]


def revision() -> str:
    """The commit, marked where the sources of the image differ from it."""
    changed = answer("git", "status", "--porcelain", "--untracked-files=no", "--", *CONTEXT)
    return answer("git", "rev-parse", "HEAD") + ("-dirty" if changed else "")


def fetch_wheels(engine: str, folder: Path) -> None:
    """Download the locked wheels; those that are there stay."""
    folder.mkdir(parents=True, exist_ok=True)
    torch_index = os.environ.get("TORCH_INDEX_URL")
    lines = (ROOT / IMAGE / f"requirements-{engine}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    torch = [line for line in lines if line.startswith("torch==")] if torch_index and engine == "cpu" else []
    parts = [(torch, ["--index-url", str(torch_index)])] if torch else []
    parts += [([line for line in lines if line not in torch], [])]
    parts += [((ROOT / IMAGE / "requirements-build.txt").read_text(encoding="utf-8").splitlines(keepends=True), [])]
    for part, options in parts:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
            requirements.writelines(part)
            requirements.flush()
            run(
                *(sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"),
                *("--require-hashes", "--only-binary", ":all:", "--python-version", PYTHON),
                *(argument for each in PLATFORMS for argument in ("--platform", each)),
                *(*options, "--dest", str(folder), "--requirement", requirements.name),
            )


def make_context(folder: Path, wheels: Path) -> None:
    """Copy the tracked files of the image and link the wheels."""
    for name in answer("git", "ls-files", "-z", "--", *CONTEXT).split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    target = folder / IMAGE / "wheels"
    target.mkdir(exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            os.link(wheel, target / wheel.name)
        except OSError:
            shutil.copy(wheel, target / wheel.name)


def import_base(builder: str, base: str) -> str:
    """Return what FROM takes: the name as it is, or the id of an image made of a layout or an archive."""
    path = Path(base)
    if (path / "oci-layout").is_file():
        return answer(builder, "pull", "--quiet", f"oci:{path.resolve()}").splitlines()[-1]
    if not path.is_file():
        return base
    if builder == "podman":
        return answer("podman", "import", "--quiet", str(path.resolve())).splitlines()[-1]
    container = answer("buildah", "from", "scratch")
    try:
        answer("buildah", "add", "--quiet", container, str(path.resolve()), "/")
        # Equal archives make equal bases, and equal images.
        return answer("buildah", "commit", "--quiet", "--timestamp", "0", container).splitlines()[-1]
    finally:
        answer("buildah", "rm", container)


def build(builder: str, context: Path, engine: str, base: str | None, tag: str) -> str:
    """Return the image's id."""
    built_at_s = answer("git", "log", "-1", "--format=%ct")
    created = datetime.fromtimestamp(int(built_at_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    arguments = {"ENGINE": engine, "PIP_NO_INDEX": "1", "SOURCE_DATE_EPOCH": built_at_s}
    arguments |= {"VERSION": version(), "REVISION": revision(), "CREATED": created}
    if base is not None:
        arguments["BASE"] = import_base(builder, base)
    identity = context.parent / "image-id"
    run(
        *(builder, "build", *isolation(builder), "--layers=false", "--timestamp", built_at_s),
        *(word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")),
        *("--file", str(context / IMAGE / "Containerfile"), "--tag", tag, "--iidfile", str(identity), str(context)),
    )
    return identity.read_text(encoding="ascii").strip()


def read_in_image(builder: str, image: str, path: str) -> str:
    if builder == "podman":
        return answer("podman", "run", "--rm", "--network", "none", image, "cat", path)
    container = answer("buildah", "from", "--pull-never", image)
    try:
        return answer("buildah", "run", *isolation(builder), container, "--", "cat", path)
    finally:
        answer("buildah", "rm", container)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the image with buildah or podman.")
    parser.add_argument("--engine", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--base", help="an image's name, a folder with an OCI layout, an archive of a root filesystem")
    parser.add_argument("--tag", help="default: kvferry:VERSION-ENGINE")
    parser.add_argument("--builder", choices=("buildah", "podman"))
    parser.add_argument("--archive", type=Path, help="also write an OCI archive, which other machines can load")
    chosen = parser.parse_args(arguments)
    started_s = time.monotonic()
    tag = chosen.tag or f"kvferry:{version()}-{chosen.engine}"
    # A folder of its own for each engine, kept: gigabytes for the GPU.
    wheels = ROOT / ".image-wheels" / chosen.engine

    def say(what: str) -> None:
        print(f"[{time.monotonic() - started_s:4.0f} s] {what}", flush=True)

    try:
        builder = find_builder(chosen.builder)
        say(f"fetching the wheels that are pinned into {wheels.relative_to(ROOT)}")
        fetch_wheels(chosen.engine, wheels)
        # Below the checkout, so that wheels can be linked.
        with tempfile.TemporaryDirectory(prefix=".image-", dir=ROOT) as folder:
            context = Path(folder) / "context"
            context.mkdir()
            make_context(context, wheels)
            say(f"building {tag} with {builder}")
            image = build(builder, context, chosen.engine, chosen.base, tag)
        say("reading its bill of materials")
        bill = ROOT / "dist" / f"kvferry-{version()}-{chosen.engine}.sbom.json"
        bill.parent.mkdir(exist_ok=True)
        bill.write_text(read_in_image(builder, image, SBOM) + "\n", encoding="utf-8")
        if chosen.archive is not None:
            say(f"writing {chosen.archive}")
            run(builder, "push", "--quiet", image, f"oci-archive:{chosen.archive.resolve()}:{tag}")
        size = answer(builder, "images", "--filter", f"reference={tag}", "--format", "{{.Size}}").splitlines()[0]
        digest = answer(builder, "images", "--filter", f"reference={tag}", "--format", "{{.Digest}}").splitlines()[0]
    except BuildFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    say("done")
    print(f"image   {tag}\nid      {image}\ndigest  {digest}\nsize    {size}\nsbom    {bill.relative_to(ROOT)}")
    if chosen.archive is not None:
        print(f"archive {chosen.archive}, {chosen.archive.stat().st_size / 1e9:.2f} GB compressed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
