"""engine/vllm/plugins/tenant_holdings.py"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvferry.engine.base import TierHints
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.pages.outcome import OTHER, Cause, Refusal, TenantUsage
from kvferry.tenancy.terms import TierTerms

from .test_tenant_policy import NOISE, Tier
from .test_tenant_scheduler import BLOCK_SIZE, Steps, prompt_of
from .test_tenant_scheduler import vllm_config as vllm_config

pytestmark = pytest.mark.vllm


ACME = TierHints(Namespace("acme"))
TERMS = TierTerms(cap=1.0)


def sent(stats: Any) -> Any:
    """As vLLM sends statistics from an engine's core to its worker."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    outputs = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    return MsgpackDecoder(EngineCoreOutputs).decode(outputs).scheduler_stats


class Worker:
    """The statistics of an engine, and the worker's end of them."""

    def __init__(self, scheduler: Any) -> None:
        from kvferry.engine.vllm.stat_logger import EngineStatLogger

        self.logger = EngineStatLogger(None)
        self.num_reports = 0
        make_stats = scheduler.make_stats

        def make(*args: Any, **kwargs: Any) -> Any:
            stats = make_stats(*args, **kwargs)
            self.num_reports += stats.ec_connector_stats is not None
            self.logger.record(sent(stats), None)
            return stats

        scheduler.make_stats = make

    @property
    def device(self) -> dict[str, TenantUsage]:
        return self.logger.tier_to_usages.get("device", {})


@pytest.mark.parametrize("is_async", [False, True])
def test_a_worker_sees_what_tenants_hold_in_its_engines_memory(vllm_config: Any, is_async: bool) -> None:
    steps = Steps(vllm_config, is_async=is_async)
    steps.set_terms(acme=TierTerms(floor=0.25, cap=0.5), noise=TERMS, absent=TERMS)
    worker = Worker(steps.scheduler)
    steps.add(prompt_of(1, 18), ACME)
    steps.run()
    (usage,) = worker.device.values()
    assert (usage.used, usage.floor, usage.cap, usage.borrowed) == (18, 10, 20, 8)
    for number in range(20):
        steps.add(prompt_of(1000 + number, 8), NOISE)
    steps.add(prompt_of(5000, 4), None)
    steps.run()
    pages = steps.scheduler._pages
    assert worker.device["acme"].used == 10
    assert worker.device["acme"].evicted[Cause.BORROWED] == 8
    assert worker.device["noise"].displaced >= 8
    assert worker.device[OTHER].used == pages.holding_of("default").used > 0
    assert sum(usage.used for usage in worker.device.values()) == sum(
        block.block_hash is not None for block in steps.scheduler._pool.blocks
    )


def test_what_expired_is_counted(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.engine.vllm.plugins import tenant_scheduler

    steps = Steps(vllm_config, is_async=False)
    worker = Worker(steps.scheduler)
    steps.set_terms(acme=TierTerms(cap=1.0, ttl_s=5.0), noise=TERMS)
    steps.add(prompt_of(1, 6), ACME)
    steps.run()
    later_s = tenant_scheduler.time.monotonic() + 6.0
    monkeypatch.setattr(tenant_scheduler.time, "monotonic", lambda: later_s)
    steps.add(prompt_of(2, 2), NOISE)
    steps.run()
    assert (worker.device["acme"].used, worker.device["acme"].evicted[Cause.EXPIRED]) == (0, 6)
    assert worker.device["noise"].displaced == 0, "those would have gone anyway"


def test_reports_are_a_second_apart_while_requests_run(vllm_config: Any) -> None:
    from kvferry.engine.vllm.plugins import tenant_holdings

    steps, now_s = Steps(vllm_config, is_async=False), 100.0
    steps.scheduler._report._now_s = lambda: now_s
    worker = Worker(steps.scheduler)
    steps.set_terms(acme=TERMS)
    steps.add(prompt_of(1, 2), ACME, max_tokens=20 * BLOCK_SIZE)
    for _ in range(5 * BLOCK_SIZE):
        steps.step()
    assert worker.num_reports == 1
    held = worker.device["acme"].used
    now_s += tenant_holdings.PERIOD_S
    steps.step()
    assert worker.num_reports == 2
    assert worker.device["acme"].used > held
    steps.run()
    assert worker.num_reports == 3, "what happened since is told before the engine is idle"
    assert worker.device["acme"].used == steps.scheduler._pages.holding_of("acme").used
    steps.scheduler.make_stats()
    assert worker.num_reports == 3, "nothing has changed"


def test_a_worker_sees_what_tenants_hold_in_the_cpu_tier() -> None:
    from vllm.v1.metrics.stats import SchedulerStats

    from kvferry.engine.vllm.plugins.tenant_holdings import HoldingsReport
    from kvferry.engine.vllm.stat_logger import EngineStatLogger

    tier, report, logger = Tier(), HoldingsReport(), EngineStatLogger(None)
    report.add("cpu", tier.policy, 2)

    def usages() -> dict[str, TenantUsage]:
        stats = SchedulerStats()
        report.attach_to(stats)
        logger.record(sent(stats), None)
        return logger.tier_to_usages.get("cpu", {})

    assert usages() == {}
    tier.policy.set_terms({"greedy": TierTerms(cap=0.25)})
    tier.store(range(20), ACME)
    usage = usages()["acme"]
    assert (usage.used, usage.floor, usage.cap, usage.borrowed) == (40, 20, 40, 20), "pages, two of them a chunk"
    for first in range(1000, 1200, 8):
        tier.store(range(first, first + 8), NOISE)
    assert usages()["acme"].evicted[Cause.BORROWED] == 20
    assert usages()["noise"].displaced == 20
    assert usages()["noise"].evicted[Cause.OWN] > 0
    assert not tier.store(range(5000, 5035), TierHints(Namespace("greedy")))
    assert usages()["greedy"].refused == {Refusal.LIMIT: 70, Refusal.NO_ROOM: 0}
    tier.manager.reset_cache()
    assert {name: usage.used for name, usage in usages().items()} == {"acme": 0, "noise": 0, "greedy": 0}
    assert usages()["acme"].floor == 20


def test_tenants_without_known_terms_are_summed_up_in_the_cpu_tier() -> None:
    tier = Tier()
    tier.store(range(4), TierHints(Namespace("stranger")))
    assert dict(tier.policy.changed_holdings())["stranger"].used == 4
    assert not tier.policy.counts.has_name("stranger")
    tier.manager.reset_cache()
    assert dict(tier.policy.changed_holdings())["stranger"] == (0, 0, 0, 0)
    assert dict(tier.policy.changed_holdings()) == {}


def test_the_scheduler_finds_the_tier_among_vllms_connectors() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
    from vllm.v1.core.sched.scheduler import Scheduler

    from kvferry.engine.vllm.plugins.tenant_scheduler import connectors_of

    several = MultiConnector.__new__(MultiConnector)
    several._connectors = [1, 2]  # type: ignore[list-item]
    assert connectors_of(several) == [1, 2]
    assert connectors_of(None) == [None]
    assert "self.connector" in inspect.getsource(Scheduler.__init__)
