"""Fits the planner's efficiencies to what was measured on a running engine. Pure."""

# Prefill: seconds = overhead + FLOPs / (peak x MFU). Decode: seconds of a step = overhead + bytes / (bandwidth x
# efficiency), or overhead + FLOPs / (peak x MFU), whichever fits better; the other roof counts as not reached. Both
# are least squares over relative errors with two unknowns that are not negative.

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvferry.errors import ConfigError
from kvferry_plan.planner.assumptions import Assumptions
from kvferry_plan.planner.roofline import Engine

MAX_MEASUREMENTS: Final = 10_000


@dataclass(frozen=True, slots=True)
class PrefillMeasurement:
    """Seconds from a request to its first token, on an idle engine; nothing of the prompt was cached."""

    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodeMeasurement:
    """Seconds of a step with `num_requests`, whose contexts have `context_tokens` on the average."""

    num_requests: int
    context_tokens: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted assumptions, and the largest relative error of the fit over the measurements."""

    assumptions: Assumptions
    prefill_error: float
    decode_error: float


def calibrate(
    engine: Engine, prefills: Sequence[PrefillMeasurement], decodes: Sequence[DecodeMeasurement]
) -> Calibration:
    """Raises ConfigError for too few or too many measurements, or such that no efficiency below 1 explains."""
    for name, measured in (("prompt lengths", {each.num_tokens for each in prefills}),
                           ("batches", {each.num_requests for each in decodes})):  # fmt: skip
        if len(measured) < 2:
            raise ConfigError(f"calibration needs measurements of two {name}; there are {len(measured)}")
    if len(prefills) + len(decodes) > MAX_MEASUREMENTS:
        raise ConfigError(f"calibration takes {MAX_MEASUREMENTS} measurements")
    seconds = [each.seconds for each in prefills] + [each.seconds for each in decodes]
    if not all(0 < each < math.inf for each in seconds):
        raise ConfigError("calibration: a step took no time: the deployment has to stream each token as it is made")
    base = dataclasses.replace(
        engine.assumptions, prefill_mfu=1.0, decode_mfu=1.0, memory_efficiency=1.0, prefill_overhead_s=0.0,
        step_overhead_s=0.0, routing_s=0.0,
    )  # fmt: skip
    ideal = dataclasses.replace(engine, assumptions=base)
    prefill_s, overhead_s = _fit(
        [ideal.prefill(each.num_tokens).compute_s for each in prefills], [each.seconds for each in prefills]
    )
    steps = [ideal.decode_step(each.num_requests, each.context_tokens) for each in decodes]
    seconds = [each.seconds for each in decodes]
    prefill = {"prefill_mfu": _share(prefill_s, "prefill_mfu"), "prefill_overhead_s": overhead_s}
    fits = {
        "memory_efficiency": _fit([step.memory_s for step in steps], seconds),
        "decode_mfu": _fit([step.compute_s for step in steps], seconds),
    }
    found = []
    refusals = []
    for name, (slope, rest) in fits.items():
        try:
            decode = {name: _share(slope, name), "step_overhead_s": rest}
        except ConfigError as error:
            refusals.append(error)
            continue
        fitted = dataclasses.replace(base, **prefill, **decode)
        found.append(_judged(dataclasses.replace(engine, assumptions=fitted), prefills, decodes))
    if not found:
        raise refusals[0]
    return min(found, key=lambda each: each.decode_error)


def _judged(
    engine: Engine, prefills: Sequence[PrefillMeasurement], decodes: Sequence[DecodeMeasurement]
) -> Calibration:
    return Calibration(
        engine.assumptions,
        max(abs(engine.prefill(each.num_tokens).total_s / each.seconds - 1) for each in prefills),
        max(
            abs(engine.decode_step(each.num_requests, each.context_tokens).total_s / each.seconds - 1)
            for each in decodes
        ),
    )


def _fit(ideals: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    # Return (a, b) of seconds = a x ideal + b, neither negative, with the least squares of relative errors.
    weights = [1 / (each * each) for each in seconds]
    whole = sum(weights)
    mean_x = sum(w * x for w, x in zip(weights, ideals, strict=True)) / whole
    mean_y = sum(w * y for w, y in zip(weights, seconds, strict=True)) / whole
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, ideals, strict=True))
    both = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, ideals, seconds, strict=True))
    slope = both / spread if spread > 0 else 0.0
    if slope <= 0:
        return 0.0, mean_y
    rest = mean_y - slope * mean_x
    if rest >= 0:
        return slope, rest
    through = sum(w * x * y for w, x, y in zip(weights, ideals, seconds, strict=True))
    return through / sum(w * x * x for w, x in zip(weights, ideals, strict=True)), 0.0


def _share(slope: float, name: str) -> float:
    # Return the efficiency that makes ideal seconds `slope` times as long.
    if slope <= 0:
        return 1.0
    if slope < 1:
        raise ConfigError(
            f"calibration: {name} would be {1 / slope:.2f}, above what the catalogue says of this GPU: name the one "
            "that serves (--gpu), or correct it (--catalogue)"
        )
    return 1 / slope
