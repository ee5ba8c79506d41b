"""The Engine around vLLM's AsyncLLM.

Must be the first in its process to import vLLM, which reads `prepare_environment`'s variables.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from kvferry.config import AdaptersConfig, EngineConfig, ModelConfig, TierConfig
from kvferry.engine.base import (
    EngineId,
    EngineInfo,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    KvEventBatch,
    KvTransferStats,
    PromptSources,
    RequestId,
    Sampling,
    TenantName,
    TierHints,
    TransferParams,
    name_adapter,
    validate_adapter,
    validate_continuation,
    validate_images,
)
from kvferry.engine.fair_turns import FairTurns
from kvferry.engine.parsing import ParsedAnswer
from kvferry.engine.quality_report import read_report, why_untested
from kvferry.engine.vllm.adapter_folder import stage
from kvferry.engine.vllm.adapters import Adapters
from kvferry.engine.vllm.plugins.core_fields import SET_TERMS
from kvferry.engine.vllm.rendering.structured_outputs import StructuredOutputValidator, structured_outputs_config
from kvferry.engine.vllm.rendering.text_model import hf_overrides, inspect_models_in_this_process
from kvferry.engine.vllm.rendering.tokenizer_words import keep_none_in, keep_none_in_copies
from kvferry.engine.vllm.rendering.vocabulary import Vocabulary
from kvferry.engine.vllm.start import draft_model
from kvferry.engine.vllm.start.arguments import (
    CONNECTOR_CLASS,
    CONNECTOR_MODULE,
    TIER_CONNECTOR_CLASS,
    TIER_CONNECTOR_MODULE,
    cpu_tier_bytes,
    describe,
    engine_arguments,
    kv_transfer_config,
    prepare_environment,
    tier_connector,
    why_not_startable,
)
from kvferry.engine.vllm.start.draft_model import DraftModel
from kvferry.engine.vllm.start.engine_folder import EngineFolder
from kvferry.engine.vllm.start.weights import check_load_format, weights_revision
from kvferry.errors import EngineDead, EngineError, InvalidRequest, KvferryError, UnsupportedEngine
from kvferry.model_folder import cache_folder
from kvferry.observability.tracing import TraceContext
from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry.tenancy.pages.outcome import TenantUsage
from kvferry.tenancy.terms import TierTerms
from kvferry.util.addresses import free_port

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

    from kvferry.engine.vllm.parsing import Begun

log = logging.getLogger(__name__)

# A finished request's pages are kept from the next step on; a release may come earlier.
_RELEASE_TRIES = 20
_RELEASE_PAUSE_S = 0.05
_MAX_PRIORITY = 2**62  # a number of 64 bits
_MAX_REPLAYS = 4096  # more than a worker takes of answers that go on


class VllmEngine:
    """Owns vLLM's processes, event socket and NIXL side-channel port until `stop`."""

    def __init__(
        self,
        model_folder: str,
        model: ModelConfig,
        engine: EngineConfig,
        *,
        producer: bool,
        tier: TierConfig | None = None,
        keeper_socket: str = "",
        volume_pool: str = "",
        has_tenants: bool = False,
        adapters: AdaptersConfig = AdaptersConfig(),  # noqa: B008 - frozen
        argument_keys: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._argument_keys = argument_keys
        self._adapters_config = adapters
        self._adapters = Adapters((), adapters.num_loaded)
        self._tier = tier if tier is not None else TierConfig()
        self._why_without_tiers = ""
        self._keeper_socket = keeper_socket
        self._volume_pool = volume_pool
        self._has_tenants = has_tenants
        self._engine_id: EngineId | None = None
        self._weights = ""
        self._weights_digest = ""
        self._draft: DraftModel | None = None
        self._model_folder = model_folder
        self._model = model
        self._config = engine
        self._producer = producer
        self._llm: Any = None
        self._info: EngineInfo | None = None
        self._prompt_sources: Any = None
        self._continuations: Any = None
        self._stat_logger: Any = None
        self._parsers: Any = None
        self._replays = FairTurns(1, _MAX_REPLAYS, "too many answers wait to go on")
        self._validator: StructuredOutputValidator | None = None
        self._folder: EngineFolder | None = None
        self._num_queued_prompt_tokens = 0

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine was not started")
        return self._info

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._llm.model_config, self._llm.output_processor.tokenizer)

    async def start(self) -> None:
        run_dir = os.environ.get("KVFERRY_RUN_DIR")
        self._folder = await asyncio.to_thread(EngineFolder, Path(run_dir) if run_dir else None)
        self._engine_id = engine_id = EngineId(secrets.token_hex(16))
        # A revision is a name that an operator gives; two folders may have the same one.
        digest = await asyncio.to_thread(weights_revision, Path(self._model_folder), cache_folder() / "weights")
        self._weights_digest = digest
        self._weights = f"{self._model.revision}:{digest}" if self._model.revision else digest
        find, cache = draft_model.find, cache_folder() / "weights"
        self._draft = await asyncio.to_thread(find, self._config, cache, self._argument_keys)
        if (adapters := self._adapters_config).served:
            folder = Path(self._model_folder)
            staged = await asyncio.to_thread(stage, adapters, folder, self._folder.path / "adapters")
            self._adapters = Adapters(staged, adapters.num_loaded)
        prepare_environment(self._config, side_channel_port=free_port(self._config.side_channel_host))
        keep_none_in_copies()
        try:
            await asyncio.wait_for(asyncio.to_thread(self._build, engine_id), self._config.start_timeout_s)
        except TimeoutError:
            raise EngineError(
                f"the engine did not start within engine.start_timeout_s ({self._config.start_timeout_s:g} s)"
            ) from None
        self._info = describe(
            self._llm.vllm_config,
            engine_id,
            self._model_folder,
            weights=self._weights,
            pool_bytes=sum(await self._llm.collective_rpc("kvferry_pool_bytes")),
            cpu_bytes=cpu_tier_bytes(self._tier),
            adapters=self._adapters.keys,
            without_tiers=self._why_without_tiers,
        )
        await asyncio.to_thread(keep_none_in, self._llm.input_processor.tokenizer)
        if not self._producer and self._config.device != "cpu":
            await self._warm_up()

    async def _warm_up(self) -> None:
        # Compiles the ranks of log-probabilities (tens of seconds) before streams wait.
        sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=1)
        request = EngineRequest(RequestId("warm-up"), [0], sampling, cache_salt="warm-up")
        async for _ in self.generate(request):
            pass
        self._stat_logger.reset()

    def _build(self, engine_id: EngineId) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        from kvferry.engine.vllm.continuation import Continuations
        from kvferry.engine.vllm.outputs import PromptSourceRecorder
        from kvferry.engine.vllm.parsing import Parsers, check_names
        from kvferry.engine.vllm.start.argument_parser import check_variables, refusal
        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        check_names(self._model)
        check_variables(self._config.env)
        check_load_format(self._config.args, Path(self._model_folder), self._argument_keys)
        if self._tier.enabled:
            from kvferry.engine.vllm.plugins.tier.tier_connector import register_connectors

            register_connectors({CONNECTOR_CLASS: CONNECTOR_MODULE, TIER_CONNECTOR_CLASS: TIER_CONNECTOR_MODULE})
        inspect_models_in_this_process()
        counters: list[EngineStatLogger] = []

        def make_counters(vllm_config: Any, engine_index: int) -> EngineStatLogger:
            counters.append(EngineStatLogger(vllm_config, engine_index))
            return counters[-1]

        try:
            arguments, vllm_config = self._engine_config(engine_id)
            self._require_quality(vllm_config)
            assert self._folder is not None
            with self._folder.holds_sockets():
                self._llm = AsyncLLM.from_vllm_config(
                    vllm_config, stat_loggers=[make_counters], enable_log_requests=arguments.enable_log_requests
                )
        except KvferryError:
            raise
        # vLLM's checks and the libraries below it raise errors of any kind.
        except Exception as error:
            raise UnsupportedEngine(refusal(error, self._config.args, self._argument_keys)) from error
        self._stat_logger = counters[0]
        self._prompt_sources = PromptSourceRecorder(self._llm.output_processor)
        self._continuations = Continuations(self._llm.output_processor)
        self._validator = StructuredOutputValidator(self._llm)
        self._parsers = Parsers(self._model, self._llm.output_processor.tokenizer, self._llm.model_config)

    def _engine_config(self, engine_id: EngineId) -> tuple[Any, Any]:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        from kvferry.engine.vllm.model_kinds import leave_untested_images_out, why_refused, why_without_tiers

        arguments = AsyncEngineArgs(**self._arguments(engine_id), structured_outputs_config=structured_outputs_config())
        vllm_config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        leave_untested_images_out(vllm_config.model_config)
        if reason := why_refused(vllm_config) or why_not_startable(vllm_config, self._config, self._argument_keys):
            raise UnsupportedEngine(reason)
        if self._tier.enabled and (reason := why_without_tiers(vllm_config)):
            log.warning("this engine has no tiers (tier.enabled): %s", reason)
            self._tier, self._why_without_tiers = TierConfig(), reason
            return self._engine_config(engine_id)
        return arguments, vllm_config

    def _require_quality(self, vllm_config: Any) -> None:
        if self._config.quality_report is None:
            return
        from vllm import __version__

        from kvferry.engine.vllm.plugins.exchange_fields import kv_cache_dtype

        reason = why_untested(
            read_report(self._config.quality_report),
            weights=self._weights_digest,
            revision=self._model.revision,
            max_model_len=vllm_config.model_config.max_model_len,
            kv_cache_dtype=kv_dtype(kv_cache_dtype(vllm_config)).name,
            compute_dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            vllm=__version__,
            device=self._config.device,
        )
        if reason:
            raise UnsupportedEngine(f"engine.quality_report {self._config.quality_report}: {reason}")

    def _arguments(self, engine_id: EngineId) -> dict[str, Any]:
        tiers = None
        if self._tier.enabled:
            tiers = tier_connector(
                self._tier,
                keeper_socket=self._keeper_socket,
                volume_pool=self._volume_pool,
                model_name=Path(self._model_folder).name,
                weights_revision=self._weights,
                has_tenants=self._has_tenants,
            )
        return engine_arguments(
            self._model_folder,
            self._model,
            self._config,
            kv_transfer=kv_transfer_config(
                self._config, engine_id, producer=self._producer, weights=self._weights, tiers=tiers
            ),
            events_endpoint=self._endpoint("events"),
            replay_endpoint=self._endpoint("replay"),
            has_tenants=self._has_tenants,
            adapters=self._adapters_config,
            draft=self._draft,
            hf_overrides=hf_overrides(self._model_folder, self._model),
            keys=self._argument_keys,
        )

    def _endpoint(self, name: str) -> str:
        assert self._folder is not None
        return f"ipc://{self._folder.path}/{name}"

    async def generate(
        self, request: EngineRequest, *, due_ms: float = 0.0, trace: TraceContext | None = None
    ) -> AsyncIterator[EngineOutput]:
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        from kvferry.engine.vllm.outputs import finish_output, to_engine_output

        llm, request_id = self._llm, request.request_id
        if llm is None:
            raise EngineDead("the engine was stopped")
        transfer = _transfer_params(request)
        finished = reached = has_output = False
        num_queued = 0 if request.transfer_params is not None else len(request.prompt_token_ids)
        self._num_queued_prompt_tokens += num_queued
        try:
            prompt = _prompt(request, llm, self._vocabulary)
            if request.continued is not None:
                self._continuations.expect(request_id, request.continued)
            params, parsed, options = await self._prepare(request, transfer, due_ms, trace)
            assert self._validator is not None
            await self._validator.validate(params)
            if request.adapter:
                options["lora_request"] = await self._adapters.lora_request(request.adapter, llm)
            reached = True
            async for output in llm.generate(prompt, params, request_id, **options):
                prompt.pop("mm_kwargs", None)  # the engine has them; vLLM keeps the prompt until the answer's end
                if num_queued:
                    self._num_queued_prompt_tokens -= num_queued
                    num_queued = 0
                completion = output.outputs[0]
                result = to_engine_output(completion)
                if not has_output and (prompt_sources := self._prompt_sources.get(request_id)) is not None:
                    has_output, result.sources = True, prompt_sources.sources
                if output.finished:
                    finished = True
                    sources = self._prompt_sources.pop(request_id) or (PromptSources(),)
                    lacks_images = transfer is not None and bool(request.images)
                    finish_output(result, output, *sources, lacks_images=lacks_images, sampling=request.sampling)
                    if result.transfer_params is not None:
                        result.transfer_params = name_adapter(result.transfer_params, request)
                if parsed is not None and result.finish_reason is not FinishReason.ABORT:
                    result.delta = parsed.on_output(completion.token_ids, completion.text, finished=finished)
                yield result
        except EngineDeadError:
            raise EngineDead("the engine's process died") from None
        except (VLLMClientError, ValueError) as error:
            reached = False
            raise InvalidRequest(str(error), param=getattr(error, "parameter", None)) from None
        finally:
            self._num_queued_prompt_tokens -= num_queued
            self._prompt_sources.pop(request_id)
            self._continuations.forget(request_id)
            if not finished and not llm.errored:
                if request_id in llm.output_processor.external_req_ids:
                    await llm.abort(request_id)
                elif not reached:
                    await self.decline(request)

    async def _prepare(
        self, request: EngineRequest, transfer: dict[str, Any] | None, due_ms: float, trace: TraceContext | None
    ) -> tuple[SamplingParams, ParsedAnswer | None, dict[str, Any]]:
        from kvferry.engine.vllm.sampling import to_vllm

        sampling, continued = request.sampling, request.continued
        params = to_vllm(
            sampling,
            transfer_params=transfer,
            num_given=continued.num_tokens if continued is not None else 0,
        )
        parsed = None
        options: dict[str, Any] = {}
        if request.parse is not None:
            begun = await self._begin_parser(request, params)
            parsed = begun.answer
            options |= begun.engine_arguments
        if self._has_tenants:
            options["priority"] = min(round(due_ms * 1e3), _MAX_PRIORITY)  # the lowest first
        is_hinted = self._has_tenants or self._tier.enabled
        if is_hinted and (request.tier is not None or trace is not None):
            from kvferry.engine.vllm.plugins.tier.request_tier_state import to_kv_hints

            options["kv_hints"] = to_kv_hints(request.request_id, request.tier or TierHints(), trace)
        return params, parsed, options

    async def _begin_parser(self, request: EngineRequest, params: SamplingParams) -> Begun:
        if request.continued is None:
            begun: Begun = self._parsers.begin(request, params)
            return begun
        # Some parsers need time by the square of the tokens so far: seconds, in which other streams have to go on.
        tenant = TenantName(request.turn.tenant if request.turn is not None else "")
        return await self._replays.run(tenant, lambda: asyncio.to_thread(self._parsers.begin, request, params))

    async def decline(self, request: EngineRequest) -> None:
        transfer, llm = request.transfer_params, self._llm
        if transfer is not None and transfer.get("do_remote_prefill") and llm is not None and not llm.errored:
            await llm.notify_kv_transfer_request_rejected(request.request_id, dict(transfer))

    async def abort(self, request_id: RequestId) -> None:
        if self._llm is not None and not self._llm.errored:
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
            # vLLM raises various errors while an engine goes down. The lease frees the pages.
            log.warning("the pages of request %s are left to their lease: %s", request_id, error)

    def stats(self) -> EngineStats:
        counters, info = self._stat_logger, self.info
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
            queued_prompt_tokens=self._num_queued_prompt_tokens,
            loaded_adapters=self._adapters.loaded,
        )

    def kv_transfer_stats(self) -> KvTransferStats:
        counters = self._stat_logger
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

    def tenant_usages(self) -> Mapping[str, Mapping[str, TenantUsage]]:
        usages: dict[str, dict[str, TenantUsage]] = self._stat_logger.tier_to_usages
        return usages

    async def set_terms(self, terms: Mapping[str, Mapping[str, TierTerms | None]]) -> None:
        if not self._has_tenants or self._llm is None:
            return
        from vllm.v1.engine.exceptions import EngineDeadError

        with contextlib.suppress(EngineDeadError):  # `check_health` says it
            await self._llm.engine_core.call_utility_async(SET_TERMS, msgspec.to_builtins(terms))

    def own_metrics(self) -> Iterable[Any]:
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        return (family for family in get_prometheus_registry().collect() if family.name.startswith("vllm:"))

    async def check_health(self) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineDead("the engine's process died")

    def kv_events(self) -> AsyncIterator[KvEventBatch]:
        from kvferry.engine.vllm.events import listen

        return listen(self._endpoint("events"), self._endpoint("replay"))

    async def stop(self) -> None:
        if self._llm is not None:
            from vllm.v1.engine.exceptions import EngineDeadError

            llm, self._llm = self._llm, None
            if self._validator is not None:
                self._validator.close()
            await asyncio.to_thread(llm.shutdown)
            # A shutdown ends the task that tells requests of an engine's end, perhaps before it has.
            llm.output_processor.propagate_error(EngineDeadError())
        if self._folder is not None:
            self._folder.remove()
        if self._engine_id is not None:
            # Left behind by a start that failed before all workers mapped the CPU tier.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"/dev/shm/vllm_offload_{self._engine_id}.mmap")  # noqa: PTH108


def _transfer_params(request: EngineRequest) -> dict[str, Any] | None:
    if request.keep_for_transfer and request.transfer_params is not None:
        raise InvalidRequest("a request is either kept for transfer or pulled, not both")
    if request.keep_for_transfer:
        return {"do_remote_decode": True, "do_remote_prefill": False}
    return dict(request.transfer_params) if request.transfer_params is not None else None


def _prompt(request: EngineRequest, llm: Any, vocabulary: Vocabulary) -> Any:
    """Return vLLM's input. Raises InvalidRequest."""
    from vllm.inputs.engine import tokens_input

    # Gateways of earlier releases let ids pass that would end the engine's process.
    vocabulary.check_prompt("prompt", request.prompt_token_ids)
    vocabulary.check_sampling(request.sampling)
    validate_adapter(request)
    validate_continuation(request)
    validate_images(request)
    if not request.images:
        return tokens_input(list(request.prompt_token_ids), cache_salt=request.page_salt or None)
    from kvferry.engine.vllm.image_models import image_prompt

    return image_prompt(request, llm.model_config)
