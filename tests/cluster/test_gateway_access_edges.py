"""Who reads what is not of one tenant, which pages reach a gateway without keys, and who decides what is traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from kvferry import config as configuration
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.key_file import new_key
from kvferry.inference.v1 import inference_pb2 as pb
from support.otlp_collector import Collector
from support.waiting import PATIENCE_S

from .conftest import MODEL, running
from .test_access import bearer, grpc_to
from .test_gateway_grpc import refused, stub_on

BODY: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1}


async def test_metrics_of_all_tenants_are_an_operators(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    tenant, operator = new_key(keys, "acme", "ci"), new_key(keys, "acme", "ops", operator=True)
    metrics = new_key(keys, "acme", "prometheus", metrics=True)
    async with (
        running(gateway={"keys_file": str(keys)}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        gateway = cluster.gateway
        assert gateway is not None
        # As on a listener that other machines reach.
        far = configuration.GatewayConfig(host="10.0.0.1", keys_file=keys)
        gateway.app._access = Access(far, gateway.identification.tenants)
        for path in ("/metrics", "/kvferry/v1/targets"):
            assert (await http.get(path)).status_code == 401
            answer = await http.get(path, headers=bearer(tenant))
            assert answer.status_code == 403
            assert "operator: true" in answer.json()["error"]["message"]
            for key in (operator, metrics):
                assert (await http.get(path, headers=bearer(key))).status_code == 200
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(operator))).status_code == 200
        assert (await http.post("/v1/completions", json=BODY, headers=bearer(metrics))).status_code == 403
        assert (await http.get("/v1/models", headers=bearer(metrics))).status_code == 403


async def test_workers_are_named_to_operators_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = new_key(keys, "acme", "ci")
    operator = new_key(keys, "staff", "ci", operator=True)
    metrics = new_key(keys, "staff", "prometheus", metrics=True)
    async with (
        running(gateway={"keys_file": str(keys)}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        asked = (({}, 0), (bearer("wrong"), 0), (bearer(key), 0), (bearer(metrics), 0), (bearer(operator), 2))
        for headers, num_named in asked:
            answer = await http.get("/readyz", headers=headers)
            assert answer.status_code == 200
            assert len(answer.json()["members"]) == num_named
    async with running() as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        assert len((await http.get("/readyz")).json()["members"]) == 2


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"host": "models.internal", "origin": "https://models.internal"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
    ],
)
async def test_a_page_elsewhere_reaches_no_gateway_without_keys(headers: dict[str, str], status: int) -> None:
    async with (
        running(gateway={"allowed_hosts": ["models.internal"]}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        answer = await http.post(
            "/v1/completions", content=json.dumps(BODY), headers={"content-type": "application/json", **headers}
        )
        assert answer.status_code == status, answer.text
        if status == 403:
            assert (await http.get("/metrics", headers=headers)).status_code == 403


async def test_a_gateway_with_keys_answers_to_any_name(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = new_key(keys, "acme", "ci")
    async with (
        running(gateway={"keys_file": str(keys)}) as cluster,
        httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
    ):
        headers = {**bearer(key), "host": "models.example"}
        assert (await http.post("/v1/completions", json=BODY, headers=headers)).status_code == 200


async def test_a_client_without_a_key_does_not_decide_what_is_traced(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    key = new_key(keys, "acme", "ci")
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    with Collector() as collector:
        tracing = {"endpoint": collector.endpoint, "sample_ratio": 0.0}
        async with (
            running(gateway={"keys_file": str(keys)}, tracing=tracing) as cluster,
            httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http,
            grpc_to(cluster) as channel,
        ):
            refused_answer = await http.post("/v1/completions", json=BODY, headers=parent)
            assert refused_answer.status_code == 401
            assert not refused_answer.headers.get("traceparent", "").startswith(f"00-{'a' * 32}")
            answer = await http.post("/v1/completions", json=BODY, headers={**parent, **bearer(key)})
            assert answer.headers["traceparent"].startswith(f"00-{'a' * 32}")
            call = stub_on(channel).Generate(pb.GenerateRequest(model=MODEL, text="x"), metadata=tuple(parent.items()))
            assert (await refused(call)).code() is grpc.StatusCode.UNAUTHENTICATED
        spans = collector.spans("a" * 32)
        assert spans
        assert not any(span.attributes.get("http.response.status_code") == 401 for span in spans)
