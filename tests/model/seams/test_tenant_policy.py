"""engine/vllm/plugins/tier/tenant_policy.py"""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from kvferry.engine.base import TierHints
from kvferry.tenancy import terms
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.terms import TierTerms

from .support import parameters

pytestmark = pytest.mark.vllm


CAPACITY = 40


ACME, NOISE, CAPPED = (TierHints(Namespace(tenant)) for tenant in ("acme", "noise", "capped"))
TERMS = {"acme": TierTerms(floor=0.25, cap=0.5), "noise": TierTerms(cap=1.0)}


class State:
    """What our connector keeps with a request."""

    def __init__(self, hints: TierHints) -> None:
        self.hints = hints


class Tier:
    """vLLM's own manager of a CPU tier with our policy."""

    def __init__(self, capacity: int = CAPACITY, policy: str = "TenantCachePolicy") -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from kvferry.engine.vllm.plugins.tier.tenant_policy import keep_contracts
        from kvferry.engine.vllm.start.arguments import CPU_POLICY_MODULE

        self.manager = CPUOffloadingManager(capacity, policy, CPU_POLICY_MODULE)
        if (kept := keep_contracts(self.manager)) is not None:
            kept.set_terms(TERMS)
        self._requests = 0

    @property
    def policy(self) -> Any:
        return self.manager._policy

    def request(self, hints: TierHints) -> Any:
        from vllm.v1.kv_offload.base import ReqContext

        from kvferry.engine.vllm.plugins.tier.request_tier_state import RequestTierState

        self._requests += 1
        context = ReqContext(f"r{self._requests}")
        state = RequestTierState.__new__(RequestTierState)
        state.hints = hints
        context.set_state(state)
        return context

    def store(self, numbers: range | list[int], hints: TierHints, *, success: bool = True) -> bool:
        context, keys = self.request(hints), [key_of(number) for number in numbers]
        output = self.manager.prepare_store(keys, context)
        if output is None:
            return False
        self.manager.complete_store(output.keys_to_store, context, success)
        self.manager.on_request_finished(context)
        return True

    def use(self, numbers: list[int], hints: TierHints) -> None:
        """A request that hits chunks, and ends."""
        context, keys = self.request(hints), [key_of(number) for number in numbers]
        for position, key in enumerate(keys):
            context.set_offload_key_position(key, position)
        self.manager.prepare_load(keys, context)
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)

    def held(self, numbers: range) -> int:
        return sum(self.policy.get(key_of(number)) is not None for number in numbers)


def key_of(number: int) -> Any:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(number.to_bytes(8, "big"), 0)


def test_vllm_asks_a_policy_for_what_ours_does() -> None:
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy

    from kvferry.engine.vllm.plugins.tier.tenant_policy import TenantCachePolicy

    assert CachePolicy.__abstractmethods__ == {"get", "insert", "remove", "touch", "evict", "clear"}
    assert not TenantCachePolicy.__abstractmethods__
    for name in (
        "evict",
        "insert",
        "touch",
        "on_store_miss",
        "on_request_finished",
        "mark_evictable",
        "mark_non_evictable",
    ):
        assert parameters(getattr(CachePolicy, name)) == parameters(getattr(TenantCachePolicy, name))


def test_vllms_manager_stores_in_the_two_ways_that_we_hook() -> None:
    from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager

    tier = CPUPrimaryTierOffloadingManager.__init__.__code__.co_names
    assert "prepare_write" in tier
    assert "prepare_store" in tier


def test_a_floor_survives_a_flood_of_ten_times_the_tier() -> None:
    tier = Tier()
    assert tier.store(range(10), ACME)
    for first in range(1000, 1000 + 10 * CAPACITY, 8):
        assert tier.store(range(first, first + 8), NOISE)
    assert tier.held(range(10)) == 10
    stock = Tier(policy="lru")
    stock.store(range(10), ACME)
    for first in range(1000, 1000 + 10 * CAPACITY, 8):
        stock.store(range(first, first + 8), NOISE)
    assert stock.held(range(10)) == 0, "so the flood is one"


def test_what_is_above_the_floor_is_lent_and_a_cap_holds() -> None:
    tier = Tier()
    assert tier.store(range(30), ACME)  # beyond its cap, into free room
    for first in range(1000, 1400, 10):
        assert tier.store(range(first, first + 10), NOISE)
    assert tier.held(range(30)) == 10
    tier.policy.set_terms({"capped": TierTerms(cap=0.25)})
    for first in range(2000, 2400, 10):
        assert tier.store(range(first, first + 10), CAPPED)
    assert tier.held(range(2000, 2400)) == 10
    assert tier.held(range(30)) == 10


def test_chunks_in_use_and_of_the_same_prompt_do_not_go() -> None:
    tier = Tier(8)
    assert tier.store(range(4), NOISE)
    reading = tier.request(NOISE)
    tier.manager.prepare_load([key_of(number) for number in range(4)], reading)
    assert tier.store(range(100, 104), NOISE)
    assert not tier.store(range(200, 205), NOISE), "only four may go"
    assert tier.store(range(200, 204), NOISE)
    assert tier.held(range(4)) == 4
    tier.manager.complete_load([key_of(number) for number in range(4)], reading)
    assert tier.store([*range(4), *range(300, 304)], NOISE)
    assert (tier.held(range(4)), tier.held(range(300, 304))) == (4, 4)


