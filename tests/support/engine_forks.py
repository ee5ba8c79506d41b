"""Starts vLLM's processes as forks of a process that has imported vLLM.

An engine has a process, and one more for each of several ranks; each imports vLLM (7 s of CPU on an AMD EPYC of
2.6 GHz). vLLM starts them by `spawn`; here they come from multiprocessing's fork server, which has the imports done and
runs nothing else. The environment of a process is that of its parent at the start, as with `spawn`. Clusters on Ray
start engines by `spawn`, so both ways are tested.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import context, forkserver
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.engine_device import on_gpu

with contextlib.suppress(ImportError):
    # vLLM's titles of processes: the library finds its place in memory only before variables change.
    import setproctitle

    setproctitle.getproctitle()

_PRELOADED = ("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "support.engine_forks")


class _Process(context.ForkServerProcess):
    _environment: Mapping[str, str] = {}

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        # Its own processes come from the same server; without these two lines it would start another.
        server = forkserver._forkserver  # type: ignore[attr-defined]
        server.ensure_running = lambda: None
        _use_forks()
        super().run()


class _Context(context.ForkServerContext):
    Process = _Process  # type: ignore[assignment]


def _use_forks() -> mock._patch[Any]:
    patch = mock.patch(
        "vllm.utils.system_utils.multiprocessing", SimpleNamespace(get_context=lambda method: _Context())
    )
    patch.start()
    return patch


@contextmanager
def forked_engines() -> Iterator[None]:
    """Let engines of this process start as forks. The server ends with this process and its engines."""
    if on_gpu():  # CUDA does not survive a fork
        yield
        return
    forkserver.set_forkserver_preload(list(_PRELOADED))
    patch = _use_forks()
    try:
        yield
    finally:
        patch.stop()
