"""engine/vllm/events.py"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.engine.base import PagesStored
from support.waiting import until

pytestmark = pytest.mark.vllm


class TestEvents:
    """engine/vllm/events.py"""

    def test_there_are_no_other_kinds_of_events(self) -> None:
        from vllm.distributed import kv_events

        kinds = {kind.__name__ for kind in kv_events.KVCacheEvent.__subclasses__()}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}

    async def test_missed_batches_are_replayed(self, tmp_path: Path) -> None:
        """The listener comes late, as to a socket that dropped what it could not hold."""
        from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

        from kvferry.engine.vllm.events import listen

        endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        publisher = ZmqEventPublisher(0, endpoint, replay, buffer_steps=4)
        try:
            for _ in range(3):
                publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            await until(lambda: len(publisher._buffer) == 3)
            batches = listen(endpoint, replay)
            first = asyncio.ensure_future(anext(batches))
            while not first.done():  # until the subscription is there
                publisher.publish(KVEventBatch(ts=0.0, events=[]))
                await asyncio.wait([first], timeout=0.05)
            numbers = [(await first).sequence]
            assert len(publisher._buffer) == 4
            for _ in range(3):
                numbers.append((await anext(batches)).sequence)
            assert numbers == list(range(numbers[0], numbers[0] + 4))
            await batches.aclose()
        finally:
            publisher.shutdown()

    async def test_batches_of_before_the_subscription_come_though_no_other_follows(self, tmp_path: Path) -> None:
        """Pages of an engine that does nothing more would stay unknown to routers."""
        from vllm.distributed.kv_events import AllBlocksCleared, KVEventBatch, ZmqEventPublisher

        from kvferry.engine.vllm.events import listen

        endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        publisher = ZmqEventPublisher(0, endpoint, replay)
        try:
            for _ in range(3):
                publisher.publish(KVEventBatch(ts=0.0, events=[AllBlocksCleared()]))
            await until(lambda: len(publisher._buffer) == 3)
            batches = listen(endpoint, replay)
            assert [(await anext(batches)).sequence for _ in range(3)] == [0, 1, 2]
            publisher.publish(KVEventBatch(ts=0.0, events=[]))
            assert (await anext(batches)).sequence == 3
            await batches.aclose()
        finally:
            publisher.shutdown()

    async def test_a_batch_that_was_replayed_does_not_come_once_more(self, tmp_path: Path) -> None:
        """It is sent to subscribers while the listener asks for what it missed."""
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        from kvferry.engine.vllm.events import _END_OF_REPLAY, listen

        payload = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[]))
        endpoint, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
        with zmq.asyncio.Context() as context, context.socket(zmq.XPUB) as live, context.socket(zmq.ROUTER) as old:
            live.bind(endpoint)
            old.bind(replay)
            batches = listen(endpoint, replay)
            first = asyncio.ensure_future(anext(batches))
            await live.recv()  # the subscription is there
            client, _, start = await old.recv_multipart()
            assert int.from_bytes(start, "big") == 0
            for number in (0, 1):
                await old.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            await old.send_multipart((client, b"", b"", _END_OF_REPLAY, b""))
            assert (await first).sequence == 0
            for number in (1, 2):
                await live.send_multipart((b"", number.to_bytes(8, "big"), payload))
            assert [(await anext(batches)).sequence for _ in range(2)] == [1, 2]
            await batches.aclose()

    @pytest.mark.parametrize(
        ("lora_name", "extra_keys", "salt"),
        [
            (None, None, None),
            (None, [("salt",), None], "salt"),
            ("sql@00", [("sql@00", "salt"), ("sql@00",)], "salt"),
            ("sql@00", [("sql@00",)], None),
        ],
    )
    def test_the_salt_is_not_taken_for_the_adapter(self, lora_name: Any, extra_keys: Any, salt: str | None) -> None:
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        from kvferry.engine.vllm.events import _batch

        stored = BlockStored(
            block_hashes=[1, 2],
            parent_block_hash=None,
            token_ids=[1, 2],
            block_size=1,
            lora_id=1 if lora_name else None,
            medium="GPU",
            lora_name=lora_name,
            extra_keys=extra_keys,
        )
        (event,) = _batch(0, msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=[stored]))).events
        assert isinstance(event, PagesStored)
        assert event.cache_salt == salt