def test_a_failed_store_leaves_no_trace_and_a_reset_none_of_all() -> None:
    tier = Tier(8)
    assert tier.store(range(8), ACME, success=False)
    assert tier.held(range(8)) == 0
    assert tier.store(range(8), ACME)
    tier.manager.reset_cache()
    assert tier.held(range(8)) == 0
    assert tier.store(range(8), NOISE)
    tier.policy._retention.check()


def test_a_wanted_prefix_survives_its_tenants_flood_and_no_other_tenant_pays() -> None:
    held = []
    for wanted_s in (None, 3600.0):
        tier = Tier()
        assert tier.store(range(20), NOISE)
        assert tier.store(range(100, 108), structs.replace(ACME, wanted_s=wanted_s))
        for first in range(1000, 1400, 8):
            assert tier.store(range(first, first + 8), ACME)
        held.append((tier.held(range(100, 108)), tier.held(range(20))))
        tier.policy._retention.check()
    (without, others_without), (with_hint, others) = held
    assert (without, with_hint) == (0, 8)
    assert others == others_without > 0


def test_chunks_of_an_ended_session_go_before_older_ones_but_not_a_shared_prompt() -> None:
    tier = Tier()
    assert tier.store(range(20), NOISE)
    ending = structs.replace(ACME, wanted_s=0.0)
    assert tier.store(range(100, 104), ACME)  # a system prompt
    assert tier.store(range(200, 204), ACME)  # of a session that goes on
    for first in (300, 310, 320):
        tier.use([*range(100, 104)], ACME)
        assert tier.store(range(first, first + 2), ACME)
    tier.use([*range(100, 104), 320, 321], ending)
    assert tier.store(range(400, 408), ACME)
    assert tier.held(range(320, 322)) == 0
    assert tier.held(range(100, 104)) == 4
    assert tier.held(range(200, 204)) + tier.held(range(300, 312)) == 8, "older chunks of the tenant"
    assert tier.held(range(20)) == 20
    tier.policy._retention.check()


def test_contracts_are_limited_to_the_tenants_that_were_seen_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "MAX_KNOWN", 4)
    tier = Tier()
    tier.policy.set_terms({f"t{number}": TierTerms() for number in range(20)})
    assert tier.policy._contracts == {}
    for number in range(20):
        tier.store(range(5000 + number, 5001 + number), TierHints(Namespace(f"t{number}")))
    assert tier.policy._contracts.keys() == {"t16", "t17", "t18", "t19"}


def test_changed_terms_hold_without_a_request() -> None:
    tier = Tier()
    tier.store(range(20), ACME)
    for floor, first_of_flood, num_held in ((0.5, 1000, 20), (0.1, 2000, 4), (0.0, 3000, 0)):
        tier.policy.set_terms({"acme": TierTerms(floor=floor, cap=0.5)})
        for first in range(first_of_flood, first_of_flood + 400, 8):
            tier.store(range(first, first + 8), NOISE)
        assert tier.held(range(20)) == num_held


def test_chunks_of_a_tenant_without_a_record_get_a_floor_when_it_has_one() -> None:
    tier = Tier()
    tier.store(range(10), CAPPED)
    assert dict(tier.policy.changed_holdings())["capped"] == (10, 0, CAPACITY // 2, 10)
    tier.policy.set_terms({"capped": TierTerms(floor=0.25)})
    for first in range(1000, 1400, 8):
        tier.store(range(first, first + 8), NOISE)
    assert tier.held(range(10)) == 10


@pytest.mark.parametrize("seed", range(10))
def test_the_accounts_of_manager_and_policy_are_one(seed: int) -> None:
    """Random stores, failures, reads and resets, some of tenants whose terms are not known."""
    chance, tier = random.Random(seed), Tier(16)
    tier.policy.set_terms({"capped": TierTerms(floor=0.1, cap=0.2)})
    everybody = [ACME, NOISE, TierHints(), CAPPED]
    reads: list[tuple[list[Any], Any]] = []
    for _ in range(400):
        verb = chance.choices(("store", "fail", "read", "end", "reset"), (10, 2, 5, 5, 0.05))[0]
        first = chance.randrange(60)
        numbers = range(first, first + chance.randrange(1, 6))
        if verb in ("store", "fail"):
            tier.store(numbers, chance.choice(everybody), success=verb == "store")
        elif verb == "read":
            keys = [key for key in map(key_of, numbers) if tier.policy.get(key) is not None]
            if keys:
                context = tier.request(chance.choice(everybody))
                tier.manager.prepare_load(keys, context)
                reads.append((keys, context))
        elif reads and verb == "end":
            keys, context = reads.pop(chance.randrange(len(reads)))
            tier.manager.complete_load(keys, context)
            tier.manager.on_request_finished(context)
        elif verb == "reset" and not reads:
            tier.manager.reset_cache()
        tier.policy._retention.check()
        evictable = sum(chunk.status.ref_cnt == 0 for chunk in tier.policy._chunks.values())
        assert tier.manager._num_evictable_cache_chunks == evictable
        assert len(tier.policy._chunks) == tier.policy._retention.used <= 16
