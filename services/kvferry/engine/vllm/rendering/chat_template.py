"""Reads the chat template that `model.chat_template` names."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NoReturn

from kvferry.config import ModelConfig
from kvferry.errors import ConfigError
from kvferry.util.regular_file import open_regular

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
