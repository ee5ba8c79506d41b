"""engine/vllm/plugins/tier/keeper_tier.py"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest

from .support import BLOCK_SIZE, Request, context_of, parameters

pytestmark = pytest.mark.vllm


class FakeClient:
    """A KeeperClient whose keeper does nothing by itself."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.connected = True
        self.calls: list[tuple[Any, ...]] = []
        self.done: list[Any] = []

    def contains(self, key: bytes) -> bool:
        return key in self.held

    def finished(self) -> list[Any]:
        done, self.done = self.done, []
        return done

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.calls.append((name, *arguments))


class TestKeeperTier:
    """engine/vllm/plugins/tier/keeper_tier.py"""

    @pytest.fixture
    def tier(self) -> Any:
        from kvferry.engine.vllm.plugins.tier.keeper_tier import KeeperTier

        tier = KeeperTier.__new__(KeeperTier)
        tier._client = FakeClient()
        tier._id_to_job, tier._done = {}, []
        return tier

    @staticmethod
    def job(job_id: int, keys: Collection[Any], rows: list[int], context: Any, *, load: bool) -> Any:
        import numpy as np
        from vllm.v1.kv_offload.tiering.base import TransferJob

        return TransferJob(job_id, keys, np.array(rows, dtype=np.int32), load, context)

    def test_vllm_asks_for_what_ours_does(self) -> None:
        from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        from kvferry.engine.vllm.plugins.tier.keeper_tier import KeeperTier

        assert not KeeperTier.__abstractmethods__
        assert parameters(SecondaryTierManager.__init__) == [
            "self", "offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector",
        ]  # fmt: skip
        assert {"job_id", "keys", "chunk_ids", "req_context"} <= {
            field.name for field in dataclasses.fields(TransferJob)
        }
        assert [field.name for field in dataclasses.fields(JobResult)] == [
            "job_id", "success", "successful_keys", "transfer_time", "transfer_bytes",
        ]  # fmt: skip
        assert KeeperTier.cache_hit_source is CacheHitSource.DISK

    def test_the_keys_of_a_request_are_where_we_look(self) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext("r")
        context.set_offload_key_position(b"k", 4)  # type: ignore[arg-type]
        assert list(context._offload_key_positions) == [b"k"]

    def test_a_lookup_is_the_mirror_and_the_hints_of_the_request(self, tier: Any) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        from kvferry.engine.base import TierHints
        from kvferry.engine.vllm.plugins.tier.request_tier_state import to_kv_hints

        hints = to_kv_hints("r", TierHints(volumes={"far": 2}))
        context, keys = context_of(Request(list(range(40)), hints), 4)
        tier._client.held = {keys[0], keys[2]}
        found = [tier.lookup(key, context) is LookupResult.HIT for key in keys]
        assert found == [True, True, True, False]
        tier._client.connected = False
        assert tier.lookup(keys[1], context) is LookupResult.MISS
        assert tier.lookup(keys[0], ReqContext("nobody")) is LookupResult.MISS

    def test_a_store_names_whose_pages_they_are_and_begins_at_the_start(self, tier: Any) -> None:
        from kvferry.engine.base import TierHints
        from kvferry.engine.vllm.plugins.tier.request_tier_state import to_kv_hints
        from kvferry.pages.keys import route_keys, seed_of
        from kvferry.tenancy.namespace import Namespace

        hints = to_kv_hints("r", TierHints(Namespace("acme", 3), wanted_s=60.0))
        context, keys = context_of(Request(list(range(40)), hints), 4)
        tier._client.held = {keys[1]}
        tier.submit_store(self.job(5, [keys[3], keys[1], keys[0], keys[2]], [13, 11, 10, 12], context, load=False))
        expected = route_keys(list(range(16)), BLOCK_SIZE, seed_of(""))
        ((name, job, namespace, pages, wanted_s),) = tier._client.calls
        assert (name, job, namespace, wanted_s) == ("store", 5, Namespace("acme", 3), 60.0)
        assert pages == [(keys[i], expected[i], 10 + i) for i in (0, 2, 3)]
        assert all(type(row) is int for _, _, row in pages)

    def test_what_came_by_the_kv_transfer_is_left_to_the_other_node(self, tier: Any) -> None:
        request = Request(list(range(40)))
        request.kv_transfer_params = {"do_remote_prefill": True, "remote_engine_id": "e"}
        context, keys = context_of(request, 6)
        request.kv_transfer_params["do_remote_prefill"] = False  # as vLLM does once the KV transfer had its turn
        tier.submit_store(self.job(5, keys, list(range(6)), context, load=False))
        ((_, _, _, pages, wanted_s),) = tier._client.calls
        assert [key for key, _, _ in pages] == keys[4:]
        assert wanted_s is None

    def test_what_is_kept_already_or_nobodys_ends_at_once(self, tier: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext

        context, keys = context_of(Request(list(range(40))), 2)
        tier._client.held = set(keys)
        tier.submit_store(self.job(5, keys, [1, 2], context, load=False))
        tier._client.held = set()
        tier.submit_store(self.job(6, keys, [1, 2], ReqContext("nobody"), load=False))
        assert [result.job_id for result in tier.get_finished_jobs()] == [5, 6]
        assert not tier._client.calls

    def test_a_load_says_where_pages_lie_that_are_not_in_the_mirror(self, tier: Any) -> None:
        from kvferry.engine.base import TierHints
        from kvferry.engine.vllm.plugins.tier.request_tier_state import to_kv_hints
        from kvferry.tenancy.namespace import DEFAULT_NAMESPACE

        context, keys = context_of(Request(list(range(40)), to_kv_hints("r", TierHints(volumes={"far": 2}))), 3)
        tier._client.held = {keys[0], keys[2]}
        tier.submit_load(self.job(5, keys, [7, 8, 9], context, load=True))
        pages = list(zip(keys, [7, 8, 9], strict=True))
        assert tier._client.calls == [("load", 5, DEFAULT_NAMESPACE, pages, {keys[1]: "far"}, None)]

    def test_a_load_says_whose_trace_it_belongs_to(self, tier: Any) -> None:
        from kvferry.engine.base import TierHints
        from kvferry.engine.vllm.plugins.tier.request_tier_state import to_kv_hints
        from kvferry.observability.tracing import TraceContext

        trace = TraceContext("00-" + 32 * "a" + "-" + 16 * "b" + "-01", "shop=7")
        context, keys = context_of(Request(list(range(40)), to_kv_hints("r", TierHints(), trace)), 2)
        tier.submit_load(self.job(5, keys, [7, 8], context, load=True))
        ((*_, carried),) = tier._client.calls
        assert carried == trace

    def test_what_did_not_load_is_a_miss_for_this_request_from_then_on(self, tier: Any) -> None:
        from vllm.v1.kv_offload.base import LookupResult

        from kvferry.keeper.client import JobDone

        context, keys = context_of(Request(list(range(40))), 3)
        another, _ = context_of(Request(list(range(40))), 3)
        tier._client.held = set(keys)
        tier.submit_load(self.job(5, keys, [7, 8, 9], context, load=True))
        good = frozenset({keys[0], keys[2]})
        tier._client.done = [JobDone(5, True, good, {keys[1]: "corrupt_payload"}, 100, 0.5)]
        (result,) = tier.get_finished_jobs()
        assert (result.job_id, result.success, set(result.successful_keys)) == (5, False, good)
        # Whatever the mirror learns meanwhile.
        assert [tier.lookup(key, context) is LookupResult.HIT for key in keys] == [True, False, True]
        assert tier.lookup(keys[1], another) is LookupResult.HIT

    def test_a_load_that_brought_nothing_is_a_failure_of_all(self, tier: Any) -> None:
        from kvferry.keeper.client import JobDone

        context, keys = context_of(Request(list(range(40))), 2)
        tier.submit_load(self.job(5, keys, [7, 8], context, load=True))
        tier._client.done = [JobDone(5, True, frozenset(), dict.fromkeys(keys, "missing"), 0, 0.5)]
        (result,) = tier.get_finished_jobs()
        assert (result.success, tuple(result.successful_keys)) == (False, ())

    def test_a_finished_request_keeps_its_pages_in_use(self, tier: Any) -> None:
        context, keys = context_of(Request(list(range(40))), 3)
        tier._client.held = {keys[0], keys[2]}
        tier.on_request_finished(context)
        assert tier._client.calls == [("touch", [keys[0], keys[2]], None)]

    def test_a_lookup_costs_the_scheduler_about_a_microsecond(self, tier: Any) -> None:
        context, keys = context_of(Request(list(range(40))), 10)
        tier._client.held = {hashlib.sha256(str(i).encode()).digest() + bytes(4) for i in range(100_000)} | set(keys)
        begun_s = time.perf_counter()
        for _ in range(1000):
            for key in keys:
                tier.lookup(key, context)
        assert (time.perf_counter() - begun_s) / 10_000 < 5e-6
