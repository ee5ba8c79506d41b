"""Measures types of KV pages against a baseline: makes samples, runs engines in turn, scores what they wrote."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from kvferry import model_folder
from kvferry.config import ClusterConfig
from kvferry.engine import quality_report as reports
from kvferry.engine.quality_report import Interval, QualityReport
from kvferry.engine.vllm.start.arguments import prepare_environment
from kvferry.engine.vllm.start.weights import weights_revision
from kvferry.errors import ConfigError, LocalError
from kvferry.pages.geometry.config_json import from_config
from kvferry.pages.geometry.kv_dtypes import kv_dtype
from kvferry.pages.geometry.model import ModelGeometry
from kvferry_plan.quality.obstacles import Hardware, find_obstacles
from kvferry_plan.quality.report_file import length_record, record
from kvferry_plan.quality.run import ANSWERS_FILE, RUN_FILE, ForcedSample, QualityRun, sample_file
from kvferry_plan.quality.samples import Dataset, sample_text, task_prompts
from kvferry_plan.quality.verdict import LengthResult, SampleScores, by_length, exact_match, worst

AUTO = "auto"
_SHORTEST = 1024
_MAX_ANSWER_TOKENS = 24
_MAX_NUM_SEQS = 16
_LOG_LINES, _MAX_LINE = 12, 300
_CAUSE = re.compile(r"\b\w*(Error|Exception|Failed|Exit|Interrupt|[Kk]illed|signal)\b")
_PIECE_CHARACTERS = 20_000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    dtypes: tuple[str, ...]
    baseline: str  # auto, or a type of KV pages
    lengths: tuple[int, ...]  # of contexts, in tokens; empty: from 1,024 to the model's
    num_samples: int  # of each length
    num_scored_tokens: int  # of each sample
    num_tasks: int
    budget: float
    timeout_s: float  # of one engine's run
    worker_extension: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Settings that all engines of one measurement share."""

    config: ClusterConfig
    settings: Settings
    dataset: Dataset
    folder: Path
    geometry: ModelGeometry
    weights: str
    hardware: Hardware
    samples: list[ForcedSample]
    tasks: list[list[int]]
    warnings: dict[str, tuple[str, ...]]  # by type


def measure(config: ClusterConfig, settings: Settings, dataset: Dataset, say: Progress) -> Iterator[QualityReport]:
    """Yield a report for each type. Raises ConfigError before any engine runs."""
    started_s = time.monotonic()
    plan = _plan(config, settings, dataset, say)
    with tempfile.TemporaryDirectory(prefix="quality-", dir=os.environ.get("KVFERRY_RUN_DIR")) as work:
        _check_room(Path(work), plan.samples, plan.geometry.vocab_size)
        prepare_environment(config.engine, side_channel_port=0)
        baseline = Path(work, "baseline")
        run_engine(
            baseline,
            _run_of(plan, *types_of(config, plan.geometry, settings.baseline)),
            settings.timeout_s,
            say,
            "baseline",
        )
        for name in plan.warnings:
            candidate = Path(work, name)
            run = _run_of(plan, *types_of(config, plan.geometry, name), extension=settings.worker_extension)
            run_engine(candidate, run, settings.timeout_s, say, name)
            results = by_length(_score(baseline, candidate, plan.samples), settings.budget)
            answers = [json.loads((each / ANSWERS_FILE).read_text(encoding="utf-8")) for each in (baseline, candidate)]
            shutil.rmtree(candidate)
            yield _report(plan, name, results, exact_match(*answers), time.monotonic() - started_s)


def _plan(config: ClusterConfig, settings: Settings, dataset: Dataset, say: Progress) -> _Plan:
    if config.model.hf_overrides.context:
        raise ConfigError("model.hf_overrides: a report says nothing of them; measure the model as its folder has it")
    folder = model_folder.resolve(config.model.path, report=say)
    values = model_folder.read_config(str(folder))
    geometry = from_config(values, name=folder.name)
    hardware = this_hardware(config.engine.device)
    warnings = {name: _check(values, name, hardware) for name in (kv_dtype(each).name for each in settings.dtypes)}
    _check(values, _own_type(config, geometry) if settings.baseline == AUTO else settings.baseline, hardware)
    lengths = context_lengths(geometry, config, settings)
    weights = weights_revision(folder, model_folder.cache_folder() / "weights")
    context = config.model.max_model_len or geometry.context_length
    samples, tasks = _make_samples(folder, config, context, lengths, settings, dataset)
    return _Plan(config, settings, dataset, folder, geometry, weights, hardware, samples, tasks, warnings)


