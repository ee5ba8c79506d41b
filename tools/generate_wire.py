"""Generate code from proto/, or with --check fail when the committed code differs.

What passes between kvferry's own processes becomes services/kvferry/wire, the public endpoint becomes
services/kvferry/inference: proto packages and modules have the same path, so the generator's absolute imports are right
without any rewriting. Of the public endpoint the load-test harness, which knows nothing of kvferry, has messages of its
own.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kvferry/wire", "kvferry/inference")
INFERENCE = Path("kvferry/inference/v1")
HARNESS = Path("loadtest/kvferry_loadtest/wire")


def generate(into: Path) -> list[Path]:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py under `into`, as under the repository; returns what was written."""
    services = into / "services"
    for folder in ROOMS:
        run_protoc(folder, services, "python_out", "pyi_out", "grpc_python_out")
    with tempfile.TemporaryDirectory() as folder:
        run_protoc(str(INFERENCE), Path(folder), "python_out", "pyi_out")
        (into / HARNESS).mkdir(parents=True, exist_ok=True)
        for path in (Path(folder) / INFERENCE).iterdir():
            shutil.copy(path, into / HARNESS / path.name)
    folders = (*(services / room for room in ROOMS), into / HARNESS)
    written = [path for folder in folders for path in folder.rglob("*_pb2*")]
    return sorted(path.relative_to(into) for path in written if path.is_file() and "__pycache__" not in path.parts)


def run_protoc(folder: str, into: Path, *outputs: str) -> None:
    into.mkdir(parents=True, exist_ok=True)
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        *(f"--{output}={into}" for output in outputs),
        *map(str, sorted((ROOT / "proto" / folder).rglob("*.proto"))),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed code instead of writing it")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        written = generate(fresh)
        differing = [
            str(path)
            for path in written
            if not (ROOT / path).is_file() or not filecmp.cmp(fresh / path, ROOT / path, shallow=False)
        ]
    for path in differing:
        print(f"{path} differs from proto/: run `make proto`", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
