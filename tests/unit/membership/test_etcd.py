"""A watcher's view of the records, and the pauses between attempts."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import grpc.aio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.membership.base import Joined, Left, Member, MemberId, MemberKind, RetryPolicy, Snapshot
from kvferry.membership.etcd_link import EtcdLink
from kvferry.membership.etcd_records import Listing, MemberView, decode_record, record_key

PREFIX = "/kvferry"


def member(name: str = "one", *, version: str = "1") -> Member:
    return Member(
        kind=MemberKind.DECODE, member_id=MemberId(name), address="127.0.0.1:1", model="tiny", version=version
    )


def key(name: str = "one") -> str:
    return record_key(PREFIX, MemberKind.DECODE, MemberId(name))


def value(name: str = "one", *, version: str = "1") -> bytes:
    return msgspec.json.encode(member(name, version=version))


def test_keys() -> None:
    assert key() == "/kvferry/members/decode/one"
    assert record_key("/kvferry/", MemberKind.DECODE, MemberId("one")) == key()


def test_a_view_tells_only_what_is_new() -> None:
    view = MemberView(PREFIX)
    assert view.replace(Listing({key(): value()}, 7)) == Snapshot((member(),))
    assert view.put(key(), value()) is None
    assert view.put(key(), value(version="2")) == Joined(member(version="2"))
    assert view.delete(key()) == Left(MemberKind.DECODE, MemberId("one"))
    assert view.delete(key()) is None
    assert view.put(key(), value()) == Joined(member())
    assert view.replace(Listing({}, 9)) == Snapshot(())
    assert view.delete(key()) is None


@pytest.mark.parametrize(
    "torn", [b"", b"{", b"[]", b"{}", b"\xff\xfe", value("two"), value().replace(b"decode", b"ferry")]
)
def test_what_cannot_be_read_leaves_what_is_known(torn: bytes, caplog: pytest.LogCaptureFixture) -> None:
    view = MemberView(PREFIX)
    view.put(key(), value())
    assert view.put(key(), torn) is None
    assert view.delete(key()) == Left(MemberKind.DECODE, MemberId("one"))
    assert f"passing over {key()}" in caplog.text


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_break_the_reader(torn: bytes) -> None:
    assert decode_record(PREFIX, key(), torn) is None


def test_a_member_of_an_older_version_offers_no_frames() -> None:
    old = value().replace(b'"link_address":"",', b"")
    assert b"link_address" not in old
    read = decode_record(PREFIX, key(), old)
    assert read is not None
    assert read.link_address == ""


def test_fields_of_a_newer_version_are_ignored() -> None:
    assert decode_record(PREFIX, key(), value().replace(b"}", b',"colour":"red"}')) == member()


@settings(deadline=None)
@given(st.integers(1, 10**9), st.integers())
def test_pauses_double_up_to_the_longest_and_differ(num_failures: int, seed: int) -> None:
    policy = RetryPolicy(first_s=0.1, max_s=5.0)
    pause_s = policy.pause_s(num_failures, random.Random(seed))
    ceiling_s = min(5.0, 0.1 * 2.0 ** min(num_failures - 1, 30))
    assert ceiling_s / 2 <= pause_s <= ceiling_s


class _Pages:
    """A KV service with a page per call, and for each value that is read how many pages had come."""

    def __init__(self, num_pages: int) -> None:
        self._num_pages = num_pages
        self.num_read = 0
        self.read_at: list[int] = []

    async def get(self, begin: bytes, *arguments: Any, **options: Any) -> Any:
        page, self.num_read = self.num_read, self.num_read + 1
        records = [_PagedRecord(self, f"/kvferry/tenants/t{page}-{at}".encode()) for at in range(3)]
        return SimpleNamespace(header=SimpleNamespace(revision=7), kvs=records, more=self.num_read < self._num_pages)


class _PagedRecord:
    mod_revision = 5

    def __init__(self, pages: _Pages, key: bytes) -> None:
        self._pages = pages
        self.key = key

    @property
    def value(self) -> bytes:
        self._pages.read_at.append(self._pages.num_read)
        return b"{}"


async def test_a_long_listing_is_taken_in_pieces() -> None:
    """Each piece has its turn of the event loop: 77 MB of tenants' records take 0.05 s together."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        link = EtcdLink(SimpleNamespace(user=""), channel, 1.0)  # type: ignore[arg-type]
        link._kv = pages = _Pages(4)
        listing = await link.list("/kvferry/tenants/")
        assert (len(listing.key_to_value), listing.revision) == (12, 7)
        assert pages.read_at == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
        link._kv = _Pages(2)
        assert set((await link.read_all("/kvferry/tenants/")).values()) == {(b"{}", 5)}
