"""Results of other tools, so that they can stand beside ours: aiperf 0.13 and guidellm 0.8.

What such a file does not have stays missing. Both count TTFT from sending: it becomes `ttft_sent`, and there is no
`ttft`. Nor is there goodput: their objectives count from sending too. Refusals are known where errors carry a status.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvferry_loadtest.errors import ResultError
from kvferry_loadtest.histogram import Latencies
from kvferry_loadtest.result import Counts, Distribution, Group, Harness, Objective, Result, Server

T = TypeVar("T")

Kind = Literal["aiperf", "guidellm"]

AIPERF_RECORDS = "profile_export.jsonl"

REFUSALS = (429, 503)

_UNKNOWN_HARNESS = Harness(ok=True, reason="", cpu_share=0.0, lateness_p99_ms=0.0, loop_stall_max_ms=0.0)


def import_result(path: Path, deployment: str, kind: Kind | None = None, benchmark: int | None = None) -> Result:
    """Reads aiperf's `profile_export_aiperf.json`, with the records of the `profile_export.jsonl` beside it where there
    is one, or guidellm's JSON; `kind` None finds out which. `benchmark` (from 1) is which of several in guidellm's.

    Histograms need every request: without aiperf's records, or when guidellm kept a sample only, there are none.
    Raises ResultError, one line that names the file and what is wrong with it or missing from it.
    """
    content = _read(path)
    kind = kind or _kind(path, content)
    if kind == "aiperf":
        return _aiperf(path, content, deployment)
    return _guidellm(path, content, deployment, benchmark)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ResultError(f"{path}: no JSON object: {error}") from None


def _kind(path: Path, content: dict[str, Any]) -> Kind:
    if "aiperf_version" in content:
        return "aiperf"
    if isinstance(metadata := content.get("metadata"), dict) and "guidellm_version" in metadata:
        return "guidellm"
    raise ResultError(f"{path}: a result neither of aiperf (no aiperf_version) nor of guidellm (no guidellm_version)")


def _converted(path: Path, content: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise ResultError(f"{path}: {error}") from None


def _distribution(values_s: Iterable[float | None]) -> Distribution | None:
    latencies = Latencies()
    for value_s in values_s:
        if value_s is not None:
            latencies.add_s(value_s)
    return latencies.distribution() if len(latencies) else None


def _utc(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


# aiperf


class _AiperfMetric(msgspec.Struct):
    avg: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None
    count: int | None = None
    sum: float | None = None


class _AiperfErrorDetails(msgspec.Struct):
    code: int | None = None
    type: str | None = None
    message: str = ""


class _AiperfError(msgspec.Struct):
    error_details: _AiperfErrorDetails
    count: int


class _AiperfEndpoint(msgspec.Struct):
    urls: list[str] = []


class _AiperfModel(msgspec.Struct):
    name: str = ""


class _AiperfModels(msgspec.Struct):
    items: list[_AiperfModel] = []


class _AiperfConfig(msgspec.Struct):
    endpoint: _AiperfEndpoint = msgspec.field(default_factory=_AiperfEndpoint)
    models: _AiperfModels = msgspec.field(default_factory=_AiperfModels)
    datasets: list[dict[str, Any]] = []
    phases: list[dict[str, Any]] = []
    slos: dict[str, float] | None = None


class _AiperfRunInfo(msgspec.Struct):
    random_seed: int | None = None


class _AiperfFile(msgspec.Struct):
    aiperf_version: str
    request_count: _AiperfMetric
    benchmark_duration: _AiperfMetric
    request_throughput: _AiperfMetric
    error_request_count: _AiperfMetric | None = None
    request_latency: _AiperfMetric | None = None
    time_to_first_token: _AiperfMetric | None = None
    inter_token_latency: _AiperfMetric | None = None
    inter_chunk_latency: _AiperfMetric | None = None
    output_token_throughput: _AiperfMetric | None = None
    total_isl: _AiperfMetric | None = None
    usage_prompt_tokens: _AiperfMetric | None = None
    usage_completion_tokens: _AiperfMetric | None = None
    good_request_fraction: _AiperfMetric | None = None
    error_summary: list[_AiperfError] = []
    start_time: str = ""
    input_config: _AiperfConfig = msgspec.field(default_factory=_AiperfConfig)
    run_info: _AiperfRunInfo = msgspec.field(default_factory=_AiperfRunInfo)


class _AiperfValue(msgspec.Struct):
    value: float | list[float]


class _AiperfMetadata(msgspec.Struct):
    request_start_ns: int
    benchmark_phase: str = "profiling"


class _AiperfRecord(msgspec.Struct):
    metadata: _AiperfMetadata
    metrics: dict[str, _AiperfValue] = {}
    error: _AiperfErrorDetails | None = None

    def number(self, name: str) -> float | None:
        found = self.metrics.get(name)
        return None if found is None or isinstance(found.value, list) else found.value

    @property
    def tpot_ms(self) -> float | None:
        """By the server's count of tokens where it gave one; aiperf's own divides by its tokenizer's."""
        decode_ms, tokens = self.number("decode_duration"), self.number("usage_completion_tokens")
        if decode_ms is None or tokens is None:
            return self.number("inter_token_latency")
        return decode_ms / (tokens - 1) if tokens > 1 else None


