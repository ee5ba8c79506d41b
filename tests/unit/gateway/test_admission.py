"""What one request may take, and what all of a gateway may have in flight, each at its limit and one over it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kvferry.config import GatewayConfig
from kvferry.engine.base import RenderedPrompt, Sampling
from kvferry.errors import InvalidRequest, NotReady, Overloaded, TenantOverloaded
from kvferry.gateway.admission import (
    MAX_ANSWER_TOKENS,
    MAX_LOGPROB_CHOICES,
    MAX_LOGPROB_ENTRIES,
    Admission,
    Claim,
    Readiness,
)
from kvferry.gateway.identity.tenant_requests import TenantRequests
from kvferry.gateway.metrics import GatewayMetrics


def admission(*, has_tenants: bool = False, **values: int) -> Admission:
    config = GatewayConfig.model_validate({"max_body_bytes": 1024, **values})
    by_tenant = TenantRequests() if has_tenants else None
    return Admission(config, GatewayMetrics(), lambda: Readiness(True, (), ()), by_tenant=by_tenant)


def prompt(num_tokens: int, max_tokens: int, logprobs: int | None = None) -> RenderedPrompt:
    return RenderedPrompt([1] * num_tokens, Sampling(max_tokens=max_tokens, logprobs=logprobs))


@pytest.mark.parametrize(
    ("limit", "key", "take"),
    [
        ("gateway.max_requests is", "choices", Claim.take_choices),
        ("a gateway takes", "prompt_tokens", Claim.take_prompt_tokens),
        ("those of all requests may have", "body_bytes", Claim.add_body_bytes),
    ],
)
def test_a_limit_counts_what_all_requests_hold(limit: str, key: str, take: Callable[[Claim, int], None]) -> None:
    gateway = admission()
    getattr(gateway, key).most = 2048
    with gateway.count_request("completions") as one, gateway.count_request("completions") as other:
        take(one.claim, 2000)
        take(other.claim, 48)
        with pytest.raises(Overloaded, match=f"{limit} 2048") as refused:
            take(other.claim, 1)
        assert refused.value.retry_after_s is not None
        assert sum(gateway.in_flight) == 2048
    assert gateway.in_flight == (0, 0, 0)
    with gateway.count_request("completions") as again:
        take(again.claim, 2048)


def test_bytes_of_a_body_count_until_it_is_rendered() -> None:
    gateway = admission()
    with gateway.count_request("completions") as one:
        one.claim.add_body_bytes(2048)
        one.claim.take_choices(1)
        assert gateway.in_flight == (1, 0, 2048)
        one.claim.take_answer([prompt(17, 1)], 1)
        assert gateway.in_flight == (1, 17, 0)
    assert gateway.in_flight == (0, 0, 0)


def test_what_an_idle_gateway_would_refuse_too_is_no_overload() -> None:
    gateway = admission(max_requests=4)
    gateway.prompt_tokens.most = 100
    with gateway.count_request("completions") as one:
        with pytest.raises(InvalidRequest, match=r"5 choices are too many; gateway\.max_requests is 4"):
            one.claim.take_choices(5)
        with pytest.raises(InvalidRequest, match=r"102 prompt tokens of all choices are too many; a gateway takes 100"):
            one.claim.take_answer([prompt(17, 1), prompt(17, 1)], 3)
    assert gateway.in_flight == (0, 0, 0)


def test_prompt_tokens_count_once_for_each_choice() -> None:
    gateway = admission()
    with gateway.count_request("completions") as one:
        one.claim.take_answer([prompt(10, 1), prompt(5, 1)], 4)
        assert gateway.prompt_tokens.num_taken == 60


@pytest.mark.parametrize(
    ("num_choices", "max_tokens", "num_top"),
    [
        (4, MAX_ANSWER_TOKENS // 4, None),
        (512, MAX_ANSWER_TOKENS // 512, None),
        (1, MAX_LOGPROB_ENTRIES, 0),
        (16, MAX_LOGPROB_ENTRIES // 16 // 4, 3),
    ],
)
def test_the_product_of_limits_is_limited(num_choices: int, max_tokens: int, num_top: int | None) -> None:
    gateway = admission()
    with gateway.count_request("completions") as one:
        one.claim.take_answer([prompt(1, max_tokens, num_top)], num_choices)
        with pytest.raises(InvalidRequest, match="at most") as refused:
            one.claim.take_answer([prompt(1, max_tokens + 1, num_top)], num_choices)
        assert refused.value.param == "max_tokens"
        assert str(max_tokens + 1) in refused.value.message


@pytest.mark.parametrize(("num_choices", "num_top"), [(MAX_LOGPROB_CHOICES, 0), (64, 3), (12, 20)])
def test_log_probabilities_of_a_step_are_limited(num_choices: int, num_top: int) -> None:
    gateway = admission()
    with gateway.count_request("completions") as one:
        one.claim.take_answer([prompt(1, 1, num_top)], num_choices)
        with pytest.raises(InvalidRequest, match="at most 64 choices and 256 a token are allowed") as refused:
            one.claim.take_answer([prompt(1, 1, num_top)], num_choices + 1)
        assert refused.value.param == "n"


def test_a_full_or_leaving_gateway_refuses_before_it_reads() -> None:
    gateway = admission(max_requests=2)
    gateway.require_admission(can_render=True)
    with gateway.count_request("completions") as one:
        one.claim.take_choices(2)
        with pytest.raises(Overloaded, match=r"gateway\.max_requests is 2"):
            gateway.require_admission(can_render=True)
    gateway.draining = True
    with pytest.raises(NotReady):
        gateway.require_admission(can_render=True)


def test_a_tenant_holds_no_more_of_a_gateway_than_is_left_for_others() -> None:
    gateway = admission(max_requests=64, has_tenants=True)
    gateway.prompt_tokens.most = 6400
    with gateway.count_request("completions") as flood, gateway.count_request("completions") as other:
        gateway.note_tenant(flood, "noise")
        gateway.note_tenant(other, "gold")
        flood.claim.take_choices(32)
        with pytest.raises(TenantOverloaded, match="would have 33 choices in flight at this gateway, more than"):
            flood.claim.take_choices(1)
        other.claim.take_choices(16)
        with pytest.raises(TenantOverloaded):
            other.claim.take_choices(1)
        with pytest.raises(
            InvalidRequest, match="3201 prompt tokens of all choices are too many; of this gateway's 6400"
        ):
            flood.claim.take_prompt_tokens(3201)
        flood.claim.take_prompt_tokens(3200)
        other.claim.take_prompt_tokens(1600)
        with flood.claim.fetching(8, 0, 16):
            with pytest.raises(TenantOverloaded, match="9 fetches of images in flight at this gateway, more than"):
                flood.claim.fetching(1, 8, 16).__enter__()
            with other.claim.fetching(4, 8, 16), pytest.raises(TenantOverloaded):
                other.claim.fetching(1, 12, 16).__enter__()
        with flood.claim.fetching(8, 0, 16), pytest.raises(InvalidRequest, match="9 fetches of images are too many"):
            flood.claim.fetching(9, 0, 16).__enter__()
    assert not any(budget.by_tenant for budget in (gateway.choices, gateway.prompt_tokens, gateway.fetches))
    assert gateway.in_flight == (0, 0, 0)


def test_where_there_are_no_tenants_one_client_may_have_all() -> None:
    gateway = admission(max_requests=64)
    with gateway.count_request("completions") as one:
        one.claim.take_choices(64)
        assert not gateway.choices.by_tenant


def test_a_starting_gateway_names_no_pool() -> None:
    readiness = Readiness(False, ["renderer", "decode worker of pool finance"], members=())
    starting = Admission(GatewayConfig(), GatewayMetrics(), lambda: readiness)
    with pytest.raises(NotReady, match=r"waiting for renderer, decode worker$"):
        starting.require_admission(can_render=False)


@pytest.mark.parametrize("has_tenants", [True, False])
@pytest.mark.parametrize("what", ["take_choices", "take_prompt_tokens", "hold_images", "add_body_bytes"])
def test_refusals_say_nothing_of_what_others_have_in_flight(what: str, has_tenants: bool) -> None:
    """A tenant that asks again and again would follow each request of the others."""
    of_others = (5, 12, 21) if has_tenants and what != "add_body_bytes" else (25, 28, 31)
    messages = set()
    for num_of_others in of_others:
        gateway = admission(max_requests=64, has_tenants=has_tenants)
        gateway.prompt_tokens.most = gateway.image_bytes.most = gateway.body_bytes.most = 64
        with gateway.count_request("completions") as one, gateway.count_request("completions") as other:
            gateway.note_tenant(one, "evil")
            gateway.note_tenant(other, "acme")
            getattr(one.claim, what)(20)
            getattr(other.claim, what)(num_of_others)
            with pytest.raises(Overloaded) as refused:
                getattr(one.claim, what)(40 if what == "hold_images" else 20)
            messages.add(refused.value.message)
    (message,) = messages
    assert re.search(r"\b[24]0\b", message), "the tenant's own figure is there"
    assert re.search(r"\b64\b", message), "and the limit"
