"""LoRA adapters: page hashes, ranks and scales of modules, and rows on the CPU device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper import punica_cpu
from vllm.v1.core import kv_cache_utils

from kvferry.engine.vllm.adapter_folder import match_pattern

# vLLM hashes an adapter's name and its path. Each engine has its own copy of an adapter, in a folder of its own, so
# equal pages would have other hashes in each, and none would be found on a volume. The name has the digest of the
# adapter's files (`StagedAdapter.key`), so the path says nothing more.


def hash_adapters_by_name() -> None:
    """Idempotent."""
    kv_cache_utils._gen_lora_extra_hash_keys = lora_hash_keys


def lora_hash_keys(request: Any) -> list[tuple[str, str]]:
    adapter = request.lora_request
    return [("lora", adapter.lora_name)] if adapter else []


# vLLM 0.32 compiles a regular expression for each key of `rank_pattern` and `alpha_pattern`, and each module, while all
# requests of the engine wait: minutes for adapters with a key per module (AdaLoRA), which counts as a hang. Keys are
# names of modules or ends of them (`adapter_folder`), so a look-up finds the same.


def look_patterns_up() -> None:
    """Idempotent."""
    PEFTHelper._match_pattern = staticmethod(match_pattern)


# vLLM 0.32 gives rows of a step without an adapter the index -1, as its GPU kernels want it. Its functions for the CPU
# take that index of a tensor: the last adapter (vllm-project/vllm#48421). A request for the model itself, beside one
# for an adapter, got a wrong answer. They also copy an adapter's matrices for each row; here rows of one adapter are
# multiplied at once.


def leave_other_rows_alone() -> None:
    """Idempotent."""
    for module in (lora_ops, punica_cpu):  # each calls those that it has
        module.bgmv_shrink = bgmv_shrink
        module.bgmv_expand = bgmv_expand
        module.bgmv_expand_slice = bgmv_expand_slice


def bgmv_shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    for rows, product in _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype):
        output_tensor[rows, : product.shape[1]] = scaling * product


def bgmv_expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    num_columns = min(lora_b_weights.shape[-2], output_tensor.shape[1])  # of which either may have padding
    bgmv_expand_slice(inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, num_columns, add_inputs=add_inputs)


def bgmv_expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    columns = slice(slice_offset, slice_offset + slice_size)
    for rows, product in _products(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype):
        if add_inputs:
            output_tensor[rows, columns] += product[:, :slice_size]
        else:
            output_tensor[rows, columns] = product[:, :slice_size]


def _products(
    inputs: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    indices = indices[: inputs.shape[0]]
    for index in indices.unique().tolist():
        if index >= 0:
            rows = (indices == index).nonzero().flatten()
            matrix = weights[index].reshape(weights.shape[-2:]).to(dtype)
            yield rows, inputs[rows].to(dtype) @ matrix.T