def _aiperf(path: Path, content: dict[str, Any], deployment: str) -> Result:
    file = _converted(path, content, _AiperfFile)
    missing = {"overall.goodput_share", "overall.goodput_requests_per_s", "overall.counts.timed_out"}
    records = _aiperf_records(path.with_name(AIPERF_RECORDS))
    ok = _required(path, "request_count", file.request_count)
    duration_s = _required(path, "benchmark_duration", file.benchmark_duration)
    if records is not None and sum(record.error is None for record in records) != ok:
        raise ResultError(f"{path.with_name(AIPERF_RECORDS)}: not the records of {path.name}, which has {ok:.0f}")
    latencies = _aiperf_latencies_of(records) if records else _aiperf_latencies_in(file, missing)
    errors = {_aiperf_error(error.error_details): error.count for error in file.error_summary}
    unsuccessful = int(file.error_request_count.avg or 0) if file.error_request_count else 0
    refused = sum(error.count for error in file.error_summary if error.error_details.code in REFUSALS)
    output_tokens_per_s = _rate(file.usage_completion_tokens, duration_s)
    if output_tokens_per_s is None and file.output_token_throughput is not None:
        output_tokens_per_s = file.output_token_throughput.avg
    prompt_tokens_per_s = _rate(file.usage_prompt_tokens, duration_s)
    if prompt_tokens_per_s is None and file.total_isl is not None and file.total_isl.avg is not None:
        prompt_tokens_per_s = file.total_isl.avg / duration_s
    for name, value in (("output_tokens_per_s", output_tokens_per_s), ("prompt_tokens_per_s", prompt_tokens_per_s)):
        if value is None:
            missing.add(f"overall.{name}")
    seed = file.run_info.random_seed
    if seed is None:
        missing.add("seed")
    config = file.input_config
    parameters: dict[str, Any] = {"datasets": config.datasets, "phases": config.phases}
    if config.slos and file.good_request_fraction is not None:
        parameters["slos"] = config.slos
        parameters["good share, counted from sending"] = file.good_request_fraction.avg
    return Result(
        deployment=deployment,
        scenario="aiperf",
        parameters=parameters,
        seed=seed or 0,
        loop=_aiperf_loop(config.phases),
        target={
            "url": next(iter(config.endpoint.urls), ""),
            "model": ", ".join(one.name for one in config.models.items),
        },
        machine="",
        started_at=_utc(min(one.metadata.request_start_ns for one in records) / 1e9) if records else file.start_time,
        duration_s=duration_s,
        objective=Objective(),
        overall=Group(
            counts=Counts(
                planned=int(ok) + unsuccessful,
                ok=int(ok),
                refused=refused,
                failed=unsuccessful - refused,
                timed_out=0,
                skipped=0,
            ),
            latencies=latencies,
            requests_per_s=_required(path, "request_throughput", file.request_throughput),
            output_tokens_per_s=output_tokens_per_s or 0.0,
            prompt_tokens_per_s=prompt_tokens_per_s or 0.0,
            goodput_requests_per_s=0.0,
            goodput_share=0.0,
        ),
        server=Server(dialect=""),
        harness=_UNKNOWN_HARNESS,
        errors=errors,
        imported_from="aiperf",
        missing=tuple(sorted(missing)),
        versions={"aiperf": file.aiperf_version},
    )


