"""Helpers of the seam tests."""

from __future__ import annotations

import hashlib
import inspect
from types import SimpleNamespace
from typing import Any


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

    from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState

    context = ReqContext("r")
    context.set_state(RequestTierState(request, BLOCK_SIZE))
    keys = []
    for end_page in range(pages_per_chunk, num_pages + 1, pages_per_chunk):
        keys.append(make_offload_key(request.block_hashes[end_page - 1], 0))
        context.set_offload_key_position(keys[-1], end_page * BLOCK_SIZE)
    return context, keys


def vllm_config(**changes: Any) -> Any:
    """Return a fake of vLLM's resolved configuration, with the values that decide the bytes of pages."""
    import torch

    values = {"dtype": torch.float32, "cache_dtype": "auto", "block_size": 32, "heads": 3, "tensor_parallel": 1}
    values |= {"max_model_len": 4096, "rope": {"factor": 1.0}}
    values |= changes
    return SimpleNamespace(
        lora_config=None,
        additional_config=None,
        model_config=SimpleNamespace(
            dtype=values["dtype"],
            max_model_len=values["max_model_len"],
            quantization=None,
            hf_config=SimpleNamespace(to_dict=lambda: {"_name_or_path": "a", "rope": values["rope"]}),
            hf_text_config=SimpleNamespace(to_dict=dict),
            get_total_num_hidden_layers=lambda: 30,
            get_total_num_kv_heads=lambda: values["heads"],
            get_head_size=lambda: 64,
        ),
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], block_size=values["block_size"], kv_cache_layout="LBHNC"
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=values["tensor_parallel"], pipeline_parallel_size=1),
    )
