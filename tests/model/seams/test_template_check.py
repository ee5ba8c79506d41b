"""engine/vllm/rendering/chat_template.py: chat templates that fail for every message do not let a gateway start."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry import model_folder
from kvferry.config import ModelConfig
from kvferry.engine.forks import ForkLimits
from kvferry.errors import ConfigError, InvalidRequest

pytestmark = pytest.mark.vllm

LIMITS = ForkLimits(cpu_s=1.0, wall_s=250.0, memory_bytes=256 << 20)
LONG_LOOP = "{% for number in range(99999) %}" * 3 + "{% endfor %}" * 3


@pytest.fixture(scope="module")
def online() -> Any:
    from kvferry.engine.vllm.rendering.vllm_prompts import VllmPrompts

    return VllmPrompts(str(model_folder.resolve("default")), "m", ModelConfig()).online


@pytest.fixture
def with_template(online: Any) -> Iterator[Any]:
    own = online.chat_template
    yield online
    online.chat_template = own


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[7].content.text }}", "refuses an ordinary message, .*no element 7"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(messages) }}", "recursion"),
        ("{{ messages }}" + LONG_LOOP, r"does not end within 1 s of CPU time"),
        (
            "{% set n = namespace(x=messages|string) %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "takes more than 256 MiB",
        ),
    ],
)
def test_a_template_that_fails_for_every_message_is_refused(with_template: Any, template: str, words: str) -> None:
    from kvferry.engine.vllm.rendering.chat_template import check_template

    with_template.chat_template = template
    file = Path("/etc/templates/chat.jinja")
    with pytest.raises(ConfigError, match=rf"^model\.chat_template: {file}: it .*{words}") as caught:
        check_template(with_template, ModelConfig(chat_template=file), LIMITS)
    assert len(caught.value.message) < 600
    with pytest.raises(ConfigError, match=r"^model\.path: the model's own chat template \(model\.chat_template"):
        check_template(with_template, ModelConfig(), LIMITS)


@pytest.mark.parametrize(
    "template",
    [
        "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[1].content }}",
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}",
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}",
        "{% for part in messages[0].content %}{{ part.text }}{% endfor %}",
    ],
)
def test_a_template_may_refuse_some_messages(with_template: Any, template: str) -> None:
    from kvferry.engine.vllm.rendering.chat_template import check_template

    with_template.chat_template = template
    check_template(with_template, ModelConfig(), LIMITS)


@pytest.mark.parametrize("reason", ["'never ' ~ messages[0].role", "'x\x1b[31m' * 9999"])
def test_a_template_that_refuses_ordinary_messages_by_itself_is_told_of(
    with_template: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from kvferry.engine.vllm.rendering.chat_template import check_template

    with_template.chat_template = "{{ raise_exception(" + reason + ") }}{{ messages }}"
    check_template(with_template, ModelConfig(chat_template=Path("/etc/chat.jinja")), LIMITS)
    (record,) = (each for each in caplog.records if each.name.endswith("chat_template"))
    assert re.search(r"chat\.jinja: it refuses an ordinary message.*: (never user|x\S*31mx)", record.getMessage())
    assert len(record.getMessage()) < 600
    assert record.getMessage().isprintable()


@pytest.mark.parametrize(("template", "num_renders"), [("{{ messages }}", 1), ("{{ messages[7].content.text }}", 2)])
def test_the_check_ends_at_the_first_chat_that_renders(
    with_template: Any, template: str, num_renders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rendering costs the start of a gateway up to the limits of a fork."""
    from kvferry.engine.vllm.rendering import chat_template

    rendered: list[Any] = []
    render = with_template.renderer.render_messages

    def counted(messages: Any, params: Any) -> Any:
        rendered.append(messages)
        return render(messages, params)

    with_template.chat_template = template
    monkeypatch.setattr(with_template.renderer, "render_messages", counted)
    with contextlib.suppress(ValueError):
        chat_template._render(with_template)
    assert len(rendered) == num_renders


def test_a_model_without_a_template_starts(with_template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine.vllm.rendering.chat_template import check_template

    monkeypatch.setattr(with_template.renderer.tokenizer, "chat_template", None)
    check_template(with_template, ModelConfig(), LIMITS)


def test_a_gateways_renderer_is_not_made_with_such_a_template(tmp_path: Path) -> None:
    from kvferry.engine.vllm.rendering.vllm_prompts import VllmPrompts

    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[7].content.text }}")
    with pytest.raises(ConfigError, match=rf"^model\.chat_template: {file}: it refuses an ordinary message"):
        VllmPrompts(str(model_folder.resolve("default")), "m", ModelConfig(chat_template=file))


async def test_a_chat_with_a_model_that_has_no_template_is_refused_with_the_key(tmp_path: Path) -> None:
    from kvferry.engine.vllm.rendering.vllm_prompts import VllmPrompts

    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder.resolve("default") / name, tmp_path / name)
    prompts = VllmPrompts(str(tmp_path), "m", ModelConfig())
    with pytest.raises(InvalidRequest, match=r"no chat template; .*model\.chat_template") as caught:
        await prompts.chat({"messages": [{"role": "user", "content": "Hello"}]})
    assert caught.value.param == "messages"
