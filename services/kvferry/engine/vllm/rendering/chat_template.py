"""A model's chat template: reads the one of `model.chat_template`, finds its arguments, and tries it in a fork."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from jinja2 import TemplateError

from kvferry.config import ModelConfig
from kvferry.engine.forks import ForkLimits, Outcome, is_of_memory, run_in_fork
from kvferry.errors import ConfigError, printable
from kvferry.util.files import open_regular

log = logging.getLogger(__name__)


def keep_no_names_of_clients() -> None:
    """Let vLLM's renderer keep no names but its own. Idempotent."""
    # vLLM 0.32 keeps, for 128 names, whether the tokenizer's method has such an argument. A name that is kept takes
    # 0.6 us and another one 18 us, so that the time of a chat would tell a tenant which names others have sent.
    from vllm.renderers.hf import _get_hf_base_chat_template_params
    from vllm.utils import func_utils

    kept: Any = func_utils._supports_kw
    if not hasattr(kept, "cache_info"):
        return
    names = _get_hf_base_chat_template_params()

    def supports(function: Callable[..., object], name: str, **options: bool) -> bool:
        return bool((kept if name in names else kept.__wrapped__)(function, name, **options))

    func_utils._supports_kw = supports


MAX_BYTES: Final = 1 << 20
KEY: Final = "model.chat_template"


def read_chat_template(model: ModelConfig) -> str | None:
    """Return the template's text; None for the model's own.

    Raises ConfigError for what is no file, has more than MAX_BYTES, or is no Jinja template of `messages`.
    """
    file = model.chat_template
    if file is None:
        return None
    import jinja2.meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    text = _read(file)
    try:
        environment = _compile_jinja_template(text).environment
        variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateSyntaxError as error:
        _refuse(file, f"line {error.lineno}: {str(error.message)[:200]}")
    except RecursionError:
        _refuse(file, "it is nested too deeply")
    except SyntaxError as error:  # of the Python that Jinja makes of it; its lines are not the file's
        _refuse(file, f"Python cannot compile it: {str(error.msg)[:200]}")
    except ValueError as error:
        _refuse(file, str(error)[:200])
    if "messages" not in variables:
        _refuse(file, "it does not use `messages`, so it is no template of a chat")
    return text


def _read(file: Path) -> str:
    try:
        with open_regular(file) as opened:
            content = opened.read(MAX_BYTES + 1)
    except OSError as error:
        _refuse(file, error.strerror or "it cannot be read")
    if len(content) > MAX_BYTES:
        _refuse(file, f"it has more than {MAX_BYTES} bytes")
    try:
        # A mark of the encoding at the beginning would be the first character of every prompt.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse(file, "it is no UTF-8")


def _refuse(file: Path, why: str) -> NoReturn:
    raise ConfigError(f"{KEY}: {str(file)[:300]}: {why}", param=KEY)


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