def _report(plan: _Plan, name: str, results: list[LengthResult], match: Interval, took_s: float) -> QualityReport:
    baseline_pages, baseline_compute = types_of(plan.config, plan.geometry, plan.settings.baseline)
    _, compute = types_of(plan.config, plan.geometry, name)
    return QualityReport(
        format=reports.FORMAT,
        verdict=worst([result.verdict for result in results]),
        budget=plan.settings.budget,
        mode=reports.ENGINE_MODE,
        kv_cache_dtype=name,
        compute_dtype=compute,
        baseline_kv_cache_dtype=baseline_compute if baseline_pages == AUTO else baseline_pages,
        baseline_compute_dtype=baseline_compute,
        model=plan.folder.name,
        weights=plan.weights,
        revision=plan.config.model.revision,
        vllm=_vllm_version(),
        device=plan.config.engine.device,
        hardware=plan.hardware.name,
        lengths=tuple(length_record(result) for result in results),
        exact_match=record(match),
        num_tasks=len(plan.tasks),
        dataset=plan.dataset.name,
        dataset_digest=plan.dataset.digest,
        warnings=plan.warnings[name],
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
        took_s=round(took_s, 1),
    )


def this_hardware(device: str) -> Hardware:
    """Raises ConfigError without the device, or without vLLM."""
    try:
        import torch
        import vllm  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"measuring needs the engine ({error}); run `make setup`") from None
    if device == "cpu":
        has = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
        return Hardware("cpu", _cpu_name(), has_avx512=bool(has))
    if not torch.cuda.is_available():
        raise ConfigError("engine.device is gpu, and no GPU is here")
    major, minor = torch.cuda.get_device_capability()
    return Hardware("gpu", torch.cuda.get_device_name(), capability=10 * major + minor)


def context_lengths(geometry: ModelGeometry, config: ClusterConfig, settings: Settings) -> tuple[int, ...]:
    """Return the lengths of contexts. Raises ConfigError."""
    longest = (config.model.max_model_len or geometry.context_length) - settings.num_scored_tokens
    if settings.lengths:
        if too_long := [length for length in settings.lengths if length > longest]:
            raise ConfigError(
                f"--lengths: {too_long[0]} and {settings.num_scored_tokens} scored tokens exceed the context of "
                f"{longest + settings.num_scored_tokens} tokens"
            )
        return tuple(sorted(set(settings.lengths)))
    if longest < 1:
        raise ConfigError(f"--tokens: {settings.num_scored_tokens} leave no context")
    lengths = []
    length = _SHORTEST
    while length < longest:
        lengths.append(length)
        length *= 2
    return (*lengths, longest)


def run_engine(folder: Path, run: QualityRun, timeout_s: float, say: Progress, name: str) -> None:
    """Run one engine to its end. Raises LocalError with the end of its log if it fails or takes too long."""
    folder.mkdir()
    (folder / RUN_FILE).write_bytes(msgspec.json.encode(run))
    started_s = time.monotonic()
    log = folder / "log"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "kvferry_plan.quality.run", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        _end(child)

    timer = threading.Timer(timeout_s, expire)
    timer.start()
    try:
        assert child.stdout is not None
        for line in child.stdout:
            say(f"{name}: {_told(line)}, {time.monotonic() - started_s:.0f} s")
        code = child.wait()
    finally:
        timer.cancel()
        _end(child)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    if expired.is_set():
        raise LocalError(f"the engine with {name} did not end within {timeout_s:g} s (--timeout)")
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        # The cause stands in a process of vLLM's, far above the end.
        causes = [line for line in lines[:-_LOG_LINES] if _CAUSE.search(line)][-_LOG_LINES:]
        shown = "\n".join(line[:_MAX_LINE] for line in (*causes, *lines[-_LOG_LINES:]))
        raise LocalError(f"the engine with {name} failed (exit code {code}); of its log:\n{shown}")


def _check(values: dict[str, Any], name: str, hardware: Hardware) -> tuple[str, ...]:
    found = find_obstacles(values, name, hardware)
    if found.refusals:
        raise ConfigError(f"KV pages of type {name} cannot be measured here: {'; '.join(found.refusals)}")
    return found.warnings


def _own_type(config: ClusterConfig, geometry: ModelGeometry) -> str:
    own: str = config.model.dtype
    if own == AUTO:
        return "float32" if config.engine.device == "cpu" else geometry.dtype
    return own


def types_of(config: ClusterConfig, geometry: ModelGeometry, name: str) -> tuple[str, str]:
    """Return vLLM's option for pages, and the type in which the model is computed."""
    # On CPUs pages of 16 bits need a model that is computed in them; with another one vLLM gives garbage.
    own = _own_type(config, geometry)
    name = own if name == AUTO else kv_dtype(name).name
    if name not in reports.UNQUANTIZED:
        return name, own
    # `auto` is what a checkpoint declares, where it does.
    return (name if geometry.checkpoint_kv_dtype else AUTO), name


