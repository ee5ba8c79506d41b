"""Layouts of one engine: tensor, pipeline and expert parallelism that vLLM accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvferry.errors import ConfigError
from kvferry.pages.geometry.layers import KvLayers
from kvferry_plan.planner.gpu_catalogue import Gpu
from kvferry_plan.planner.models import PlannedModel

MAX_TENSOR_PARALLEL: Final = 64
MAX_PIPELINE_PARALLEL: Final = 16
# vLLM pads the vocabulary to a multiple of this, and then divides it (vocab_parallel_embedding.py).
_VOCABULARY_PADDING: Final = 64
_PIPELINES: Final = (1, 2, 3, 4, 8)


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """How one engine is split. With `expert_parallel` whole experts lie on ranks instead of slices of each."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    expert_parallel: bool = False

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def text(self) -> str:
        parts = [f"TP {self.tensor_parallel_size}"]
        if self.pipeline_parallel_size > 1:
            parts.append(f"PP {self.pipeline_parallel_size}")
        if self.expert_parallel:
            parts.append(f"EP {self.tensor_parallel_size}")
        return " ".join(parts)


def refusal(layout: Layout, model: PlannedModel, gpu: Gpu) -> str:
    """Return why vLLM would not start so, or so on this GPU; empty: it would. Rules of vLLM 0.32."""
    geometry = model.geometry
    tensor, pipeline = layout.tensor_parallel_size, layout.pipeline_parallel_size
    if not 1 <= tensor <= MAX_TENSOR_PARALLEL or not 1 <= pipeline <= MAX_PIPELINE_PARALLEL:
        return f"TP 1 to {MAX_TENSOR_PARALLEL} and PP 1 to {MAX_PIPELINE_PARALLEL} are planned"
    try:
        geometry.check_tensor_parallel(tensor)
        for group in geometry.groups:
            if isinstance(group, KvLayers):
                group.rank_heads(tensor)
    except ConfigError as error:
        return error.message
    padded = -(-geometry.vocab_size // _VOCABULARY_PADDING) * _VOCABULARY_PADDING
    if padded % tensor:
        return f"TP {tensor}: the vocabulary, padded to {padded} rows, cannot be divided by it"
    if tensor > gpu.gpus_per_node:
        return f"TP {tensor}: a node has {gpu.gpus_per_node} of these GPUs, and an engine's ranks share a node"
    if pipeline > geometry.num_layers:
        return f"PP {pipeline}: the model has {geometry.num_layers} layers"
    if layout.expert_parallel and geometry.num_experts < max(2, tensor):
        return f"EP {tensor}: the model has {geometry.num_experts or 'no'} experts"
    if gpu.is_cpu and layout.num_gpus > 1:
        return "a CPU node is planned as one engine"
    return ""


def legal(
    model: PlannedModel, gpu: Gpu, *, tensor_parallel: int | None = None, pipeline_parallel: int | None = None
) -> Iterator[Layout]:
    """Yield the legal layouts on `gpu`. Raises ConfigError for a given size that is not legal, with the legal ones."""
    sizes = [
        tensor
        for tensor in range(1, min(gpu.gpus_per_node, MAX_TENSOR_PARALLEL) + 1)
        if not refusal(Layout(tensor), model, gpu)
    ]
    if tensor_parallel is not None and tensor_parallel not in sizes:
        why = refusal(Layout(tensor_parallel), model, gpu)
        raise ConfigError(f"--tp {tensor_parallel}: {why}; legal here: {', '.join(map(str, sizes))}")
    if pipeline_parallel is not None and (why := refusal(Layout(sizes[0], pipeline_parallel), model, gpu)):
        raise ConfigError(f"--pp {pipeline_parallel}: {why}")
    for tensor in sizes if tensor_parallel is None else (tensor_parallel,):
        for pipeline in _PIPELINES if pipeline_parallel is None else (pipeline_parallel,):
            for expert_parallel in (False, True) if model.is_mixture and tensor > 1 else (False,):
                layout = Layout(tensor, pipeline, expert_parallel)
                if not refusal(layout, model, gpu):
                    yield layout
