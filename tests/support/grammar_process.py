"""A grammar process without vLLM: what it does with a spec is the spec."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from kvferry.engine.forks import ForkLimits, ForkServer


def compile_spec(spec: str) -> None:
    match spec.partition(" ")[0]:
        case "ok":
            return
        case "refuse":
            raise ValueError("refused because\nof a second line")
        case "spin":
            while True:
                pass
        case "wait":
            signal.pause()
        case "allocate":
            mmap.mmap(-1, 1 << 30)
        case "segfault":
            ctypes.string_at(0)
        case "recurse":
            _recurse()
        case "kill":
            os.kill(os.getppid(), signal.SIGKILL)
            signal.pause()
        case "files":
            raise ValueError(",".join(str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3)))
        case "environment":
            raise ValueError(",".join(sorted(os.environ)))


def work(payload: bytes) -> bytes:
    compile_spec(payload.decode())
    return b""


def _recurse() -> None:
    # qsort's comparison calls qsort: native frames, which Python does not count.
    libc = ctypes.CDLL(None)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    sys.setrecursionlimit(1_000_000)

    def compare(_a: int, _b: int) -> int:
        libc.qsort(numbers, 2, 4, compare_c)
        return 0

    numbers, compare_c = (ctypes.c_int * 2)(2, 1), kind(compare)
    compare(0, 0)


if __name__ == "__main__":
    with socket.socket(fileno=os.dup(0)) as connection:
        ForkServer(connection, work, msgspec.json.decode(sys.argv[-1], type=ForkLimits)).run()
