"""The GPUs of this machine, by `nvidia-smi`. Imports nothing that has to be installed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

# Oldest driver for the CUDA 13 libraries in torch's wheel, which the extra `gpu` installs.
OLDEST_DRIVER = 580
_FIELDS = "name,memory.total,compute_cap,driver_version"
_TIMEOUT_S = 60.0


class NoGpu(Exception):
    """Nothing can be tested here; the message says why."""


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_mib: int
    capability: int  # 90 is compute capability 9.0
    driver: str


def gpus_here() -> list[Gpu]:
    """Raises NoGpu where there is none, or its driver is too old."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise NoGpu("there is no nvidia-smi, so no driver of an NVIDIA GPU")
    try:
        done = subprocess.run(
            [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoGpu(f"nvidia-smi does not answer: {error}") from None
    if done.returncode:
        raise NoGpu(f"nvidia-smi finds none: {' '.join((done.stdout + done.stderr).split())[:300]}")
    found = parse(done.stdout)
    if not found:
        raise NoGpu("nvidia-smi lists none")
    return found


def parse(lines: str) -> list[Gpu]:
    """Read what nvidia-smi prints. Raises NoGpu for something else, and for a driver that is too old."""
    found = []
    for line in lines.splitlines():
        if not line.strip():
            continue
        try:
            name, memory, capability, driver = (part.strip() for part in line.split(","))
            major, minor = capability.split(".")
            found.append(Gpu(name, int(memory), 10 * int(major) + int(minor), driver))
            is_too_old = int(driver.split(".")[0]) < OLDEST_DRIVER
        except ValueError:
            raise NoGpu(f"nvidia-smi says {line[:200]!r}, which is no GPU") from None
        if is_too_old:
            raise NoGpu(f"the driver {driver} is too old for CUDA 13: {OLDEST_DRIVER} is the oldest")
    return found
