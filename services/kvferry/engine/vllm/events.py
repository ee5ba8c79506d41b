"""vLLM's KV events from ZMQ.

They carry salts and token ids without authentication, so the socket is an ipc file in a private folder.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from kvferry.engine.base import AllPagesCleared, KvEvent, KvEventBatch, PagesRemoved, PagesStored
from kvferry.engine.vllm.image_models import digest_in
from kvferry.engine.vllm.plugins.core_fields import ROUTE_KEYS_TAG
from kvferry.pages.keys import PageImages, unpack_keys

log = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(KVEventBatch)

_REPLAY_TIMEOUT_S = 2.0  # for each batch; vLLM looks for requests every 0.1 s
_SILENCE_MS = 1000
_END_OF_REPLAY = b"\xff" * 8


async def listen(endpoint: str, replay_endpoint: str) -> AsyncIterator[KvEventBatch]:
    """Yield all batches of the engine's life, in order. Those that vLLM no longer has leave a gap in the numbers.

    Both endpoints are ipc addresses that the engine binds.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)  # type: ignore[attr-defined]
    expected, has_joined, is_complete = 0, False, False
    try:
        socket.connect(endpoint)
        socket.subscribe(b"")
        while True:
            if not is_complete and not await socket.poll(_SILENCE_MS):
                # What came before this socket had joined, or was dropped, would be missed until the next batch.
                for missed, old in await _replayed(context, replay_endpoint, expected):
                    yield _batch(missed, old)
                    expected = missed + 1
                is_complete = has_joined
                continue
            _topic, raw, payload = await socket.recv_multipart()
            has_joined, is_complete = True, False
            sequence = int.from_bytes(raw, "big")
            if sequence < expected:
                continue  # replayed meanwhile
            if sequence > expected:
                for missed, old in await _replayed(context, replay_endpoint, expected, sequence):
                    yield _batch(missed, old)
            yield _batch(sequence, payload)
            expected = sequence + 1
    finally:
        socket.close(linger=0)
        context.destroy(linger=0)


async def _replayed(context: Any, endpoint: str, first: int, end: int | None = None) -> list[tuple[int, bytes]]:
    """Return the batches from `first`, to before `end` where it is known, that the engine still has."""
    socket = context.socket(zmq.DEALER)  # type: ignore[attr-defined]
    batches: list[tuple[int, bytes]] = []
    try:
        socket.connect(endpoint)
        await socket.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                _empty, _topic, raw, payload = await socket.recv_multipart()
            if raw == _END_OF_REPLAY:
                break
            sequence = int.from_bytes(raw, "big")
            if end is None or sequence < end:
                batches.append((sequence, payload))
    except TimeoutError:
        log.warning("the engine does not replay its events from %d on", first)
    finally:
        socket.close(linger=0)
    if batches or end is not None:
        log.info("%d missed batches of events were replayed, from %d on", len(batches), first)
    return batches


def _batch(sequence: int, payload: bytes) -> KvEventBatch:
    return KvEventBatch(sequence, [_translate(event) for event in _decoder.decode(payload).events])


def _translate(event: Any) -> KvEvent:
    match event:
        case BlockStored():
            extra = event.extra_keys[0] if event.extra_keys else None
            # vLLM puts an adapter's name before the salt.
            salts = (extra or ())[1:] if event.lora_name else extra or ()
            if extra and extra[0] == ROUTE_KEYS_TAG:
                return PagesStored(
                    event.block_hashes, None, (), 0, medium=event.medium or "CPU", route_keys=unpack_keys(extra[1])
                )
            return PagesStored(
                page_hashes=event.block_hashes,
                parent_hash=event.parent_block_hash,
                token_ids=event.token_ids,
                block_size=event.block_size,
                cache_salt=next((key for key in salts if isinstance(key, str)), None),
                medium=event.medium or "GPU",
                images=_images(event.extra_keys or ()),
            )
        case BlockRemoved():
            return PagesRemoved(page_hashes=event.block_hashes, medium=event.medium or "GPU")
        case AllBlocksCleared():
            return AllPagesCleared()
        case _:
            raise TypeError(f"vLLM published an event this version does not know: {type(event).__name__}")


def _images(extra_keys: Sequence[Any]) -> PageImages:
    # vLLM publishes an image as a pair: its name, and its offset from the page's start. Salts and names are texts.
    found = {}
    for page, keys in enumerate(extra_keys):
        images = [(digest_in(str(key[0])), int(key[1])) for key in keys or () if isinstance(key, list | tuple)]
        if images:
            found[page] = images
    return found
