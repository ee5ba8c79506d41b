"""Traces of requests, as a real OTLP server gets them: one tree over every process, times that add up."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from bench.vllm_engines import VllmPair
from kvferry import config as configuration
from kvferry.engine.base import Engine
from kvferry.gateway.lifecycle import GatewayHost
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.inference.v1 import inference_pb2_grpc
from kvferry.membership.base import MemberKind
from kvferry.observability import tracing
from kvferry.worker.lifecycle import WorkerHost
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from support.otlp_collector import Collector, SpanNode
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running
from .test_tier import add_worker, config_with, end_workers, gateway_over, has_keeper, keeper, until_known
from .test_tier import sockets as sockets

PROMPT = " ".join(f"word{i}" for i in range(200))
BODY: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
SLOW = {"step_ms": 20.0, "prefill_tokens_per_s": 500.0}
NUM_TOKENS = 50


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr(tracing, "_EXPORT_PERIOD_S", 0.02)
    with Collector() as collector:
        yield collector


def a_parent() -> tuple[str, str, dict[str, str]]:
    """Trace id and span id of a client that traces, and its headers."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-01", "tracestate": "shop=7"}


async def tree_of(collector: Collector, trace_id: str, parent_id: str = "") -> SpanNode:
    """When the gateway's span has come, which ends last, and those of the other processes with it."""

    def is_whole() -> bool:
        spans = collector.spans(trace_id)
        ids = {span.span_id for span in spans}
        waiting = [span for span in spans if span.parent_id not in ids and span.parent_id != parent_id]
        workers = {span.parent_id for span in spans if span.name.startswith("worker ")}
        remote = {span.span_id for span in spans if span.kind == "client" and not span.is_error}
        return any(span.parent_id == parent_id for span in spans) and not waiting and remote <= workers

    await until(is_whole, what="the whole trace arrived")
    return collector.tree(trace_id, parent_id)


def check_times(root: SpanNode, end_to_end_s: float, engines_s: float) -> None:
    """Children within their parents, hops one after the other, and all of the engines' work in their children.

    How long a busy machine takes between two spans is nothing that a test can know.
    """
    for span in root.all():
        for child in span.children:
            assert child.start_s >= span.start_s - 0.001, f"{child.name} begins before {span.name}"
            assert child.end_s <= span.end_s + 0.001, f"{child.name} ends after {span.name}"
    assert root.seconds <= end_to_end_s + 0.001
    hops = [root.find(name) for name in ("render", "route", "prefill", "decode")]
    assert all(before.end_s <= after.start_s + 0.001 for before, after in itertools.pairwise(hops))
    work = [span for hop in ("prefill", "decode") for span in root.find(hop, f"worker {hop}").children]
    assert sum(span.seconds for span in work) >= engines_s


