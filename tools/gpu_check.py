"""Run bench/gpu_check on this machine's GPUs, in an environment of its own, which is made first (`make gpu-check`).

Run by any Python from 3.11 to 3.13 with nothing installed. Without a GPU nothing is installed: exit code 3. What needs
no device (--dry-run, --list, --help) runs in the environment that is there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv-gpu"
NEEDS_NO_DEVICE = frozenset({"--dry-run", "--list", "-h", "--help"})

sys.path[:0] = [str(ROOT)]

from bench.gpu_check.__main__ import read_arguments  # noqa: E402
from bench.gpu_check.gpus import NoGpu, gpus_here  # noqa: E402


def main(arguments: list[str]) -> int:
    begun_s = time.monotonic()
    module = ["-m", "bench.gpu_check"]
    if NEEDS_NO_DEVICE & set(arguments):
        return _become(_first_python(), [*module, *arguments])
    read_arguments(arguments)  # before an environment is made for them
    try:
        found = gpus_here()
    except NoGpu as error:
        print(f"gpu-check: no GPU here: {error}. `make gpu-check ARGS=--dry-run` needs none", file=sys.stderr)
        return 3
    print(f"{len(found)} GPU(s): {', '.join(gpu.name for gpu in found)}", flush=True)
    command = [sys.executable, str(ROOT / "tools" / "setup_environment.py"), "--engine", "gpu", "--venv", str(VENV)]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        return 1
    # The last one counts: that of the arguments, in whatever form.
    limit = ["--limit", f"{_left_s(time.monotonic() - begun_s):.0f}"]
    return _become(VENV / "bin" / "python", [*module, *limit, *arguments])


def _become(python: Path, program: list[str]) -> NoReturn:
    # Not as a child: `subprocess` kills one that takes long to end after Ctrl-C, and with it what ends a part.
    os.chdir(ROOT)
    os.execv(python, [str(python), *program])


def _left_s(used_s: float) -> float:
    """Seconds of the hour that setting up has left; the first time it takes minutes."""
    return max(600.0, 3600.0 - used_s)


def _first_python() -> Path:
    return next((python for venv in (VENV, ROOT / ".venv") if (python := venv / "bin" / "python").exists()),
                Path(sys.executable))  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
