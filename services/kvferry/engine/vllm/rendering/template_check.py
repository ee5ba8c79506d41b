"""Renders an ordinary message with a model's chat template before a gateway starts, in a fork with limits."""

from __future__ import annotations

import logging
from typing import Any

from jinja2 import TemplateError

from kvferry.config import ModelConfig
from kvferry.engine.forks import ForkLimits, Outcome, is_of_memory, run_in_fork
from kvferry.engine.vllm.rendering.chat_template import KEY
from kvferry.errors import ConfigError, printable

log = logging.getLogger(__name__)

LIMITS = ForkLimits(cpu_s=10.0, wall_s=300.0, memory_bytes=1 << 30)
_USER = {"role": "user", "content": "warmup"}  # as vLLM renders without a limit
_SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
_CHATS = ([_USER], [_SYSTEM, _USER])  # some templates require a system message, and some take none
_MAX_REASON_CHARS = 300


def check_template(online: Any, model: ModelConfig, limits: ForkLimits = LIMITS) -> None:
    """Raises ConfigError for a template that fails for each of _CHATS, or exceeds a limit.

    Logs a warning for one that refuses them by raise_exception: it may take other messages.
    """
    verdict = run_in_fork(lambda _: _render(online), b"", limits)
    said = verdict.result.decode() or verdict.reason
    reason = printable(" ".join(said.split()))[:_MAX_REASON_CHARS]
    refusal = f"it refuses an ordinary message, with a system message and without: {reason}"
    why = {
        Outcome.REFUSED: refusal,
        Outcome.CPU_TIME: f"it does not end within {limits.cpu_s:g} s of CPU time for an ordinary message",
        Outcome.MEMORY: f"it takes more than {limits.memory_bytes >> 20} MiB for an ordinary message",
        Outcome.CRASHED: f"the process that renders an ordinary message with it crashes: {reason}",
    }
    whose = f"{KEY}: {str(model.chat_template)[:300]}"
    if model.chat_template is None:
        whose = f"model.path: the model's own chat template ({KEY} can name another)"
    if verdict.result:
        log.warning("%s: %s", whose, refusal)
    if verdict.outcome in why:
        raise ConfigError(f"{whose}: {why[verdict.outcome]}", param=KEY)
    if verdict.outcome is not Outcome.OK:
        log.warning("the chat template is unchecked: the machine is too busy to render a message with it")


def _render(online: Any) -> bytes:
    """Return the reason of a template that refuses the messages itself, or nothing."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import ChatTemplateResolutionError

    first: Exception | None = None
    for messages in _CHATS:
        request = ChatCompletionRequest.model_validate({"model": "", "messages": messages})
        params = request.build_chat_params(online.chat_template, online.chat_template_content_format)
        try:
            online.renderer.render_messages(list(messages), params.with_defaults(online.default_chat_template_kwargs))
        except ChatTemplateResolutionError:
            break  # a model without a template: its chats are refused
        except Exception as error:
            if is_of_memory(error):
                raise MemoryError from None
            first = first or error
        else:
            return b""
    if first is not None and _is_raised_by_template(first):
        return (str(first) or "no reason").encode()
    if first is not None:
        raise ValueError(str(first) or type(first).__name__)
    return b""


def _is_raised_by_template(error: BaseException | None) -> bool:
    while error is not None and type(error) is not TemplateError:  # faults of a template are of derived types
        error = error.__cause__ or error.__context__
    return error is not None
