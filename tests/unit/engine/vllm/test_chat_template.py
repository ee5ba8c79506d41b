"""Files that `model.chat_template` names."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kvferry.config import ModelConfig
from kvferry.engine.vllm.rendering.chat_template import MAX_BYTES, read_chat_template
from kvferry.errors import ConfigError

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def test_a_template_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(TEMPLATE)
    assert read_chat_template(ModelConfig(chat_template=file)) == TEMPLATE
    assert read_chat_template(ModelConfig()) is None
    file.write_text(TEMPLATE + "{#" + "x" * (MAX_BYTES - len(TEMPLATE) - 4) + "#}")
    assert len(read_chat_template(ModelConfig(chat_template=file)) or "") == MAX_BYTES


def test_a_mark_of_the_encoding_is_no_part_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(b"\xef\xbb\xbf" + TEMPLATE.encode())
    assert read_chat_template(ModelConfig(chat_template=file)) == TEMPLATE


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{% for message in messages %}", "line 1: Unexpected end of template"),
        (b"\n{{ messages | nothing_of_this }}", "line 2: No filter named"),
        (b"tool_use", "it does not use `messages`, so it is no template of a chat"),
        (b"", "it does not use `messages`"),
        (b"{{ messages }}\xff", "it is no UTF-8"),
        (b"{{ messages }}" + b" " * MAX_BYTES, f"it has more than {MAX_BYTES} bytes"),
        (b"{{ messages }}{% break %}", "Python cannot compile it: 'break' outside loop"),
        (b"{% if messages %}" * 150 + b"{% endif %}" * 150, "Python cannot compile it: too many levels of indentation"),
        (b"{{ messages }}{{ " + b"9" * 5000 + b" }}", "Exceeds the limit (4300 digits)"),
        (b"{{ messages" + b"(" * 5000 + b")" * 5000 + b" }}", "it is nested too deeply"),
    ],
)
def test_what_is_no_template_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"model.chat_template: {file}: {why}")):
        read_chat_template(ModelConfig(chat_template=file))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for file, why in ((pipe, "it is no file"), (tmp_path, "Is a directory"), (tmp_path / "a", "No such file")):
        with pytest.raises(ConfigError, match=why):
            read_chat_template(ModelConfig(chat_template=file))
