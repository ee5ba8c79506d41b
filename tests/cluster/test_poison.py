"""Requests that end the engines that get them: few engines are lost, and other requests do not fail."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from kvferry.config import ClusterConfig
from kvferry.engine.base import EngineOutput, EngineRequest, Renderer
from kvferry.engine.hang_detector import HangDetector
from kvferry.gateway.lifecycle import build_renderer
from kvferry.link.gateway_session import GatewaySession
from kvferry.link.worker_link import WorkerLink
from kvferry.membership.base import MemberKind
from kvferry.router import worker_pool
from kvferry.router.engine_losses import MAX_BLAMELESS_LOSSES
from kvferry.worker import lifecycle
from kvferry.worker.lifecycle import WorkerHost
from kvferry.worker.quarantine_relay import QuarantineRelay
from kvferry_sim import Faults, SimEngine
from kvferry_sim.tokenizer import SimTokenizer
from support.beside import answered, beside
from support.waiting import PATIENCE_S, SOON_S, until, wait_until

from .conftest import MODEL, SimCluster, running

POISON = "poison"
(POISON_TOKEN,) = SimTokenizer().encode(POISON)
BODY: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
SIM = {"step_ms": 2.0, "prefill_tokens_per_s": 20_000.0}


def kill(engine: SimEngine) -> None:
    engine.kill()


def hang(engine: SimEngine) -> None:
    engine.faults = Faults(stalled=True)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[SimEngine], None]]:
    """Make engines end, as the one entry says, with any prompt that contains POISON."""
    how = [kill]
    generate = SimEngine.generate

    async def generate_or_end(
        engine: SimEngine, request: EngineRequest, **of_worker: Any
    ) -> AsyncIterator[EngineOutput]:
        if POISON_TOKEN in list(request.prompt_token_ids):
            how[0](engine)
        async for output in generate(engine, request, **of_worker):
            yield output

    monkeypatch.setattr(SimEngine, "generate", generate_or_end)
    return how


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[HangDetector]:
    """Count the detectors' looks at their engines, of which ten are the timeout: on a busy machine they take longer."""
    done: list[HangDetector] = []
    is_hung = HangDetector.is_hung

    def count(self: HangDetector, now_s: float, progress: Hashable, *, busy: bool) -> bool:
        done.append(self)
        return is_hung(self, done.count(self) * self._timeout_s / 10, progress, busy=busy)

    monkeypatch.setattr(HangDetector, "is_hung", count)
    monkeypatch.setattr(lifecycle, "HEALTH_PERIOD_S", 0.02)
    return done


def num_dead(cluster: SimCluster) -> int:
    return sum(host.server.died.is_set() for host, _ in cluster.workers)


async def ask(http: httpx.AsyncClient, prompt: str, **values: Any) -> httpx.Response:
    return await http.post(
        "/v1/completions", json={**BODY, "prompt": prompt, **values}, headers={"x-kvferry-debug": "1"}
    )


