"""Limits of tenants at one gateway: errors, changes of contracts, and what other gateways admit."""

from __future__ import annotations

import pytest

from kvferry.errors import InvalidRequest, TenantLimited
from kvferry.gateway.identity.tenant_requests import GatewayLimits
from kvferry.tenancy.limits import Limits


class Contracts:
    def __init__(self, **limits: Limits | None) -> None:
        self.limits = limits
        self.now_s = 0.0

    def gateway(self) -> GatewayLimits:
        return GatewayLimits(lambda tenant: self.limits.get(tenant), clock=lambda: self.now_s)


def test_the_error_names_the_limit_and_when_to_come_back() -> None:
    gateway = Contracts(acme=Limits(requests_per_minute=6, max_choices=3)).gateway()
    assert gateway.admit("acme", 1, 10)
    with pytest.raises(
        TenantLimited, match="this tenant's requests_per_minute is 6: it may come back in 10 s"
    ) as caught:
        gateway.admit("acme", 1, 10)
    assert (caught.value.http_status, caught.value.retry_after_s) == (429, 10)
    gateway = Contracts(acme=Limits(max_choices=3)).gateway()
    gateway.admit("acme", 2, 10)
    with pytest.raises(TenantLimited, match="max_choices is 3: 2 choices of it are in flight, and this request has 2"):
        gateway.admit("acme", 2, 10)


def test_a_request_of_more_choices_than_are_ever_admitted_is_refused_for_good() -> None:
    limits = GatewayLimits({"acme": Limits(max_choices=2)}.get, lambda: 0.0)
    with pytest.raises(InvalidRequest, match="3 choices are too many: this tenant's max_choices is 2"):
        limits.admit("acme", 3, 1)
    assert limits.admit("acme", 2, 1)


def test_tenants_without_limits_leave_no_trace() -> None:
    contracts = Contracts(acme=Limits())
    gateway = contracts.gateway()
    for tenant in ("acme", "nobody"):
        assert not gateway.admit(tenant, 512, 10**6)
        gateway.used(tenant, 10, 10)
        gateway.end(tenant, 512)
    assert not gateway._by_tenant


def test_a_limit_that_is_taken_away_while_requests_run_lets_all_pass() -> None:
    contracts = Contracts(acme=Limits(max_choices=1))
    gateway = contracts.gateway()
    assert gateway.admit("acme", 1, 1)
    contracts.limits["acme"] = Limits()
    assert not gateway.admit("acme", 5, 1)
    gateway.end("acme", 1)
    contracts.limits["acme"] = Limits(max_choices=1)
    assert gateway.admit("acme", 1, 1)


def test_choices_at_other_gateways_count_also_for_a_tenant_that_comes_later() -> None:
    gateway = Contracts(acme=Limits(max_choices=4)).gateway()
    gateway.set_running({"acme": 3})
    assert gateway.admit("acme", 1, 1)
    with pytest.raises(TenantLimited):
        gateway.admit("acme", 1, 1)
    gateway.set_running({})
    assert gateway.admit("acme", 1, 1)


def test_one_tenants_limit_is_not_anothers() -> None:
    gateway = Contracts(acme=Limits(requests_per_minute=6), beta=Limits(requests_per_minute=6)).gateway()
    gateway.admit("acme", 1, 1)
    assert gateway.admit("beta", 1, 1)
