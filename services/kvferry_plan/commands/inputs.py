"""Reads what a plan may be asked with: a trace of requests, a scenario of the load-test harness, a GPU catalogue."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvferry.errors import ConfigError
from kvferry.pages.geometry.model import ModelGeometry
from kvferry.util import plain_yaml
from kvferry_plan.planner import workload
from kvferry_plan.planner.gpu_catalogue import MAX_FILE_BYTES, Gpu, merged
from kvferry_plan.planner.workload import Lengths

_MAX_LAYERS: Final = 1024
_MAX_EXPERTS: Final = 4096
_ROUTED: Final = re.compile(r"\.experts\.")
# Weights are counted, not their quantized form; code of the model's own is not run.
_LEFT_OUT: Final = ("quantization_config", "auto_map")


def count(config: Mapping[str, Any], geometry: ModelGeometry) -> tuple[int, int] | None:
    """Return all parameters and those that a token takes, or None for a model that transformers does not have.

    Of a multimodal model the language model alone counts, and modules for multi-token prediction do not: as in the
    catalogue, whose counts were made so.
    """
    if geometry.num_layers > _MAX_LAYERS or geometry.num_experts > _MAX_EXPERTS:
        return None
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        values = {key: value for key, value in config.items() if key not in (*_LEFT_OUT, "model_type")}
        text = AutoConfig.for_model(config["model_type"], **values).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text)
        sizes = {name: each.numel() for name, each in model.named_parameters()}
    # Whatever a config.json makes transformers raise: then the user is asked for the counts.
    except Exception:
        return None
    total = sum(sizes.values())
    if geometry.num_experts <= 1:
        return total, total
    routed = sum(size for name, size in sizes.items() if _ROUTED.search(name))
    unused = 1 - geometry.num_experts_per_token / geometry.num_experts
    return total, total - round(routed * unused)


MAX_TRACE_BYTES: Final = 512 << 20
MAX_LINE_BYTES: Final = 16 << 20
MAX_TIME_MS: Final = 1e15
MAX_SCENARIO_BYTES: Final = 1 << 20
_PROMPT_KEYS: Final = ("input_length", "prompt_tokens", "input_tokens", "isl")
_OUTPUT_KEYS: Final = ("output_length", "output_tokens", "completion_tokens", "osl")
_KINDS: Final = ("rag", "chat", "agent", "documents")


@dataclass(frozen=True, slots=True)
class Load:
    """Demand read from a trace or a scenario; None for what it leaves open."""

    prompt: Lengths
    output: Lengths
    rate_per_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    think_s: float | None = None
    prefix_share: float | None = None


def read_catalogue(file: Path) -> Mapping[str, Gpu]:
    """Return the shipped catalogue with the user's over it. Raises ConfigError."""
    try:
        return merged(plain_yaml.read_bounded(file, MAX_FILE_BYTES), str(file))
    except OSError as error:
        raise ConfigError(f"--catalogue {file}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--catalogue {file}: {error}") from None


def read_trace(file: Path) -> Load:
    """Read JSON lines with prompt and output lengths, such as Mooncake's; `timestamp` in ms gives the rate.

    Raises ConfigError naming the line that is wrong.
    """
    prompts: list[int] = []
    outputs: list[int] = []
    times_ms: list[float] = []
    try:
        with file.open("rb") as lines:
            if file.stat().st_size > MAX_TRACE_BYTES:
                raise ConfigError(f"--trace {file}: over {MAX_TRACE_BYTES} bytes, the limit")
            number = 0
            while line := lines.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise ConfigError(f"--trace {file}, line {number}: over {MAX_LINE_BYTES} bytes, the limit")
                if not line.strip():
                    continue
                record = _record(line, f"--trace {file}, line {number}")
                prompts.append(_length(record, _PROMPT_KEYS, f"--trace {file}, line {number}"))
                outputs.append(_length(record, _OUTPUT_KEYS, f"--trace {file}, line {number}"))
                if (at := record.get("timestamp")) is not None:
                    times_ms.append(_time_ms(at, f"--trace {file}, line {number}"))
                if len(prompts) > workload.MAX_SAMPLES:
                    raise ConfigError(f"--trace {file}: over {workload.MAX_SAMPLES} requests, the limit")
    except OSError as error:
        raise ConfigError(f"--trace {file}: {error.strerror}") from None
    if not prompts:
        raise ConfigError(f"--trace {file}: no requests")
    span_s = (max(times_ms) - min(times_ms)) / 1000 if len(times_ms) == len(prompts) else 0
    rate = (len(prompts) - 1) / span_s if span_s > 0 else None
    return Load(workload.of_samples(prompts), workload.of_samples(outputs), rate_per_s=rate)


