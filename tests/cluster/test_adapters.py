"""LoRA adapters by name: over both protocols, by tenant, through losses, and beside other releases and files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from openai import AsyncOpenAI

from kvferry.gateway.usage.usage_log import read
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.link.identity import ADAPTERS, FEATURES, Identity
from kvferry.membership.base import MemberKind
from kvferry_client import AsyncClient, NotFound
from support.beside import answered, beside
from support.waiting import until

from .conftest import MODEL, running
from .test_access import bearer, grpc_to
from .test_compatibility import changed
from .test_fallback import BODY, post, succeeds
from .test_gateway_grpc import stub_on
from .test_pools import client, key_of, settled
from .test_tenants import IN_ETCD

SERVED = {"sql": {"path": "/adapters/sql"}, "poems": {"path": "/adapters/poems"}}
ADAPTERS_OF: dict[str, Any] = {"served": SERVED}
NAMES = (MODEL, "sql", f"{MODEL}:poems")


async def test_each_name_has_answers_of_its_own_on_pages_of_its_own() -> None:
    async with running(1, 1, adapters=ADAPTERS_OF) as cluster:
        outcomes = await asyncio.gather(*(succeeds(cluster, model=name) for name in (*NAMES, *NAMES)))
        texts = [text for text, _ in outcomes]
        assert texts[:3] == texts[3:]
        assert len(set(texts)) == 3
        for name, (_, record) in zip((*NAMES, *NAMES), outcomes, strict=True):
            assert record.get("adapter", "").partition("@")[0] == ("" if name == MODEL else name.rpartition(":")[2])
            assert record["reason"] == "disaggregated"
        by_own_name, record = await succeeds(cluster, model="poems")
        assert by_own_name == texts[2]
        assert record["cached_prompt_tokens_by_tier"]["device"] == 32, "pages of the adapter, under either name"
        (decode,) = cluster.engines(MemberKind.DECODE)
        await cluster.until_quiet()
        assert decode.num_wrong_pages == 0
        # Those of three models: of the prompt on one worker, of prompt and answer on the other.
        index = cluster.gateway.residency.index  # type: ignore[union-attr]
        await until(lambda: index.num_pages == 3 * (2 + 4), what="pages of three models are published")


async def test_an_unknown_adapter_is_not_found_and_what_is_served_is_named() -> None:
    served = {**SERVED, "ours": {"path": "/a", "tenants": ["acme"]}}
    async with running(1, 1, gateway=IN_ETCD, adapters={"served": served}) as cluster, client(cluster) as http:
        acme, other = await key_of(cluster, "acme"), await key_of(cluster, "bystander")
        await settled(http, acme)
        await settled(http, other)

        async def ask(key: str, name: str) -> httpx.Response:
            body = {"model": name, "prompt": "a b c", "max_tokens": 4}
            return await http.post("/v1/completions", json=body, headers=bearer(key))

        assert (await ask(acme, "ours")).status_code == (await ask(acme, f"{MODEL}:ours")).status_code == 200
        unknown = await ask(other, "nothing")
        assert unknown.status_code == 404
        error = unknown.json()["error"]
        assert error["message"] == f"the model 'nothing' does not exist; served here: {MODEL}, sql, poems"
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        # Another tenant's is not told from one that does not exist.
        refused = await ask(other, "ours")
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].replace("ours", "nothing") == error["message"]

        listed = {key: (await http.get("/v1/models", headers=bearer(key))).json()["data"] for key in (acme, other)}
        assert [each["id"] for each in listed[acme]] == [MODEL, "sql", "poems", "ours"]
        assert [each["id"] for each in listed[other]] == [MODEL, "sql", "poems"]
        assert "parent" not in listed[other][0]
        assert (listed[other][1]["root"], listed[other][1]["parent"]) == ("sql", MODEL)
        for name, key, status in (("ours", acme, 200), ("ours", other, 404), (f"{MODEL}:sql", other, 200)):
            one = await http.get(f"/v1/models/{name}", headers=bearer(key))
            assert one.status_code == status
            if status == 200:
                assert (one.json()["id"], one.json()["parent"]) == (name, MODEL)
        async with grpc_to(cluster) as channel:
            stub, metadata = stub_on(channel), tuple(bearer(other).items())
            models = (await stub.ListModels(pb.ListModelsRequest(), metadata=metadata)).models
            assert [(each.name, each.parent) for each in models] == [(MODEL, ""), ("sql", MODEL), ("poems", MODEL)]
            for call in (
                lambda: stub.Generate(pb.GenerateRequest(model="ours", text="a"), metadata=metadata),
                lambda: stub.Tokenize(pb.TokenizeRequest(model="ours", text="a"), metadata=metadata),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call()
                assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_usage_records_name_the_adapter(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    in_records = {**IN_ETCD, "usage_dir": str(folder)}
    async with running(1, 1, gateway=in_records, adapters=ADAPTERS_OF) as cluster, client(cluster) as http:
        key = await key_of(cluster, "acme")
        await settled(http, key)
        for name in NAMES:
            body = {"model": name, "prompt": "a b c", "max_tokens": 4}
            assert (await http.post("/v1/completions", json=body, headers=bearer(key))).status_code == 200
    bad: list[int] = []
    records = list(read(folder, lambda _, number: bad.append(number)))
    assert not bad
    # Earlier ones waited for the key to be known.
    assert [each.adapter for each in records][-3:] == ["", "sql", "poems"]


async def test_both_clients_ask_for_adapters_by_name() -> None:
    async with running(1, 1, adapters=ADAPTERS_OF) as cluster:
        expected = [(await succeeds(cluster, model=name))[0] for name in NAMES]
        prompt, sampling = BODY["prompt"], {"max_tokens": BODY["max_tokens"], "temperature": 0.0, "ignore_eos": True}
        assert cluster.gateway is not None
        own = AsyncClient(f"localhost:{cluster.gateway.grpc.port}")
        async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none") as openai, own:
            for name, text in zip(NAMES, expected, strict=True):
                answer = await openai.completions.create(
                    model=name, prompt=prompt, max_tokens=24, temperature=0, extra_body={"ignore_eos": True}
                )
                assert (answer.model, answer.choices[0].text) == (name, text)
                assert (await own.generate(prompt, model=name, **sampling)).answers[0].text == text
            # Without a name it is the model itself, though adapters are listed beside it.
            assert (await own.generate(prompt, **sampling)).answers[0].text == expected[0]
            assert [model.parent for model in await own.models()] == ["", MODEL, MODEL]
            with pytest.raises(NotFound, match="served here"):
                await own.generate("a", model="none")


async def test_an_answer_goes_on_with_its_adapter_after_a_loss() -> None:
    async with running(1, 2, adapters=ADAPTERS_OF) as cluster:
        whole, _ = await succeeds(cluster, model="sql", max_tokens=400)
        engines = cluster.engines(MemberKind.DECODE)
        async with beside(succeeds(cluster, model="sql", max_tokens=400)) as (asked,):
            await until(lambda: any(engine.stats().num_running for engine in engines), what="the answer has begun")
            next(engine for engine in engines if engine.stats().num_running).kill()
            text, record = await asked
        assert len(record["lost_workers"]) == 1
        assert text == whole


@pytest.mark.parametrize("kind", [MemberKind.PREFILL, MemberKind.DECODE])
async def test_a_worker_of_an_older_release_gets_no_request_with_an_adapter(
    kind: MemberKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ignore the adapter, and answer with the model itself."""
    async with running(1, 1, adapters=ADAPTERS_OF) as cluster:
        expected, _ = await succeeds(cluster, model="sql")
        old = Identity(features=frozenset(FEATURES) - {ADAPTERS})
        monkeypatch.setattr("kvferry.worker.lifecycle.identity", lambda config, folder: old)
        await cluster.add_worker(kind)
        await cluster.ready()
        (new,) = [host for host in cluster.hosts(kind) if host.server.identity is not old]
        for i in range(6):
            text, record = await succeeds(cluster, model="sql", cache_salt=str(i))
            assert text == expected
            assert record[f"{kind.value}_worker"] == new.worker_id
        served = {(await succeeds(cluster, cache_salt=str(i)))[1][f"{kind.value}_worker"] for i in range(6)}
        assert len(served) == 2, "requests for the model itself go to both"


