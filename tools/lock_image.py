"""Pin, with hashes, everything the image installs: deploy/image/requirements-{cpu,gpu,build}.txt.

python tools/lock_image.py cpu              versions of this environment, which the tests ran in
python tools/lock_image.py gpu | build      what pip would install; versions of the present file are kept
    --upgrade                               the newest versions that are allowed
    --check                                 write nothing; fail where the file's versions lead to another file

Hashes are those of the wheels that pip chooses on this machine: run it with Python 3.11 on x86-64, the image's own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

from distributions import CORE, SATELLITES
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "image"
PROJECT = "kvferry"
# They come with vLLM, are not needed for text, and fail to import beside a CPU build of torch.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# What the build itself runs; hatchling's version is pyproject.toml's.
BUILD_TOOLS = ("pip", "cyclonedx-bom")
# FlashInfer compiles its kernels on the node. On its own the compiler would be newer than torch's CUDA, and write code
# that the driver which this torch needs may not load; cuda-toolkit's version is torch's.
CUDA_COMPILER = ("cuda-toolkit[cccl,crt,cudart,curand,nvcc,nvvm]",)
HEADER = """\
# Made by tools/lock_image.py; read by the Containerfile. Hashes are of wheels for CPython 3.11 on Linux x86-64.
"""
TORCH_NOTE = """\
# torch is PyTorch's CPU build, whose index TORCH_INDEX_URL names: the default index has the CUDA build of this version.
"""


class Locked(NamedTuple):
    version: str
    digest: str  # sha256:hex
    file: str


class LockFailed(Exception):
    """The message is for the user."""


def from_environment(extra: str) -> dict[str, str]:
    """name -> version of all that pyproject.toml asks for with this extra, as installed here."""
    left_out = {canonicalize_name(name) for name in CUDA_COMPANIONS}
    versions: dict[str, str] = {}
    waiting = asked_for(extra)
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in left_out or key in seen or name.startswith(PROJECT):
            continue
        seen.add(key)
        needed = distribution(requirement.name)
        versions[name] = needed.version
        waiting += [each for each in map(Requirement, needed.requires or ()) if _applies(each, requirement.extras)]
    return versions


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in (*extras, ""))


def asked_for(extra: str) -> list[Requirement]:
    """Requirements of the core with this extra, and of the satellites."""
    core, *satellites = (_project(folder) for folder in (CORE, *SATELLITES))
    texts = [*core["dependencies"], *core["optional-dependencies"][extra]]
    return [Requirement(text) for text in (*texts, *(text for each in satellites for text in each["dependencies"]))]


def _project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def resolved(*arguments: str) -> dict[str, Locked]:
    """name -> what pip would install. Downloads metadata only, where the index has it. Raises LockFailed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"),
            *("--report", str(report), *arguments),
        ]
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            raise LockFailed("pip could not resolve these packages")
        items = json.loads(report.read_text(encoding="utf-8"))["install"]
    found: dict[str, Locked] = {}
    for item in items:
        name = canonicalize_name(item["metadata"]["name"])
        if name.startswith(PROJECT):
            continue
        download = item["download_info"]
        digest = download.get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise LockFailed(f"the index gives no SHA-256 of {name}")
        found[name] = Locked(item["metadata"]["version"], f"sha256:{digest}", download["url"].rpartition("/")[2])
    return found


def pins(file: Path) -> dict[str, str]:
    """name -> version in a requirements file of this tool."""
    if not file.exists():
        return {}
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split(" ")[0].split("==") for line in lines)


def lock_cpu(present: dict[str, str]) -> dict[str, Locked]:
    # A check is of the file: other versions in the environment are no fault of it.
    versions = from_environment("cpu")
    versions |= {name: version for name, version in present.items() if name in versions}
    torch = f"torch=={versions.pop('torch').partition('+')[0]}"
    index = os.environ.get("TORCH_INDEX_URL")
    locked = resolved("--no-deps", *(f"{name}=={version}" for name, version in versions.items()))
    locked |= resolved("--no-deps", *(("--index-url", index) if index else ()), torch)
    if not locked["torch"].version.endswith("+cpu"):
        raise LockFailed(
            f"torch {locked['torch'].version} is a CUDA build: name an index of CPU builds in TORCH_INDEX_URL"
        )
    return locked


def lock_resolved(engine: str, present: dict[str, str]) -> dict[str, Locked]:
    if engine == "gpu":
        wanted = [".[gpu]", *map(str, SATELLITES), *CUDA_COMPILER]
    else:
        build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
        wanted = [*build, *BUILD_TOOLS]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.writelines(f"{name}=={version}\n" for name, version in present.items())
        constraints.flush()
        locked = resolved("--constraint", constraints.name, *wanted)
    for name, each in locked.items():
        if "+" in each.version:
            raise LockFailed(
                f"{name} {each.version} comes from files of this machine and not from an index: run this with "
                "PIP_CONFIG_FILE=/dev/null and without PIP_FIND_LINKS"
            )
    return locked


def main() -> int:
    parser = argparse.ArgumentParser(description="Pin everything the image installs.")
    parser.add_argument("engine", choices=("cpu", "gpu", "build"))
    parser.add_argument("--upgrade", action="store_true", help="gpu, build: do not keep the file's versions")
    parser.add_argument("--check", action="store_true", help="fail where the file would change")
    arguments = parser.parse_args()
    file = FOLDER / f"requirements-{arguments.engine}.txt"
    try:
        if (sys.version_info[:2], platform.machine()) != ((3, 11), "x86_64"):
            raise LockFailed("run this with Python 3.11 on x86-64: pip chooses wheels for the machine it runs on")
        if arguments.engine == "cpu":
            locked = lock_cpu(pins(file) if arguments.check else {})
        else:
            locked = lock_resolved(arguments.engine, {} if arguments.upgrade else pins(file))
    except LockFailed as failure:
        print(f"{file.name}: {failure}", file=sys.stderr)
        return 1
    for name, each in locked.items():
        if not each.file.endswith(".whl"):
            print(f"{name}: {each.file} is no wheel; the image would run its build", file=sys.stderr)
            return 1
    lines = [f"{name}=={each.version} --hash={each.digest}\n" for name, each in sorted(locked.items())]
    text = HEADER + (TORCH_NOTE if arguments.engine == "cpu" else "") + "".join(lines)
    if arguments.check:
        if file.read_text(encoding="utf-8") != text:
            print(f"{file.relative_to(ROOT)}: not up to date; run tools/lock_image.py {arguments.engine}")
            return 1
        print(f"{file.relative_to(ROOT)}: up to date, {len(lines)} packages")
        return 0
    file.write_text(text, encoding="utf-8")
    print(f"{file.relative_to(ROOT)}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
