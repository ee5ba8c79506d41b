"""Helpers of the seam tests."""

from __future__ import annotations

import hashlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm")


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


BLOCK_SIZE = 4


class Request(SimpleNamespace):
    """What the tier reads of vLLM's requests."""

    def __init__(self, tokens: list[int], hints: Any = None, salt: str = "") -> None:
        super().__init__(
            request_id="r",
            all_token_ids=tokens,
            prompt_token_ids=tokens[:16],
            cache_salt=salt or None,
            kv_hints=hints,
            kv_transfer_params=None,
            block_hashes=[
                hashlib.sha256(bytes(tokens[: end + BLOCK_SIZE])).digest() for end in range(0, 40, BLOCK_SIZE)
            ],
        )

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def context_of(request: Request, num_pages: int, pages_per_chunk: int = 1) -> tuple[Any, list[Any]]:
    """A ReqContext with its state and chunk keys."""
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from kvferry.engine.vllm.plugins.request_tier_state import RequestTierState

    context = ReqContext("r")
    context.set_state(RequestTierState(request, BLOCK_SIZE))
    keys = []
    for end_page in range(pages_per_chunk, num_pages + 1, pages_per_chunk):
        keys.append(make_offload_key(request.block_hashes[end_page - 1], 0))
        context.set_offload_key_position(keys[-1], end_page * BLOCK_SIZE)
    return context, keys
