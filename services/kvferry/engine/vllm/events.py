"""vLLM's KV events from ZMQ.

They carry salts and token ids without authentication, so the socket is an ipc file in a private folder.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvferry.engine.base import AllPagesCleared, KvEvent, KvEventBatch, PagesRemoved, PagesStored
from kvferry.engine.vllm.plugins.core_fields import ROUTE_KEYS_TAG
from kvferry.pages.keys import unpack_keys

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(KVEventBatch)


async def listen(endpoint: str) -> AsyncIterator[KvEventBatch]:
    """`endpoint` is the ipc address that the engine binds."""
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)  # type: ignore[attr-defined]
    try:
        socket.connect(endpoint)
        socket.subscribe(b"")
        while True:
            _topic, sequence, payload = await socket.recv_multipart()
            batch = _decoder.decode(payload)
            yield KvEventBatch(int.from_bytes(sequence, "big"), [_translate(event) for event in batch.events])
    finally:
        socket.close(linger=0)
        context.destroy(linger=0)


def _translate(event: Any) -> KvEvent:
    match event:
        case BlockStored():
            extra = event.extra_keys[0] if event.extra_keys else None
            if extra and extra[0] == ROUTE_KEYS_TAG:
                return PagesStored(
                    event.block_hashes, None, (), 0, medium=event.medium or "CPU", route_keys=unpack_keys(extra[1])
                )
            return PagesStored(
                page_hashes=event.block_hashes,
                parent_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                cache_salt=next((key for key in extra or () if isinstance(key, str)), None),
                medium=event.medium or "GPU",
            )
        case BlockRemoved():
            return PagesRemoved(page_hashes=event.block_hashes, medium=event.medium or "GPU")
        case AllBlocksCleared():
            return AllPagesCleared()
        case _:
            raise TypeError(f"vLLM published an event this version does not know: {type(event).__name__}")
