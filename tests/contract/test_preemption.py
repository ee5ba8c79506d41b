"""Streams of a tenant above its share that are preempted, on a cluster of simulated engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from bench.live_cluster import MODEL, Cluster, running
from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.gateway.http.asgi import EXPLAIN_PATH
from kvferry_sim import Faults, SimEngine
from support.waiting import PATIENCE_S, SOON_S, until

NUM_SLOTS = 4  # of each of two decode workers
NUM_TOKENS = 150
SLOW = Faults(step_delay_s=0.009)  # one stream is long beside what a gateway needs to begin others


def config() -> ClusterConfig:
    return configuration.parse(
        {
            "model": {"path": MODEL},
            "engine": {"kind": "sim", "block_size": 16, "max_num_seqs": NUM_SLOTS},
            "prefill": {"replicas": 2},
            "decode": {"replicas": 2},
            "sim": {"step_ms": 1.0, "num_pages": 4096},
            "gateway": {"http_port": 0, "grpc_port": None, "tenants_in_etcd": True},
        }
    )


class Tenant:
    def __init__(self, cluster: Cluster, key: str) -> None:
        self.num_begun = 0
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{cluster.gateways[0].port}",
            headers={"authorization": f"Bearer {key}"},
            timeout=PATIENCE_S,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def is_known(self) -> bool:
        return (await self._http.get("/v1/models")).status_code == 200

    async def num_preemptions(self, answer_id: str) -> int:
        answer = await self._http.get(f"{EXPLAIN_PATH}{answer_id}")
        return sum(request["num_preemptions"] for request in answer.json()["requests"])

    async def ask(self, prompt: str, num_tokens: int, **more: Any) -> tuple[str, int, str]:
        """Return the text, the number of tokens that is told as its usage, and the answer's id."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **more}
        text, usage, answer_id = "", 0, ""
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                answer_id = event["id"]
                for choice in event["choices"]:
                    self.num_begun += not text
                    text += choice["text"]
                if event.get("usage"):
                    usage = event["usage"]["completion_tokens"]
        return text, usage, answer_id


async def tenants_of(cluster: Cluster, *names: str) -> list[Tenant]:
    tenants = []
    for name in names:
        await cluster.admin.create(name)
        tenants.append(Tenant(cluster, await cluster.admin.add_key(name, "test")))
        async with asyncio.timeout(SOON_S):
            while not await tenants[-1].is_known():  # noqa: ASYNC110 - gateways hear of a key a moment later
                await asyncio.sleep(0.01)
    return tenants


def set_pace(cluster: Cluster, faults: Faults) -> None:
    for _, engine in cluster.workers:
        assert isinstance(engine, SimEngine)
        engine.faults = faults


def num_preempted(cluster: Cluster) -> float:
    text = cluster.gateways[0].metrics.render().decode()
    (line,) = [line for line in text.splitlines() if line.startswith("kvferry_preempted_requests_total")]
    return float(line.split()[-1])


SAMPLED = {"temperature": 1.0, "seed": 3}
PENALTIES = {"presence_penalty": 0.001, "frequency_penalty": 0.5, "bad_words": ["w7"]}


@pytest.mark.parametrize(
    "more", [{}, SAMPLED, PENALTIES, SAMPLED | PENALTIES], ids=["plain", "seed", "penalties", "both"]
)
async def test_preempted_streams_go_on_without_a_difference(more: dict[str, Any]) -> None:
    """A tenant whose streams hold all slots gives some to one that comes, and none of its answers is another one.

    No parameter keeps a slot.
    """
    async with running(config(), 1) as cluster:
        noise, gold = await tenants_of(cluster, "noise", "gold")
        set_pace(cluster, SLOW)
        prompts = [f"noise {number} of many" for number in range(4 * NUM_SLOTS)]
        flood = [asyncio.create_task(noise.ask(prompt, NUM_TOKENS, **more)) for prompt in prompts]
        await until(lambda: noise.num_begun >= 2 * NUM_SLOTS)
        answers = await asyncio.gather(*(gold.ask(f"gold {number}", 5) for number in range(NUM_SLOTS)))
        assert {num_tokens for _, num_tokens, _ in answers} == {5}
        assert not any(task.done() for task in flood), "gold did not wait for an end of noise"
        assert num_preempted(cluster) >= 1
        set_pace(cluster, Faults())
        preempted = await asyncio.gather(*flood)
        alone = await asyncio.gather(*(gold.ask(prompt, NUM_TOKENS, **more) for prompt in prompts))
        assert [answer[:2] for answer in preempted] == [answer[:2] for answer in alone]
        assert {num_tokens for _, num_tokens, _ in alone} == {NUM_TOKENS}
        counts = [await noise.num_preemptions(answer_id) for _, _, answer_id in preempted]
        assert sum(counts) == num_preempted(cluster)
        for tenant in (noise, gold):
            await tenant.close()
        for host, _ in cluster.workers:
            await until(lambda host=host: not host.server.num_requests)  # type: ignore[misc]
