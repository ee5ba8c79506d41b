"""One run: look at the target, send the plan, come to a result."""

from __future__ import annotations

import asyncio
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import uvloop

from kvferry_loadtest import __version__, measures
from kvferry_loadtest.apis import Api, Sampling
from kvferry_loadtest.engine import Engine
from kvferry_loadtest.errors import KeyRefused, ScenarioError, TargetError
from kvferry_loadtest.floor import floor_of
from kvferry_loadtest.grpc_api import SCHEMES, GrpcApi
from kvferry_loadtest.http_client import Endpoint, HttpClient
from kvferry_loadtest.machine import machine_line
from kvferry_loadtest.openai_api import OpenAiApi
from kvferry_loadtest.plan import Plan
from kvferry_loadtest.record import Record
from kvferry_loadtest.result import Result
from kvferry_loadtest.scenario import Scenario
from kvferry_loadtest.server_metrics import Sampler, server_of
from kvferry_loadtest.watch import Watch, punctual

PROGRESS_EVERY_S = 0.25
RECENT_S = 5.0


@dataclass(frozen=True)
class Target:
    """An endpoint. Keys are read from the environment, so that no command line and no result has one."""

    urls: Sequence[str]  # servers that are alike, asked in turn
    deployment: str
    model: str = ""  # empty: the first that it serves
    api_key_env: str = ""
    metrics_urls: Sequence[str] | None = None  # None: /metrics of each server
    versions: Mapping[str, str] = field(default_factory=dict)  # of what is deployed, where somebody knows


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    planned: int
    sent: int
    in_flight: int
    ok: int
    missed: int
    elapsed_s: float
    ttft_p50_ms: float | None  # of the last seconds


@dataclass
class Outcomes:
    """A result and what it was made of."""

    result: Result
    records: list[Record] = field(default_factory=list)


def run(
    scenario: Scenario,
    plan: Plan,
    target: Target,
    *,
    repeat: int = 0,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Outcomes:
    """Raises TargetError when the target cannot be used, ScenarioError when a tenant's key is not set."""
    tenant_to_key = {
        tenant.name: _key(tenant.api_key_env, f"tenant {tenant.name}")
        for tenant in scenario.tenants
        if tenant.api_key_env
    }
    default_key = _key(target.api_key_env, "the target") if target.api_key_env else ""
    with punctual():
        outcomes: Outcomes = uvloop.run(_run(scenario, plan, target, tenant_to_key, default_key, repeat, on_progress))
    return outcomes


async def _run(
    scenario: Scenario,
    plan: Plan,
    target: Target,
    tenant_to_key: Mapping[str, str],
    default_key: str,
    repeat: int,
    on_progress: Callable[[Progress], None],
) -> Outcomes:
    apis = apis_of(target.urls)
    headers = {"authorization": f"Bearer {default_key}"} if default_key else {}
    urls = target.metrics_urls
    if urls is None:
        # Whoever speaks gRPC tells its metrics elsewhere.
        urls = [f"{api.url}/metrics" for api in apis if isinstance(api, OpenAiApi)]
    metrics_clients = [HttpClient(Endpoint(url)) for url in urls]
    watch = Watch()
    try:
        model = target.model
        for api in apis:
            # The first one's choice is asked of all.
            model = await look_at(api, model, default_key, target.api_key_env)
        engine = Engine(
            plan,
            apis,
            Sampling(
                model=model,
                temperature=scenario.temperature,
                ignore_eos=scenario.ignore_eos,
                timeout_s=scenario.request_timeout_s,
            ),
            loop_kind=scenario.loop,
            num_users=scenario.concurrency or 1,
            tenant_to_key=tenant_to_key,
            default_key=default_key,
        )
        sampler = Sampler(metrics_clients, headers, engine.now_s)

        async def begin_to_measure() -> None:
            await sampler.begin()
            watch.begin()

        started_at = datetime.datetime.now(datetime.UTC)
        shown = asyncio.create_task(_show(engine, on_progress))
        try:
            records = await engine.run(begin_to_measure)
            watch.end()
            await sampler.end()
        finally:
            shown.cancel()
            await asyncio.gather(shown, return_exceptions=True)
        on_progress(_progress(engine))
    finally:
        for api in apis:
            await api.close()
        for client in metrics_clients:
            await client.close()

    counted = [record for record in records if not record.warmup]
    length_s = measures.duration_s(counted)
    tenants = sorted({record.tenant for record in counted})
    result = Result(
        deployment=target.deployment,
        scenario=plan.scenario,
        parameters={**scenario.parameters(), **plan.notes},
        seed=plan.seed,
        repeat=repeat,
        loop=scenario.loop,
        target={"url": " ".join(api.url for api in apis), "model": model},
        machine=machine_line(),
        started_at=started_at.isoformat(timespec="seconds"),
        duration_s=length_s,
        objective=scenario.objective,
        overall=measures.group_of(counted, scenario.objective, length_s),
        tenants={
            tenant: measures.group_of(
                [record for record in counted if record.tenant == tenant], scenario.objective, length_s
            )
            for tenant in (tenants if len(tenants) > 1 else ())
        },
        floor=floor_of(plan, scenario.page_tokens, scenario.chat_template),
        server=server_of(sampler.first, sampler.last, sampler.samples, counted),
        harness=watch.verdict(counted),
        seconds=measures.seconds_of(counted, sampler.samples),
        errors=measures.errors_of(counted),
        versions={"kvferry-loadtest": __version__, **target.versions},
    )
    return Outcomes(result, records)


def apis_of(urls: Sequence[str]) -> list[Api]:
    """Raises TargetError for what is no URL, and for HTTP and gRPC in one run."""
    kinds = {urlsplit(url).scheme in SCHEMES for url in urls}
    if len(kinds) > 1:
        raise TargetError("servers that are asked in turn speak one protocol: HTTP or gRPC")
    return [GrpcApi(url) for url in urls] if kinds == {True} else [OpenAiApi(Endpoint(url)) for url in urls]


async def look_at(api: Api, model: str, key: str, key_name: str) -> str:
    """The model to ask for. Raises TargetError: unreachable, refuses the key, does not serve the model."""
    try:
        models = await api.models(key)
    except KeyRefused as error:
        which = f"the key in ${key_name}" if key_name else "requests without a key (--api-key-env)"
        raise TargetError(f"{api.url}: refuses {which}: {error.reason}") from None
    if not models:
        raise TargetError(f"{api.url}: serves no model")
    if model and model not in models:
        raise TargetError(f"{api.url}: does not serve {model!r}, but {', '.join(models)}")
    return model or models[0]


async def _show(engine: Engine, on_progress: Callable[[Progress], None]) -> None:
    while True:
        await asyncio.sleep(PROGRESS_EVERY_S)
        on_progress(_progress(engine))


def _progress(engine: Engine) -> Progress:
    now_s = engine.now_s()
    recent = sorted(record.ttft_s for record in engine.recently_ended(now_s - RECENT_S) if record.ttft_s is not None)
    return Progress(
        planned=len(engine.records),
        sent=engine.num_sent,
        in_flight=engine.num_in_flight,
        ok=engine.num_ok,
        missed=engine.num_ended - engine.num_ok,
        elapsed_s=now_s,
        ttft_p50_ms=recent[len(recent) // 2] * 1e3 if recent else None,
    )


def _key(name: str, whose: str) -> str:
    key = os.environ.get(name, "")
    if not key:
        raise ScenarioError(f"the key of {whose} is read from ${name}, which is not set")
    return key