def _required(path: Path, name: str, metric: _AiperfMetric) -> float:
    if not metric.avg:
        raise ResultError(f"{path}: no figure in {name}")
    return metric.avg


def _rate(tokens: _AiperfMetric | None, duration_s: float) -> float | None:
    return None if tokens is None or tokens.sum is None else tokens.sum / duration_s


def _aiperf_error(error: _AiperfErrorDetails) -> str:
    return _short(" ".join(part for part in (str(error.code or ""), error.type or "", error.message) if part))


def _short(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= 160 else f"{text[:158]}…"


def _aiperf_loop(phases: list[dict[str, Any]]) -> str:
    phase = next((one for one in phases if one.get("kind", "profiling") == "profiling"), {})
    return "open" if phase.get("rate") is not None else "closed" if phase.get("concurrency") is not None else ""


def _aiperf_records(path: Path) -> list[_AiperfRecord] | None:
    """Without warm-up. None when there is no such file."""
    if not path.exists():
        return None
    decoder = msgspec.json.Decoder(_AiperfRecord)
    records = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        try:
            record = decoder.decode(line)
        except msgspec.MsgspecError as error:
            raise ResultError(f"{path}: line {number}: {error}") from None
        if record.metadata.benchmark_phase == "profiling":
            records.append(record)
    return records


def _aiperf_latencies_of(records: list[_AiperfRecord]) -> dict[str, Distribution]:
    good = [record for record in records if record.error is None]
    gaps = (record.metrics.get("inter_chunk_latency") for record in good)
    kind_to_values_ms: dict[str, list[float | None]] = {
        "ttft_sent": [record.number("time_to_first_token") for record in good],
        "tpot": [record.tpot_ms for record in good],
        "itl": [value for gap in gaps if gap is not None and isinstance(gap.value, list) for value in gap.value],
        "e2e_sent": [record.number("request_latency") for record in good],
    }
    return _present(
        (kind, _distribution(None if value is None else value / 1e3 for value in values_ms))
        for kind, values_ms in kind_to_values_ms.items()
    )


def _present(kinds: Iterable[tuple[str, Distribution | None]]) -> dict[str, Distribution]:
    return {kind: found for kind, found in kinds if found is not None}


def _aiperf_latencies_in(file: _AiperfFile, missing: set[str]) -> dict[str, Distribution]:
    metrics = {
        "ttft_sent": file.time_to_first_token,
        "tpot": file.inter_token_latency,
        "itl": file.inter_chunk_latency,
        "e2e_sent": file.request_latency,
    }
    latencies = {}
    for kind, metric in metrics.items():
        if metric is None or not metric.count:
            continue
        found = (metric.avg, metric.p50, metric.p90, metric.p99, metric.max)
        mean, p50, p90, p99, top = (value or 0.0 for value in found)
        for name, value in zip(("mean", "p50", "p90", "p99", "max"), found, strict=True):
            if value is None:
                missing.add(f"overall.latencies.{kind}.{name}")
        p999 = top if metric.count < 1000 else 0.0  # of fewer than a thousand, the slowest is at p99.9
        if metric.count >= 1000:
            missing.add(f"overall.latencies.{kind}.p999")
        latencies[kind] = Distribution(count=metric.count, mean=mean, p50=p50, p90=p90, p99=p99, p999=p999, max=top)
    return latencies


# guidellm


class _GuidellmPercentiles(msgspec.Struct):
    p50: float
    p90: float
    p99: float
    p999: float


class _GuidellmSummary(msgspec.Struct):
    mean: float
    max: float
    count: int
    percentiles: _GuidellmPercentiles

    def distribution(self, scale: float) -> Distribution:
        at = self.percentiles
        return Distribution(
            count=self.count,
            mean=self.mean * scale,
            p50=at.p50 * scale,
            p90=at.p90 * scale,
            p99=at.p99 * scale,
            p999=at.p999 * scale,
            max=self.max * scale,
        )


class _GuidellmMetric(msgspec.Struct):
    successful: _GuidellmSummary | None = None


class _GuidellmTotals(msgspec.Struct):
    successful: int
    errored: int
    incomplete: int
    total: int


class _GuidellmMetrics(msgspec.Struct):
    request_totals: _GuidellmTotals
    request_latency: _GuidellmMetric
    time_to_first_token_ms: _GuidellmMetric = msgspec.field(default_factory=_GuidellmMetric)
    request_scheduled_latency: _GuidellmMetric = msgspec.field(default_factory=_GuidellmMetric)
    turn_predecessor_delay: _GuidellmMetric = msgspec.field(default_factory=_GuidellmMetric)
    turn_scheduling_delay: _GuidellmMetric = msgspec.field(default_factory=_GuidellmMetric)
    prompt_token_count: _GuidellmMetric = msgspec.field(default_factory=_GuidellmMetric)
    output_token_count: _GuidellmMetric = msgspec.field(default_factory=_GuidellmMetric)


class _GuidellmInfo(msgspec.Struct):
    error: str | None = None


class _GuidellmRequest(msgspec.Struct):
    info: _GuidellmInfo = msgspec.field(default_factory=_GuidellmInfo)
    request_latency: float | None = None
    request_scheduled_latency: float | None = None
    turn_predecessor_delay: float | None = None
    turn_scheduling_delay: float | None = None
    time_to_first_token_ms: float | None = None
    inter_token_latency_ms: float | None = None

    @property
    def e2e_s(self) -> float | None:
        """From when it was due: waiting for the turn before is not its own."""
        if self.request_scheduled_latency is None:
            return None
        return self.request_scheduled_latency - (self.turn_predecessor_delay or 0.0)


class _GuidellmRequests(msgspec.Struct):
    successful: list[_GuidellmRequest] = []
    errored: list[_GuidellmRequest] = []


class _GuidellmStrategy(msgspec.Struct):
    type_: str = ""
    rate: float | None = None


class _GuidellmBenchmarkConfig(msgspec.Struct):
    strategy: _GuidellmStrategy = msgspec.field(default_factory=_GuidellmStrategy)


class _GuidellmBenchmark(msgspec.Struct):
    metrics: _GuidellmMetrics
    start_time: float
    duration: float
    config: _GuidellmBenchmarkConfig = msgspec.field(default_factory=_GuidellmBenchmarkConfig)
    requests: _GuidellmRequests = msgspec.field(default_factory=_GuidellmRequests)


class _GuidellmMetadata(msgspec.Struct):
    guidellm_version: str
    python_version: str = ""
    platform: str = ""


class _GuidellmBackend(msgspec.Struct):
    target: str = ""
    model: str | None = None


class _GuidellmSeed(msgspec.Struct):
    value: int | None = None


class _GuidellmSpec(msgspec.Struct):
    backend: _GuidellmBackend = msgspec.field(default_factory=_GuidellmBackend)
    data: list[dict[str, Any]] = []
    constraints: list[dict[str, Any]] = []
    seed: _GuidellmSeed = msgspec.field(default_factory=_GuidellmSeed)


class _GuidellmConfig(msgspec.Struct):
    spec: _GuidellmSpec = msgspec.field(default_factory=_GuidellmSpec)


class _GuidellmFile(msgspec.Struct):
    metadata: _GuidellmMetadata
    benchmarks: list[_GuidellmBenchmark]
    config: _GuidellmConfig = msgspec.field(default_factory=_GuidellmConfig)


def _guidellm(path: Path, content: dict[str, Any], deployment: str, benchmark: int | None) -> Result:
    file = _converted(path, content, _GuidellmFile)
    chosen = _chosen(path, file.benchmarks, benchmark)
    totals, duration_s = chosen.metrics.request_totals, chosen.duration
    if duration_s <= 0 or totals.total == 0:
        raise ResultError(f"{path}: a benchmark without any request")
    missing = {"overall.goodput_share", "overall.goodput_requests_per_s"}
    spec = file.config.spec
    if spec.seed.value is None:
        missing.add("seed")
    texts = [one.info.error or "" for one in chosen.requests.errored]
    statuses = [int(found.group(1)) for text in texts if (found := re.search(r"error '(\d{3}) ", text))]
    refused = sum(status in REFUSALS for status in statuses)
    if len(texts) != totals.errored:
        missing.add("overall.counts.refused")  # only a sample of the requests is in the file
        refused = 0
    errors: dict[str, int] = {}
    for text in texts:
        # What follows a line break, escaped as it is there, is advice to look the status up.
        shown = _short(re.split(r"\\n|\n", text)[0])
        errors[shown] = errors.get(shown, 0) + 1
    rates = {}
    for name, metric in (
        ("prompt_tokens_per_s", chosen.metrics.prompt_token_count.successful),
        ("output_tokens_per_s", chosen.metrics.output_token_count.successful),
    ):
        if metric is None:
            missing.add(f"overall.{name}")
        rates[name] = 0.0 if metric is None else metric.mean * metric.count / duration_s
    strategy = chosen.config.strategy
    return Result(
        deployment=deployment,
        scenario="guidellm",
        parameters={
            "strategy": strategy.type_,
            "rate_per_s": strategy.rate,
            "data": [_without_none(one) for one in spec.data],
            "constraints": [_without_none(one) for one in spec.constraints],
        },
        seed=spec.seed.value or 0,
        loop="open" if strategy.type_ in ("poisson", "constant") else "closed" if strategy.type_ else "",
        target={"url": spec.backend.target, "model": spec.backend.model or ""},
        machine=file.metadata.platform,
        started_at=_utc(chosen.start_time),
        duration_s=duration_s,
        objective=Objective(),
        overall=Group(
            counts=Counts(
                planned=totals.total,
                ok=totals.successful,
                refused=refused,
                failed=totals.errored - refused,
                timed_out=totals.incomplete,  # cut off when the run ended
                skipped=0,
            ),
            latencies=_guidellm_latencies(chosen),
            requests_per_s=totals.successful / duration_s,
            goodput_requests_per_s=0.0,
            goodput_share=0.0,
            **rates,
        ),
        server=Server(dialect=""),
        harness=_UNKNOWN_HARNESS,
        errors=errors,
        imported_from="guidellm",
        missing=tuple(sorted(missing)),
        versions={"guidellm": file.metadata.guidellm_version, "python": file.metadata.python_version},
    )


def _chosen(path: Path, benchmarks: list[_GuidellmBenchmark], benchmark: int | None) -> _GuidellmBenchmark:
    if not benchmarks:
        raise ResultError(f"{path}: no benchmark in it")
    if benchmark is None and len(benchmarks) > 1:
        names = ", ".join(
            f"{number} {one.config.strategy.type_} {one.config.strategy.rate or ''}".strip()
            for number, one in enumerate(benchmarks, start=1)
        )
        raise ResultError(f"{path}: {len(benchmarks)} benchmarks in it, say which: {names}")
    if benchmark is not None and not 1 <= benchmark <= len(benchmarks):
        raise ResultError(f"{path}: no benchmark {benchmark}, there are {len(benchmarks)}")
    return benchmarks[(benchmark or 1) - 1]


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, [], {})}


