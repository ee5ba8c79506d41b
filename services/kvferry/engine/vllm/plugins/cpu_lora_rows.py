"""LoRA on the CPU device: no adapter for rows that ask for none."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

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
