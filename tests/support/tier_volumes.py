"""Volumes for tests: opened on demand, checked and closed at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvferry_keeper.store.volume import Volume
from support.tier_chunks import CHUNK_BYTES

Opened = Callable[..., Volume]


@contextlib.contextmanager
def opened_volumes(folder: Path) -> Iterator[Opened]:
    """Yield a function that opens volumes below `folder`; those still open are checked and closed at the end.

    None of them waits for a lock.
    """
    volumes: list[Volume] = []

    def open_volume(name: str = "v", *, chunks: int = 8, **values: Any) -> Volume:
        volume = Volume(folder / name, capacity_bytes=chunks * CHUNK_BYTES, **{"lock_patience_s": 0.0, **values})
        volume.open()
        volumes.append(volume)
        return volume

    yield open_volume
    for volume in volumes:
        if volume._locks:
            volume.check()
            volume.close()
