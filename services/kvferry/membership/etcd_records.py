"""Member records and others in etcd, and a watcher's views. Pure."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

from kvferry.membership.base import Joined, Left, Member, MemberId, MemberKind, RecordChanged, Records, Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listing:
    """All records at one revision; watches continue at `revision` + 1."""

    key_to_value: dict[str, bytes]
    revision: int


class MemberView:
    name = "members"

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self.prefix = record_prefix(prefix)
        self._key_to_member: dict[str, Member] = {}

    def replace(self, listing: Listing) -> Snapshot:
        self._key_to_member = {
            key: member
            for key, value in sorted(listing.key_to_value.items())
            if (member := decode_record(self._prefix, key, value)) is not None
        }
        return Snapshot(tuple(self._key_to_member.values()))

    def put(self, key: str, value: bytes) -> Joined | None:
        """Return None for an unchanged or unreadable record."""
        member = decode_record(self._prefix, key, value)
        if member is None or self._key_to_member.get(key) == member:
            return None
        self._key_to_member[key] = member
        return Joined(member)

    def delete(self, key: str) -> Left | None:
        """Return None for an unknown record."""
        member = self._key_to_member.pop(key, None)
        return None if member is None else Left(member.kind, member.member_id)


class RecordView:
    """A view of records that passes every value on, unread."""

    def __init__(self, prefix: str, folder: str) -> None:
        self.name = folder
        self.prefix = f"{prefix.rstrip('/')}/{folder}/"

    def replace(self, listing: Listing) -> Records:
        return Records({key.removeprefix(self.prefix): value for key, value in listing.key_to_value.items()})

    def put(self, key: str, value: bytes) -> RecordChanged:
        return RecordChanged(key.removeprefix(self.prefix), value)

    def delete(self, key: str) -> RecordChanged:
        return RecordChanged(key.removeprefix(self.prefix), None)


def record_prefix(prefix: str) -> str:
    return f"{prefix.rstrip('/')}/members/"


def record_key(prefix: str, kind: MemberKind, member_id: MemberId) -> str:
    return f"{record_prefix(prefix)}{kind}/{member_id}"


def decode_record(prefix: str, key: str, value: bytes) -> Member | None:
    """Return None, and log, for an unreadable or misplaced record."""
    try:
        member = msgspec.json.decode(value, type=Member)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning(f"passing over {key}: {error}")
        return None
    if key != record_key(prefix, member.kind, member.member_id):
        log.warning(f"passing over {key}: it holds the record of {member.kind}/{member.member_id}")
        return None
    return member
