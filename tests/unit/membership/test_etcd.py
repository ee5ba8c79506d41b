"""A watcher's view of the records, and the pauses between attempts."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.membership.base import Joined, Left, Member, MemberId, MemberKind, Snapshot
from kvferry.membership.etcd_records import Listing, MemberView, decode_record, record_key
from kvferry.membership.retry import RetryPolicy

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
