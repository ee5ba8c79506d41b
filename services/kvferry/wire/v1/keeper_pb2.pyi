from kvferry.wire.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FollowRequest(_message.Message):
    __slots__ = ("volume_id",)
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    def __init__(self, volume_id: _Optional[str] = ...) -> None: ...

class VolumeUpdate(_message.Message):
    __slots__ = ("residency", "state")
    RESIDENCY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    residency: _worker_pb2.Residency
    state: VolumeState
    def __init__(self, residency: _Optional[_Union[_worker_pb2.Residency, _Mapping]] = ..., state: _Optional[_Union[VolumeState, _Mapping]] = ...) -> None: ...

class VolumeState(_message.Message):
    __slots__ = ("volume_id", "read_bytes_per_s", "queue_bytes", "chunk_bytes", "blocks_per_chunk", "breaker_open", "capacity_bytes", "used_bytes", "num_chunks", "shared", "write_breaker_open", "full", "trips", "pool")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    BREAKER_OPEN_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    WRITE_BREAKER_OPEN_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    TRIPS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    read_bytes_per_s: float
    queue_bytes: int
    chunk_bytes: int
    blocks_per_chunk: int
    breaker_open: bool
    capacity_bytes: int
    used_bytes: int
    num_chunks: int
    shared: bool
    write_breaker_open: bool
    full: bool
    trips: int
    pool: str
    def __init__(self, volume_id: _Optional[str] = ..., read_bytes_per_s: _Optional[float] = ..., queue_bytes: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., blocks_per_chunk: _Optional[int] = ..., breaker_open: _Optional[bool] = ..., capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_chunks: _Optional[int] = ..., shared: _Optional[bool] = ..., write_breaker_open: _Optional[bool] = ..., full: _Optional[bool] = ..., trips: _Optional[int] = ..., pool: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("volume_id", "layout", "payload_bytes", "tenant", "epoch", "keys", "agent", "pool")
    VOLUME_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    volume_id: str
    layout: bytes
    payload_bytes: int
    tenant: str
    epoch: int
    keys: bytes
    agent: str
    pool: str
    def __init__(self, volume_id: _Optional[str] = ..., layout: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., keys: _Optional[bytes] = ..., agent: _Optional[str] = ..., pool: _Optional[str] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("lease", "chunks", "agent", "agent_metadata")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_METADATA_FIELD_NUMBER: _ClassVar[int]
    lease: int
    chunks: _containers.RepeatedCompositeFieldContainer[FetchedChunk]
    agent: str
    agent_metadata: bytes
    def __init__(self, lease: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[FetchedChunk, _Mapping]]] = ..., agent: _Optional[str] = ..., agent_metadata: _Optional[bytes] = ...) -> None: ...

class FetchedChunk(_message.Message):
    __slots__ = ("cause", "address", "header")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    cause: str
    address: int
    header: bytes
    def __init__(self, cause: _Optional[str] = ..., address: _Optional[int] = ..., header: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KeeperDescription(_message.Message):
    __slots__ = ("keeper_id", "version", "node", "num_engines", "volumes")
    KEEPER_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ENGINES_FIELD_NUMBER: _ClassVar[int]
    VOLUMES_FIELD_NUMBER: _ClassVar[int]
    keeper_id: str
    version: str
    node: str
    num_engines: int
    volumes: _containers.RepeatedCompositeFieldContainer[VolumeState]
    def __init__(self, keeper_id: _Optional[str] = ..., version: _Optional[str] = ..., node: _Optional[str] = ..., num_engines: _Optional[int] = ..., volumes: _Optional[_Iterable[_Union[VolumeState, _Mapping]]] = ...) -> None: ...
