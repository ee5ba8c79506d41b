"""Several models in one cluster: by name, by share, changed under load, and never a token of the wrong one."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from typing import Any

import grpc
import httpx
import pytest

from kvferry import config as configuration
from kvferry.config import ClusterConfig
from kvferry.engine.base import Renderer
from kvferry.errors import ConfigError
from kvferry.gateway.lifecycle import GatewayHost, build_renderer
from kvferry.inference.v1 import inference_pb2 as pb
from kvferry.link.identity import Identity, ServedModel
from kvferry.membership.base import MemberKind
from kvferry.pages.keys import route_keys, seed_of
from kvferry.router.request import Request
from kvferry_sim.membership import MemoryMembership
from support.beside import answered, beside
from support.waiting import PATIENCE_S, SOON_S, until

from .conftest import MODEL, SimCluster, running
from .test_access import BODY, bearer, grpc_to
from .test_gateway_grpc import stub_on
from .test_pools import ask, client, key_of, settled, workers_of
from .test_tenants import IN_ETCD, events_of

ROLES = {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}
# Simulated engines of different revisions give different answers.
ALPHA = {"name": "alpha", "model": {"path": "org/alpha", "revision": "a1", "aliases": ["first", "org/one"]}, **ROLES}
BETA = {"name": "beta", "model": {"path": "org/beta", "revision": "b1", "served_name": "Beta-7B"}, **ROLES}
NO_DEFAULT = {"prefill": 0, "decode": 0}
NAME_TO_ENTRY = {MODEL: "", "alpha": "alpha", "first": "alpha", "org/one": "alpha", "Beta-7B": "beta"}


def of_entry(cluster: SimCluster, name: str) -> set[str]:
    """Ids of a model's workers; the default model's name is empty."""
    pool = cluster.config.entry(name).pool if name else ""
    return {str(host.worker_id) for host, _ in cluster.workers if host.member.pool == pool}


async def expected(entry: dict[str, Any], prompt: str, **body: Any) -> str:
    """What a cluster of this model alone answers."""
    async with running(models=[entry], prefill=0, decode=0) as cluster, client(cluster) as http:
        name = entry["model"].get("served_name", entry["name"])
        answer = await ask(http, model=name, prompt=prompt, **body)
        text: str = answer.json()["choices"][0]["text"]
        return text


async def change(cluster: SimCluster, **values: Any) -> ClusterConfig:
    """Give all gateways the configuration with other sections, as Serve does."""
    cluster.config = configuration.parse({**cluster.config.model_dump(), **values})
    for gateway in cluster.gateways:
        await gateway.reconfigure(cluster.config)
    return cluster.config


async def test_each_name_is_answered_by_its_model_over_both_protocols() -> None:
    prompt = "the same words for all of them"
    texts = {
        entry["name"]: await expected(entry, prompt, max_tokens=12)  # type: ignore[index]
        for entry in (ALPHA, BETA)
    }
    async with running(models=[ALPHA, BETA]) as cluster, client(cluster) as http, grpc_to(cluster) as channel:
        texts[""] = (await ask(http, prompt=prompt, max_tokens=12)).json()["choices"][0]["text"]
        assert len(set(texts.values())) == 3, "or the test proves nothing"
        stub = stub_on(channel)
        listed = (await http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == list(NAME_TO_ENTRY)
        assert [each.name for each in (await stub.ListModels(pb.ListModelsRequest())).models] == list(NAME_TO_ENTRY)
        for _, (name, entry) in itertools.product(range(3), NAME_TO_ENTRY.items()):
            answer = await ask(http, model=name, prompt=prompt, max_tokens=12)
            assert workers_of(answer) == of_entry(cluster, entry)
            assert answer.json()["model"] == name
            assert answer.json()["choices"][0]["text"] == texts[entry]
            assert answer.json()["kvferry"].get("pool", "") == entry
            body = {**BODY, "model": name, "prompt": prompt, "max_tokens": 12, "stream": True}
            async with http.stream("POST", "/v1/completions", json=body) as streamed:
                pieces = [event["choices"][0]["text"] async for event in events_of(streamed) if event.get("choices")]
            assert "".join(pieces) == texts[entry]
            sampling = pb.Sampling(max_tokens=12, temperature=0, ignore_eos=True)
            message = await stub.Generate(pb.GenerateRequest(model=name, text=prompt, sampling=sampling))
            assert (message.model, message.answers[0].text) == (name, texts[entry])
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
        await cluster.until_quiet()


async def test_an_unknown_name_is_404_and_names_what_is_served() -> None:
    async with running(0, 0, models=[ALPHA, BETA]) as cluster, client(cluster) as http, grpc_to(cluster) as channel:
        names = "alpha, first, org/one, Beta-7B"
        for name in (MODEL, "beta", "gamma", "x" * 5000):
            refused = await ask(http, model=name)
            assert refused.status_code == 404
            message = refused.json()["error"]["message"]
            assert message == f"the model {name[:256]!r} does not exist; served here: {names}"
            assert refused.json()["error"]["param"] == "model"
        assert (await http.get("/v1/models/beta")).status_code == 404
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub_on(channel).Generate(pb.GenerateRequest(model="gamma", text="a"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert names in str(unknown.value.details())


async def test_models_share_no_page_and_no_route_key() -> None:
    """Not even two entries of the same weights, which could: it is not what an operator asked for."""
    same = {**BETA, "model": {**ALPHA["model"], "aliases": []}}  # type: ignore[dict-item]
    prompt = " ".join(f"word{i}" for i in range(64))
    async with running(models=[ALPHA, same]) as cluster, client(cluster) as http:
        seen: list[Request] = []
        cluster.dispatcher.run = _noted(cluster.dispatcher.run, seen)  # type: ignore[method-assign]
        cached = {}
        for name in ("alpha", "beta", MODEL):
            await ask(http, model=name, prompt=prompt)
            cached[name] = [
                (await ask(http, model=each, prompt=prompt)).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                for each in ("alpha", "beta", MODEL)
                if each not in cached
            ]
            assert cached[name][0] > 0, "its own pages are found"
        tokens = {tuple(request.prompt.token_ids) for request in seen}
        assert len(tokens) == 1
        keys = {
            tuple(route_keys(next(iter(tokens)), 16, seed_of(salt)))
            for salt in {each.prompt.cache_salt for each in seen}
        }
        assert len(set(itertools.chain(*keys))) == 3 * len(next(iter(keys))), "no key of one model is another's"


def _noted(run: Any, seen: list[Request]) -> Any:
    def noted(request: Request, *args: Any, **kwargs: Any) -> Any:
        seen.append(request)
        return run(request, *args, **kwargs)

    return noted


async def test_workers_refuse_requests_of_another_model() -> None:
    """A fault in a gateway: it takes workers of all models for candidates."""
    async with running(models=[ALPHA, BETA], gateway={"queue_timeout_s": 0.3}) as cluster, client(cluster) as http:
        gateway = cluster.gateway
        assert gateway is not None
        candidates = gateway.worker_pool.candidates
        others = [cluster.config.entry("beta").pool, ""]
        gateway.worker_pool.candidates = (  # type: ignore[method-assign]
            lambda kind, pool: [each for other in others for each in candidates(kind, other)]
        )
        answers = await asyncio.gather(*(ask(http, model="alpha", prompt=f"p {i}") for i in range(8)))
        assert {answer.status_code for answer in answers} == {429}, "the workers of alpha have room, and never get it"
        for _, engine in cluster.workers:
            assert not engine.stats().prompt_tokens.total, "no engine saw a token"
            assert not engine.stats().num_generated_tokens


async def test_a_worker_that_serves_another_model_than_its_record_says_gets_nothing() -> None:
    async with running(models=[ALPHA, BETA]) as cluster, client(cluster) as http:
        gateway = cluster.gateway
        assert gateway is not None
        config, alpha = cluster.config.of_model("beta"), cluster.config.entry("alpha")
        liar, engine = await cluster.add_worker(MemberKind.DECODE, config, "beta", alpha.pool)
        await until(lambda: bool(gateway.worker_pool.incompatible()))
        assert gateway.readiness().left_out == [f"{liar.worker_id}: its model is 'Beta-7B', and here it is 'alpha'"]
        for i in range(6):
            assert str(liar.worker_id) not in workers_of(await ask(http, model="alpha", prompt=f"p {i}"))
        assert not engine.stats().prompt_tokens.total
        # And the other way: a gateway that took this worker for one of its model is refused by it.
        assert liar.server.welcome().served.served_name == "Beta-7B"


async def test_a_worker_of_another_revision_gets_nothing() -> None:
    async with running(models=[ALPHA]) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        other = {**ALPHA, "model": {**ALPHA["model"], "revision": "a2"}}  # type: ignore[dict-item]
        config = configuration.parse({**cluster.config.model_dump(), "models": [other]}).of_model("alpha")
        worker, _ = await cluster.add_worker(
            MemberKind.DECODE, config, "alpha", cluster.config.entry("alpha").pool, "org/alpha"
        )
        await until(lambda: bool(gateway.worker_pool.incompatible()))
        (line,) = gateway.readiness().left_out
        assert line == f"{worker.worker_id}: its weights revision is 'a2', and here it is 'a1'"


async def test_workers_of_models_that_a_gateway_does_not_serve_are_not_dialled() -> None:
    async with running(models=[ALPHA]) as cluster:
        gateway = cluster.gateway
        assert gateway is not None
        config = configuration.parse({**cluster.config.model_dump(), "models": [ALPHA, BETA]})
        before = {
            link.member.member_id
            for kind in (MemberKind.PREFILL, MemberKind.DECODE)
            for link in gateway.worker_pool.links(kind)
        }
        await cluster.add_worker(
            MemberKind.DECODE, config.of_model("beta"), "beta", config.entry("beta").pool, "org/beta"
        )
        worker, _ = await cluster.add_worker(MemberKind.DECODE)
        await until(lambda: gateway.worker_pool.link(worker.worker_id) is not None)
        dialled = {link.member.member_id for link in gateway.worker_pool.links(MemberKind.DECODE)}
        assert dialled <= before | {worker.worker_id}
        await change(cluster, models=[ALPHA, BETA])
        await until(lambda: gateway.readiness().pools["beta"]["decode"] == 1)


async def test_tenants_of_a_model_have_it_alone() -> None:
    async with running(gateway=IN_ETCD, models=[ALPHA, BETA]) as cluster, client(cluster) as http:
        own, other = await key_of(cluster, "own", "beta"), await key_of(cluster, "guest")
        await settled(http, other)
        async with asyncio.timeout(SOON_S):
            while (await ask(http, own, model="Beta-7B")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        listed = (await http.get("/v1/models", headers=bearer(own))).json()["data"]
        assert [each["id"] for each in listed] == ["Beta-7B"]
        for name in (MODEL, "alpha"):
            assert (await ask(http, own, model=name)).status_code == 404, "the default name is not beta's"
            assert (await ask(http, other, model=name)).status_code == 200


async def test_a_model_without_workers_holds_up_no_other() -> None:
    idle = {**BETA, "decode": {"replicas": 0}}
    async with running(models=[ALPHA, idle], gateway={"queue_timeout_s": 0.3}) as cluster, client(cluster) as http:
        refused = await ask(http, model="Beta-7B")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == "no decode worker of model 'beta' is connected"
        assert (await ask(http, model="alpha")).status_code == 200
        ready = (await http.get("/readyz")).json()
        assert ready["ready"]
        assert ready["pools"] == {
            "default": {"prefill": 1, "decode": 1},
            "alpha": {"prefill": 1, "decode": 1},
            "beta": {"prefill": 1, "decode": 0},
        }
        assert cluster.metric('kvferry_model_ready{model="alpha"}') == 1
        assert cluster.metric('kvferry_model_ready{model="beta"}') == 0


# Shares


def conversation(i: int, num_turns: int = 1) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": f"Question {i}?"}]
    for turn in range(1, num_turns):
        turns += [{"role": "assistant", "content": f"Answer {turn}."}, {"role": "user", "content": f"And {turn}?"}]
    return turns


async def chat(http: httpx.AsyncClient, model: str, messages: list[dict[str, str]]) -> str:
    """Which model answered: empty for the default one."""
    body = {"model": model, "messages": messages, "max_tokens": 2}
    answer = await http.post("/v1/chat/completions", json=body, headers={"x-kvferry-debug": "1"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    pool: str = answer.json()["kvferry"].get("pool", "")
    return pool


async def test_a_canary_gets_its_share_of_conversations_and_keeps_them() -> None:
    canary = {**ALPHA, "model": {**ALPHA["model"], "canary": {"beta": 25, "default": 10}}}  # type: ignore[dict-item]
    async with running(models=[canary, BETA]) as cluster, client(cluster) as http:
        first = await asyncio.gather(*(chat(http, "alpha", conversation(i)) for i in range(200)))
        counts = Counter(first)
        assert 30 <= counts["beta"] <= 70, counts  # of 50 expected
        assert 8 <= counts[""] <= 36, counts  # of 20
        # Later turns, and other gateways, decide alike.
        await cluster.add_gateway()
        await cluster.ready()
        async with client(cluster, cluster.gateways[1]) as second:
            later = await asyncio.gather(*(chat(second, "first", conversation(i, num_turns=3)) for i in range(60)))
        assert later == first[:60]
        assert {await chat(http, "Beta-7B", conversation(i)) for i in range(8)} == {"beta"}
        metrics = cluster.gateways[0].metrics.render().decode()
        for model, num in (("alpha", counts["alpha"]), ("beta", counts["beta"]), ("default", counts[""])):
            line = f'kvferry_model_requests_total{{asked="alpha",model="{model}",outcome="ok"}} {num:.1f}'
            assert line in metrics.splitlines()


async def test_a_canary_without_workers_gets_nothing() -> None:
    canary = {**ALPHA, "model": {**ALPHA["model"], "canary": {"beta": 100}}}  # type: ignore[dict-item]
    async with running(models=[canary, BETA]) as cluster, client(cluster) as http:
        assert {await chat(http, "alpha", conversation(i)) for i in range(4)} == {"beta"}
        for host in cluster.in_pool(cluster.config.entry("beta").pool):
            await host.drain()
        gateway = cluster.gateway
        assert gateway is not None
        await until(lambda: not gateway.readiness().pools["beta"]["decode"])
        assert {await chat(http, "alpha", conversation(i)) for i in range(4)} == {"alpha"}


# Changes while it serves


async def test_a_model_is_replaced_under_load_and_no_request_fails() -> None:
    """New entry up, a share for it, all of it, its name taken over, the old one removed."""
    new = {"name": "alpha-2", "model": {"path": "org/alpha", "revision": "a2"}, **ROLES}
    prompts = [f"prompt {i} of the load" for i in range(4)]
    body = {"max_tokens": 40, "temperature": 0}
    texts = {
        (name, prompt): await expected(entry, prompt, **body)  # type: ignore[arg-type]
        for name, entry in (("alpha", ALPHA), ("beta", BETA), ("alpha-2", new))
        for prompt in prompts
    }
    assert len(set(texts.values())) == len(texts)
    async with running(0, 0, models=[ALPHA, BETA]) as cluster, client(cluster) as http:
        gateway = cluster.gateway
        assert gateway is not None
        engines_of_beta = {engine.info.engine_id for host, engine in cluster.workers if "beta@" in host.member.pool}
        num_answered: Counter[str] = Counter()

        async def load(model: str, number: int) -> None:
            for i in itertools.count(number):
                prompt = prompts[i % len(prompts)]
                answer = await ask(http, model=model, prompt=prompt, **body)
                assert answer.status_code == 200, answer.text
                pool = answer.json()["kvferry"]["pool"]
                assert pool in (("beta",) if model == "Beta-7B" else ("alpha", "alpha-2"))
                assert answer.json()["choices"][0]["text"] == texts[pool, prompt], "a token of the wrong model"
                num_answered[pool] += 1

        def has_answered(pool: str) -> Any:
            goal = num_answered[pool] + 12
            return until(lambda: num_answered[pool] >= goal, what=f"more answers of {pool}")

        loads = [load(name, i) for i in range(3) for name in ("alpha", "org/one", "Beta-7B")]
        async with beside(*loads):
            await has_answered("alpha")
            await change(cluster, models=[ALPHA, BETA, new])
            for kind in (MemberKind.PREFILL, MemberKind.DECODE):
                await cluster.add_model_worker(kind, "alpha-2")
            await until(lambda: gateway.readiness().pools["alpha-2"] == {"prefill": 1, "decode": 1})
            half = {**ALPHA, "model": {**ALPHA["model"], "canary": {"alpha-2": 50}}}  # type: ignore[dict-item]
            await change(cluster, models=[half, BETA, new])
            await has_answered("alpha-2")
            all_of_it = {**ALPHA, "model": {**ALPHA["model"], "canary": {"alpha-2": 100}}}  # type: ignore[dict-item]
            await change(cluster, models=[all_of_it, BETA, new])
            await has_answered("alpha-2")
            # The new one takes the old one's names, in the change that removes it.
            heir = {**new, "model": {**new["model"], "aliases": ["alpha", "org/one"]}}  # type: ignore[dict-item]
            old = [host for host, _ in cluster.workers if host.member.pool.startswith("alpha@")]
            await change(cluster, models=[BETA, heir])
            await asyncio.gather(*(host.drain() for host in old))
            before = num_answered["alpha"]
            await has_answered("alpha-2")
            assert num_answered["alpha"] <= before + len(loads)
            refused = await ask(http, model="first")
            assert refused.status_code == 404
            assert refused.json()["error"]["message"].endswith("served here: Beta-7B, alpha-2, alpha, org/one")
        assert num_answered["alpha"]
        assert num_answered["beta"] >= 12
        assert engines_of_beta == {
            engine.info.engine_id
            for host, engine in cluster.workers
            if "beta@" in host.member.pool and not host.server.draining
        }
        await cluster.until_quiet()


async def test_a_changed_entry_answers_with_its_earlier_model_until_the_new_one_has_workers() -> None:
    prompt, body = "which of the two", {"max_tokens": 200, "temperature": 0}
    changed = {**ALPHA, "model": {**ALPHA["model"], "revision": "a2"}}  # type: ignore[dict-item]
    old_text, new_text = [await expected(entry, prompt, **body) for entry in (ALPHA, changed)]
    assert old_text != new_text
    async with running(0, 0, models=[ALPHA]) as cluster, client(cluster) as http:
        gateway = cluster.gateway
        assert gateway is not None
        async with beside(answered(ask(http, model="alpha", prompt=prompt, **body))) as (begun,):
            await until(lambda: any(engine.stats().num_running for engine in cluster.engines(MemberKind.DECODE)))
            await change(cluster, models=[changed])
            answer = await ask(http, model="alpha", prompt=prompt, **body)
            assert answer.json()["choices"][0]["text"] == old_text, "the new one has no workers"
            for kind in (MemberKind.PREFILL, MemberKind.DECODE):
                await cluster.add_model_worker(kind, "alpha")
            await until(lambda: gateway.readiness().pools["alpha"] == {"prefill": 1, "decode": 1})
            answer = await ask(http, model="alpha", prompt=prompt, **body)
            assert answer.json()["choices"][0]["text"] == new_text
            assert (await begun).json()["choices"][0]["text"] == old_text, (
                "in flight, it stays with the model it began with"
            )


@pytest.mark.usefixtures("short_worker_wait")
async def test_an_answer_that_loses_its_worker_never_goes_on_with_a_changed_model() -> None:
    body = {**BODY, "model": "alpha", "max_tokens": 1000, "stream": True}
    changed = {**ALPHA, "model": {**ALPHA["model"], "revision": "a2"}}  # type: ignore[dict-item]
    async with running(0, 0, models=[ALPHA]) as cluster, client(cluster) as http:
        gateway = cluster.gateway
        assert gateway is not None
        events: list[dict[str, Any]] = []
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for event in events_of(answer):
                events.append(event)
                if len(events) == 20:
                    await change(cluster, models=[changed])
                    for kind in (MemberKind.PREFILL, MemberKind.DECODE):
                        await cluster.add_model_worker(kind, "alpha")
                    new = [
                        engine
                        for host, engine in cluster.workers
                        if host.member.pool == cluster.config.entry("alpha").pool
                    ]
                    await until(lambda: gateway.readiness().pools["alpha"]["decode"] == 1)
                    for engine in cluster.engines(MemberKind.DECODE):
                        if engine not in new:
                            engine.kill()
        assert events[-1]["error"]["code"] == "no_decode_worker"
        for engine in new:
            assert not engine.stats().prompt_tokens.total


async def test_a_model_that_cannot_be_loaded_keeps_no_other_from_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    is_there = False

    def identity(config: ClusterConfig, folder: str) -> Identity:
        if folder == "org/beta" and not is_there:
            raise ConfigError("org/beta: No such file or directory")
        return Identity(config.name, ServedModel(config.served_name, "sim", config.model.revision))

    monkeypatch.setattr("kvferry.gateway.models.RETRY_FIRST_S", 0.02)
    async with running(models=[ALPHA]) as cluster, client(cluster) as http:
        gateway = cluster.gateway
        assert gateway is not None
        monkeypatch.setattr("kvferry.gateway.lifecycle.identity", identity)
        await change(cluster, models=[ALPHA, BETA])
        for kind in (MemberKind.PREFILL, MemberKind.DECODE):
            await cluster.add_model_worker(kind, "beta")
        await until(lambda: "renderer of pool beta" in gateway.readiness().waiting_for)
        refused = await ask(http, model="Beta-7B")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert (await ask(http, model="alpha")).status_code == 200
        listed = [each["id"] for each in (await http.get("/v1/models")).json()["data"]]
        assert "Beta-7B" not in listed
        is_there = True
        await until(lambda: not gateway.readiness().waiting_for)
        assert (await ask(http, model="Beta-7B")).status_code == 200


async def test_a_gateway_is_not_ready_before_its_default_model_even_where_another_one_is() -> None:
    may_load = threading.Event()

    def make_renderer(config: ClusterConfig, folder: str) -> Renderer:
        if folder == MODEL:
            assert may_load.wait(PATIENCE_S)
        return build_renderer(config, folder)

    async with running(models=[ALPHA]) as cluster:
        gateway = GatewayHost(cluster.config, MODEL, MemoryMembership(cluster.registry), make_renderer)
        starting = asyncio.create_task(gateway.start())
        try:
            await until(lambda: [each.renderer is not None for each in gateway._models].count(True) == 1)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as http:
                for name in (MODEL, "alpha"):
                    refused = await ask(http, model=name)
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready"), name
                ready = await http.get("/readyz")
                assert (ready.status_code, ready.json()["waiting_for"][0]) == (503, "renderer")
                may_load.set()
                await starting
                await until(lambda: gateway.readiness().ready)
                assert [(await ask(http, model=name)).status_code for name in (MODEL, "alpha")] == [200, 200]
        finally:
            may_load.set()
            await asyncio.gather(starting, return_exceptions=True)
            await gateway.stop()


async def test_without_a_default_model_an_unknown_name_is_404_before_any_model_is_loaded() -> None:
    may_load = threading.Event()

    def make_renderer(config: ClusterConfig, folder: str) -> Renderer:
        assert may_load.wait(PATIENCE_S)
        return build_renderer(config, folder)

    async with running(models=[ALPHA], **NO_DEFAULT) as cluster:
        gateway = GatewayHost(cluster.config, MODEL, MemoryMembership(cluster.registry), make_renderer)
        try:
            await gateway.start()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.port}") as http:
                assert (await ask(http, model="nope")).status_code == 404
                loading = await ask(http, model="alpha")
                assert (loading.status_code, "loading the model 'alpha'" in loading.text) == (503, True)
                assert (await http.get("/readyz")).status_code == 503
        finally:
            may_load.set()
            await gateway.stop()
