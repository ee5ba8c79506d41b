"""A real Prometheus scrapes a loaded cluster: every documented metric is there, all of them at zero from the start."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from kvferry import config as configuration
from kvferry.membership.base import MemberKind
from kvferry.observability.telemetry import CATALOGUE, IDENTITY, PROOFS_SEEN, Kind, Metric
from kvferry.worker.lifecycle import WorkerHost, build_engine
from kvferry_sim import SimEngine
from kvferry_sim.membership import MemoryMembership
from support.prometheus_server import NoPrometheus, PrometheusServer, find_prometheus
from support.waiting import PATIENCE_S, until, until_async

from .conftest import MODEL, SimCluster
from .test_access import bearer
from .test_tenants import tenant_with_key
from .test_tier import config_with, gateway_over, has_keeper, keeper
from .test_tier import sockets as sockets

NUM_REQUESTS = 24
TENANT = "acme"
# What an idle process says that is not zero, and is no counter.
NOT_ZERO_AT_FIRST = frozenset(
    {
        "kvferry_model_ready",
        "kvferry_ready",
        *("kvferry_worker_connected", "kvferry_worker_kv_pages"),
        *("kvferry_volume_readable", "kvferry_volume_writable", "kvferry_volume_capacity_bytes"),
        *("kvferry_engine_alive", "kvferry_engine_gateways"),
        *("kvferry_engine_kv_pages", "kvferry_engine_cpu_tier_pages"),
        *("kvferry_keeper_engines", "kvferry_keeper_regions_mapped"),
        *("kvferry_tier_capacity_bytes", "kvferry_tier_breaker_state", "kvferry_tier_tenant_cap_bytes"),
    }
)


@pytest.fixture(scope="module", autouse=True)
def _prometheus_is_there() -> None:
    try:
        find_prometheus()
    except NoPrometheus as error:
        pytest.skip(str(error))


@pytest_asyncio.fixture
async def cluster(tmp_path: Path, sockets: Path) -> AsyncIterator[SimCluster]:
    """A prefill worker, a decode worker, a gateway, and a keeper with one volume."""
    plain = config_with(tmp_path / "volume", sockets).model_dump(mode="json")
    gateway_fields = {"http_port": 0, "grpc_port": 0, "placement": "round_robin", "tenants_in_etcd": True}
    config = configuration.parse({**plain, "prefill": {"replicas": 1}, "gateway": gateway_fields})
    async with gateway_over(config) as cluster, keeper(config, cluster.registry) as kept:
        for kind in (MemberKind.PREFILL, MemberKind.DECODE):
            engine = await add_worker_with(cluster, kind, kept.member.socket_path)
            await until(functools.partial(has_keeper, engine))
        gateway = await cluster.add_gateway()
        await cluster.ready()
        await until(lambda: bool(gateway.keeper_volumes.states()) and gateway._registration is not None)
        yield cluster


@pytest_asyncio.fixture
async def operator_key(cluster: SimCluster) -> str:
    return await tenant_with_key(cluster, TENANT, operator=True)


async def add_worker_with(cluster: SimCluster, kind: MemberKind, keeper_socket: str) -> SimEngine:
    engine = build_engine(cluster.config, kind, MODEL, keeper_socket=keeper_socket)
    assert isinstance(engine, SimEngine)
    host = WorkerHost(cluster.config, kind, engine, MemoryMembership(cluster.registry))
    await host.start()
    cluster.workers.append((host, engine))
    return engine


@pytest.fixture
def prometheus(cluster: SimCluster, operator_key: str, tmp_path: Path) -> Iterator[PrometheusServer]:
    """Configured as docs/operator/metrics.md says."""
    (tmp_path / "operator.key").write_text(operator_key)
    discovery = {
        "url": f"{cluster.url}/kvferry/v1/targets",
        "refresh_interval": "200ms",
        "authorization": {"type": "Bearer", "credentials_file": str(tmp_path / "operator.key")},
    }
    with PrometheusServer(tmp_path / "prometheus", [{"job_name": "kvferry", "http_sd_configs": [discovery]}]) as server:
        yield server


def series_of(metric: Metric) -> str:
    """The name of one of its samples."""
    return metric.name + {"histogram": "_count", "summary": "_count"}.get(metric.kind.value, "")


def known_series(metric: Metric) -> int:
    """How many series it has where there is one of each process and volume."""
    if metric in PROOFS_SEEN:
        return 0  # nobody proves anything of simulated engines
    return math.prod(len(label.values) or 1 for label in metric.labels)


async def test_prometheus_sees_every_documented_metric(
    cluster: SimCluster, operator_key: str, prometheus: PrometheusServer
) -> None:
    async def value(expression: str) -> float | None:
        return await asyncio.to_thread(prometheus.value, expression)

    async def until_value(expression: str, wanted: float) -> None:
        seen = None
        for _ in range(200):
            seen = await value(expression)
            if seen == wanted:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{expression} is {seen}, not {wanted}")

    await until_value("sum(up)", 4)
    kinds = await asyncio.to_thread(prometheus.query, "up")
    assert sorted(sample["metric"]["kind"] for sample in kinds) == ["decode", "gateway", "keeper", "prefill"]

    # Before any request.
    by_name: dict[str, list[dict[str, Any]]] = {}

    async def all_are_there() -> bool:
        """Read the series. A scrape that takes too long on a busy machine leaves none of its target's."""
        by_name.clear()
        for sample in await asyncio.to_thread(prometheus.query, '{__name__=~"kvferry_.+"}'):
            if sample["metric"].get("tenant") != TENANT:  # gateways and keepers name it, workers once they meet it
                by_name.setdefault(sample["metric"]["__name__"], []).append(sample)
        return all(series_of(metric) in by_name for metric in CATALOGUE if known_series(metric))

    await until_async(all_are_there, what="series of all metrics")
    two_workers = {"worker": 2}
    for metric in CATALOGUE:
        found = by_name.get(series_of(metric), [])
        labels = {label.name for label in (*metric.labels, *IDENTITY[metric.exporter])}
        num_owners = max([two_workers.get(label, 1) for label in labels], default=1)
        assert len(found) == known_series(metric) * num_owners, f"{metric.name}: {len(found)} series"
        for sample in found:
            assert labels <= set(sample["metric"]), metric.name
            if metric.name not in NOT_ZERO_AT_FIRST:
                assert float(sample["value"][1]) == 0, f"{sample['metric']} is not zero at first"
    families = {metric.name for metric in CATALOGUE if known_series(metric)}
    suffixes = {metric.name: ("_bucket", "_count", "_sum") for metric in CATALOGUE if metric.buckets}
    suffixes |= {metric.name: ("_count", "_sum") for metric in CATALOGUE if metric.kind is Kind.SUMMARY}
    expected = {name + suffix for name in families for suffix in suffixes.get(name, ("",))}
    assert set(by_name) == expected, "nothing is there that is not documented"
    told = await asyncio.to_thread(prometheus.metadata)
    for metric in CATALOGUE:
        assert (told[metric.name]["type"], told[metric.name]["help"]) == (metric.kind.value, metric.help)

    # Under load.
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S, headers=bearer(operator_key)) as http:

        async def ask(i: int) -> None:
            prompt = " ".join(f"word{i}-{j}" for j in range(40 + i))
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "stream": bool(i % 2)}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200
            await answer.aread()

        await asyncio.gather(*(ask(i) for i in range(NUM_REQUESTS)))
        assert (await http.post("/v1/completions", json={"model": "other", "prompt": "x"})).status_code == 404
    await until_value('sum(kvferry_requests_total{status="200"})', NUM_REQUESTS)
    await until_value('sum(kvferry_requests_refused_total{code="model_not_found"})', 1)
    await until_value("sum(kvferry_time_to_first_token_seconds_count)", NUM_REQUESTS)
    await until_value("sum(kvferry_generated_tokens_total)", 8 * NUM_REQUESTS)
    await until_value('sum(kvferry_placements_total{reason="disaggregated"})', NUM_REQUESTS)
    await until_value("sum(kvferry_prefill_seconds_count)", NUM_REQUESTS)
    await until_value('sum(kvferry_engine_requests_total{role="prefill",reason="length"})', NUM_REQUESTS)
    await until_value('sum(kvferry_engine_requests_total{role="decode",reason="length"})', NUM_REQUESTS)
    await until_value('sum(kvferry_engine_decode_seconds_count{role="decode"})', NUM_REQUESTS)
    await until_value('sum(kvferry_ferry_seconds_count{role="decode"})', NUM_REQUESTS)
    transferred = sum(engine.stats().transferred_bytes for engine in cluster.engines(MemberKind.DECODE))
    await until_value('sum(kvferry_ferry_bytes_total{role="decode"})', transferred)
    # A gateway hears of it a moment later.
    await until_value('max by (role) (kvferry_worker_ferried_bytes_total{role="decode"})', transferred)
    stored = 'sum(kvferry_keeper_pages_total{operation="store",outcome="ok"})'
    await until_value(f"{stored} > bool 0", 1)
    await until_value(f'{stored} - sum(kvferry_tier_operations_total{{direction="write",outcome="ok"}})', 0)
    await until_value('sum(kvferry_tier_breaker_state{state="closed"})', 2)
    await until_value(f'sum(kvferry_tenant_requests_total{{tenant="{TENANT}",outcome="ok"}})', NUM_REQUESTS)
    await until_value('sum(kvferry_model_requests_total{asked="default",model="default",outcome="ok"})', NUM_REQUESTS)
    await until_value('sum(kvferry_model_time_to_first_token_seconds_count{model="default"})', NUM_REQUESTS)
    await until_value(f'sum(kvferry_engine_tenant_wait_seconds_count{{tenant="{TENANT}"}})', NUM_REQUESTS)
    prompts = f'sum(kvferry_engine_tenant_prompt_tokens_total{{tenant="{TENANT}"}})'
    await until_value(f"{prompts} - sum(kvferry_engine_prompt_tokens_total)", 0)
    ferried = f'sum(kvferry_engine_tenant_cached_prompt_tokens_total{{tenant="{TENANT}",tier="ferry"}})'
    await until_value(f'{ferried} - sum(kvferry_engine_cached_prompt_tokens_total{{tier="ferry"}})', 0)
    await until_value(f"{ferried} > bool 0", 1)
    kept = f'sum(kvferry_tier_tenant_used_bytes{{tenant="{TENANT}"}})'
    await until_value(f"{kept} - sum(kvferry_tier_used_bytes)", 0)
    borrowed = f'sum(kvferry_tier_tenant_borrowed_bytes{{tenant="{TENANT}"}})'
    await until_value(f"{borrowed} - sum(kvferry_tier_used_bytes)", 0)  # it has no floor


async def test_discovery_survives_the_registry(cluster: SimCluster, operator_key: str) -> None:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S, headers=bearer(operator_key)) as http:
        before = (await http.get("/kvferry/v1/targets")).json()
        assert len(before) == 4
        assert all(target["labels"]["__scheme__"] == "http" for target in before)
        for target in before:
            (address,) = target["targets"]
            assert address.startswith("127.0.0.1:")
            answer = await http.get(f"http://{address}/metrics")
            assert answer.status_code == 200
            assert (await http.post(f"http://{address}/metrics")).status_code == 405
            assert (await http.get(f"http://{address}/v1/models")).status_code == 404
        with cluster.registry.outage():
            assert (await http.get("/kvferry/v1/targets")).json() == before