def _record(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object")
    return record


def _time_ms(value: Any, where: str) -> float:
    # NaN is not within the limits.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME_MS:
        raise ConfigError(f"{where}: expected timestamp in ms, 0 to {MAX_TIME_MS:g}")
    return float(value)


def _length(record: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    value = next((record[key] for key in keys if key in record), None)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= workload.MAX_TOKENS:
        raise ConfigError(f"{where}: expected {' or '.join(keys)}, 0 to {workload.MAX_TOKENS} tokens")
    return value


def read_scenario(file: Path) -> Load:
    """Read a scenario of kvferry-loadtest, by the mean of its lengths. Raises ConfigError."""
    # Prompts of later turns contain the earlier ones. Only the system prompt, which all sessions share, counts as
    # shared.
    try:
        content = tomllib.loads(plain_yaml.read_bounded(file, MAX_SCENARIO_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"--scenario {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--scenario {file}: {str(error)[:200]}") from None
    kind = content.get("kind")
    table = content.get(kind) if isinstance(kind, str) else None
    if kind not in _KINDS or not isinstance(table, dict):
        raise ConfigError(
            f"--scenario {file}: expected a scenario of kind {', '.join(_KINDS)}, with a table of that name"
        )
    where = f"--scenario {file}: {kind}"
    prompts, answer, system = _PROMPTS[kind](_Table(table, where))
    arrivals, objective = _Table(content.get("arrivals"), where), _Table(content.get("objective"), where)
    sessions_per_s = arrivals.optional("rate_per_s")
    ttft_ms, tpot_ms = objective.optional("ttft_ms"), objective.optional("tpot_ms")
    lengths = workload.of_samples([max(1, round(prompt)) for prompt in prompts])
    return Load(
        lengths,
        workload.fixed(max(1.0, answer)),
        rate_per_s=None if sessions_per_s is None else sessions_per_s * len(prompts),
        ttft_s=None if ttft_ms is None else ttft_ms / 1000,
        tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        prefix_share=min(0.99, system / lengths.mean),
    )


class _Table:
    # A table of a scenario; a span `{min, max}` counts as its mean.

    def __init__(self, values: Any, where: str) -> None:
        self._values = values if isinstance(values, dict) else {}
        self._where = where

    def get(self, key: str) -> float:
        value = self.optional(key)
        if value is None:
            raise ConfigError(f"{self._where}.{key}: missing")
        return value

    def optional(self, key: str) -> float | None:
        value = self._values.get(key)
        if isinstance(value, dict):
            low, high = value.get("min"), value.get("max")
            value = "no span"  # refused below
            if isinstance(low, int) and isinstance(high, int) and 0 <= low <= high <= workload.MAX_TOKENS:
                value = (low + high) / 2
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= workload.MAX_TOKENS:
            raise ConfigError(f"{self._where}.{key}: expected a number from 0 to {workload.MAX_TOKENS}")
        return float(value)

    def count(self, key: str) -> int:
        value = round(self.get(key))
        if not 1 <= value <= 10_000:
            raise ConfigError(f"{self._where}.{key}: expected 1 to 10000")
        return value


def _rag(table: _Table) -> tuple[list[float], float, float]:
    system, answer = table.get("system_tokens"), table.get("answer_tokens")
    start, user = system + table.get("document_tokens"), table.get("user_tokens")
    turns = range(1, table.count("turns") + 1)
    return [start + turn * user + (turn - 1) * answer for turn in turns], answer, system


def _chat(table: _Table) -> tuple[list[float], float, float]:
    system, user, answer = table.get("system_tokens"), table.get("user_tokens"), table.get("answer_tokens")
    turns = range(1, table.count("turns") + 1)
    return [system + turn * user + (turn - 1) * answer for turn in turns], answer, system


def _agent(table: _Table) -> tuple[list[float], float, float]:
    system, answer, result = table.get("system_tokens"), table.get("answer_tokens"), table.get("tool_result_tokens")
    start = system + table.get("task_tokens")
    return [start + step * (answer + result) for step in range(table.count("steps"))], answer, system


def _documents(table: _Table) -> tuple[list[float], float, float]:
    system = table.get("system_tokens")
    return [system + table.get("document_tokens")], table.get("answer_tokens"), system


_PROMPTS: Final = {"rag": _rag, "chat": _chat, "agent": _agent, "documents": _documents}
