"""engine/vllm/plugins/tier/tier_connector.py"""

from __future__ import annotations

import inspect
import re

import msgspec
import pytest

from .support import BLOCK_SIZE, Request, context_of, parameters

pytestmark = pytest.mark.vllm


class TestTierConnector:
    """engine/vllm/plugins/tier/tier_connector.py"""

    def test_vllm_still_has_what_is_overridden_and_reached_into(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager
        from vllm.v1.request import Request

        assert parameters(OffloadingConnector.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]
        ask = scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens
        assert parameters(ask) == ["self", "request", "num_computed_tokens", "max_num_new_tokens"]
        source = inspect.getsource(scheduler.OffloadingConnectorScheduler)
        assert "self._req_status[request.request_id] = req_status" in source
        ask = scheduler.OffloadingConnectorScheduler.get_external_cache_hit_sources
        assert parameters(ask) == ["self", "request", "num_external_tokens"]
        for name in ("request_finished", "request_finished_all_groups"):
            assert parameters(getattr(OffloadingConnector, name)) == ["self", "request", "block_ids"]
        assert parameters(OffloadingConnector.update_state_after_alloc) == [
            "self", "request", "blocks", "num_external_tokens",
        ]  # fmt: skip
        assert "self._sliding_window_groups: tuple" in source
        assert "req_context: ReqContext" in inspect.getsource(scheduler.RequestOffloadState)
        assert {"group_idx", "tokens_per_chunk", "sliding_window_size_in_chunks"} <= set(
            scheduler.GroupOffloadConfig._fields
        )
        primary = inspect.getsource(CPUPrimaryTierOffloadingManager.__init__)
        assert "self.complete_write = self.complete_store" in primary
        assert "self._mmap_region = mmap_region" in primary
        tiering = inspect.getsource(TieringOffloadingManager)
        assert "self.primary_tier.complete_store(keys, req_context, success)" in tiering
        assert tiering.count("self.primary_tier.complete_write(") == 2
        assert {"block_hashes", "all_token_ids", "prompt_token_ids", "cache_salt", "kv_hints", "num_tokens"} <= {
            *re.findall(r"self\.(\w+)", inspect.getsource(Request.__init__)), *vars(Request)
        }  # fmt: skip
        assert isinstance(KVConnectorFactory._registry, dict)
        # Statistics are made anew from class names, in the process of whoever logs them.
        assert "get_connector_class_by_name(" in inspect.getsource(MultiConnector.build_kv_connector_stats)

    def test_nothing_of_ours_hides_something_of_vllm(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1 import base, offloading_connector

        source = inspect.getsource(base.KVConnectorBase_V1) + inspect.getsource(offloading_connector)
        for name in (
            "_block_size",
            "_manager",
            "_load_timeout_s",
            "_waits_when_idle",
            "_is_region_verified",
            "_events",
        ):
            assert f"self.{name} " not in source
            assert f"self.{name}:" not in source

    def test_the_kv_transfer_says_that_it_had_its_turn(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pull_scheduler

        source = inspect.getsource(pull_scheduler.NixlPullConnectorScheduler.update_state_after_alloc)
        assert 'params["do_remote_prefill"] = False' in source

    def test_children_of_a_multi_connector_get_its_engine_id(self) -> None:
        """Named in a child too, it would be given twice."""
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        source = inspect.getsource(MultiConnector._get_connector_classes_and_configs)
        assert "KVTransferConfig(\n                **ktc, engine_id=engine_id" in source

    @pytest.mark.parametrize(
        ("block_bytes", "tokens", "expected"),
        [(1_474_560, 32, 1), (1 << 20, 32, 1), (300_000, 32, 4), (4096, 32, 8), (4096, 300, 1), (100, 1, 256)],
    )
    def test_small_pages_are_grouped(self, block_bytes: int, tokens: int, expected: int) -> None:
        from kvferry.engine.vllm.plugins.tier.tier_connector import blocks_per_chunk

        assert blocks_per_chunk(block_bytes, tokens) == expected

    def test_route_keys_grow_with_the_answer_and_are_those_of_the_prompt(self) -> None:
        from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState
        from kvferry.pages.keys import route_keys, seed_of

        tokens = list(range(10))
        request = Request(tokens, salt="tenant")
        pages = RequestTierState(request, BLOCK_SIZE)
        expected = route_keys(list(range(20)), BLOCK_SIZE, seed_of("tenant"))
        assert (pages.route_key(8), pages.route_key(4)) == (expected[1], expected[0])
        assert [pages.route_key(end) for end in (0, 3, 12, None)] == [0, 0, 0, 0]
        tokens += range(10, 20)
        assert list(pages.route_keys(1, 5)) == expected[1:]
        assert pages.route_key(20) == expected[4]

    def test_hints_cross_into_the_core(self) -> None:
        from vllm.v1.kv_hints import KvHintsEnvelope

        from kvferry.engine.base import TierHints
        from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState, to_kv_hints
        from kvferry.tenancy.namespace import Namespace

        hints = TierHints(Namespace("acme", 3), {"near": 2, "far": 4}, load=False, wanted_s=60.0)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(to_kv_hints("r", hints)), type=KvHintsEnvelope)
        pages = RequestTierState(Request([1] * 40, sent), BLOCK_SIZE)
        assert pages.hints == hints
        assert [pages.volume_of(end) for end in (4, 8, 12, 16, 20, None)] == ["near", "near", "far", "far", None, None]
        assert RequestTierState(Request([1]), BLOCK_SIZE).hints == TierHints()
        strange = msgspec.structs.replace(
            sent, actions=[msgspec.structs.replace(sent.actions[0], action_type="another.product")]
        )
        assert RequestTierState(Request([1], strange), BLOCK_SIZE).hints == TierHints()

    @pytest.mark.parametrize("pages_per_chunk", [1, 2])
    def test_the_cpu_tier_is_told_of_page_by_page_under_route_keys(self, pages_per_chunk: int) -> None:
        from vllm.distributed.kv_events import KVEventBatch
        from vllm.v1.kv_offload.base import Medium, OffloadingEvent, make_offload_key

        from kvferry.engine.base import PagesRemoved, PagesStored
        from kvferry.engine.vllm.events import _decoder, _translate
        from kvferry.engine.vllm.plugins.tier.cpu_tier_events import CpuTierEvents
        from kvferry.pages.keys import route_keys, seed_of

        request = Request(list(range(40)), salt="s")
        context, keys = context_of(request, 6, pages_per_chunk)
        hashes = [int.from_bytes(page_hash[-8:], "big") for page_hash in request.block_hashes[:6]]
        expected = route_keys(list(range(24)), BLOCK_SIZE, seed_of("s"))
        events = CpuTierEvents(0, pages_per_chunk * BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
        events.record_stored(keys, context)
        backwards = [
            OffloadingEvent(keys[::-1], Medium.CPU, removed=False),
            OffloadingEvent(keys[:1], Medium.CPU, removed=True),
            OffloadingEvent([make_offload_key(bytes(32), 0)], Medium.CPU, removed=False),  # nobody named it
            OffloadingEvent(keys, Medium.STORAGE, removed=False),
        ]
        batch = KVEventBatch(0.0, list(events.translate(backwards)))
        stored, removed = map(_translate, _decoder.decode(msgspec.msgpack.encode(batch)).events)
        assert isinstance(stored, PagesStored)
        assert isinstance(removed, PagesRemoved)
        assert (stored.medium, removed.medium) == ("CPU", "CPU")
        assert stored.route_keys is not None
        assert dict(zip(stored.page_hashes, stored.route_keys, strict=True)) == dict(zip(hashes, expected, strict=True))
        assert list(removed.page_hashes) == hashes[:pages_per_chunk]
        assert len(events) == len(keys) - 1

    def test_other_groups_and_partial_chunks_are_not_told_of(self) -> None:
        from vllm.v1.kv_offload.base import make_offload_key

        from kvferry.engine.vllm.plugins.tier.cpu_tier_events import CpuTierEvents

        context, _ = context_of(Request(list(range(40))), 4)
        other, partial = make_offload_key(b"h" * 32, 1), make_offload_key(b"p" * 32, 0)
        context.set_offload_key_position(other, 8)
        context.set_offload_key_position(partial, 6)
        events = CpuTierEvents(0, BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE)
        events.record_stored([other, partial], context)
        assert len(events) == 0

    def test_connectors_can_be_found_by_name(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        from kvferry.engine.vllm import engine
        from kvferry.engine.vllm.plugins.tier.tier_connector import TierConnector, register_connectors

        for _ in range(2):
            register_connectors({engine.TIER_CONNECTOR_CLASS: engine.TIER_CONNECTOR_MODULE})
        assert KVConnectorFactory.get_connector_class_by_name("TierConnector") is TierConnector
