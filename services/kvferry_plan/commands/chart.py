"""Draws a plan as a PNG: memory of one GPU, and the rooflines of prefill and decode. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError
from kvferry_plan.commands.report import memory_parts
from kvferry_plan.planner.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCHES = (11.0, 4.2)
_DPI = 130
_COLOURS = ("#4c6ef5", "#74c0fc", "#adb5bd", "#40c057", "#e9ecef")


def draw(plan: Plan, file: Path) -> None:
    """Raises ConfigError without matplotlib, or where the file cannot be written."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib; --bars needs nothing") from None
    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    memory_axes, roof_axes = figure.subplots(1, 2, width_ratios=(1, 1.4))
    _draw_memory(memory_axes, plan)
    _draw_roofline(roof_axes, plan)
    best, geometry = plan.best, plan.question.model.geometry
    figure.suptitle(
        f"{geometry.name}, weights {plan.question.model.weights}, KV {plan.question.kv_dtype}, on "
        f"{best.num_gpus} x {best.gpu_name}, {best.layout.text()}"
    )
    try:
        figure.savefig(file, format="png", metadata={"Software": "kvferry plan"})
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror}") from None


def _draw_memory(axes: Axes, plan: Plan) -> None:
    bottom = 0.0
    for (name, num_bytes), colour in zip(memory_parts(plan.best.memory), _COLOURS, strict=True):
        size = num_bytes / 1e9
        axes.bar(0, size, bottom=bottom, color=colour, width=0.5, label=f"{name}: {size:.1f} GB")
        bottom += size
    axes.set_xticks([])
    axes.set_ylabel("GB of one GPU")
    axes.set_xlim(-0.4, 1.1)
    axes.legend(loc="center right", frameon=False, fontsize=9)
    axes.set_title("memory", fontsize=10)


def _draw_roofline(axes: Axes, plan: Plan) -> None:
    # Draw attainable FLOP/s of one GPU over FLOPs per byte, and where prefill and decode lie.
    gpu, model, assume = plan.best.gpu, plan.question.model, plan.question.assumptions
    peak, dtype = gpu.flops_of(model.compute_dtype())
    bandwidth = gpu.memory_bytes_s
    ridge = peak / bandwidth
    intensities = [10 ** (exponent / 20) for exponent in range(-10, 101)]
    attainable = [min(peak, bandwidth * each) / 1e12 for each in intensities]
    axes.plot(intensities, attainable, color="#212529", label=f"{gpu.title}, {dtype}")
    reached: list[tuple[str, Any, float, str]] = [
        ("prefill of the mean prompt", plan.best.prefill, assume.prefill_mfu, "#4c6ef5"),
        (f"decode, {plan.best.batch:.0f} requests an engine", plan.best.decode, assume.decode_mfu, "#e8590c"),
    ]
    for name, roof, mfu, colour in reached:
        flops = roof.compute_s * peak * mfu
        num_bytes = max(1.0, roof.memory_s * bandwidth * assume.memory_efficiency)
        busy_s = max(roof.total_s, 1e-12)
        axes.plot([flops / num_bytes], [flops / busy_s / 1e12], "o", color=colour, label=name)
    axes.axvline(ridge, color="#adb5bd", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs for each byte of memory traffic")
    axes.set_ylabel("TFLOP/s of one GPU")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    axes.set_title("roofline", fontsize=10)
