"""Changes tenants' records, each in one step."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.base import MemberKind, Membership
from kvferry.tenancy import records
from kvferry.tenancy.limits import LimitName, shown
from kvferry.tenancy.records import KeyRecord, Purge, TenantRecord, make_key
from kvferry.tenancy.terms import TIERS, TierTerms, check_floors, describe

T = TypeVar("T")

MAX_ATTEMPTS: Final = 16
MAX_OUTAGES: Final = 3  # calls without an answer, as on a machine whose engines take all cores


@dataclass(frozen=True, slots=True)
class Change:
    # For people.
    tenant: str
    line: str


class TenantAdmin:
    """Raises ConfigError for changes that make no sense, and UnavailableError while etcd is away."""

    def __init__(self, membership: Membership, *, now_unix_s: Callable[[], float] = time.time) -> None:
        self._membership = membership
        self._store = membership.records
        self._now_unix_s = now_unix_s

    async def all(self) -> dict[str, TenantRecord]:
        """Return deleted tenants too."""
        found = await self._patiently(lambda: self._store.read_all(records.TENANTS))
        return {name: _decode(name, record.value) for name, record in sorted(found.items())}

    async def get(self, name: str) -> TenantRecord:
        found = await self._patiently(lambda: self._store.read(_path(name)))
        record = None if found is None else _decode(name, found.value)
        if record is None or record.is_deleted:
            raise ConfigError(f"there is no tenant {name!r}")
        return record

    async def create(self, name: str) -> TenantRecord:
        """Return the new tenant's record. A name that was deleted comes back with a new epoch."""
        known = await self._patiently(lambda: self._store.read_all(records.TENANTS))
        if name not in known and len(known) >= records.MAX_TENANTS:
            raise ConfigError(f"there are {len(known)} tenants, with deleted ones; {records.MAX_TENANTS} is the limit")

        def begin(record: TenantRecord | None) -> TenantRecord:
            if record is not None and not record.is_deleted:
                raise ConfigError(f"there is a tenant {name!r} already")
            return _begun(TenantRecord(name=name), record)

        return await self._change(name, begin)

    async def set_contract(
        self, tenant: str, *, class_name: str | None = None, share: float | None = None, keeps_share: bool = True
    ) -> TenantRecord:
        def changed(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            return msgspec.structs.replace(
                record,
                class_name=record.class_name if class_name is None else class_name,
                own_share=share if share is not None else record.own_share if keeps_share else None,
            )

        return await self._change(tenant, changed)

    async def set_limits(self, tenant: str, limits: Mapping[str, float | None]) -> TenantRecord:
        """Change the given fields of `Limits`."""

        def changed(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            return msgspec.structs.replace(record, limits=msgspec.structs.replace(record.limits, **limits))

        return await self._change(tenant, changed)

    async def set_tier(self, tenant: str, tier: str, terms: Mapping[str, Any] | None) -> TenantRecord:
        """Change the given fields of a tenant's `TierTerms`; with None, take those of its class again."""
        others = {name: record for name, record in (await self.all()).items() if name != tenant}

        def changed(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            tiers = {name: own for name, own in record.own_tiers.items() if name != tier}
            if terms is not None:
                if tier not in record.tiers:
                    raise ConfigError(f"tier {tier[:80]!r}: one of {', '.join(TIERS)}")
                tiers[tier] = msgspec.structs.replace(record.tiers[tier], **terms)
            record = msgspec.structs.replace(record, own_tiers=tiers)
            record.check()
            _check_floors([*others.values(), record])
            return record

        return await self._change(tenant, changed)

    async def add_key(
        self, tenant: str, name: str, *, expires_unix_s: float | None = None, operator: bool = False, group: str = ""
    ) -> str:
        """Return a new key, which is kept nowhere."""
        key, digest = make_key()
        added = KeyRecord(
            name=name,
            sha256=digest,
            created_unix_s=round(self._now_unix_s()),
            expires_unix_s=expires_unix_s,
            operator=operator,
            group=group,
        )
        await self._change(tenant, lambda record: _living(tenant, record).with_key(added))
        return key

    async def rotate_key(self, tenant: str, name: str, new_name: str, overlap_s: float) -> str:
        """Return a new key with the rights of an old one, which expires after `overlap_s`."""
        key, digest = make_key()
        now_unix_s = self._now_unix_s()

        def rotate(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            old = record.key(name)
            if old is None:
                raise ConfigError(f"the tenant {tenant!r} has no key {name!r}")
            ends_s = min(old.expires_unix_s or math.inf, now_unix_s + overlap_s)
            new = msgspec.structs.replace(
                old, name=new_name, sha256=digest, created_unix_s=round(now_unix_s), expires_unix_s=None
            )
            kept = tuple(
                msgspec.structs.replace(each, expires_unix_s=ends_s) if each is old else each for each in record.keys
            )
            return msgspec.structs.replace(record, keys=kept).with_key(new)

        await self._change(tenant, rotate)
        return key

    async def revoke_key(self, tenant: str, name: str) -> None:
        await self._change(tenant, lambda record: _living(tenant, record).without_key(name))

    async def raise_epoch(self, tenant: str) -> TenantRecord:
        def higher(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            return msgspec.structs.replace(record, epoch=record.epoch + 1)

        return await self._change(tenant, higher)

    async def delete(self, tenant: str) -> TenantRecord:
        return await self._change(tenant, lambda record: _living(tenant, record).deleted())

    async def purges(self, record: TenantRecord) -> tuple[list[Purge], list[tuple[str, str]]]:
        """Return what keepers have removed of a deleted tenant, and keeper and volume of those that have not yet."""
        found = await self._patiently(lambda: self._store.read_all(f"{records.PURGES}/{record.name}"))
        every = [msgspec.json.decode(each.value, type=Purge) for each in found.values()]
        done = {(purge.keeper_id, purge.volume_id): purge for purge in every if purge.epoch >= record.epoch}
        wanted = [
            (str(member.member_id), volume_id)
            for member in await self._membership.members()
            if member.kind is MemberKind.KEEPER
            for volume_id in member.volumes
        ]
        return [done[each] for each in wanted if each in done], [each for each in wanted if each not in done]

    async def differences(self, wanted: Sequence[TenantRecord], *, prune: bool) -> list[Change]:
        """Return what `apply` would change. Raises ConfigError for a key of two tenants."""
        known = await self.all()
        names = {record.name for record in wanted}
        kept = [record for name, record in known.items() if name not in names]
        owners: dict[str, str] = {}
        for record in (*kept, *wanted):
            for key in record.keys:
                if (owner := owners.setdefault(key.sha256, record.name)) != record.name:
                    raise ConfigError(f"the key {key.name!r} of tenant {record.name!r} is also one of {owner!r}")
        try:
            _check_floors(wanted if prune else [*kept, *wanted])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        changes = [change for record in wanted for change in _differences(known.get(record.name), record)]
        gone = [name for name, record in known.items() if prune and name not in names and not record.is_deleted]
        return [*changes, *(Change(name, "- tenant") for name in gone)]

    async def apply(self, wanted: Sequence[TenantRecord], *, prune: bool) -> list[Change]:
        """Make tenants those of `wanted`; with `prune` delete all others. Return what was changed."""
        changes = await self.differences(wanted, prune=prune)
        changed = {change.tenant for change in changes}
        for record in wanted:
            if record.name in changed:
                await self._change(record.name, functools.partial(_applied, record))
        for name in changed - {record.name for record in wanted}:
            await self.delete(name)
        return changes

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        for _ in range(MAX_OUTAGES):
            try:
                return await read()
            except UnavailableError:
                pass
        return await read()

    async def _change(self, name: str, change: Callable[[TenantRecord | None], TenantRecord]) -> TenantRecord:
        tried: tuple[bytes, TenantRecord] | None = None  # a write whose answer did not come
        num_outages = 0
        for _ in range(MAX_ATTEMPTS):
            found = await self._patiently(lambda: self._store.read(_path(name)))
            if tried is not None and found is not None and found.value == tried[0]:
                return tried[1]
            try:
                changed = change(None if found is None else _decode(name, found.value))
                value = records.encode(changed)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            try:
                if await self._store.write(_path(name), value, found.revision if found is not None else 0):
                    return changed
            except UnavailableError:
                num_outages += 1
                if num_outages > MAX_OUTAGES:
                    raise
                tried = value, changed
        raise UnavailableError(f"the tenant {name!r} is changed by others all the time; nothing was changed")


def _check_floors(tenants: Iterable[TenantRecord]) -> None:
    check_floors({record.name: record.tiers for record in tenants if not record.is_deleted})


def _terms(terms: TierTerms | None) -> str:
    return "of its class" if terms is None else describe(terms)


def _path(name: str) -> str:
    return f"{records.TENANTS}/{name}"


def _decode(name: str, value: bytes) -> TenantRecord:
    try:
        return records.decode(name, value)
    except ValueError as error:
        raise ConfigError(f"the record of tenant {name[:64]!r} cannot be read: {error}") from None


def _living(name: str, record: TenantRecord | None) -> TenantRecord:
    if record is None or record.is_deleted:
        raise ConfigError(f"there is no tenant {name!r}")
    return record


def _applied(wanted: TenantRecord, before: TenantRecord | None) -> TenantRecord:
    known: Mapping[str, KeyRecord] = {key.name: key for key in before.keys} if before is not None else {}
    keys = tuple(
        msgspec.structs.replace(key, created_unix_s=known[key.name].created_unix_s)
        if key.name in known and known[key.name].sha256 == key.sha256
        else key
        for key in wanted.keys
    )
    if before is None or before.is_deleted:
        return _begun(wanted, before)
    return msgspec.structs.replace(
        before,
        keys=keys,
        class_name=wanted.class_name,
        own_share=wanted.own_share,
        own_tiers=wanted.own_tiers,
        limits=wanted.limits,
    )


def _begun(wanted: TenantRecord, before: TenantRecord | None) -> TenantRecord:
    epoch = 0 if before is None else before.epoch
    return msgspec.structs.replace(wanted, epoch=epoch, first_epoch=epoch)


def _differences(before: TenantRecord | None, wanted: TenantRecord) -> list[Change]:
    name = wanted.name
    is_new = before is None or before.is_deleted
    lines = ["+ tenant"] if is_new else []
    if before is not None and not is_new:
        contract = (("class", before.class_name, wanted.class_name), ("share", before.own_share, wanted.own_share))
        for name_of, was, wants in contract:
            if was != wants:
                lines.append(f"~ {name_of}: {was or 'of its class'} -> {wants or 'of its class'}")
        for limit in LimitName:
            was, wants = getattr(before.limits, limit.value), getattr(wanted.limits, limit.value)
            if was != wants:
                lines.append(f"~ {limit.value}: {shown(was)} -> {shown(wants)}")
        for tier in TIERS:
            was_terms, terms = before.own_tiers.get(tier), wanted.own_tiers.get(tier)
            if was_terms != terms:
                lines.append(f"~ {tier} tier: {_terms(was_terms)} -> {_terms(terms)}")
    old = {} if before is None or is_new else {key.name: key for key in before.keys}
    new = {key.name: key for key in _applied(wanted, before).keys}
    for key_name in sorted(old.keys() | new.keys()):
        if key_name not in new:
            lines.append(f"- key {key_name}")
        elif key_name not in old:
            lines.append(f"+ key {key_name}")
        elif old[key_name] != new[key_name]:
            pairs = zip(msgspec.structs.astuple(old[key_name]), msgspec.structs.astuple(new[key_name]), strict=True)
            fields = [each for each, (a, b) in zip(KeyRecord.__struct_fields__, pairs, strict=True) if a != b]
            lines.append(f"~ key {key_name}: {', '.join(fields)}")
    return [Change(name, line) for line in lines]
