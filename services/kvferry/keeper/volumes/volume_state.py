"""State of a volume, as its keeper reports it to gateways."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from kvferry.wire.v1 import keeper_pb2 as pb


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