class _Started:
    """An engine that lives longer than its worker: neither started nor stopped by it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


@asynccontextmanager
async def sim_cluster(endpoint: str, **tracing: object) -> AsyncIterator[str]:
    async with running(sim=SLOW, tracing={"endpoint": endpoint, **tracing}) as cluster:
        yield cluster.url


@asynccontextmanager
async def vllm_cluster(pair: VllmPair, endpoint: str) -> AsyncIterator[str]:
    folder = pair.decode.info.model
    config = configuration.parse(
        {
            "model": {"path": folder, "served_name": MODEL},
            "engine": {"proof": "off"},  # its requests would be counted with those of the tests
            "gateway": {"http_port": 0, "grpc_port": 0, "placement": "round_robin"},
            "tracing": {"endpoint": endpoint},
        }
    )
    cluster = SimCluster(config, MemoryRegistry())
    hosts = [
        WorkerHost(config, kind, _Started(engine), MemoryMembership(cluster.registry))
        for kind, engine in ((MemberKind.PREFILL, pair.prefill), (MemberKind.DECODE, pair.decode))
    ]
    gateway = cluster.gateway = GatewayHost(config, folder, MemoryMembership(cluster.registry))
    try:
        for host in hosts:
            await host.start()
        await gateway.start()
        await cluster.ready(2)
        yield cluster.url
    finally:
        await gateway.stop()
        for host in hosts:
            await host.stop()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> VllmPair | None:
    """Real engines, or None for sim ones. Not asynchronous: a loop that runs cannot start the pair."""
    started: VllmPair | None = request.getfixturevalue("vllm_pair") if request.param == "vllm" else None
    return started


@pytest_asyncio.fixture(loop_scope="session")
async def traced_url(pair: VllmPair | None, collector: Collector) -> AsyncIterator[str]:
    """A prefill worker, a decode worker and a gateway that trace to the collector."""
    cluster = sim_cluster(collector.endpoint) if pair is None else vllm_cluster(pair, collector.endpoint)
    async with cluster as url:
        yield url


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "pair", ["sim", pytest.param("vllm", marks=[pytest.mark.model, pytest.mark.shared_pair])], indirect=True
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_is_one_tree_over_all_processes(
    traced_url: str, collector: Collector, pair: VllmPair | None, stream: bool
) -> None:
    async with httpx.AsyncClient(base_url=traced_url, timeout=PATIENCE_S) as http:
        body = {**BODY, "model": MODEL, "max_tokens": NUM_TOKENS, "stream": stream}
        # The first request of a link, and of a model, is not what is looked at.
        await http.post("/v1/completions", json={**body, "prompt": f"other {PROMPT}"})
        trace_id, span_id, headers = a_parent()
        begun_s = time.monotonic()
        answer = await http.post("/v1/completions", json={**body, "prompt": f"{stream} {PROMPT}"}, headers=headers)
        end_to_end_s = time.monotonic() - begun_s
    assert answer.status_code == 200
    root = await tree_of(collector, trace_id, span_id)
    assert answer.headers["traceparent"] == f"00-{trace_id}-{root.span_id}-01"
    assert answer.headers["tracestate"] == "shop=7"

    assert (root.name, root.kind, root.service) == (f"text_completion {MODEL}", "server", "kvferry-gateway")
    assert [(span.name, span.kind, span.service) for span in root.children] == [
        ("render", "internal", "kvferry-gateway"),
        ("route", "internal", "kvferry-gateway"),
        ("prefill", "client", "kvferry-gateway"),
        ("decode", "client", "kvferry-gateway"),
    ]
    prefill, decode = root.find("prefill", "worker prefill"), root.find("decode", "worker decode")
    assert (prefill.kind, prefill.service) == ("server", "kvferry-prefill")
    assert (decode.kind, decode.service) == ("server", "kvferry-decode")
    assert [span.name for span in prefill.children] == ["queue", "compute prompt"]
    assert [span.name for span in decode.children] == ["queue", "ferry", "compute prompt", "generate"]
    assert not any(span.is_error for span in root.all())
    num_prompt = root.attributes["gen_ai.usage.input_tokens"]
    first_chunk_s = root.attributes["gen_ai.response.time_to_first_chunk"]
    assert prefill.seconds <= first_chunk_s <= root.seconds
    assert root.attributes == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvferry",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": NUM_TOKENS,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": pytest.approx(root.attributes["gen_ai.request.top_p"]),
        "gen_ai.request.stream": stream,
        "gen_ai.response.id": answer.headers["x-request-id"],
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": first_chunk_s,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": NUM_TOKENS,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "kvferry.tenant": "default",
        "kvferry.model": "default",
    }
    assert root.find("route").attributes["kvferry.reason"] == "disaggregated"
    assert decode.find("ferry").attributes["kvferry.tokens"] == num_prompt
    simulated_s = num_prompt / SLOW["prefill_tokens_per_s"] + (NUM_TOKENS - 1) * SLOW["step_ms"] / 1000
    check_times(root, end_to_end_s, simulated_s if pair is None else 0.0)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize(
    "pair", ["sim", pytest.param("vllm", marks=[pytest.mark.model, pytest.mark.shared_pair])], indirect=True
)
async def test_workers_export_what_their_engines_did(traced_url: str, pair: VllmPair | None) -> None:
    async with httpx.AsyncClient(base_url=traced_url, timeout=PATIENCE_S) as http:
        body = {**BODY, "model": MODEL, "max_tokens": 4, "prompt": f"metrics {PROMPT}"}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        targets = {target["labels"]["kind"]: target for target in (await http.get("/kvferry/v1/targets")).json()}
        for role in ("prefill", "decode"):
            samples = await samples_of(http, targets[role]["targets"][0], with_kv_transfer=role == "decode")
            identity = {"role": role, "worker": targets[role]["labels"]["member"]}
            assert all(identity.items() <= sample.labels.items() for sample in samples)
            value = {(sample.name, sample.labels.get("reason")): sample.value for sample in samples}
            assert value["kvferry_engine_requests_total", "length"] == 1
            assert value["kvferry_engine_prefill_seconds_count", None] == 1
            assert value["kvferry_engine_prefill_seconds_sum", None] > 0
            assert (value["kvferry_ferry_seconds_count", None] > 0) == (role == "decode")
            # Real engines make hundreds of their own, in one registry a process: here that of the last one started.
            assert (value.get(("vllm:prompt_tokens_total", None), 0) > 0) == (pair is not None)


async def samples_of(http: httpx.AsyncClient, address: str, *, with_kv_transfer: bool) -> list[Sample]:
    """What is scraped there; `with_kv_transfer`: once a transfer is counted, which vLLM tells with a later step."""
    async with asyncio.timeout(SOON_S):
        while True:
            text = (await http.get(f"http://{address}/metrics")).text
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            if not with_kv_transfer or any(
                sample.name == "kvferry_ferry_bytes_total" and sample.value for sample in samples
            ):
                return samples
            await asyncio.sleep(0.05)


async def test_each_try_of_a_request_has_its_span(collector: Collector) -> None:
    async with running(decode=2, sim={"step_ms": 20.0}, tracing={"endpoint": collector.endpoint}) as cluster:
        trace_id, span_id, headers = a_parent()
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            body = {**BODY, "model": MODEL, "max_tokens": 30, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                pieces = answer.aiter_bytes()
                await anext(pieces)
                (busy,) = (engine for engine in cluster.engines(MemberKind.DECODE) if engine.stats().num_running)
                busy.kill()
                assert b"[DONE]" in b"".join([piece async for piece in pieces])
        await until(lambda: len([span for span in collector.spans(trace_id) if span.name == "worker decode"]) == 2)
        root = await tree_of(collector, trace_id, span_id)
        first, second = (span for span in root.children if span.name == "decode")
        assert first.is_error
        assert first.attributes["error.type"] == first.find("worker decode").attributes["error.type"] == "engine_dead"
        assert not second.is_error
        assert first.attributes["kvferry.worker"] != second.attributes["kvferry.worker"]
        assert not root.is_error
        assert root.attributes["gen_ai.usage.output_tokens"] == 30


async def test_a_load_from_a_volume_is_in_the_trace(tmp_path: Path, sockets: Path, collector: Collector) -> None:
    plain = config_with(tmp_path / "volume", sockets)
    config = configuration.parse({**plain.model_dump(mode="json"), "tracing": {"endpoint": collector.endpoint}})
    async with gateway_over(config) as cluster, keeper(config, cluster.registry) as kept:
        _, engine = await add_worker(cluster, kept)
        await until(lambda: has_keeper(engine))
        await cluster.add_gateway()
        await cluster.ready(1)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            body = {**BODY, "model": MODEL, "max_tokens": 4}
            num_prompt = (await http.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens"]
            await until_known(cluster, num_prompt // 16)
            await end_workers(cluster)
            _, fresh = await add_worker(cluster, kept)
            await until(lambda: has_keeper(fresh))
            await cluster.ready(1)
            trace_id, span_id, headers = a_parent()
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        await until(lambda: any(span.name == "keeper load" for span in collector.spans(trace_id)))
        root = await tree_of(collector, trace_id, span_id)
        worker = root.find("decode", "worker decode")
        load, waited = worker.find("keeper load"), worker.find("load from tiers")
        assert (load.service, load.kind) == ("kvferry-keeper", "server")
        num_pages = fresh.stats().cached_tokens.volume // 16
        assert num_pages > 0
        assert load.attributes["kvferry.pages"] == num_pages
        assert load.attributes["kvferry.failed_pages"] == 0
        assert load.attributes["kvferry.bytes"] == num_pages * 4096
        assert waited.start_s - 0.001 <= load.start_s <= load.end_s <= waited.end_s + 0.001


async def test_pages_of_another_node_are_in_the_trace_too(tmp_path: Path, sockets: Path, collector: Collector) -> None:
    traced = {"tracing": {"endpoint": collector.endpoint}}
    near = configuration.parse({**config_with(tmp_path / "near", sockets / "n").model_dump(mode="json"), **traced})
    far = configuration.parse({**config_with(tmp_path / "far", sockets / "f").model_dump(mode="json"), **traced})
    async with (
        gateway_over(near) as cluster,
        keeper(far, cluster.registry, node="far") as far_keeper,
        keeper(near, cluster.registry, node="near") as near_keeper,
    ):
        _, engine = await add_worker(cluster, far_keeper)
        await until(lambda: has_keeper(engine))
        await cluster.add_gateway()
        await cluster.ready(1)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            body = {**BODY, "model": MODEL, "max_tokens": 4}
            num_prompt = (await http.post("/v1/completions", json=body)).json()["usage"]["prompt_tokens"]
            await until_known(cluster, num_prompt // 16)
            await end_workers(cluster)
            _, fresh = await add_worker(cluster, near_keeper)
            await until(lambda: has_keeper(fresh))
            await cluster.ready(1)
            trace_id, span_id, headers = a_parent()
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert fresh.stats().cached_tokens.volume > 0
        await until(lambda: any(span.name == "keeper load" for span in collector.spans(trace_id)))
        root = await tree_of(collector, trace_id, span_id)
        lend = root.find("decode", "worker decode", "keeper load", "keeper lend")
        assert lend.service == "kvferry-keeper"
        assert lend.kind == "server"


async def test_a_grpc_call_is_traced_as_http_is(collector: Collector) -> None:
    async with running(sim=SLOW, tracing={"endpoint": collector.endpoint}) as cluster:
        assert cluster.gateway is not None
        async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.gateway.grpc.port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
            request = pb.GenerateRequest(model=MODEL, text=PROMPT, sampling=pb.Sampling(max_tokens=4))
            trace_id, span_id, headers = a_parent()
            call = stub.Generate(request, metadata=tuple(headers.items()))
            await call
            root = await tree_of(collector, trace_id, span_id)
            assert dict(await call.initial_metadata())["traceparent"] == f"00-{trace_id}-{root.span_id}-01"
            assert (root.name, root.kind) == (f"generate_content {MODEL}", "server")
            assert root.attributes["rpc.method"] == "Generate"
            assert root.attributes["gen_ai.usage.output_tokens"] == 4
            assert "http.response.status_code" not in root.attributes
            assert [span.name for span in root.children] == ["render", "route", "prefill", "decode"]
            trace_id, span_id, headers = a_parent()
            request.model = "other"
            with pytest.raises(grpc.RpcError):
                await stub.Generate(request, metadata=tuple(headers.items()))
            refused = await tree_of(collector, trace_id, span_id)
            assert refused.attributes["error.type"] == "model_not_found"


async def test_a_request_without_a_parent_begins_a_trace(collector: Collector) -> None:
    async with sim_cluster(collector.endpoint) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "n": 2, "seed": 3}
        answer = await http.post("/v1/chat/completions", json=body)
        _, trace_id, _, flags = answer.headers["traceparent"].split("-")
        assert int(flags, 16) & 1, "sampled"
        root = await tree_of(collector, trace_id)
        assert root.name == f"chat {MODEL}"
        assert root.attributes["gen_ai.request.choice.count"] == 2
        assert [span.name for span in root.children].count("decode") == 2
        assert root.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]


async def test_errors_have_their_code_and_a_client_that_leaves_is_seen(collector: Collector) -> None:
    async with sim_cluster(collector.endpoint) as url, httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        refused_id, parent_id, headers = a_parent()
        answer = await http.post("/v1/completions", json={**BODY, "model": "other"}, headers=headers)
        assert answer.status_code == 404
        assert answer.headers["traceparent"].split("-")[1] == refused_id
        left_id, left_parent_id, headers = a_parent()
        body = {**BODY, "model": MODEL, "max_tokens": 5000, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as stream:
            await anext(stream.aiter_bytes())
        refused = await tree_of(collector, refused_id, parent_id)
        assert refused.attributes["error.type"] == "model_not_found"
        assert refused.attributes["http.response.status_code"] == 404
        assert not refused.is_error, "the client's fault is none of a server's"
        await until(lambda: any(span.name == "worker decode" for span in collector.spans(left_id)))
        left = await tree_of(collector, left_id, left_parent_id)
        assert left.attributes["error.type"] == "ClientGone"
        assert left.find("decode", "worker decode").attributes["error.type"] == "cancelled"


@pytest.mark.parametrize("prompts", [False, True])
async def test_no_text_of_clients_is_in_a_span_unless_asked(collector: Collector, prompts: bool) -> None:
    async with sim_cluster(collector.endpoint, prompts=prompts) as url, httpx.AsyncClient(base_url=url) as http:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "the heliotrope sailed"}],
            "max_tokens": 3,
            "user": "heliotrope",
        }
        headers = {"authorization": "Bearer heliotrope", "x-secret": "heliotrope"}
        answer = await http.post("/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
        root = await tree_of(collector, answer.headers["traceparent"].split("-")[1])
        text = answer.json()["choices"][0]["message"]["content"]
        if prompts:
            assert "the heliotrope sailed" in root.attributes["gen_ai.input.messages"]
            assert text in root.attributes["gen_ai.output.messages"]
        else:
            assert "gen_ai.input.messages" not in root.attributes
            assert not any(b"heliotrope" in raw or text.encode() in raw for raw in collector.raw)


async def test_what_is_not_sampled_is_not_traced(collector: Collector) -> None:
    async with sim_cluster(collector.endpoint, sample_ratio=0.0) as url, httpx.AsyncClient(base_url=url) as http:
        body = {**BODY, "model": MODEL, "max_tokens": 2}
        answer = await http.post("/v1/completions", json=body, timeout=PATIENCE_S)
        assert not int(answer.headers["traceparent"].split("-")[3], 16) & 1
        # A client that decided is followed, either way.
        trace_id, span_id, headers = a_parent()
        await http.post("/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
        await tree_of(collector, trace_id, span_id)
        assert {span.trace_id for span in collector.spans()} == {trace_id}


async def test_a_collector_that_is_away_holds_up_nobody(
    collector: Collector, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_EXPORT_TIMEOUT_S", 0.5)
    endpoint = collector.endpoint
    collector.stop()
    caplog.set_level(logging.INFO)
    async with running(tracing={"endpoint": endpoint}) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
            body = {**BODY, "model": MODEL, "max_tokens": 2}

            async def ask() -> float:
                begun_s = time.monotonic()
                assert (await http.post("/v1/completions", json=body)).status_code == 200
                return time.monotonic() - begun_s

            times_s = [await ask() for _ in range(20)]
            assert max(times_s) < 1.0
            failed = 'kvferry_trace_spans_total{outcome="failed"}'
            await until(lambda: cluster.metric(failed) > 0, within_s=SOON_S, what="the exporter gave up on a batch")
            said = [record.getMessage() for record in caplog.records if "traces do not reach" in record.getMessage()]
            assert len(said) <= 3, "once a process"
            assert any(endpoint in line for line in said)
            assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
            collector.start()
            assert collector.endpoint == endpoint
            trace_id, span_id, headers = a_parent()
            await http.post("/v1/completions", json=body, headers=headers)
            await tree_of(collector, trace_id, span_id)
            assert cluster.metric('kvferry_trace_spans_total{outcome="exported"}') > 0


async def test_without_an_endpoint_there_is_no_trace_of_tracing(cluster: SimCluster, http: httpx.AsyncClient) -> None:
    trace_id, _, headers = a_parent()
    answer = await http.post("/v1/completions", json={**BODY, "model": MODEL, "max_tokens": 2}, headers=headers)
    assert answer.status_code == 200
    assert "traceparent" not in answer.headers
    assert trace_id not in str(answer.headers)
    assert cluster.gateway is not None
    assert cluster.gateway.admission.tracing is None
    assert all(host.server.instrumentation.tracing is None for host, _ in cluster.workers)
    await asyncio.sleep(0)
    assert cluster.metric('kvferry_trace_spans_total{outcome="exported"}') == 0