@asynccontextmanager
async def client_of(cluster: SimCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as http:
        yield http


def texts(answer: httpx.Response) -> list[str]:
    return [choice["text"] for choice in answer.json().get("choices", ())]


def prompts(count: int) -> list[str]:
    return [" ".join(f"w{i}x{j}" for j in range(40)) for i in range(count)]


@pytest.mark.parametrize(("prefill", "decode"), [(2, 6), (0, 6)])
async def test_a_request_loses_two_workers_at_most_and_is_refused_then(
    poisoned: object, prefill: int, decode: int
) -> None:
    async with running(prefill, decode, sim=SIM) as cluster, client_of(cluster) as http:
        answer = await ask(http, f"{POISON} one two")
        assert answer.status_code == 500
        assert "retry-after" not in answer.headers
        error = answer.json()["error"]
        assert error["code"] == "request_quarantined"
        assert "2 workers were lost" in error["message"]
        assert not any(host.worker_id in error["message"] for host, _ in cluster.workers)
        assert num_dead(cluster) == 2
        assert cluster.metric('kvferry_quarantined_requests_total{when="first"}') == 1

        again = await ask(http, f"{POISON} one two", seed=5)
        assert (again.status_code, again.json()["error"]["code"]) == (500, "request_quarantined")
        assert num_dead(cluster) == 2
        assert cluster.metric('kvferry_quarantined_requests_total{when="again"}') == 1
        assert (await ask(http, "one two")).status_code == 200


async def test_explain_names_the_workers_that_were_lost(poisoned: object) -> None:
    async with running(0, 3, sim=SIM) as cluster, client_of(cluster) as http:
        first, again = await ask(http, POISON), await ask(http, POISON)
        (request,), (repeat,) = [
            (await http.get(f"/kvferry/v1/requests/{answer.headers['x-request-id']}")).json()["requests"]
            for answer in (first, again)
        ]
        assert (request["error_code"], repeat["error_code"]) == ("request_quarantined", "request_quarantined")
        assert (repeat["lost_workers"], repeat["choices"]) == ([], [])
        dead = [host.worker_id for host, _ in cluster.workers if host.server.died.is_set()]
        assert sorted(request["lost_workers"]) == sorted(dead)
        assert len(dead) == 2


@pytest.mark.parametrize("num_quiet", [2, 3])
async def test_a_request_that_lost_a_worker_is_not_given_to_one_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch, num_quiet: int
) -> None:
    """Unless no other worker is left."""
    quiet: set[str] = set()
    monkeypatch.setattr(WorkerLink, "is_quiet", property(lambda link: link.member.member_id in quiet))
    async with running(0, 4, sim=SIM) as cluster, client_of(cluster) as http:
        hosts = dict(cluster.workers)
        for engine in hosts.values():
            hang(engine)
        async with beside(answered(ask(http, prompts(1)[0], max_tokens=2))) as (asking,):
            busy = lambda: [host for host, engine in hosts.items() if engine.stats().num_waiting]  # noqa: E731
            await until(lambda: bool(busy()))
            (first,) = busy()
            others = [host.worker_id for host in hosts if host is not first]
            quiet.update(others[:num_quiet])
            hosts[first].kill()
            for engine in hosts.values():
                engine.faults = Faults()
            answer = await asking
        record = cluster.dispatcher.recent(answer.headers["x-request-id"])[0]
        assert record.lost_workers == (first.worker_id,)
        assert record.decode_worker in (others[num_quiet:] or others)


@pytest.mark.parametrize("how", [kill, hang])
@pytest.mark.parametrize("prefill", [0, 2])
async def test_streams_beside_it_end_whole(
    poisoned: list[Callable[[SimEngine], None]],
    looks: list[HangDetector],
    how: Callable[[SimEngine], None],
    prefill: int,
) -> None:
    poisoned[0] = how
    async with running(prefill, 4, sim=SIM) as cluster, client_of(cluster) as http:
        expected = [texts(answer) for answer in await asyncio.gather(*(ask(http, prompt) for prompt in prompts(8)))]
        engines = cluster.engines(MemberKind.DECODE)
        async with beside(*(answered(ask(http, prompt)) for prompt in prompts(8))) as streams:
            await until(lambda: sum(engine.stats().num_running for engine in engines) == 8)
            answer = await ask(http, POISON)
            assert answer.status_code == 500
            assert num_dead(cluster) == 2
            assert [texts(await stream) for stream in streams] == expected


@pytest.mark.parametrize("num_poisons", [1, 3])
async def test_requests_that_wait_for_a_first_token_beside_it_are_answered(poisoned: object, num_poisons: int) -> None:
    """They cannot be told apart from it by the first loss."""
    async with running(0, 8, sim={**SIM, "prefill_tokens_per_s": 400.0}) as cluster, client_of(cluster) as http:
        engines = cluster.engines(MemberKind.DECODE)
        async with beside(*(answered(ask(http, prompt, max_tokens=4)) for prompt in prompts(16))) as waiting:
            await until(lambda: sum(e.stats().num_running + e.stats().num_waiting for e in engines) == 16)
            answers = await asyncio.gather(*(ask(http, f"{POISON} {i}") for i in range(num_poisons)))
            assert [answer.status_code for answer in answers] == [500] * num_poisons
            assert num_dead(cluster) <= 2 * num_poisons
            await asyncio.gather(*waiting)


async def test_every_gateway_refuses_what_one_has_in_quarantine(poisoned: object) -> None:
    async with running(1, 5, sim=SIM) as cluster:
        first = cluster.gateway
        second = await cluster.add_gateway()
        await cluster.ready()
        async with client_of(cluster) as http:
            assert (await ask(http, f"{POISON} one two")).status_code == 500
        assert num_dead(cluster) == 2
        assert cluster.metric('kvferry_quarantined_requests_total{when="first"}') == 1

        def make_renderer_after_links(config: ClusterConfig, model_folder: str) -> Renderer:
            """As with a real model, whose renderer takes seconds."""
            gateway = cluster.gateways[-1]
            wait_until(lambda: len(gateway.readiness().members) == 4, what="four workers")
            return build_renderer(config, model_folder)

        third = await cluster.add_gateway(make_renderer_after_links)
        for gateway in (first, second, third):
            cluster.gateway = gateway
            async with client_of(cluster) as http:
                await until(
                    lambda: not cluster.dispatcher._router.workers.quarantined.is_empty(0.0), what="it was told"
                )
                again = await ask(http, f"{POISON} one two", seed=7)
                assert again.json()["error"]["code"] == "request_quarantined"
        assert num_dead(cluster) == 2


