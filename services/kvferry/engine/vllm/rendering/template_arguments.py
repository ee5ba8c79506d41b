"""Names of chat templates' arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


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