def _guidellm_latencies(benchmark: _GuidellmBenchmark) -> dict[str, Distribution]:
    good, metrics = benchmark.requests.successful, benchmark.metrics
    if len(good) == metrics.request_totals.successful:
        kind_to_values_s: dict[str, list[float | None]] = {
            "ttft_sent": [_seconds(one.time_to_first_token_ms) for one in good],
            "tpot": [_seconds(one.inter_token_latency_ms) for one in good],
            "e2e": [one.e2e_s for one in good],
            "e2e_sent": [one.request_latency for one in good],
            "predecessor_wait": [one.turn_predecessor_delay for one in good],
            "lateness": [one.turn_scheduling_delay for one in good],
        }
        return _present((kind, _distribution(values_s)) for kind, values_s in kind_to_values_s.items())
    # A sample of the requests: only the summaries stand for all. Its inter-token latency there is weighted by tokens
    # and hence no TPOT, and its scheduled latency is ours only where no turn waited for the one before.
    waited = metrics.turn_predecessor_delay.successful
    summaries = {
        "ttft_sent": (metrics.time_to_first_token_ms.successful, 1.0),
        "e2e": (metrics.request_scheduled_latency.successful if waited and waited.max == 0 else None, 1e3),
        "e2e_sent": (metrics.request_latency.successful, 1e3),
        "predecessor_wait": (waited, 1e3),
        "lateness": (metrics.turn_scheduling_delay.successful, 1e3),
    }
    return {
        kind: summary.distribution(scale)
        for kind, (summary, scale) in summaries.items()
        if summary is not None and summary.count
    }


def _seconds(value_ms: float | None) -> float | None:
    return None if value_ms is None else value_ms / 1e3
