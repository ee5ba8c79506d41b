"""The exposition: what a dashboard needs is there from the start, under conventional names."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.router.placement import Reason
from kvferry.telemetry import ENDPOINTS, FALLBACK_CAUSES, PLACEMENT_REASONS, Metrics, WorkerSample

SAMPLE = WorkerSample(
    worker_id="decode-1",
    role="decode",
    connected=True,
    num_running=2,
    num_waiting=1,
    num_pages_used=5,
    num_pages=64,
    prompt_tokens_by_source={"local_compute": 3, "local_cache_hit": 0, "external_kv_transfer": 41},
    cached_tokens_by_tier={"device": 0, "cpu": 0, "volume": 32, "ferry": 41},
    ferried_bytes=4096,
    num_generated_tokens=17,
)


def rows(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


@pytest.mark.parametrize(
    "series",
    [
        *(f'kvferry_requests_total{{endpoint="{endpoint}",status="200"}}' for endpoint in ENDPOINTS),
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
    assert rows(Metrics())[series] == 0


def test_every_reason_of_placement_is_a_series() -> None:
    assert set(PLACEMENT_REASONS) == {reason.value for reason in Reason}


def test_names_follow_the_conventions_of_prometheus() -> None:
    families = list(text_string_to_metric_families(Metrics(lambda: [SAMPLE]).render().decode()))
    names = {family.name for family in families if not family.name.endswith("_created")}
    assert "kvferry_worker_connected" in names
    for family in families:
        assert re.fullmatch(r"kvferry_[a-z][a-z0-9_]*", family.name)
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|milliseconds|kb|mb|percent)(_|$)", family.name), "base units only"
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)
        elif not family.name.endswith("_created"):
            assert not family.name.endswith("_total")
        if family.type == "histogram":
            assert family.name.endswith("_seconds")


def test_what_a_worker_reports_is_read_when_scraped() -> None:
    samples: list[WorkerSample] = []
    metrics = Metrics(lambda: samples)
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


def test_two_gateways_in_one_process_do_not_share_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.decode_retries.inc()
    assert rows(one)["kvferry_decode_retries_total"] == 1
    assert rows(other)["kvferry_decode_retries_total"] == 0
