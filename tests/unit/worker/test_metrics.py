"""The metrics of workers and keepers: all that the catalogue says, read from what they report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from kvferry.engine.base import EngineOutput, EngineRequest, EngineTimes, FinishReason, RequestId, Sampling
from kvferry.errors import EngineDead
from kvferry.observability.exposition import SpanCounts
from kvferry.observability.telemetry import CATALOGUE, VERIFICATION_FAILURES, Exporter
from kvferry.tenancy.pages.outcome import Cause, Refusal, TenantUsage
from kvferry.worker.metrics import RequestInstrumentation, WorkerMetrics
from kvferry.worker.server import WorkerServer
from kvferry_keeper.keeper import Keeper
from kvferry_keeper.metrics import KeeperMetrics
from kvferry_keeper.remote.chunk_lender import ChunkLender
from kvferry_keeper.remote.remote_reader import RemoteReader, RemoteStats
from kvferry_sim import SimEngine
from kvferry_sim.settings import SimConfig


def an_engine() -> SimEngine:
    return SimEngine("m", SimConfig(), block_size=16, max_num_seqs=4)


def worker_metrics(engine: SimEngine) -> WorkerMetrics:
    counts = SpanCounts(5, 1, 2)
    metrics = WorkerMetrics(engine, lambda: server, worker_id="w-1", role="decode", read_span_counts=lambda: counts)
    server = WorkerServer(
        engine,
        worker_id="w-1",
        role="decode",
        host="127.0.0.1",
        max_requests=4,
        heartbeat_s=1.0,
        instrumentation=RequestInstrumentation("decode", metrics),
    )
    return metrics


def rows(text: bytes) -> dict[str, float]:
    lines = text.decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def names_of(text: bytes) -> set[str]:
    families = text_string_to_metric_families(text.decode())
    return {family.name + "_total" * (family.type == "counter") for family in families}


async def test_a_worker_has_all_its_metrics_before_its_engine_has_started() -> None:
    metrics = worker_metrics(an_engine())
    assert metrics.exposition.missing == frozenset()
    text = await metrics.render()
    assert names_of(text) == {metric.name for metric in CATALOGUE if metric.exporter is Exporter.WORKER}
    seen, identity = rows(text), 'role="decode",worker="w-1"'
    assert seen[f'kvferry_engine_requests_total{{reason="stop",{identity}}}'] == 0
    assert seen[f'kvferry_engine_trace_spans_total{{outcome="dropped",{identity}}}'] == 2
    assert all('role="decode"' in name and 'worker="w-1"' in name for name in seen)


async def test_times_of_a_request_go_where_they_belong() -> None:
    metrics = worker_metrics(an_engine())
    instrumentation = metrics._read_server().instrumentation
    request = EngineRequest(RequestId("r"), [1, 2], Sampling(max_tokens=3))
    times = EngineTimes(10.0, 12.0, 12.5, 14.5, kv_transfer=(10.25, 11.75))
    instrumentation.begin(request).finished(EngineOutput((), "", finish_reason=FinishReason.STOP, times=times))
    instrumentation.begin(request).finished(EngineOutput((), "", finish_reason=FinishReason.ABORT, times=times))
    instrumentation.begin(request).failed(EngineDead("gone"))
    instrumentation.refused()
    seen, identity = rows(await metrics.render()), 'role="decode",worker="w-1"'
    for reason, count in (("stop", 1), ("abort", 1), ("error", 1), ("refused", 1), ("length", 0)):
        assert seen[f'kvferry_engine_requests_total{{reason="{reason}",{identity}}}'] == count
    for name, seconds in (("queue", 0.25), ("prefill", 0.5), ("decode", 2.0)):
        assert seen[f"kvferry_engine_{name}_seconds_count{{{identity}}}"] == 1, "an abort is no measure"
        assert seen[f"kvferry_engine_{name}_seconds_sum{{{identity}}}"] == pytest.approx(seconds)


async def test_what_tenants_hold_in_an_engine_is_there_by_tier_and_zero_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = an_engine()
    metrics = worker_metrics(engine)
    await engine.start()
    try:
        seen, identity = rows(await metrics.render()), 'role="decode",{},worker="w-1"'
        for tier in ("device", "cpu"):
            labels = identity.format(f'tenant="other",tier="{tier}"')
            assert seen[f"kvferry_engine_tenant_used_pages{{{labels}}}"] == 0
            assert seen[f'kvferry_engine_tenant_evicted_pages_total{{cause="expired",{labels}}}'] == 0
        usage = TenantUsage(
            used=7,
            floor=4,
            cap=8,
            borrowed=3,
            displaced=5,
            evicted={**dict.fromkeys(Cause, 0), Cause.EXPIRED: 2},
            refused={Refusal.LIMIT: 1, Refusal.NO_ROOM: 0},
        )
        monkeypatch.setattr(engine, "tenant_usages", lambda: {"cpu": {"acme": usage}})
        seen, labels = rows(await metrics.render()), identity.format('tenant="acme",tier="cpu"')
        for name, value in (("used", 7), ("floor", 4), ("cap", 8), ("borrowed", 3), ("displaced", 5)):
            assert seen[f"kvferry_engine_tenant_{name}_pages{'_total' * (name == 'displaced')}{{{labels}}}"] == value
        assert seen[f'kvferry_engine_tenant_evicted_pages_total{{cause="expired",{labels}}}'] == 2
        refused = f'kvferry_engine_tenant_refused_pages_total{{reason="limit",{labels}}}'
        assert seen[refused] == 1
    finally:
        await engine.stop()


async def test_what_an_engine_makes_itself_gets_the_same_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = an_engine()
    family = CounterMetricFamily("vllm:prompt_tokens", "Theirs.", labels=["model_name"])
    family.add_metric(["m"], 7)
    monkeypatch.setattr(engine, "own_metrics", lambda: [family])
    text = (await worker_metrics(engine).render()).decode()
    assert 'vllm:prompt_tokens_total{model_name="m",role="decode",worker="w-1"} 7.0' in text.splitlines()

    def dead() -> Any:
        raise EngineDead("gone")

    monkeypatch.setattr(engine, "own_metrics", dead)
    assert b"kvferry_engine_alive" in await worker_metrics(engine).render()


async def test_a_keeper_has_all_its_metrics(tmp_path: Path) -> None:
    from kvferry.config import TierConfig

    keeper = Keeper(TierConfig(), [], keeper_id="k-1")
    remote = SimpleNamespace(stats=RemoteStats(2, {}, 8192, 0.5, 0.25, 0))
    lender = SimpleNamespace(num_lent=3, num_expired=1)
    metrics = KeeperMetrics(keeper, cast("RemoteReader", remote), cast("ChunkLender", lender))
    assert metrics.exposition.missing == frozenset()
    text = await metrics.render()
    assert names_of(text) == {metric.name for metric in CATALOGUE if metric.exporter is Exporter.KEEPER}
    seen = rows(text)
    assert seen['kvferry_keeper_remote_bytes_total{keeper="k-1"}'] == 8192
    assert seen['kvferry_keeper_remote_seconds_total{keeper="k-1",phase="fetch"}'] == 0.5
    assert seen['kvferry_keeper_lent_pages_total{keeper="k-1"}'] == 3
    assert seen['kvferry_keeper_job_seconds_count{keeper="k-1",operation="load"}'] == 0
    for cause in VERIFICATION_FAILURES:
        assert seen[f'kvferry_keeper_pages_total{{keeper="k-1",operation="load",outcome="{cause}"}}'] == 0
