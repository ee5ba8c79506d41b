"""The real engine: vLLM's AsyncLLM in this process, its core and workers in processes of their own.

Must be the first in its process to import vLLM: `prepare_environment` sets what vLLM reads from the environment, and
its children inherit it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from kvferry.addresses import free_port
from kvferry.config import EngineConfig, ModelConfig, TierConfig
from kvferry.engine.base import (
    EngineId,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    EngineTimes,
    FinishReason,
    KvEventBatch,
    KvTransferStats,
    PromptSources,
    RequestId,
    Sampling,
    TierHints,
    TokenLogprob,
    TransferParams,
    validate_continuation,
)
from kvferry.engine.vllm.weights import weights_revision
from kvferry.errors import EngineDead, EngineError, InvalidRequest, UnsupportedEngine
from kvferry.model_folder import cache_folder

log = logging.getLogger(__name__)

CONNECTOR_MODULE = "kvferry.engine.vllm.plugins.nixl"
CONNECTOR_CLASS = "KvTransferConnector"
TIER_CONNECTOR_MODULE = "kvferry.engine.vllm.plugins.offloading"
TIER_CONNECTOR_CLASS = "TierConnector"
CPU_TIER_MODULE = "kvferry.engine.vllm.plugins.cpu_tier"
CPU_TIER_CLASS = "CpuTierSpec"
RELEASE_EXTENSION = "kvferry.engine.vllm.plugins.release.ReleaseExtension"

# A request that has just finished is kept from the next step on; a release may come before that.
_RELEASE_TRIES = 20
_RELEASE_PAUSE_S = 0.05

_FINISH_REASONS: dict[str | None, FinishReason] = {reason.value: reason for reason in FinishReason}


class VllmEngine:
    """One AsyncLLM that can hand over and pull pages through NIXL, for either role.

    With `tier.enabled` it has a CPU tier, and behind it the volumes of the keeper at `keeper_socket`, if that is named.
    Owns the engine's processes, its event socket folder and its NIXL side-channel port from `start` to `stop`.
    """

    def __init__(
        self,
        model_folder: str,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        producer: bool,
        tier: TierConfig | None = None,
        keeper_socket: str = "",
    ) -> None:
        self._tier = tier if tier is not None else TierConfig()
        self._keeper_socket = keeper_socket
        self._engine_id: EngineId | None = None
        self._revision = ""
        self._model_folder = model_folder
        self._model = model
        self._config = engine
        self._producer = producer
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._tap: Any = None
        self._continuations: Any = None
        self._counters: Any = None
        self._parsers: Any = None
        self._folder: Path | None = None

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine was not started")
        return self._info

    async def start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="engine-", dir=os.environ.get("KVFERRY_RUN_DIR")))
        self._engine_id = engine_id = EngineId(secrets.token_hex(16))
        if self._tier.enabled:
            self._revision = self._model.revision or await asyncio.to_thread(
                weights_revision, Path(self._model_folder), cache_folder() / "weights"
            )
        prepare_environment(self._config, side_channel_port=free_port(self._config.side_channel_host))
        try:
            await asyncio.wait_for(asyncio.to_thread(self._build, engine_id), self._config.start_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"the engine did not start within engine.start_timeout_s ({self._config.start_timeout_s:g} s)"
            ) from None
        if not self._producer:
            await self._warm_up()

    async def _warm_up(self) -> None:
        """Log-probabilities are compiled at their first use, for tens of seconds: not while streams wait."""
        sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=1)
        request = EngineRequest(RequestId("warm-up"), [0], sampling, cache_salt="warm-up")
        async for _ in self.generate(request):
            pass
        self._counters.reset()

    def _build(self, engine_id: EngineId) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from kvferry.engine.vllm.continuation import Continuations
        from kvferry.engine.vllm.counters import Counters
        from kvferry.engine.vllm.output_tap import OutputTap
        from kvferry.engine.vllm.parsing import Parsers, check_names

        check_names(self._model)
        if self._tier.enabled:
            from kvferry.engine.vllm.plugins.offloading import register_connectors

            register_connectors({CONNECTOR_CLASS: CONNECTOR_MODULE, TIER_CONNECTOR_CLASS: TIER_CONNECTOR_MODULE})
        counters: list[Counters] = []

        def make_counters(vllm_config: Any, engine_index: int) -> Counters:
            counters.append(Counters(vllm_config, engine_index))
            return counters[-1]

        try:
            arguments = AsyncEngineArgs(**self._arguments(engine_id))
            self._llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[make_counters])
        except ValueError as error:
            raise UnsupportedEngine(f"vLLM refuses this configuration: {error}") from error
        self._counters = counters[0]
        self._tap = OutputTap(self._llm.output_processor)
        self._continuations = Continuations(self._llm.output_processor)
        self._parsers = Parsers(self._model, self._llm.output_processor.tokenizer, self._llm.model_config)
        cpu_bytes = int(self._tier.cpu_gib * (1 << 30)) if self._tier.enabled else 0
        self._info = describe(self._llm.vllm_config, engine_id, self._model_folder, cpu_bytes=cpu_bytes)

    def _arguments(self, engine_id: EngineId) -> dict[str, Any]:
        on_cpu = self._config.device == "cpu"
        dtype = self._model.dtype
        optional: dict[str, Any] = {
            "max_model_len": self._model.max_model_len,
            "max_num_batched_tokens": self._config.max_num_batched_tokens,
        }
        if self._model.reasoning_parser:
            # A grammar begins where the reasoning ends, which the engine has to see.
            optional["reasoning_parser"] = self._model.reasoning_parser
        if not on_cpu:
            optional["gpu_memory_utilization"] = self._config.gpu_memory_utilization
        return {
            # The very string is part of NIXL's compatibility hash: the same canonical path on every node.
            "model": self._model_folder,
            "tokenizer": self._model_folder,
            "dtype": "float32" if on_cpu and dtype == "auto" else dtype,
            "trust_remote_code": self._model.trust_remote_code,
            "block_size": self._config.block_size,
            "kv_cache_dtype": self._config.kv_cache_dtype,
            "max_num_seqs": self._config.max_num_seqs,
            "tensor_parallel_size": self._config.tensor_parallel_size,
            "enforce_eager": on_cpu if self._config.enforce_eager is None else self._config.enforce_eager,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": "sha256_cbor",
            "enable_log_requests": False,
            "worker_extension_cls": RELEASE_EXTENSION,
            "kv_transfer_config": {
                **(self._kv_transfer_and_tier() if self._tier.enabled else self._kv_transfer()),
                # Fresh on every start: a peer never re-handshakes an engine id it knows, so a restarted engine under
                # its old id would be recomputed for, silently and for ever.
                "engine_id": engine_id,
                "kv_load_failure_policy": "recompute",
            },
            "kv_events_config": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": self._events_endpoint(),
                "topic": "kv",
            },
            **{name: value for name, value in optional.items() if value is not None},
        }

    @property
    def _role(self) -> str:
        return "kv_producer" if self._producer else "kv_consumer"

    def _kv_transfer(self) -> dict[str, Any]:
        on_cpu = self._config.device == "cpu"
        return {
            "kv_connector": CONNECTOR_CLASS,
            "kv_connector_module_path": CONNECTOR_MODULE,
            "kv_role": self._role,
            "kv_buffer_device": "cpu" if on_cpu else "cuda",
            "kv_connector_extra_config": {
                "kv_lease_duration": self._config.transfer_lease_s,
                # With the 4 threads that vLLM asks NIXL for, a decode engine that had read many descriptors kept 0.97
                # of a core busy with nothing to do; without them 0.03.
                **({"num_threads": 0} if on_cpu else {}),
            },
        }

    def _kv_transfer_and_tier(self) -> dict[str, Any]:
        """The ferry first: of two that have a prompt's pages, vLLM takes the first.

        What is joined has no engine id of its own: vLLM gives it the whole's, and refuses two.
        """
        tier = {
            "kv_connector": TIER_CONNECTOR_CLASS,
            "kv_connector_module_path": TIER_CONNECTOR_MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": CPU_TIER_CLASS,
                "spec_module_path": CPU_TIER_MODULE,
                "cpu_bytes_to_use": int(self._tier.cpu_gib * (1 << 30)),
                # A follow-up sends the answer again.
                "offload_prompt_only": False,
                "blocks_per_chunk": self._tier.blocks_per_chunk,
                "keeper_socket": self._keeper_socket,
                "patience_s": self._tier.io_timeout_s,
                "model_name": Path(self._model_folder).name,
                "weights_revision": self._revision,
            },
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_role": self._role,
            "kv_connector_extra_config": {"connectors": [self._kv_transfer(), tier]},
        }

    def _events_endpoint(self) -> str:
        return f"ipc://{self._folder}/events"

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        from kvferry.engine.vllm.continuation import rest_of
        from kvferry.engine.vllm.plugins.load_times import take_times
        from kvferry.engine.vllm.plugins.side_channel import CACHED_PARAMETER, cached_tokens
        from kvferry.engine.vllm.sampling import to_vllm

        llm, request_id = self._llm, request.request_id
        if request.keep_for_transfer and request.transfer_params is not None:
            raise InvalidRequest("a request is either kept for transfer or pulled, not both")
        transfer = dict(request.transfer_params) if request.transfer_params is not None else None
        if request.keep_for_transfer:
            transfer = {"do_remote_decode": True, "do_remote_prefill": False}
        prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt or None)
        finished = False
        sampling, continued = request.sampling, request.continued
        if continued is not None:
            validate_continuation(request)
            sampling = rest_of(sampling, continued)
            self._continuations.expect(request_id, continued, request.sampling.min_tokens)
        try:
            params = to_vllm(sampling, transfer_params=transfer)
            answer = None
            more: dict[str, Any] = {}
            if request.parse is not None:
                whole = params if continued is None else to_vllm(request.sampling, transfer_params=None)
                begun = self._parsers.begin(request, whole)
                answer, more = begun.answer, dict(begun.engine_arguments)
            if self._tier.enabled and (request.tier is not None or request.trace is not None):
                from kvferry.engine.vllm.plugins.offloading import to_kv_hints

                more["kv_hints"] = to_kv_hints(request_id, request.tier or TierHints(), request.trace)
            async for output in llm.generate(prompt, params, request_id, **more):
                completion = output.outputs[0]
                token_ids = completion.token_ids
                result = EngineOutput(token_ids=token_ids, text=completion.text)
                if completion.logprobs is not None:
                    result.logprobs = [
                        _position(token_id, entries)
                        for token_id, entries in zip(token_ids, completion.logprobs, strict=True)
                    ]
                if output.finished:
                    finished = True
                    result.finish_reason = _FINISH_REASONS.get(completion.finish_reason)
                    if result.finish_reason is None:
                        raise EngineError(f"the engine ended the request with {completion.finish_reason!r}")
                    result.stop_reason = completion.stop_reason
                    result.sources = self._tap.take(request_id) or PromptSources()
                    transfer_params, kv_transfer, load = take_times(output.kv_transfer_params)
                    brought = transfer_params.pop(CACHED_PARAMETER, None) if transfer_params is not None else None
                    result.cached = cached_tokens(result.sources, brought)
                    result.transfer_params = transfer_params or None
                    result.times = _times(output.metrics, kv_transfer, load)
                if answer is not None and result.finish_reason is not FinishReason.ABORT:
                    result.delta = answer.on_output(token_ids, completion.text, finished=finished)
                yield result
        except EngineDeadError:
            raise EngineDead("the engine's process died") from None
        except (VLLMClientError, ValueError) as error:
            raise InvalidRequest(str(error), param=getattr(error, "parameter", None)) from None
        finally:
            self._tap.take(request_id)
            self._continuations.forget(request_id)
            if not finished and not llm.errored:
                await self._withdraw(request_id, transfer)

    async def _withdraw(self, request_id: RequestId, transfer: dict[str, Any] | None) -> None:
        """End a request whose reader left.

        Where it never reached the engine, its prefill engine still holds pages for it: tell it.
        """
        if request_id in self._llm.output_processor.external_req_ids:
            await self._llm.abort(request_id)
        elif transfer is not None and transfer.get("do_remote_prefill"):
            await self._llm.notify_kv_transfer_request_rejected(request_id, transfer)

    async def abort(self, request_id: RequestId) -> None:
        if not self._llm.errored:
            await self._llm.abort(request_id)

    async def release(self, transfer_params: TransferParams) -> None:
        request_id = transfer_params.get("remote_request_id")
        if transfer_params.get("remote_engine_id") != self.info.engine_id or not isinstance(request_id, str):
            return
        try:
            for _ in range(_RELEASE_TRIES):
                if self._llm is None or self._llm.errored:
                    return
                if any(await self._llm.collective_rpc("kvferry_release", args=(request_id,))):
                    return
                await asyncio.sleep(_RELEASE_PAUSE_S)
        except Exception as error:
            # Of whatever kind vLLM has for an engine that is going down. The lease ends the pages.
            log.warning("the pages of request %s are left to their lease: %s", request_id, error)

    def stats(self) -> EngineStats:
        counters, info = self._counters, self.info
        unfinished = self._llm.get_num_unfinished_requests()
        running = min(counters.num_running, unfinished)
        return EngineStats(
            num_running=running,
            num_waiting=unfinished - running,
            num_pages_used=round(counters.kv_cache_usage * info.num_pages),
            num_pages=info.num_pages,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            transferred_bytes=counters.transferred_bytes,
            num_generated_tokens=counters.num_generated_tokens,
            num_steps=counters.num_steps,
        )

    def kv_transfer_stats(self) -> KvTransferStats:
        counters = self._counters
        return KvTransferStats(
            counters.num_transfers,
            counters.transferred_bytes,
            counters.transfer_s,
            {
                "transfer": counters.num_failed_transfers,
                "handshake": counters.num_failed_handshakes,
                "lease_ended": counters.num_ended_leases,
            },
        )

    def own_metrics(self) -> Iterable[Any]:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return (family for family in get_prometheus_registry().collect() if family.name.startswith("vllm:"))

    async def check_health(self) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineDead("the engine's process died")

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        from kvferry.engine.vllm.events import listen

        return listen(self._events_endpoint())

    async def stop(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._engine_id is not None:
            # The CPU tier's, of a start that ended before all had it mapped: later there is none.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/vllm_offload_{self._engine_id}.mmap")  # noqa: PTH108


def prepare_environment(config: EngineConfig, *, side_channel_port: int) -> None:
    """What vLLM, NIXL and UCX read from the environment. Values that an operator set stay."""
    values = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if config.device == "cpu":
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // 2)
        values |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
            # Engines share this machine: vLLM's own binding would put them all on the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "UCX_TLS": config.ucx_tls,
            # KV pages in huge pages of memory, where the system has them: moving and reading them costs less.
            "THP_MEM_ALLOC_ENABLE": "1",
            # What was compiled once is not compiled again, whatever folder is temporary this time.
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "inductor"),
        }
        # Ray sets OMP_NUM_THREADS to what a replica reserved, which says nothing about compute threads here.
        os.environ["OMP_NUM_THREADS"] = str(threads)
        if config.side_channel_host.startswith("127."):
            values |= {"UCX_NET_DEVICES": "lo", "VLLM_HOST_IP": config.side_channel_host}
    for name, value in values.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = config.side_channel_host
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_channel_port)


def describe(vllm_config: Any, engine_id: EngineId, model_folder: str, *, cpu_bytes: int = 0) -> EngineInfo:
    """Facts of a started engine with `cpu_bytes` of CPU tier; `page_bytes` by attention geometry.

    2 x layers x KV heads x head size x block size x bytes.
    """
    import torch
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    dtype = model.dtype if cache.cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
    per_token = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * parallel.tensor_parallel_size
        * model.get_head_size()
        * torch.empty((), dtype=dtype).element_size()
    )
    return EngineInfo(
        engine_id=engine_id,
        model=model_folder,
        max_model_len=model.max_model_len,
        block_size=cache.block_size,
        page_bytes=per_token * cache.block_size,
        num_pages=cache.num_gpu_blocks,
        kv_cache_dtype=str(dtype).removeprefix("torch."),
        num_cpu_pages=cpu_bytes // (per_token * cache.block_size),
    )


def _times(stats: Any, kv_transfer: Any, load: Any) -> EngineTimes | None:
    """From vLLM's statistics of a request, in its core's monotonic clock; None for one that never began."""
    if stats is None or not stats.first_token_ts:
        return None
    return EngineTimes(
        stats.queued_ts,
        stats.scheduled_ts,
        stats.first_token_ts,
        stats.last_token_ts,
        tuple(kv_transfer) if kv_transfer is not None else None,
        tuple(load) if load is not None else None,
    )


def _position(sampled: int, entries: Any) -> list[TokenLogprob]:
    """The sampled token first, then the others, most likely first."""

    def one(token_id: int) -> TokenLogprob:
        entry = entries[token_id]
        return TokenLogprob(token_id, entry.decoded_token or "", entry.logprob)

    others = sorted((token_id for token_id in entries if token_id != sampled), key=lambda t: -entries[t].logprob)
    return [one(sampled), *map(one, others)]
