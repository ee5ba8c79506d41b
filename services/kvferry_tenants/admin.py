"""Changes tenants' records, each in one step."""

from __future__ import annotations

import asyncio
import functools
import math
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from kvferry.errors import ConfigError, UnavailableError
from kvferry.membership.base import Member, MemberKind, Membership, Record, RetryPolicy
from kvferry.tenancy import records
from kvferry.tenancy.limits import LimitName, shown
from kvferry.tenancy.namespace import MAX_EPOCH, Namespace, check_name
from kvferry.tenancy.records import KeyRecord, Purge, TenantRecord, make_key
from kvferry.tenancy.terms import TIERS, TierTerms, check_floors, describe

T = TypeVar("T")

MAX_ATTEMPTS: Final = 16
MAX_OUTAGES: Final = 3  # calls without an answer, as on a machine whose engines take all cores
_RETRY: Final = RetryPolicy(first_s=0.1, max_s=1.0)


@dataclass(frozen=True, slots=True)
class Change:
    # For people.
    tenant: str
    line: str


@dataclass(frozen=True, slots=True)
class Tenants:
    records: dict[str, TenantRecord]  # deleted ones too
    faults: dict[str, str]  # of records that cannot be read


class TenantAdmin:
    """Raises ConfigError for changes that make no sense, and UnavailableError while etcd is away."""

    def __init__(self, membership: Membership, *, now_unix_s: Callable[[], float] = time.time) -> None:
        self._membership = membership
        self._store = membership.records
        self._now_unix_s = now_unix_s
        self._rng = random.Random()

    async def tenants(self) -> Tenants:
        found = await self._patiently(lambda: self._store.read_all(records.TENANTS))
        tenants = Tenants({}, {})
        for name, record in sorted(found.items()):
            try:
                tenants.records[name] = records.decode(name, record.value)
            except ValueError as error:
                tenants.faults[name] = str(error)[:200]
        return tenants

    async def get(self, name: str) -> TenantRecord:
        found = await self._patiently(lambda: self._store.read(_path(name)))
        record = None if found is None else _decode(name, found.value)
        if record is None or record.is_deleted:
            raise ConfigError(f"there is no tenant {name!r}")
        return record

    async def exists(self, name: str) -> bool:
        """Also one whose record cannot be read."""
        found = await self._patiently(lambda: self._store.read(_path(name)))
        try:
            return found is not None and not records.decode(name, found.value).is_deleted
        except ValueError:
            return True

    async def create(self, name: str, *, pool: str = "") -> TenantRecord:
        """Return the new tenant's record. A name that was deleted comes back with a new epoch."""
        _check_name(name)
        await self._require_gateways_know_pools(pool)
        known = await self._patiently(lambda: self._store.read_all(records.TENANTS))
        if name not in known and len(known) >= records.MAX_TENANTS:
            raise _too_many(len(known))

        def begin(record: TenantRecord | None) -> TenantRecord:
            if record is not None and not record.is_deleted:
                raise ConfigError(f"there is a tenant {name!r} already")
            return self._begun(TenantRecord(name=name, pool=pool), record)

        return await self._change(name, begin)

    async def set_contract(
        self,
        tenant: str,
        *,
        class_name: str | None = None,
        share: float | None = None,
        keeps_share: bool = True,
        pool: str | None = None,
    ) -> TenantRecord:
        """Change what is given; an empty pool takes the tenant's away."""
        await self._require_gateways_know_pools(pool or "")

        def changed(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            return msgspec.structs.replace(
                record,
                class_name=record.class_name if class_name is None else class_name,
                own_share=share if share is not None else record.own_share if keeps_share else None,
                pool=record.pool if pool is None else pool,
            )

        return await self._change(tenant, changed)

    async def unknown_pools(self, pools: Iterable[str]) -> list[str]:
        """Return those that no registered gateway is configured with: their tenants get 503 until one is."""
        return sorted(set(pools) - await self._known_pools() - {""})

    async def require_known_pool(self, pool: str) -> None:
        """Raise ConfigError for a pool that no registered gateway is configured with."""
        await self._require_gateways_know_pools(pool)
        known = await self._patiently(self._known_pools)
        if pool not in known:
            raise ConfigError(
                f"no running gateway is configured with the pool {pool[:64]!r}, but with: "
                f"{', '.join(sorted(known)) or 'none'}; a tenant of it would get 503 (--allow-unknown-pool)"
            )

    async def _known_pools(self) -> set[str]:
        return {pool for gateway in await self._gateways() for pool in gateway.pools or ()}

    async def _gateways(self) -> list[Member]:
        return [member for member in await self._membership.members() if member.kind is MemberKind.GATEWAY]

    async def _require_gateways_know_pools(self, *pools: str) -> None:
        """Raise ConfigError if a gateway would not read that a tenant has a pool, and place it on any worker."""
        if not any(pools):
            return
        for gateway in await self._patiently(self._gateways):
            if gateway.pools is None:
                raise ConfigError(
                    f"{gateway.member_id} runs {gateway.version[:64]}, which knows no pools: it would send this"
                    " tenant's requests to the workers of all; upgrade the gateways first"
                )

    async def set_limits(self, tenant: str, limits: Mapping[str, float | None]) -> TenantRecord:
        """Change the given fields of `Limits`."""

        def changed(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            return msgspec.structs.replace(record, limits=msgspec.structs.replace(record.limits, **limits))

        return await self._change(tenant, changed)

    async def set_tier(self, tenant: str, tier: str, terms: Mapping[str, Any] | None) -> TenantRecord:
        """Change the given fields of a tenant's `TierTerms`; with None, take those of its class again."""
        others = {name: record for name, record in (await self.tenants()).records.items() if name != tenant}

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

    async def rotate_key(
        self, tenant: str, name: str, new_name: str, overlap_s: float, *, expires_unix_s: float | None = None
    ) -> str:
        """Return a new key with the rights of an old one, which expires after `overlap_s`."""
        key, digest = make_key()
        now_unix_s = self._now_unix_s()

        def rotate(record: TenantRecord | None) -> TenantRecord:
            record = _living(tenant, record)
            old = record.key(name)
            if old is None:
                raise ConfigError(f"the tenant {tenant!r} has no key {name!r}")
            if old.is_expired(now_unix_s):
                raise ConfigError(f"the key {name!r} of tenant {tenant!r} has expired; make a new one")
            if old.expires_unix_s is not None and expires_unix_s is None:
                raise ConfigError(f"the key {name!r} of tenant {tenant!r} expires: say when the new one does")
            ends_s = min(math.inf if old.expires_unix_s is None else old.expires_unix_s, now_unix_s + overlap_s)
            new = msgspec.structs.replace(
                old,
                name=new_name,
                sha256=digest,
                created_unix_s=round(now_unix_s),
                expires_unix_s=None if expires_unix_s == math.inf else expires_unix_s,
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
            if record.epoch == MAX_EPOCH:
                raise ConfigError(f"the tenant {tenant!r} has no epoch left")
            return msgspec.structs.replace(record, epoch=records.next_epoch(record.epoch, self._now_unix_s()))

        return await self._change(tenant, higher)

    async def delete(self, tenant: str) -> TenantRecord:
        """Delete also a tenant whose record cannot be read."""

        def deleted(record: TenantRecord | None) -> TenantRecord:
            return self._deleted(tenant, _living(tenant, record).epoch)

        return await self._change(tenant, deleted, unreadable=lambda: self._deleted(tenant, None))

    async def forget(self, tenant: str) -> None:
        """Remove the record of a deleted tenant, once no keeper here has chunks of it."""
        found = await self._patiently(lambda: self._store.read(_path(tenant)))
        record = None if found is None else _decode(tenant, found.value)
        if found is None or record is None or not record.is_deleted:
            raise ConfigError(f"the tenant {tenant!r} is not deleted" if found else f"there is no tenant {tenant!r}")
        _, left = await self.purges(record)
        if left:
            keepers = ", ".join(sorted({keeper_id for keeper_id, _ in left})[:5])
            raise ConfigError(f"chunks of tenant {tenant!r} are not yet removed by {keepers}")
        # Reports go first: without the record nothing would name them.
        folder = f"{records.PURGES}/{tenant}"
        for name, report in (await self._patiently(lambda: self._store.read_all(folder))).items():
            await self._store.write(f"{folder}/{name}", None, report.revision)
        if not await self._store.write(_path(tenant), None, found.revision):
            raise ConfigError(f"the tenant {tenant!r} was changed meanwhile; nothing was forgotten")

    async def purges(self, record: TenantRecord) -> tuple[list[Purge], list[tuple[str, str]]]:
        """Return what keepers have removed of a deleted tenant, and keeper and volume of those that have not yet."""
        found = await self._patiently(lambda: self._store.read_all(f"{records.PURGES}/{record.name}"))
        every = [purge for each in found.values() if (purge := records.decode_purge(each.value)) is not None]
        done = {(purge.keeper_id, purge.volume_id): purge for purge in every if purge.epoch >= record.epoch}
        wanted = [
            (str(member.member_id), volume_id)
            for member in await self._membership.members()
            if member.kind is MemberKind.KEEPER
            for volume_id in member.volumes
        ]
        return [done[each] for each in wanted if each in done], [each for each in wanted if each not in done]

    async def differences(self, wanted: Sequence[TenantRecord], *, prune: bool) -> list[Change]:
        """Return what `apply` would change. Raises ConfigError for a key of two tenants, and too many tenants."""
        tenants = await self.tenants()
        known = tenants.records
        names = {record.name for record in wanted}
        kept = [record for name, record in known.items() if name not in names]
        owners: dict[str, str] = {}
        for record in (*kept, *wanted):
            for key in record.keys:
                if (owner := owners.setdefault(key.sha256, record.name)) != record.name:
                    raise ConfigError(f"the key {key.name!r} of tenant {record.name!r} is also one of {owner!r}")
        num_tenants = len(known.keys() | tenants.faults.keys() | names)
        if num_tenants > records.MAX_TENANTS and not names <= known.keys() | tenants.faults.keys():
            raise _too_many(num_tenants)
        try:
            _check_floors(wanted if prune else [*kept, *wanted])
        except ValueError as error:
            raise ConfigError(str(error)) from None
        changes = [change for record in wanted for change in _differences(known.get(record.name), record)]
        living = [name for name, record in known.items() if not record.is_deleted]
        gone = [name for name in (*living, *tenants.faults) if prune and name not in names]
        return [*changes, *(Change(name, "- tenant") for name in gone)]

    async def apply(self, wanted: Sequence[TenantRecord], *, prune: bool) -> list[Change]:
        """Make tenants those of `wanted`; with `prune` delete all others. Return what was changed."""
        for record in wanted:
            _check_name(record.name)
        await self._require_gateways_know_pools(*(record.pool for record in wanted))
        changes = await self.differences(wanted, prune=prune)
        changed = {change.tenant for change in changes}
        for record in wanted:
            if record.name in changed:
                await self._change(
                    record.name,
                    functools.partial(self._applied, record),
                    unreadable=functools.partial(self._begun, record, None),
                )
        for name in changed - {record.name for record in wanted}:
            await self.delete(name)
        return changes

    async def _patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        for num_outages in range(1, MAX_OUTAGES + 1):
            try:
                return await read()
            except UnavailableError:
                await self._pause(num_outages)
        return await read()

    async def _pause(self, num_failures: int) -> None:
        await asyncio.sleep(_RETRY.pause_s(num_failures, self._rng))

    async def _change(
        self,
        name: str,
        change: Callable[[TenantRecord | None], TenantRecord],
        *,
        unreadable: Callable[[], TenantRecord] | None = None,
    ) -> TenantRecord:
        """`unreadable` makes the record that takes the place of one that cannot be read."""
        path = _path(name)
        tried: tuple[bytes, TenantRecord] | None = None  # a write whose answer did not come
        num_outages = 0
        for attempt in range(MAX_ATTEMPTS):
            found = await self._patiently(lambda: self._store.read(path))
            if tried is not None and found is not None and found.value == tried[0]:
                return tried[1]
            try:
                changed = self._changed(name, found, change, unreadable)
                value = records.encode(changed)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            try:
                if await self._store.write(path, value, found.revision if found is not None else 0):
                    return changed
                await self._pause(attempt + 1)
            except UnavailableError:
                num_outages += 1
                if num_outages > MAX_OUTAGES:
                    raise
                tried = value, changed
                await self._pause(num_outages)
        raise UnavailableError(f"the tenant {name!r} is changed by others all the time; nothing was changed")

    def _changed(
        self,
        name: str,
        found: Record | None,
        change: Callable[[TenantRecord | None], TenantRecord],
        unreadable: Callable[[], TenantRecord] | None,
    ) -> TenantRecord:
        try:
            record = None if found is None else records.decode(name, found.value)
        except ValueError as error:
            if unreadable is None:
                raise _unreadable(name, error) from None
            return unreadable()
        return change(record)

    def _deleted(self, name: str, epoch: int | None) -> TenantRecord:
        return TenantRecord(name=name, epoch=records.next_epoch(epoch, self._now_unix_s()), is_deleted=True)

    def _begun(self, wanted: TenantRecord, before: TenantRecord | None) -> TenantRecord:
        # The epoch of a deleted one was raised when it ended.
        epoch = records.next_epoch(None if before is None else before.epoch - 1, self._now_unix_s())
        if before is not None and before.epoch == MAX_EPOCH:
            raise ConfigError(f"the name {wanted.name!r} has no epoch left")
        return msgspec.structs.replace(wanted, epoch=epoch, first_epoch=epoch)

    def _applied(self, wanted: TenantRecord, before: TenantRecord | None) -> TenantRecord:
        if before is None or before.is_deleted:
            return self._begun(wanted, before)
        return msgspec.structs.replace(
            before,
            keys=_keys(wanted, before),
            class_name=wanted.class_name,
            own_share=wanted.own_share,
            own_tiers=wanted.own_tiers,
            limits=wanted.limits,
            pool=wanted.pool,
        )


def _check_floors(tenants: Iterable[TenantRecord]) -> None:
    check_floors({record.name: record.tiers for record in tenants if not record.is_deleted})


def _terms(terms: TierTerms | None) -> str:
    return "of its class" if terms is None else describe(terms)


def _path(name: str) -> str:
    """Raises ConfigError for a text that is no name of a tenant."""
    try:
        Namespace(name)
    except ValueError as error:
        raise ConfigError(str(error)[:200]) from None
    return f"{records.TENANTS}/{name}"


def _check_name(name: str) -> None:
    try:
        check_name(name)
    except ValueError as error:
        raise ConfigError(str(error)[:200]) from None


def _decode(name: str, value: bytes) -> TenantRecord:
    try:
        return records.decode(name, value)
    except ValueError as error:
        raise _unreadable(name, error) from None


def _unreadable(name: str, error: ValueError) -> ConfigError:
    return ConfigError(
        f"the record of tenant {name[:64]!r} cannot be read; `kvferry tenant delete` ends it: {str(error)[:200]}"
    )


def _too_many(num_tenants: int) -> ConfigError:
    return ConfigError(
        f"{num_tenants} tenants, with deleted ones: {records.MAX_TENANTS} is the limit; `kvferry tenant forget` removes"
        " deleted ones"
    )


def _living(name: str, record: TenantRecord | None) -> TenantRecord:
    if record is None or record.is_deleted:
        raise ConfigError(f"there is no tenant {name!r}")
    return record


def _keys(wanted: TenantRecord, before: TenantRecord | None) -> tuple[KeyRecord, ...]:
    known: Mapping[str, KeyRecord] = {key.name: key for key in before.keys} if before is not None else {}
    return tuple(
        msgspec.structs.replace(key, created_unix_s=known[key.name].created_unix_s)
        if key.name in known and known[key.name].sha256 == key.sha256
        else key
        for key in wanted.keys
    )


def _differences(before: TenantRecord | None, wanted: TenantRecord) -> list[Change]:
    name = wanted.name
    is_new = before is None or before.is_deleted
    lines = ["+ tenant"] if is_new else []
    if before is not None and not is_new:
        contract = (("class", before.class_name, wanted.class_name), ("share", before.own_share, wanted.own_share))
        for name_of, was, wants in contract:
            if was != wants:
                lines.append(f"~ {name_of}: {was or 'of its class'} -> {wants or 'of its class'}")
        if before.pool != wanted.pool:
            lines.append(f"~ pool: {before.pool or 'none'} -> {wanted.pool or 'none'}")
        for limit in LimitName:
            was, wants = getattr(before.limits, limit.value), getattr(wanted.limits, limit.value)
            if was != wants:
                lines.append(f"~ {limit.value}: {shown(was)} -> {shown(wants)}")
        for tier in TIERS:
            was_terms, terms = before.own_tiers.get(tier), wanted.own_tiers.get(tier)
            if was_terms != terms:
                lines.append(f"~ {tier} tier: {_terms(was_terms)} -> {_terms(terms)}")
    old = {} if before is None or is_new else {key.name: key for key in before.keys}
    new = {key.name: key for key in _keys(wanted, None if is_new else before)}
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
