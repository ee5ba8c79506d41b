"""vLLM's renderer in process, without an engine.

Chat template and tokens, and sampling parameters with the model's defaults.

Importing takes about 8 s of CPU; do it once, at start-up.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from kvferry.config import ModelConfig
from kvferry.engine.base import RenderedPrompt
from kvferry.errors import ContextLengthExceeded, InvalidRequest, KvferryError


class VllmRenderer:
    """A Renderer. Complete once constructed; needs the model's folder for config and tokenizer, never its weights."""

    def __init__(self, model_folder: str, served_name: str, model: ModelConfig) -> None:
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # Read by vLLM's CPU platform while it builds a configuration; no cache is allocated here.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm.config import ModelConfig as VllmModelConfig
        from vllm.config import VllmConfig
        from vllm.entrypoints.openai.models.protocol import BaseModelPath
        from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
        from vllm.entrypoints.scale_out.render.serving import ServingRender
        from vllm.renderers import renderer_from_config
        from vllm.renderers.online_renderer import OnlineRenderer

        config = VllmModelConfig(
            model=model_folder,
            tokenizer=model_folder,
            max_model_len=model.max_model_len,
            trust_remote_code=model.trust_remote_code,
            renderer_num_workers=1,
        )
        online = OnlineRenderer(
            model_config=config,
            renderer=renderer_from_config(VllmConfig(model_config=config)),
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
        online.warmup()
        self._served_name = served_name
        self._max_model_len = int(config.max_model_len)
        self._serving = ServingRender(
            OpenAIModelRegistry(
                model_config=config,
                base_model_paths=[BaseModelPath(name=served_name, model_path=model_folder)],
            ),
            online,
        )
        self._tokenizer = online.renderer.get_tokenizer()

    def max_model_len(self) -> int:
        return self._max_model_len

    async def render_chat(self, body: Mapping[str, Any]) -> RenderedPrompt:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        requested = body.get("max_completion_tokens")
        if requested is None:
            requested = body.get("max_tokens")
        plain = {key: value for key, value in body.items() if key not in ("max_tokens", "max_completion_tokens")}
        rendered = await self._render(self._serving.render_chat_request, ChatCompletionRequest, plain)
        return self._within_context(rendered, requested)

    async def render_completion(self, body: Mapping[str, Any]) -> Sequence[RenderedPrompt]:
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        requested = body.get("max_tokens", 16)
        plain = {key: value for key, value in body.items() if key != "max_tokens"}
        rendered = await self._render(self._serving.render_completion_request, CompletionRequest, plain)
        return [self._within_context(one, requested) for one in rendered]

    async def _render(self, render: Any, kind: Any, body: Mapping[str, Any]) -> Any:
        from vllm.entrypoints.serve.engine.protocol import ErrorResponse
        from vllm.exceptions import VLLMClientError

        try:
            result = await render(kind.model_validate({**body, "model": self._served_name}))
        except ValidationError as error:
            fault = error.errors()[0]
            # vLLM's wrapping validators show up as parts such as "function-wrap[...]".
            where = ".".join(str(part) for part in fault["loc"] if "[" not in str(part))
            raise InvalidRequest(f"{where or 'body'}: {fault['msg']}", param=where or None) from None
        except (VLLMClientError, ValueError, TypeError) as error:
            raise self._from_vllm(str(error), getattr(error, "parameter", None)) from None
        except Exception as error:
            # Chat templates raise jinja2.TemplateError for messages they refuse (roles out of order, say).
            if type(error).__module__.startswith("jinja2"):
                raise InvalidRequest(
                    f"messages: the model's chat template refuses them: {error}", param="messages"
                ) from None
            raise
        if isinstance(result, ErrorResponse):
            raise self._from_vllm(result.error.message, result.error.param)
        return result

    def _from_vllm(self, message: str, param: str | None) -> KvferryError:
        first_line = message.strip().splitlines()[0] if message.strip() else "the request cannot be rendered"
        if "context length" in message or "maximum model length" in message:
            return ContextLengthExceeded(first_line, param=param)
        return InvalidRequest(first_line, param=param)

    def _within_context(self, rendered: Any, requested: int | None) -> RenderedPrompt:
        from kvferry.engine.vllm_sampling import from_vllm

        sampling = from_vllm(rendered.sampling_params)
        num_prompt_tokens = len(rendered.token_ids)
        if requested is not None:
            if num_prompt_tokens + requested > self._max_model_len:
                raise context_exceeded(self._max_model_len, num_prompt_tokens, requested)
            sampling = dataclasses.replace(sampling, max_tokens=requested)
        if sampling.min_tokens > sampling.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({sampling.min_tokens}) is over max_tokens ({sampling.max_tokens})", param="min_tokens"
            )
        if sampling.max_tokens < 1:
            raise context_exceeded(self._max_model_len, num_prompt_tokens, 1)
        return RenderedPrompt(token_ids=rendered.token_ids, sampling=sampling)


def context_exceeded(max_model_len: int, num_prompt_tokens: int, max_tokens: int) -> ContextLengthExceeded:
    """The error that gives all three numbers."""
    return ContextLengthExceeded(
        f"this model's context is {max_model_len} tokens, but the request asks for {num_prompt_tokens + max_tokens}: "
        f"{num_prompt_tokens} in the prompt and {max_tokens} to generate",
        param="max_tokens",
    )
