"""Pages of a GPU beside the rows of a CPU tier, as engines have them: pinned rows, copies on a stream of their own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np


class GpuPages:
    """A page on the device for each row. `device` is torch's; the rows are pinned where it is a GPU, until `close`."""

    def __init__(self, rows: Sequence[memoryview], device: str = "cuda:0") -> None:
        import torch

        self._torch = torch
        self._is_gpu = torch.device(device).type == "cuda"
        self._device = device
        self._rows = [torch.from_numpy(np.frombuffer(row, dtype=np.uint8)) for row in rows]
        self._pages = [torch.empty_like(row, device=device) for row in self._rows]
        self._of_thread = threading.local()
        self._pinned: list[int] = []
        if self._is_gpu:
            for row in self._rows:
                self._check(torch.cuda.cudart().cudaHostRegister(row.data_ptr(), row.numel(), 0))
                self._pinned.append(row.data_ptr())
        for number in range(len(self._rows)):
            self.load(number)

    def load(self, number: int) -> None:
        """Copy a row to its page, and wait for the end."""
        self._copy(self._pages[number], self._rows[number])

    def store(self, number: int) -> None:
        """Copy a page to its row, and wait for the end."""
        self._copy(self._rows[number], self._pages[number])

    def is_equal(self, number: int) -> bool:
        """Return whether a page has the bytes of its row."""
        return bool(self._torch.equal(self._pages[number].cpu(), self._rows[number]))

    def close(self) -> None:
        while self._pinned:
            self._check(self._torch.cuda.cudart().cudaHostUnregister(self._pinned.pop()))

    def _copy(self, to: Any, origin: Any) -> None:
        if not self._is_gpu:
            to.copy_(origin)
            return
        stream = getattr(self._of_thread, "stream", None)
        if stream is None:
            stream = self._of_thread.stream = self._torch.cuda.Stream(self._device)
        with self._torch.cuda.stream(stream):
            to.copy_(origin, non_blocking=True)
        stream.synchronize()

    def _check(self, error: Any) -> None:
        if int(error):
            raise RuntimeError(f"CUDA cannot pin a row: error {int(error)}")