def _make_samples(
    folder: Path, config: ClusterConfig, context: int, lengths: Sequence[int], settings: Settings, dataset: Dataset
) -> tuple[list[ForcedSample], list[list[int]]]:
    tokenizer = _tokenizer(folder)
    num_tokens = max(lengths) + settings.num_scored_tokens
    texts = [
        _tokens(tokenizer, sample_text(dataset, number, settings.num_samples), num_tokens)
        for number in range(settings.num_samples)
    ]
    samples = [
        ForcedSample(
            number=len(texts) * i + number,
            context=tokens[:length],
            forced=tokens[length : length + settings.num_scored_tokens],
        )
        for i, length in enumerate(lengths)
        for number, tokens in enumerate(texts)
    ]
    _check_distinct(samples, settings.num_samples)
    longest = max(1, context - _MAX_ANSWER_TOKENS)
    tasks = [tokenizer.encode(prompt)[-longest:] for prompt in task_prompts(settings.num_tasks)]
    return samples, tasks


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:
        # Each kind of tokenizer raises its own errors.
        reason = " ".join(str(error).split())[:_MAX_LINE] or type(error).__name__
        raise ConfigError(f"model.path: {folder} has no usable tokenizer: {reason}", param="model.path") from None


def _check_distinct(samples: Sequence[ForcedSample], num_samples: int) -> None:
    """Equal samples have equal results, and intervals that are narrow for nothing. Raises ConfigError."""
    for length in sorted({len(sample.context) for sample in samples}):
        found = {(*sample.context, *sample.forced) for sample in samples if len(sample.context) == length}
        if len(found) < num_samples:
            raise ConfigError(
                f"--samples {num_samples}: only {len(found)} of them differ at {length} tokens; choose fewer, or a "
                "--dataset of more paragraphs"
            )


def _tokens(tokenizer: Any, paragraphs: Iterator[str], num_tokens: int) -> list[int]:
    tokens: list[int] = []
    piece: list[str] = []
    while len(tokens) < num_tokens:
        piece.append(next(paragraphs))
        if sum(map(len, piece)) > _PIECE_CHARACTERS:
            tokens += tokenizer.encode("\n\n".join(piece) + "\n\n", add_special_tokens=not tokens)
            piece = []
    return tokens[:num_tokens]


def _run_of(plan: _Plan, pages: str, compute: str, *, extension: str = "") -> QualityRun:
    engine = plan.config.engine
    longest_task = max(map(len, plan.tasks), default=0) + _MAX_ANSWER_TOKENS
    return QualityRun(
        model_folder=str(plan.folder),
        compute_dtype=compute,
        kv_cache_dtype=pages,
        device=engine.device,
        block_size=engine.block_size,
        max_model_len=max(longest_task, *(len(sample.context) + len(sample.forced) for sample in plan.samples)),
        max_num_seqs=min(engine.max_num_seqs, _MAX_NUM_SEQS),
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        vocab_size=plan.geometry.vocab_size,
        samples=plan.samples,
        tasks=plan.tasks,
        max_answer_tokens=_MAX_ANSWER_TOKENS,
        worker_extension=extension,
    )


def _score(baseline: Path, candidate: Path, samples: Sequence[ForcedSample]) -> list[SampleScores]:
    import numpy as np

    return [
        score(
            np.load(sample_file(baseline, sample.number)),
            np.load(sample_file(candidate, sample.number)),
            sample.forced,
            len(sample.context),
        )
        for sample in samples
    ]


def score(baseline: Any, candidate: Any, forced: Sequence[int], num_tokens: int) -> SampleScores:
    """Score log-probabilities of shape (positions, vocabulary) against the baseline's."""
    import numpy as np

    probabilities = np.exp(baseline.astype(np.float64))
    # A token without probability adds nothing, whatever the other distribution says of it.
    differences = np.subtract(
        baseline, candidate, dtype=np.float64, where=probabilities > 0, out=np.zeros_like(probabilities)
    )
    divergence = float((probabilities * differences).sum(axis=1).mean())
    rows = np.arange(len(forced))
    return SampleScores(
        num_tokens=num_tokens,
        divergence=divergence,
        baseline_loss=float(-baseline[rows, list(forced)].astype(np.float64).mean()),
        loss=float(-candidate[rows, list(forced)].astype(np.float64).mean()),
        num_agreeing=int((baseline.argmax(axis=1) == candidate.argmax(axis=1)).sum()),
        num_positions=len(forced),
    )


def _check_room(folder: Path, samples: Sequence[ForcedSample], vocab_size: int) -> None:
    needed = 2 * 4 * vocab_size * sum(len(sample.forced) for sample in samples)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"{folder.parent} has {free >> 20} MiB free, and distributions take {needed >> 20} MiB: choose fewer "
            "--samples or --tokens, or another folder (KVFERRY_RUN_DIR)"
        )


def _told(line: bytes) -> str:
    facts = json.loads(line)
    match facts["step"]:
        case "started":
            return "engine started"
        case "scored":
            return f"{facts['num_samples']} samples of {facts['num_tokens']} tokens scored"
        case _:
            return f"{facts['num_tasks']} tasks answered"


def _end(child: subprocess.Popen[bytes]) -> None:
    # vLLM's processes are in the child's session; they may outlive it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)