@pytest.mark.parametrize("is_said", [True, False])
async def test_a_client_hears_of_the_quarantine_when_the_other_gateways_know_or_say_nothing(
    poisoned: object, monkeypatch: pytest.MonkeyPatch, is_said: bool
) -> None:
    held: list[Callable[[], None]] = []
    note_known = QuarantineRelay.note_known

    def hold(relay: QuarantineRelay, number: int, session: GatewaySession) -> None:
        held.append(lambda: note_known(relay, number, session))

    monkeypatch.setattr(QuarantineRelay, "note_known", hold)
    monkeypatch.setattr(worker_pool, "QUARANTINE_TIMEOUT_S", PATIENCE_S if is_said else 0.05)
    async with running(1, 4, sim=SIM) as cluster:
        first, second = cluster.gateway, await cluster.add_gateway()
        await cluster.ready()
        cluster.gateway = first
        async with client_of(cluster) as http, asyncio.TaskGroup() as clients:
            asking = [clients.create_task(answered(ask(http, f"{POISON} one two"), 500))]
            await until(lambda: len(held) == len(cluster.workers), what="workers asked the second gateway")
            cluster.gateway = second
            assert not cluster.dispatcher._router.workers.quarantined.is_empty(0.0)
            # A repeat is held up as well.
            asking.append(clients.create_task(answered(ask(http, f"{POISON} one two"), 500)))
            if is_said:
                for say in held[1:]:
                    say()
                _, pending = await asyncio.wait(asking, timeout=0.1)
                assert len(pending) == 2
                held[0]()
            codes = [(await each).json()["error"]["code"] for each in asking]
        assert codes == ["request_quarantined"] * 2
        assert num_dead(cluster) == 2


