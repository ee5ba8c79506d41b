"""Requests in flight by tenant, to end those of a tenant that is deleted."""

from __future__ import annotations

from typing import Protocol

from kvferry.errors import KvferryError


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
