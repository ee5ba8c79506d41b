"""Authentication for HTTP and gRPC (matrix: docs/operator/security.md)."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from kvferry.config import GatewayConfig
from kvferry.errors import NotReady, PermissionDenied, Unauthenticated
from kvferry.gateway.identity.jwt_tokens import JwtTokens, looks_like_jwt
from kvferry.gateway.identity.key_file import KeyFile
from kvferry.gateway.identity.tenant_directory import TenantDirectory
from kvferry.gateway.identity.tenants import DEFAULT_TENANT, Tenant, Tenants
from kvferry.tenancy.namespace import check_claimed_name, check_name
from kvferry.tenancy.records import KEY_PREFIX, TenantRecord
from kvferry.util.addresses import is_loopback

_SCHEME = "bearer"


class _Shown(NamedTuple):
    """Credentials of a client: its tenant, and attributes of its key."""

    tenant: str
    group: str = ""
    is_operator: bool = False
    is_in_file: bool = False
    is_for_metrics: bool = False  # and nothing else


_ANYBODY = _Shown("", is_operator=True)


class Access:
    def __init__(
        self,
        config: GatewayConfig,
        tenants: Tenants,
        directory: TenantDirectory | None = None,
        tokens: JwtTokens | None = None,
    ) -> None:
        """Raises ConfigError for a key file that cannot be read."""
        self._keys = KeyFile(config.keys_file) if config.keys_file is not None else None
        self._tenants = tenants
        self._directory = directory
        self._tokens = tokens
        self._wants_certificate = config.tls.client_ca_file is not None
        self.takes_keys = self._keys is not None or directory is not None
        self._wants_bearer = config.wants_bearer
        self.is_open = not (self._wants_bearer or self._wants_certificate)
        # Any page in a browser on this machine can reach it; elsewhere `insecure` has said that everybody may.
        self.checks_pages = self.is_open and is_loopback(config.host)

    def __repr__(self) -> str:
        return f"<Access keys={self._keys!r} directory={self._directory!r} certificate={self._wants_certificate}>"

    def identify(self, authorization: str | None, client_name: str | None) -> Tenant:
        """Return the tenant; `client_name` is the verified certificate's common name.

        Raises Unauthenticated, PermissionDenied for a certificate or token of no tenant, and NotReady while tenants
        cannot be read, without repeating keys.
        """
        if self.is_open:
            return DEFAULT_TENANT
        shown = self._shown(authorization, client_name)
        if shown.is_for_metrics:
            raise PermissionDenied("this key reads metrics and targets, and nothing else")
        try:
            record = self._record(shown)
            is_claimed = record is None and not shown.is_in_file
            (check_claimed_name if is_claimed else check_name)(shown.tenant)
            if record is None:
                pool = "" if self._keys is None else self._keys.pool_of(shown.tenant)
                return self._tenants.named(shown.tenant, pool=pool)  # groups are of records' keys
            return self._tenants.named(shown.tenant, record.epoch, shown.group, record.share, record.pool)
        except ValueError as error:
            raise PermissionDenied(f"the client's name is no tenant: {error}") from None

    def require_metrics(self, authorization: str | None, client_name: str | None) -> None:
        """Raises as `identify`, and PermissionDenied, unless the client may read metrics of all tenants."""
        shown = self._known(authorization, client_name)
        if not (shown.is_operator or shown.is_for_metrics):
            raise PermissionDenied(
                "only a key with `operator: true` or `metrics: true` (kvferry key new --operator, --metrics) reads "
                "this here; metrics are also on the listener of section `metrics`"
            )

    def is_operator(self, authorization: str | None, client_name: str | None) -> bool:
        """Return whether the client may read what is of all tenants, and names of workers. Raises as `identify`."""
        return self._known(authorization, client_name).is_operator

    def _known(self, authorization: str | None, client_name: str | None) -> _Shown:
        # On loopback too: a proxy on this machine passes on what the whole network asks.
        if self.is_open:
            return _ANYBODY
        shown = self._shown(authorization, client_name)
        self._record(shown)
        return shown

    def _record(self, shown: _Shown) -> TenantRecord | None:
        if self._directory is None:
            return None
        if not self._directory.is_known:
            raise NotReady("this gateway is starting: it waits for etcd to read the tenants")
        record = self._directory.record(shown.tenant)
        if record is not None and record.is_deleted:
            raise Unauthenticated("this tenant was deleted")
        if record is None and not shown.is_in_file:
            raise PermissionDenied(f"{shown.tenant[:64]!r} is no tenant of this cluster")
        return record

    def _shown(self, authorization: str | None, client_name: str | None) -> _Shown:
        if self._wants_certificate and client_name is None:
            raise Unauthenticated("this connection needs a client certificate and has none")
        if not self._wants_bearer:
            return _Shown(client_name or "")
        if not authorization:
            what = "an API key" if self.takes_keys else "a token"
            raise Unauthenticated(f"{what} is required: authorization: Bearer {'KEY' if self.takes_keys else 'TOKEN'}")
        scheme, _, bearer = authorization.partition(" ")
        if scheme.lower() != _SCHEME:
            raise Unauthenticated("authorization: only the scheme Bearer is known here")
        bearer = bearer.strip()
        if self._tokens is not None and looks_like_jwt(bearer) and not bearer.startswith(KEY_PREFIX):
            return _Shown(self._tokens.tenant_of(bearer))
        return self._find(bearer)

    def _find(self, key: str) -> _Shown:
        digest = hashlib.sha256(key.encode(errors="surrogatepass")).digest()
        if self._keys is not None and (entry := self._keys.find(digest)) is not None:
            return _Shown(entry.tenant, is_operator=entry.operator, is_in_file=True, is_for_metrics=entry.metrics)
        if self._directory is not None:
            if (found := self._directory.find(digest)) is not None:
                tenant, record = found
                return _Shown(tenant, record.group, record.operator)
            if not self._directory.is_known:
                raise NotReady("this gateway is starting: it waits for etcd to read the tenants")
        raise Unauthenticated("this API key is not known here, or has expired")
