"""The exposition: what a dashboard needs is there from the start, under conventional names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.engine.base import CachedTokens, FinishReason, PromptSources
from kvferry.gateway.metrics import GatewayMetrics, VolumeSample, WorkerSample
from kvferry.keeper.volume_state import VolumeState
from kvferry.observability import telemetry
from kvferry.observability.exposition import Exposition, Reading
from kvferry.observability.telemetry import (
    CATALOGUE,
    ENDPOINTS,
    FALLBACK_CAUSES,
    PLACEMENT_REASONS,
    REFUSAL_CODES,
    STATUSES,
    Exporter,
    Kind,
    Metric,
)
from kvferry.router.placement import Reason
from kvferry_keeper.store.outcome import Outcome
from kvferry_keeper.volumes.breaker import BreakerState, Cause
from support.chart import load_tool

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = WorkerSample(
    worker_id="decode-1",
    role="decode",
    connected=True,
    is_unpaired=False,
    num_running=2,
    num_waiting=1,
    num_pages_used=5,
    num_pages=64,
    prompt_tokens_by_source={"local_compute": 3, "local_cache_hit": 0, "external_kv_transfer": 41},
    cached_tokens_by_tier={"device": 0, "cpu": 0, "volume": 32, "ferry": 41},
    transferred_bytes=4096,
    num_generated_tokens=17,
)


def rows(metrics: GatewayMetrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize(
    "series",
    [
        *(
            f'kvferry_requests_total{{endpoint="{endpoint}",status="{status}"}}'
            for endpoint in ENDPOINTS
            for status in STATUSES
        ),
        *(f'kvferry_requests_refused_total{{code="{code}"}}' for code in REFUSAL_CODES),
        *(f'kvferry_placements_total{{reason="{reason}"}}' for reason in PLACEMENT_REASONS),
        *(f'kvferry_prefill_fallbacks_total{{cause="{cause}"}}' for cause in FALLBACK_CAUSES),
        "kvferry_requests_in_flight",
        "kvferry_decode_retries_total",
        "kvferry_ferried_pages_total",
        "kvferry_requests_cancelled_total",
        "kvferry_prompt_tokens_total",
        "kvferry_generated_tokens_total",
        "kvferry_time_to_first_token_seconds_count",
        "kvferry_time_per_output_token_seconds_count",
    ],
)
def test_a_series_exists_at_zero_from_the_start(series: str) -> None:
    assert rows(GatewayMetrics())[series] == 0


def test_every_reason_of_placement_is_a_series() -> None:
    assert set(PLACEMENT_REASONS) == {reason.value for reason in Reason}


def test_the_catalogue_follows_the_conventions_of_prometheus() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert re.fullmatch(r"kvferry_[a-z][a-z0-9_]*", metric.name)
        assert metric.help.endswith("."), metric.name
        assert not re.search(r"_(ms|millis|milliseconds|kb|mb|gib|percent)(_|$)", metric.name), "base units only"
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert not metric.name.endswith(("_count", "_sum", "_bucket", "_created", "_info"))
        if metric.kind in (Kind.HISTOGRAM, Kind.SUMMARY):
            assert metric.name.endswith("_seconds")
        for unit in ("seconds", "bytes"):
            if metric.unit == unit:
                assert f"_{unit}" in metric.name, f"{metric.name} does not say that it is in {unit}"
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(metric.buckets)
        labels = [label.name for label in metric.labels]
        assert len(set(labels)) == len(labels)
        own = {"instance", "job", "le", "quantile", "member", "kind", "node"}
        assert not own & set(labels), "Prometheus's own, and those of targets"


def test_labels_have_the_values_that_the_code_gives_them() -> None:
    assert set(telemetry.PAGE_OUTCOMES) == {*Outcome, *Cause}
    assert set(telemetry.VERIFICATION_FAILURES) < set(Outcome)
    assert set(telemetry.BREAKER_STATES) == set(BreakerState)
    assert list(telemetry.PROMPT_SOURCES) == list(PromptSources.__struct_fields__)
    assert list(telemetry.CACHE_TIERS) == list(CachedTokens().by_tier())
    assert set(FinishReason) < set(telemetry.END_REASONS)


def test_nobody_makes_metrics_outside_the_catalogue() -> None:
    importers = set()
    for file in (ROOT / "services" / "kvferry").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [node.module] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any((module or "").split(".")[0] == "prometheus_client" for module in modules):
                importers.add(file.name)
    assert importers == {"exposition.py"}


def test_what_is_not_in_the_catalogue_cannot_be_made() -> None:
    exposition = Exposition(Exporter.GATEWAY)
    own = Metric("kvferry_own_total", Kind.COUNTER, "things", Exporter.GATEWAY, "Not there.")
    with pytest.raises(ValueError, match="kvferry_own_total: not a counter of a gateway"):
        exposition.counter(own)
    with pytest.raises(ValueError, match="kvferry_engine_steps_total: not a counter of a gateway"):
        exposition.counter(telemetry.ENGINE_STEPS)
    with pytest.raises(ValueError, match="kvferry_requests_total: not a gauge of a gateway"):
        exposition.gauge(telemetry.REQUESTS)
    exposition.counter(telemetry.REQUESTS)
    with pytest.raises(ValueError, match="was made already"):
        exposition.counter(telemetry.REQUESTS)


def test_a_gateway_makes_all_its_metrics() -> None:
    metrics = GatewayMetrics()
    assert metrics.exposition.missing == frozenset()
    families = list(text_string_to_metric_families(metrics.render().decode()))
    names = {family.name + "_total" * (family.type == "counter") for family in families}
    assert names == {metric.name for metric in CATALOGUE if metric.exporter is Exporter.GATEWAY}


def test_of_each_volume_every_series_that_is_known_is_there() -> None:
    readings: list[Reading] = []
    exposition = Exposition(Exporter.KEEPER, {"keeper": "k-1"})
    exposition.read((telemetry.TIER_BYTES,), lambda: readings)
    assert b"volume" not in exposition.render()
    readings.append(Reading(telemetry.TIER_BYTES, ("v-1", "read"), 7))
    lines = exposition.render().decode().splitlines()
    assert 'kvferry_tier_bytes_total{direction="read",keeper="k-1",volume="v-1"} 7.0' in lines
    assert 'kvferry_tier_bytes_total{direction="write",keeper="k-1",volume="v-1"} 0.0' in lines
    assert sum("v-1" in line for line in lines) == 2


def test_the_page_is_that_of_the_catalogue() -> None:
    page = load_tool("generate_metrics_doc").page()
    assert (ROOT / "docs" / "operator" / "metrics.md").read_text(encoding="utf-8") == page, "run `make metrics-doc`"
    for metric in CATALOGUE:
        assert f"| `{metric.name}` |" in page


def test_what_a_worker_reports_is_read_when_scraped() -> None:
    samples: list[WorkerSample] = []
    metrics = GatewayMetrics(lambda: samples)
    assert not any("decode-1" in name for name in rows(metrics))
    samples.append(SAMPLE)
    seen = rows(metrics)
    labels = 'role="decode",worker="decode-1"'
    assert seen[f"kvferry_worker_connected{{{labels}}}"] == 1
    assert seen[f"kvferry_worker_requests_running{{{labels}}}"] == 2
    assert seen[f"kvferry_worker_requests_waiting{{{labels}}}"] == 1
    assert seen[f"kvferry_worker_kv_pages_used{{{labels}}}"] == 5
    assert seen[f"kvferry_worker_kv_pages{{{labels}}}"] == 64
    assert seen[f"kvferry_worker_ferried_bytes_total{{{labels}}}"] == 4096
    assert seen[f"kvferry_worker_generated_tokens_total{{{labels}}}"] == 17
    by_source = 'kvferry_worker_prompt_tokens_total{role="decode",source="external_kv_transfer",worker="decode-1"}'
    assert seen[by_source] == 41
    samples.clear()
    assert not any("decode-1" in name for name in rows(metrics)), "a worker that left is no series"


SEEN_VOLUME = VolumeState(
    volume_id="v-1",
    breaker_open=True,
    trips=2,
    num_chunks=3,
    used_bytes=4096,
    capacity_bytes=8192,
    queue_bytes=10,
    read_bytes_per_s=2.5,
)


def test_what_keepers_report_is_read_when_scraped() -> None:
    metrics = GatewayMetrics(read_volumes=lambda: [VolumeSample("k-1", SEEN_VOLUME)])
    seen, labels = rows(metrics), 'keeper="k-1",volume="v-1"'
    assert seen[f"kvferry_volume_readable{{{labels}}}"] == 0
    assert seen[f"kvferry_volume_writable{{{labels}}}"] == 1
    assert seen[f"kvferry_volume_breaker_trips_total{{{labels}}}"] == 2
    assert seen[f"kvferry_volume_pages{{{labels}}}"] == 3
    assert seen[f"kvferry_volume_read_bytes_per_second{{{labels}}}"] == 2.5


def test_two_gateways_in_one_process_do_not_share_numbers() -> None:
    one, other = GatewayMetrics(), GatewayMetrics()
    one.decode_retries.inc()
    assert rows(one)["kvferry_decode_retries_total"] == 1
    assert rows(other)["kvferry_decode_retries_total"] == 0
