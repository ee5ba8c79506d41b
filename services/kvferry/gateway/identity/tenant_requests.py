"""Requests of tenants at a gateway: those that a deletion ends, and limits that also count other gateways."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from kvferry.errors import InvalidRequest, KvferryError, TenantLimited
from kvferry.tenancy.limits import LimitName, Limits, TenantLimits


class Endable(Protocol):
    tenant: str

    def end(self, error: KvferryError) -> None: ...


class TenantRequests:
    def __init__(self) -> None:
        self._by_tenant: dict[str, set[Endable]] = {}

    def __repr__(self) -> str:
        return f"<TenantRequests of {len(self._by_tenant)} tenants>"

    def add(self, request: Endable, tenant: str) -> None:
        request.tenant = tenant
        self._by_tenant.setdefault(tenant, set()).add(request)

    def remove(self, request: Endable) -> None:
        requests = self._by_tenant[request.tenant]
        requests.discard(request)
        if not requests:
            del self._by_tenant[request.tenant]

    def end(self, tenant: str, error: KvferryError) -> int:
        """End a tenant's requests with an error each; return their number."""
        requests = self._by_tenant.get(tenant, set())
        for request in requests:
            request.end(error)
        return len(requests)


_NONE: Final = Limits()


class GatewayLimits:
    def __init__(self, limits_of: Callable[[str], Limits | None], clock: Callable[[], float] = time.monotonic) -> None:
        """`limits_of` returns a tenant's limits as they are now, None without a record."""
        self._limits_of = limits_of
        self._clock = clock
        self._by_tenant: dict[str, TenantLimits] = {}
        self._elsewhere: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"<GatewayLimits of {len(self._by_tenant)} tenants>"

    def admit(self, tenant: str, num_choices: int, num_tokens: int) -> bool:
        """Return whether `end` must follow. Raises TenantLimited, and InvalidRequest for more than is ever admitted."""
        known = self._known(tenant)
        if known is None:
            return False
        most = known.limits.max_choices
        if most is not None and num_choices > most:
            raise InvalidRequest(f"{num_choices} choices are too many: this tenant's max_choices is {most}", param="n")
        refusal = known.admit(num_choices, num_tokens, self._clock())
        if refusal is None:
            return True
        if refusal.limit is LimitName.CHOICES:
            num_running = known.num_choices + known.num_choices_elsewhere
            fact = f"{num_running} choices of it are in flight, and this request has {num_choices}"
        else:
            fact = f"it may come back in {refusal.retry_after_s} s"
        raise TenantLimited(
            f"this tenant's {refusal.limit.value} is {refusal.allowed:g}: {fact}", retry_after_s=refusal.retry_after_s
        )

    def end(self, tenant: str, num_choices: int) -> None:
        known = self._by_tenant.get(tenant)
        if known is not None:
            known.end(num_choices)

    def take_back(self, tenant: str, num_requests: int, num_tokens: int = 0) -> None:
        if (known := self._known(tenant)) is not None:
            known.take_back(num_requests, num_tokens, self._clock())

    def used(self, tenant: str, num_requests: int, num_tokens: int) -> None:
        if (known := self._known(tenant)) is not None:
            known.used(num_requests, num_tokens, self._clock())

    def set_running(self, elsewhere: Mapping[str, int]) -> None:
        """Replace the numbers of choices that other gateways have in flight, by tenant."""
        self._elsewhere = elsewhere
        for name, known in self._by_tenant.items():
            known.num_choices_elsewhere = elsewhere.get(name, 0)

    def _known(self, tenant: str) -> TenantLimits | None:
        limits = self._limits_of(tenant)
        known = self._by_tenant.get(tenant)
        if limits is None or limits == _NONE:
            if known is not None and not known.num_choices:
                del self._by_tenant[tenant]
            elif known is not None:
                known.set(_NONE, self._clock())
            return None
        if known is None:
            known = self._by_tenant[tenant] = TenantLimits(limits, self._clock())
            known.num_choices_elsewhere = self._elsewhere.get(tenant, 0)
        elif known.limits is not limits and known.limits != limits:
            known.set(limits, self._clock())
        return known
