"""Threads for libraries that recurse with their input."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

# llguidance 1.7 uses 8.4 KiB for each level of a JSON schema. The system allocates memory as the stack grows.
STACK_BYTES: Final = 64 << 20

_making = threading.Lock()  # the size is that of all threads which Python starts meanwhile


class DeepThreads(ThreadPoolExecutor):
    """Its threads have stacks of `STACK_BYTES`."""

    def _adjust_thread_count(self) -> None:
        with _making:
            before = threading.stack_size(STACK_BYTES)
            try:
                super()._adjust_thread_count()
            finally:
                threading.stack_size(before)
