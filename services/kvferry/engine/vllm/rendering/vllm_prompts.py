"""Renders prompts with vLLM's own renderer, without an engine."""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs
from pydantic import ValidationError

from kvferry.config import ModelConfig
from kvferry.engine.vllm.rendering.chat_template import check_template, read_chat_template
from kvferry.engine.vllm.rendering.plain_prompts import Rendered
from kvferry.engine.vllm.rendering.text_model import hf_overrides, text_model_config
from kvferry.engine.vllm.rendering.tokenizer_words import keep_none_in, keep_none_in_copies
from kvferry.errors import ConfigError, ContextLengthExceeded, InvalidRequest, KvferryError


class VllmPrompts:
    """Needs the model's folder, never its weights. Use it from one event loop, which vLLM's renderer keeps."""

    def __init__(self, model_folder: str, served_name: str, model: ModelConfig) -> None:
        """`model.dtype` is the engines'.

        Raises ConfigError for parsers that vLLM does not have, or that do not fit the tokenizer, and for a chat
        template that is none or fails.
        """
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # Read by vLLM's CPU platform while it builds a configuration; no cache is allocated here.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
        from vllm.entrypoints.scale_out.render.serving import ServingRender

        from kvferry.engine.vllm.parsing import check_names
        from kvferry.engine.vllm.rendering.chat_template import keep_no_names_of_clients
        from kvferry.engine.vllm.rendering.structured_outputs import use_no_xgrammar

        use_no_xgrammar()
        keep_no_names_of_clients()
        keep_none_in_copies()

        check_names(model)
        self.model_config = text_model_config(
            model_folder,
            max_model_len=model.max_model_len,
            hf_overrides=hf_overrides(model_folder, model),
            dtype=model.dtype,  # of an image's features
            renderer_num_workers=1,
        )
        self.online = _online_renderer(self.model_config, model)
        keep_none_in(self.online.renderer.get_tokenizer())
        check_template(self.online, model)  # first: vLLM renders a message here without a limit
        self.online.warmup()
        self._model = model
        self._served_name = served_name
        self.serving = ServingRender(
            OpenAIModelRegistry(
                model_config=self.model_config,
                base_model_paths=[BaseModelPath(name=served_name, model_path=model_folder)],
            ),
            self.online,
        )

    async def chat(self, body: Mapping[str, Any]) -> Rendered:
        """Raises InvalidRequest and ContextLengthExceeded."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        from kvferry.engine.vllm.parsing import parse_of

        chat_template_kwargs: dict[str, Any] = {}

        async def render(request: ChatCompletionRequest) -> Any:
            chat_template_kwargs.update(self.online.effective_chat_template_kwargs(request))
            return await self.serving.render_chat_request(request)

        plain = {key: value for key, value in body.items() if key not in ("max_tokens", "max_completion_tokens")}
        request = await self._render(render, ChatCompletionRequest, plain)
        rendered = self._as_rendered(request)
        # Engines use it only with a grammar.
        reasoning_ended = request.reasoning_ended if rendered.sampling.structured_outputs else None
        parse = parse_of(body, self._model, chat_template_kwargs, reasoning_ended=reasoning_ended)
        return structs.replace(rendered, parse=parse)

    async def completions(self, body: Mapping[str, Any]) -> Sequence[Rendered]:
        """Raises InvalidRequest and ContextLengthExceeded."""
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        plain = {key: value for key, value in body.items() if key != "max_tokens"}
        rendered = await self._render(self.serving.render_completion_request, CompletionRequest, plain)
        return [self._as_rendered(one) for one in rendered]

    def require_image_processor(self) -> None:
        """Raises ConfigError where the model's image processor cannot be made."""
        # vLLM starts without, and fails on each image.
        try:
            self.online.renderer.get_mm_processor().info.get_hf_processor()
        except Exception as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"model: its image processor cannot be made: {why[:300]}. Its files, such as preprocessor_config.json, "
                "belong beside the tokenizer; with gateway.images.max_per_request 0 images are refused",
                param="model",
            ) from None

    def _as_rendered(self, request: Any) -> Rendered:
        from kvferry.engine.vllm.sampling import check_allowed_tokens, from_vllm

        params = request.sampling_params
        if params.allowed_token_ids:
            check_allowed_tokens(params, self.model_config, self.online.renderer)
        return Rendered(array("I", request.token_ids), from_vllm(params))

    async def _render(self, render: Any, kind: Any, body: Mapping[str, Any]) -> Any:
        from vllm import envs
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.exceptions import VLLMClientError
        from vllm.renderers.chat_utils import ChatTemplateResolutionError

        try:
            result = await render(kind.model_validate({**body, "model": self._served_name}))
        except ValidationError as error:
            where, reason = _fault_of(error)
            raise InvalidRequest(f"{where or 'body'}: {reason}", param=where or None) from None
        except TimeoutError:
            # This is vLLM's own limit. Callers of this method would read it as the end of the request's time.
            raise InvalidRequest(
                f"messages: the model's chat template takes over {envs.VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT:g} s for them",
                param="messages",
            ) from None
        except ChatTemplateResolutionError:
            raise InvalidRequest(
                "messages: this model has no chat template; use completions, or have the operator name a template in "
                "model.chat_template",
                param="messages",
            ) from None
        except Exception as error:
            # Chat templates raise jinja2.TemplateError for messages they refuse, e.g. roles out of order; vLLM passes
            # its text on alone.
            if _is_of_template(error):
                raise InvalidRequest(
                    f"messages: the model's chat template refuses them: {str(error)[:300]}", param="messages"
                ) from None
            if isinstance(error, VLLMClientError | ValueError | TypeError):
                raise _from_vllm(str(error), getattr(error, "parameter", None)) from None
            raise
        if isinstance(result, ErrorResponse):
            raise _from_vllm(result.error.message, result.error.param)
        return result


def _fault_of(error: ValidationError) -> tuple[str, str]:
    faults = error.errors(include_url=False)
    # Each kind of message that vLLM knows tells why it is not meant: other kinds by their role.
    fault = next((fault for fault in faults if fault["loc"][-1:] != ("role",)), faults[0])
    # vLLM's wrapping validators add parts such as "function-wrap[...]", and unions their classes.
    parts = [part for part in fault["loc"] if "[" not in str(part) and not str(part)[:1].isupper()]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return where.lstrip("."), fault["msg"]


def _is_of_template(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__module__.startswith("jinja2"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _from_vllm(message: str, param: str | None) -> KvferryError:
    first_line = message.strip().splitlines()[0] if message.strip() else "the request cannot be rendered"
    if "context length" in message or "maximum model length" in message:
        return ContextLengthExceeded(first_line, param=param)
    return InvalidRequest(first_line, param=param)


def _online_renderer(config: Any, model: ModelConfig) -> Any:
    from vllm.config import VllmConfig
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    try:
        return OnlineRenderer(
            model_config=config,
            renderer=renderer_from_config(VllmConfig(model_config=config)),
            request_logger=None,
            chat_template=read_chat_template(model),
            chat_template_content_format="auto",
            enable_auto_tools=bool(model.tool_parser),
            tool_parser=model.tool_parser or None,
            reasoning_parser=model.reasoning_parser or None,
        )
    except TypeError as error:
        # The parser needs tokens that this tokenizer lacks.
        raise ConfigError(f"model.tool_parser, model.reasoning_parser: {error}") from None
