"""Section `tier`."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from kvferry.config.section import AbsolutePath, Section
from kvferry.util.addresses import SOCKET_PATH_BYTES


class VolumeConfig(Section):
    """A directory on NVMe that stores chunks: local to one node, or a mount that nodes share."""

    path: AbsolutePath  # absolute; made at the first start
    capacity_gib: float = Field(gt=0, allow_inf_nan=False)
    shared: bool = False  # mounted by other nodes too, whose keepers read and write it
    write_gib_per_day: float | None = Field(None, gt=0, allow_inf_nan=False)  # empty: as much as comes
    pool: str = ""  # whose engines alone use it; empty: the default pool's, and those of pools that may use its volumes


# What the system takes for the address of a Unix socket, less the name that keepers give theirs.
_MAX_SOCKET_DIR_BYTES = SOCKET_PATH_BYTES - len("/keeper.sock")


class TierConfig(Section):
    """Tiers beyond an engine's own memory: a CPU tier per engine, and volumes behind one keeper per node."""

    enabled: bool = False  # the CPU tier, and a keeper where there are volumes
    cpu_gib: float = Field(1.0, gt=0, allow_inf_nan=False)  # CPU tier per engine, in /dev/shm
    # KV pages (vLLM: blocks) in one chunk. Empty: as many as give 1 MiB, but no more than 256 tokens; 1 for sim.
    blocks_per_chunk: int | None = Field(None, ge=1)
    volumes: tuple[VolumeConfig, ...] = ()  # on NVMe
    socket_dir: AbsolutePath | None = None  # of keepers; empty: the run folder, or a private folder under /run or /tmp
    host: str = "127.0.0.1"  # where keepers answer gateways and each other; auto: this node's address
    # For an operation on a drive; one that takes longer hangs. An operation may wait as long for its turn, and a
    # request twice as long for its pages from tiers: then it computes them.
    io_timeout_s: float = Field(10.0, gt=0)
    encryption_keys_file: Path | None = None

    @property
    def load_timeout_s(self) -> float:
        return 2 * self.io_timeout_s  # pages wait for their turn in a queue, and are read

    @field_validator("socket_dir")
    @classmethod
    def _socket_dir_fits(cls, path: Path | None) -> Path | None:
        if path is not None and len(os.fsencode(path)) > _MAX_SOCKET_DIR_BYTES:
            raise ValueError(f"at most {_MAX_SOCKET_DIR_BYTES} bytes, or no socket in it could be addressed")
        return path

    @model_validator(mode="after")
    def _volumes_make_sense(self) -> TierConfig:
        if self.volumes and not self.enabled:
            raise ValueError("volumes are read through the CPU tier: say enabled: true, or leave them out")
        paths = [Path(os.path.normpath(volume.path)) for volume in self.volumes]
        for i, path in enumerate(paths):
            for j, other in enumerate(paths):
                if i < j and path == other:
                    raise ValueError(f"volumes {i} and {j} are the same directory, {path}")
                if i != j and other in path.parents:
                    raise ValueError(f"volume {i} ({path}) lies inside volume {j} ({other})")
        return self
