"""Authentication for HTTP and gRPC (matrix: docs/security.md)."""

from __future__ import annotations

import functools

from kvferry.addresses import is_loopback
from kvferry.config import GatewayConfig
from kvferry.errors import PermissionDenied, Unauthenticated
from kvferry.gateway.key_file import ApiKey, KeyFile
from kvferry.gateway.tenants import DEFAULT_TENANT, Tenant

_SCHEME = "bearer"


class Access:
    def __init__(self, config: GatewayConfig) -> None:
        """Raises ConfigError for a key file that cannot be read."""
        self._keys = KeyFile(config.keys_file) if config.keys_file is not None else None
        self._wants_certificate = config.tls.client_ca_file is not None
        self._tenant_of_certificate = functools.lru_cache(maxsize=4096)(_tenant_named)
        self.is_open = self._keys is None and not self._wants_certificate
        # Any page in a browser on this machine can reach it; elsewhere `insecure` has said that everybody may.
        self.checks_pages = self.is_open and is_loopback(config.host)
        self.metrics_are_open = self.is_open or is_loopback(config.host)

    def __repr__(self) -> str:
        return f"<Access keys={self._keys!r} certificate={self._wants_certificate}>"

    def identify(self, authorization: str | None, client_name: str | None) -> Tenant:
        """Return the tenant; `client_name` is the verified certificate's common name.

        Raises Unauthenticated, or PermissionDenied for a certificate of no tenant, without repeating keys.
        """
        key = self._key_of(authorization, client_name)
        if key is not None:
            return key.tenant
        return DEFAULT_TENANT if self.is_open else self._tenant_of_certificate(client_name or "")

    def require_operator(self, authorization: str | None, client_name: str | None) -> None:
        """Raises as `identify`, and PermissionDenied, unless the client may read metrics of all tenants."""
        if self.metrics_are_open:
            return
        key = self._key_of(authorization, client_name)
        if key is None or not key.operator:
            raise PermissionDenied(
                "only a key with `operator: true` (kvferry key new --operator) reads this here; "
                "metrics are also on the listener of section `metrics`"
            )

    def _key_of(self, authorization: str | None, client_name: str | None) -> ApiKey | None:
        """Return the shown key, or None where none is asked for."""
        if self.is_open:
            return None
        if self._wants_certificate and client_name is None:
            raise Unauthenticated("a client certificate is required here, and none was shown")
        if self._keys is None:
            return None
        if not authorization:
            raise Unauthenticated("an API key is required: authorization: Bearer KEY")
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != _SCHEME:
            raise Unauthenticated("authorization: only the scheme Bearer is known here")
        found = self._keys.find(key.strip())
        if found is None:
            raise Unauthenticated("this API key is not known here")
        return found


def _tenant_named(client_name: str) -> Tenant:
    try:
        return Tenant(client_name)
    except ValueError as error:
        raise PermissionDenied(f"the client certificate's common name is no tenant: {error}") from None
