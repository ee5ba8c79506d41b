"""State of a volume, as its keeper reports it to gateways, and its read rate."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass

from kvferry.wire.v1 import keeper_pb2 as pb

# Weight of the last measurement in the rate.
_WEIGHT = 0.3
# A rate expires after this time without reads. A slow volume gets no loads, so its rate would never be measured again.
_EXPIRY_S = 5.0


class ReadRate:
    """Bytes per second while at least one read runs. Thread-safe."""

    def __init__(self, now_s: float) -> None:
        self._lock = threading.Lock()
        self._num_reading = 0
        self._since_s = 0.0
        self._busy_s = 0.0  # since the last measurement
        self._num_bytes = 0
        self._measured_at_s = now_s
        self.bytes_per_s = 0.0  # 0: nothing was read in the last seconds

    def __repr__(self) -> str:
        return f"<ReadRate {self.bytes_per_s:.0f} bytes/s>"

    def begin_read(self, now_s: float) -> None:
        with self._lock:
            if not self._num_reading:
                self._since_s = now_s
            self._num_reading += 1

    def end_read(self, num_bytes: int, now_s: float) -> None:
        with self._lock:
            self._num_reading -= 1
            self._num_bytes += num_bytes
            if not self._num_reading:
                self._busy_s += now_s - self._since_s

    def measure(self, now_s: float) -> None:
        """Update the rate from the reads since the last call; call about every second."""
        with self._lock:
            busy_s, num_bytes = self._busy_s, self._num_bytes
            if self._num_reading:
                busy_s += now_s - self._since_s
                self._since_s = now_s
            self._busy_s, self._num_bytes = 0.0, 0
        if num_bytes and busy_s > 0:
            weight = _WEIGHT if self.bytes_per_s else 1.0
            self.bytes_per_s += weight * (num_bytes / busy_s - self.bytes_per_s)
            self._measured_at_s = now_s
        elif now_s - self._measured_at_s > _EXPIRY_S:
            self.bytes_per_s = 0.0


@dataclass(frozen=True, slots=True)
class VolumeState:
    volume_id: str = ""
    read_bytes_per_s: float = 0.0  # while it reads, in the last seconds; 0: nothing was read
    queue_bytes: int = 0  # of reads that wait or run
    chunk_bytes: int = 0  # average size of a chunk's file
    blocks_per_chunk: int = 1  # engine pages (vLLM: blocks) per chunk, in the layout used last
    breaker_open: bool = False  # the volume's chunks are misses
    capacity_bytes: int = 0
    used_bytes: int = 0
    num_chunks: int = 0
    shared: bool = False  # other nodes mount it
    write_breaker_open: bool = False  # no chunk is written to it
    full: bool = False  # its drive had no space for the last write
    trips: int = 0  # of both breakers, since the keeper started
    pool: str = ""  # whose engines use it

    @property
    def is_readable(self) -> bool:
        return not self.breaker_open

    @property
    def is_writable(self) -> bool:
        return not (self.write_breaker_open or self.full)

    def to_wire(self) -> pb.VolumeState:
        return pb.VolumeState(**asdict(self))

    @classmethod
    def from_wire(cls, message: pb.VolumeState) -> VolumeState:
        return cls(
            volume_id=message.volume_id,
            read_bytes_per_s=message.read_bytes_per_s,
            queue_bytes=message.queue_bytes,
            chunk_bytes=message.chunk_bytes,
            blocks_per_chunk=max(1, message.blocks_per_chunk),
            breaker_open=message.breaker_open,
            capacity_bytes=message.capacity_bytes,
            used_bytes=message.used_bytes,
            num_chunks=message.num_chunks,
            shared=message.shared,
            write_breaker_open=message.write_breaker_open,
            full=message.full,
            trips=message.trips,
            pool=message.pool,
        )
