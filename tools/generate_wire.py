"""Generate services/kvferry/wire from proto/, or with --check fail when the committed code differs.

The proto package is kvferry.wire.v1 and the generated modules live at the same path under services/, so the generator's
absolute imports are right without any rewriting.
"""

from __future__ import annotations

import argparse
import filecmp
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(into: Path) -> list[Path]:
    """Write *_pb2.py, *_pb2.pyi and *_pb2_grpc.py of every proto file under `into`; returns what was written."""
    protos = sorted((ROOT / "proto").rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    arguments = [
        "protoc",
        f"-I{ROOT / 'proto'}",
        f"-I{well_known}",
        f"--python_out={into}",
        f"--pyi_out={into}",
        f"--grpc_python_out={into}",
        *map(str, protos),
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    return sorted(
        path.relative_to(into) for path in into.rglob("*_pb2*") if path.is_file() and "__pycache__" not in path.parts
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the committed code instead of writing it")
    if not parser.parse_args().check:
        generate(ROOT / "services")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        written = generate(fresh)
        differing = [
            str(path)
            for path in written
            if not (ROOT / "services" / path).is_file()
            or not filecmp.cmp(fresh / path, ROOT / "services" / path, shallow=False)
        ]
    for path in differing:
        print(f"services/{path} differs from proto/: run `make proto`", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