async def test_without_a_worker_that_has_the_adapter_the_request_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old = Identity(features=frozenset(FEATURES) - {ADAPTERS})
    monkeypatch.setattr("kvferry.worker.lifecycle.identity", lambda config, folder: old)
    async with running(1, 1, adapters=ADAPTERS_OF) as cluster:
        answer = await post(cluster, model="sql")
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert answer.json()["error"]["message"] == "no decode worker that has the adapter 'sql' is connected"
        assert (await post(cluster)).status_code == 200
        async with grpc_to(cluster) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub_on(channel).Generate(pb.GenerateRequest(model="sql", text="a"))
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_while_an_adapter_changes_no_answer_is_of_two_of_its_files() -> None:
    async with running(1, 2, adapters=ADAPTERS_OF) as cluster:
        before, _ = await succeeds(cluster, model="sql", max_tokens=300)
        served = {**SERVED, "sql": {"path": "/adapters/sql-2"}}
        config = changed(cluster, adapters={"served": served})
        new = [await cluster.add_worker(kind, config) for kind in (MemberKind.PREFILL, MemberKind.DECODE)]
        await cluster.ready()
        # Most workers have the old files: all requests get those, wherever their worker is lost.
        old = [host for host in cluster.hosts(MemberKind.DECODE) if host is not new[1][0]]
        asking = [succeeds(cluster, model="sql", max_tokens=300, cache_salt=str(i)) for i in range(4)]
        async with beside(*asking) as asked:
            await until(lambda: all(host.server.is_busy for host in old), what="both old workers have answers")
            engines = dict(cluster.workers)
            engines[old[0]].kill()
            for text, _ in await asyncio.gather(*asked):
                assert text == before
        # The other one leaves too: what begins now has the new files, and is the same for all.
        await old[1].drain()
        texts = {(await succeeds(cluster, model="sql", max_tokens=300, cache_salt=str(i)))[0] for i in range(3)}
        assert len(texts) == 1
        assert texts != {before}
        assert (await succeeds(cluster, model="poems"))[0]


@pytest.mark.usefixtures("short_worker_wait")
async def test_an_answer_whose_adapter_is_gone_ends_instead_of_changing() -> None:
    async with running(0, 1, adapters=ADAPTERS_OF) as cluster:
        ((_, engine),) = cluster.workers
        async with beside(answered(post(cluster, model="sql", max_tokens=2000), 503)) as (asked,):
            await until(lambda: bool(engine.stats().num_running), what="the answer has begun")
            served = {**SERVED, "sql": {"path": "/adapters/sql-2"}}
            await cluster.add_worker(MemberKind.DECODE, changed(cluster, adapters={"served": served}))
            await cluster.ready()
            engine.kill()
            answer = await asked
        assert "with the files that the request began with, is connected" in answer.json()["error"]["message"]
