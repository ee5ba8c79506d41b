"""Records of tenants, as etcd holds them: JSON under `{prefix}/tenants/{name}`."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from typing import Final

import msgspec

from kvferry.config import check_pool_name
from kvferry.tenancy.limits import Limits
from kvferry.tenancy.namespace import MAX_EPOCH, Namespace
from kvferry.tenancy.terms import CLASSES, DEFAULT_CLASS, TIERS, TierTerms

KEY_PREFIX: Final = "kvf_"
# Folders of records.
TENANTS: Final = "tenants"
PURGES: Final = "purges"
FLOORS: Final = "floors"  # reports of nodes
ENGINE_FLOORS: Final = "engine_floors"  # reports of workers, in a folder for each role and tier
MAX_KEYS: Final = 64  # of a tenant
MAX_TENANTS: Final = 10_000  # with deleted ones
MAX_RECORD_BYTES: Final = 64 << 10
MAX_UNIX_S: Final = 253_402_300_799.0  # the end of the year 9999

_SHA256 = re.compile(r"[0-9a-f]{64}")
_KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_key_name(name: str) -> None:
    """Raises ValueError."""
    if not _KEY_NAME.fullmatch(name):
        raise ValueError(f"name {name[:80]!r}: letters, digits, dots, dashes and underscores, at most 63")


# Gateways have up to 640,000 of them, whose entries in an index the garbage collector would visit.
class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An API key of a tenant, without the key itself."""

    name: str
    sha256: str  # of the whole key, prefix included; hexadecimal
    created_unix_s: float = 0.0
    expires_unix_s: float | None = None
    operator: bool = False  # may read what is not of one tenant: metrics, targets
    group: str = ""  # keys of other groups share no pages with this one

    def is_expired(self, now_unix_s: float) -> bool:
        return self.expires_unix_s is not None and now_unix_s >= self.expires_unix_s

    def check(self) -> None:
        """Raises ValueError for an invalid name, digest, time or group."""
        check_key_name(self.name)
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(f"the sha256 of key {self.name!r} is not 64 hexadecimal digits in lower case")
        if self.group and not _KEY_NAME.fullmatch(self.group):
            raise ValueError(f"group {self.group[:80]!r}: letters, digits, dots, dashes and underscores, at most 63")
        for field, unix_s in (("created", self.created_unix_s), ("expires", self.expires_unix_s)):
            if unix_s is not None and not 0 <= unix_s <= MAX_UNIX_S:
                raise ValueError(f"key {self.name!r}: {field} {unix_s:g} is no time in seconds since 1970")


MIN_SHARE: Final = 0.01
MAX_SHARE: Final = 1000.0


class TenantRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A tenant's identity. A deleted one keeps its record, so that its name never gets an old epoch again."""

    name: str
    epoch: int = 0
    first_epoch: int = 0  # of this tenant, where an earlier one of its name was deleted
    keys: tuple[KeyRecord, ...] = ()
    is_deleted: bool = False
    class_name: str = DEFAULT_CLASS
    own_share: float | None = None  # instead of the class's
    own_tiers: dict[str, TierTerms] = {}  # by tier, instead of the class's
    limits: Limits = Limits()
    pool: str = ""  # of workers, and no others, that serve it; empty: none of its own

    @property
    def share(self) -> float:
        return CLASSES[self.class_name].share if self.own_share is None else self.own_share

    @property
    def tiers(self) -> Mapping[str, TierTerms]:
        return {**CLASSES[self.class_name].tiers, **self.own_tiers}

    def check(self) -> None:
        """Raises ValueError naming the fault."""
        Namespace(self.name, self.epoch)
        if len(self.keys) > MAX_KEYS:
            raise ValueError(f"tenant {self.name!r} has {len(self.keys)} keys; {MAX_KEYS} is the limit")
        if self.is_deleted and self.keys:
            raise ValueError(f"tenant {self.name!r} is deleted and has keys")
        if self.class_name not in CLASSES:
            raise ValueError(f"class {self.class_name[:80]!r}: one of {', '.join(CLASSES)}")
        if self.own_share is not None and not MIN_SHARE <= self.own_share <= MAX_SHARE:
            raise ValueError(f"share {self.own_share}: from {MIN_SHARE} to {MAX_SHARE:g}")
        self.limits.check()
        if self.pool:
            check_pool_name(self.pool)
        for tier, terms in self.own_tiers.items():
            if tier not in TIERS:
                raise ValueError(f"tier {tier[:80]!r}: one of {', '.join(TIERS)}")
            try:
                terms.check(tier)
            except ValueError as error:
                raise ValueError(f"the {tier} tier: {error}") from None
        for key in self.keys:
            key.check()
        if len({key.name for key in self.keys}) < len(self.keys):
            raise ValueError(f"tenant {self.name!r} has two keys of one name")
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError(f"tenant {self.name!r} has one key under two names")

    def key(self, name: str) -> KeyRecord | None:
        return next((key for key in self.keys if key.name == name), None)

    def with_key(self, key: KeyRecord) -> TenantRecord:
        """Raises ValueError for a name that is in use, or one key too many."""
        if self.key(key.name) is not None:
            raise ValueError(f"the tenant {self.name!r} has a key {key.name!r} already")
        changed = msgspec.structs.replace(self, keys=(*self.keys, key))
        changed.check()
        return changed

    def without_key(self, name: str) -> TenantRecord:
        """Raises ValueError for a key that it does not have."""
        if self.key(name) is None:
            raise ValueError(f"the tenant {self.name!r} has no key {name!r}")
        return msgspec.structs.replace(self, keys=tuple(key for key in self.keys if key.name != name))


def next_epoch(epoch: int | None, unix_s: float) -> int:
    """Return an epoch that a name never had, even if its record was lost: the time in ms, or one more than the last."""
    return min(MAX_EPOCH, max(int(unix_s * 1000), 0 if epoch is None else epoch + 1))


class Purge(msgspec.Struct, frozen=True):
    """A keeper's report that no chunk of a tenant before an epoch is left on one of its volumes."""

    keeper_id: str
    volume_id: str
    epoch: int
    num_chunks: int  # that this keeper removed
    unix_s: float


def encode(record: TenantRecord) -> bytes:
    """Raises ValueError for an invalid record, or one over `MAX_RECORD_BYTES`."""
    record.check()
    value = msgspec.json.encode(record)
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError(
            f"the record of tenant {record.name!r} has {len(value)} bytes; {MAX_RECORD_BYTES} is the limit"
        )
    return value


def decode(name: str, value: bytes) -> TenantRecord:
    """Raises ValueError for a value that is not the record of `name`. Unknown fields are ignored."""
    if len(value) > MAX_RECORD_BYTES:
        raise ValueError(f"{len(value)} bytes; {MAX_RECORD_BYTES} is the limit")
    try:
        record = msgspec.json.decode(value, type=TenantRecord)
    except RecursionError:
        raise ValueError("too deeply nested") from None
    record.check()
    if record.name != name:
        raise ValueError(f"it holds the record of {record.name!r}")
    return record


def decode_purge(value: bytes) -> Purge | None:
    """Return None for a value that is none."""
    try:
        return msgspec.json.decode(value, type=Purge)
    except (ValueError, RecursionError):
        return None


def make_key() -> tuple[str, str]:
    """Return a new API key and its SHA-256, hexadecimal. It has 32 random bytes, so a plain SHA-256 suffices."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()
