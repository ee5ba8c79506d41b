"""engine/vllm/rendering/chat_template.py"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.vllm


def test_names_that_clients_send_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.renderers import hf
    from vllm.utils import func_utils

    from kvferry.engine.vllm.rendering.chat_template import keep_no_names_of_clients

    def template(conversation: Any, *, tools: Any = None, known: bool = False) -> None: ...

    kept: Any = func_utils._supports_kw
    if not hasattr(kept, "cache_info"):  # a renderer of another test has replaced it
        kept = inspect.getclosurevars(kept).nonlocals["kept"]
        monkeypatch.setattr(func_utils, "_supports_kw", kept)

    def asked(name: str) -> tuple[bool, int]:
        """Return the answer, and how many names vLLM's cache has more."""
        before = kept.cache_info().misses
        return hf.supports_kw(template, name, allow_var_kwargs=False), kept.cache_info().misses - before

    assert asked("of a client") == (False, 1)
    monkeypatch.setattr(func_utils, "_supports_kw", kept)
    keep_no_names_of_clients()
    keep_no_names_of_clients()
    assert asked("of another client") == (False, 0)
    assert asked("known") == (True, 0)
    assert asked("tools") == (True, 1)  # of vLLM's own, each of which it asks for with every chat
    assert asked("tools") == (True, 0)