async def test_a_suspect_is_tried_after_the_first_outputs_of_other_gateways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it is refused for an engine that a request of another gateway ends."""
    generate = SimEngine.generate
    may_answer, is_killed = asyncio.Event(), asyncio.Event()
    slow: list[SimEngine] = []
    tried: list[SimEngine] = []

    async def generate_slowly(
        engine: SimEngine, request: EngineRequest, **of_worker: Any
    ) -> AsyncIterator[EngineOutput]:
        is_slow = len(request.prompt_token_ids) < 20
        (slow if is_slow else tried).append(engine)
        # The suspect has no answer before its first engine is killed.
        await (may_answer if is_slow else is_killed).wait()
        async for output in generate(engine, request, **of_worker):
            yield output

    monkeypatch.setattr(SimEngine, "generate", generate_slowly)
    async with running(0, 2, sim=SIM) as cluster:
        first = cluster.gateway
        await cluster.add_gateway()
        await cluster.ready()
        async with (
            client_of(cluster) as http,
            beside(*(answered(ask(http, f"{i} two", max_tokens=1)) for i in range(4))) as others,
        ):
            await until(lambda: len(slow) == 4 and len(set(slow)) == 2, what="both engines have some")
            cluster.gateway = first
            async with (
                client_of(cluster) as http_of_first,
                beside(answered(ask(http_of_first, prompts(1)[0], max_tokens=1))) as (suspect,),
            ):
                await until(lambda: bool(tried))
                tried[0].kill()
                is_killed.set()
                (left,) = (host for host, engine in cluster.workers if engine is not tried[0])
                await until(lambda: left.server.is_full, what="the suspect waits there")
                assert len(tried) == 1
                may_answer.set()
                await suspect
            assert len(tried) == 2
            await asyncio.gather(*others)


async def test_a_stream_of_another_gateway_outlives_both_engines_that_it_ends(poisoned: object) -> None:
    """That gateway has no other request on them: their workers know that the stream is not to blame."""
    async with running(0, 3, sim=SIM) as cluster:
        first, second = cluster.gateway, await cluster.add_gateway()
        await cluster.ready()
        hosts = dict(cluster.workers)
        # Each takes answers that go on, and nothing else.
        trials = {host: object() for host in hosts}
        for host, trial in trials.items():
            assert host.server.begin_trial(trial)

        async def admit_where_the_stream_runs() -> None:
            def found() -> list[WorkerHost]:
                return [host for host in trials if hosts[host].stats().num_running == 1]

            await until(lambda: bool(found()), what="the stream runs on another worker")
            (host,) = found()
            host.server.end_trial(trials.pop(host))

        cluster.gateway = second
        async with client_of(cluster) as http:
            any_host = next(iter(hosts))
            any_host.server.end_trial(trials[any_host])
            (expected,) = texts(await ask(http, "a stream", max_tokens=1000))
            async with beside(answered(ask(http, "a stream", max_tokens=1000))) as (stream,):
                await admit_where_the_stream_runs()
                cluster.gateway = first
                async with client_of(cluster) as other, beside(answered(ask(other, POISON), 500)) as (poison,):
                    await admit_where_the_stream_runs()
                    answer = await poison
                assert answer.json()["error"]["code"] == "request_quarantined"
                assert num_dead(cluster) == 2
                assert texts(await stream) == [expected]


async def test_a_request_that_ends_engines_after_some_tokens_is_refused_beside_those_of_another_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which has requests without an output on each engine that it ends."""
    generate = SimEngine.generate

    async def generate_and_end(
        engine: SimEngine, request: EngineRequest, **of_worker: Any
    ) -> AsyncIterator[EngineOutput]:
        num_tokens = 0
        async for output in generate(engine, request, **of_worker):
            yield output
            num_tokens += len(output.token_ids)
            if POISON_TOKEN in list(request.prompt_token_ids) and num_tokens >= 5:
                engine.kill()

    monkeypatch.setattr(SimEngine, "generate", generate_and_end)
    async with running(0, 8, sim={**SIM, "prefill_tokens_per_s": 200.0}) as cluster:
        first, second = cluster.gateway, await cluster.add_gateway()
        await cluster.ready()

        async def keep_asking(http: httpx.AsyncClient, client: int) -> None:
            for i in itertools.count():
                await ask(http, " ".join(f"o{client}x{i}x{j}" for j in range(30)), max_tokens=2)

        cluster.gateway = second
        async with client_of(cluster) as others, beside(*(keep_asking(others, client) for client in range(24))):
            await until(lambda: all(engine.stats().num_waiting for _, engine in cluster.workers), what="all are busy")
            cluster.gateway = first
            async with client_of(cluster) as http, asyncio.timeout(SOON_S):
                answer = await ask(http, POISON, max_tokens=400)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "request_quarantined")
        assert num_dead(cluster) <= MAX_BLAMELESS_LOSSES


async def test_copies_of_a_poison_lose_no_more_workers_than_were_hit_at_once(poisoned: object) -> None:
    async with running(0, 8, sim=SIM) as cluster, client_of(cluster) as http:
        await ask(http, f"{POISON} zero")
        num_before = num_dead(cluster)
        answers = await asyncio.gather(*(ask(http, f"{POISON} copies") for _ in range(6)))
        assert [answer.status_code for answer in answers] == [500] * 6
        # Round robin: the copies were on every worker that was left, at most once.
        assert num_dead(cluster) <= 8
        assert num_before == 2


async def test_suspects_of_two_gateways_are_not_tried_on_one_worker_at_once() -> None:
    async with running(0, 1, sim=SIM) as cluster:
        (host,) = cluster.hosts(MemberKind.DECODE)
        server = host.server
        one, other = object(), object()
        assert server.begin_trial(one)
        assert server.begin_trial(one)
        assert not server.begin_trial(other)
        server.end_trial(other)
        assert not server.begin_trial(other)
        server.end_trial(one)
        assert server.begin_trial(other)


async def test_an_engine_that_hangs_is_noticed_while_requests_keep_coming(looks: list[HangDetector]) -> None:
    async with running(0, 1, sim=SIM) as cluster:
        (host,) = cluster.hosts(MemberKind.DECODE)
        hang(cluster.engines(MemberKind.DECODE)[0])
        async with client_of(cluster) as http:
            asked = []
            async with asyncio.timeout(SOON_S):
                while not host.server.died.is_set():
                    asked.append(asyncio.create_task(ask(http, f"number {len(asked)}")))
                    num_looks = len(looks)
                    await until(lambda num_looks=num_looks: len(looks) > num_looks)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        assert "hung" in host.server.why_died
