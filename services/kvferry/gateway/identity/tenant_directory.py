"""The tenants of the cluster, as etcd has them: watched, and kept while etcd is away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from kvferry.errors import NotReady
from kvferry.membership.base import RecordStore
from kvferry.membership.tenant_follower import TenantFollower
from kvferry.tenancy import records
from kvferry.tenancy.limits import Limits
from kvferry.tenancy.records import KeyRecord, TenantRecord

log = logging.getLogger(__name__)

# More than administrators may write: two of them at once must not make gateways choose different tenants to leave out.
MAX_KNOWN: Final = 2 * records.MAX_TENANTS
MAX_WITHHELD: Final = MAX_KNOWN


class TenantDirectory:
    # `on_ended` is called with the name of each tenant that was deleted.

    def __init__(
        self,
        store: RecordStore,
        *,
        on_ended: Callable[[str], None] = lambda name: None,
        on_change: Callable[[], None] = lambda: None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self.is_known = False  # once all records were read
        self.follower = TenantFollower(
            store,
            on_record=self._take,
            on_gone=lambda name: self._replace(name, None),
            on_unreadable=self._pass_over,
            on_change=self._finish_change,
        )
        self._on_ended = on_ended
        self._on_change = on_change
        self._now_unix_s = now_unix_s
        self._tenants: dict[str, TenantRecord] = {}
        self._withheld: set[str] = set()  # tenants that have, or had, a record which is not known here
        self._withholds_others = False  # once there were more of them: any tenant without a record may be one
        # Two tenants with one key have none: the record of either could have been written for the other's pages.
        self._by_digest: dict[bytes, dict[str, KeyRecord]] = {}

    def __repr__(self) -> str:
        return f"<TenantDirectory tenants={len(self._tenants)} keys={len(self._by_digest)}>"

    def record(self, tenant: str) -> TenantRecord | None:
        """Raises NotReady for a tenant whose record is not known here, though it has one, or lost it undeleted."""
        record = self._tenants.get(tenant)
        if record is None and (self._withholds_others or tenant in self._withheld):
            raise NotReady("this gateway cannot read the record of the client's tenant; its log says why")
        return record

    def names(self) -> list[str]:
        """Return the tenants that are not deleted."""
        return [name for name, record in self._tenants.items() if not record.is_deleted]

    def has(self, tenant: str) -> bool:
        """Return whether there is such a tenant, and it is not deleted."""
        record = self._tenants.get(tenant)
        return record is not None and not record.is_deleted

    def limits(self, tenant: str) -> Limits | None:
        record = self._tenants.get(tenant)
        return None if record is None else record.limits

    def find(self, digest: bytes) -> tuple[str, KeyRecord] | None:
        """Return the tenant of a key's SHA-256 and its record, unless it is expired."""
        owners = self._by_digest.get(digest)
        # While the first records are read, another one may have the same key.
        if not self.is_known or owners is None or len(owners) != 1:
            return None
        ((tenant, key),) = owners.items()
        return None if key.is_expired(self._now_unix_s()) else (tenant, key)

    def _finish_change(self) -> None:
        self.is_known = True
        self._on_change()

    def _pass_over(self, name: str, error: ValueError) -> None:
        # What is known of the tenant stays: a record of another release must not lock it out.
        log.error("the record of tenant %.64r cannot be read: %.200s", name, error)
        self._withhold(name)

    def _take(self, record: TenantRecord) -> None:
        if record.name not in self._tenants and len(self._tenants) >= MAX_KNOWN:
            log.error("tenant %r is left out: there are %d, the limit", record.name, MAX_KNOWN)
            self._withhold(record.name)
            return
        self._warn_of_older(record)
        self._replace(record.name, record)

    def _warn_of_older(self, record: TenantRecord) -> None:
        before = self._tenants.get(record.name)
        if before is not None and record.epoch < before.epoch:
            log.warning(
                "the record of tenant %s went back from epoch %d to %d: older pages can be read again, and keys that"
                " were revoked since may work; run `kvferry tenant reset-pages` and check its keys",
                record.name,
                before.epoch,
                record.epoch,
            )

    def _withhold(self, name: str) -> None:
        if len(self._withheld) < MAX_WITHHELD:
            self._withheld.add(name)
        elif name not in self._withheld and not self._withholds_others:
            self._withholds_others = True
            log.error(
                "the records of %d tenants cannot be read or are gone, the limit: until this gateway starts again it"
                " refuses every tenant without a record",
                MAX_WITHHELD,
            )

    def _replace(self, name: str, record: TenantRecord | None) -> None:
        before = self._tenants.pop(name, None)
        if before is not None:
            for key in before.keys:
                digest = bytes.fromhex(key.sha256)
                owners = self._by_digest[digest]
                del owners[name]
                if not owners:
                    del self._by_digest[digest]
        if record is None and before is not None and not before.is_deleted:
            # A key file must not serve it by default: its record may name a pool, and later epochs.
            log.error("the record of tenant %s is gone, which was not deleted: it is refused", name)
            self._withhold(name)
        if record is not None:
            # Only a record that is read ends this: one that was never read and is gone may have named a pool, too.
            self._withheld.discard(name)
            self._tenants[name] = record
            for key in record.keys:
                owners = self._by_digest.setdefault(bytes.fromhex(key.sha256), {})
                owners[name] = key
                if len(owners) > 1:
                    log.error("a key of the tenants %s is the same, and is refused", ", ".join(sorted(owners)))
        has_ended = record is None or record.is_deleted or (before and record.first_epoch != before.first_epoch)
        if before is not None and not before.is_deleted and has_ended:
            self._on_ended(name)
