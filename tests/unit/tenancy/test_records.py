"""Records of tenants, and the salts of their pages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.tenancy import records
from kvferry.tenancy.namespace import MAX_EPOCH, Namespace, make_salt
from kvferry.tenancy.records import (
    KEY_PREFIX,
    MAX_KEYS,
    MAX_RECORD_BYTES,
    KeyRecord,
    TenantRecord,
    make_key,
    next_epoch,
)

SECRET = bytes(range(32))


def key(number: int = 0, **fields: object) -> KeyRecord:
    return KeyRecord(**({"name": f"k{number}", "sha256": f"{number:064x}"} | fields))  # type: ignore[arg-type]


def test_a_record_survives_its_encoding() -> None:
    record = TenantRecord(name="acme", epoch=3, keys=(key(1, expires_unix_s=5.0), key(2, operator=True, group="g")))
    assert records.decode("acme", records.encode(record)) == record


def test_fields_of_a_later_release_are_passed_over() -> None:
    assert records.decode("acme", b'{"name":"acme","share":{"weight":4}}') == TenantRecord(name="acme")


@pytest.mark.parametrize(
    "value",
    [b"", b"[]", b'{"name":"other"}', b'{"name":"acme","epoch":-1}', b'{"name":"acme","keys":[{"name":"a"}]}',
     b'{"name":"acme","keys":[{"name":"a b","sha256":"' + b"0" * 64 + b'"}]}',
     b'{"name":"acme","keys":[{"name":"a","sha256":"' + b"A" * 64 + b'"}]}',
     b'{"name":"acme","is_deleted":true,"keys":[{"name":"a","sha256":"' + b"0" * 64 + b'"}]}',
     b'{"name":"acme"}' + b" " * MAX_RECORD_BYTES],
)  # fmt: skip
def test_what_is_no_record_of_the_tenant_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError):
        records.decode("acme", value)


def test_keys_of_a_tenant_are_limited_and_have_their_own_names() -> None:
    record = TenantRecord(name="acme")
    for number in range(MAX_KEYS):
        record = record.with_key(key(number))
    assert len(records.encode(record)) < MAX_RECORD_BYTES
    with pytest.raises(ValueError, match=f"{MAX_KEYS} is the limit"):
        record.with_key(key(MAX_KEYS))
    with pytest.raises(ValueError, match="has a key 'k1' already"):
        record.without_key("k0").with_key(key(1))
    with pytest.raises(ValueError, match="no key 'k0'"):
        record.without_key("k0").without_key("k0")


def test_the_largest_record_that_can_be_written_can_be_read() -> None:
    keys = tuple(key(number, name=f"{number:063d}", group="g" * 63) for number in range(MAX_KEYS))
    record = TenantRecord(name="a" * 63, epoch=2**64 - 1, keys=keys)
    assert records.decode("a" * 63, records.encode(record)) == record


def test_epochs_follow_the_time_and_never_go_back() -> None:
    assert next_epoch(None, 1.5) == 1500
    assert next_epoch(1500, 1.5) == 1501
    assert next_epoch(7, 1.5) == 1500
    assert next_epoch(1 << 50, 1.5) == (1 << 50) + 1
    assert next_epoch(MAX_EPOCH, 1.5) == MAX_EPOCH


@pytest.mark.parametrize("unix_s", [-1.0, 1e300, float("inf"), float("nan"), records.MAX_UNIX_S + 1])
def test_times_that_are_none_are_refused(unix_s: float) -> None:
    with pytest.raises(ValueError, match="expires"):
        key(expires_unix_s=unix_s).check()
    with pytest.raises(ValueError, match="created"):
        key(created_unix_s=unix_s).check()
    key(expires_unix_s=records.MAX_UNIX_S).check()


@pytest.mark.parametrize("value", [b"", b"{", b"[" * 60_000, b'{"keeper_id": 1}', b"\xff"])
def test_a_value_that_is_no_report_of_a_purge_is_none(value: bytes) -> None:
    assert records.decode_purge(value) is None


def test_a_key_expires() -> None:
    assert not key(expires_unix_s=10.0).is_expired(9.9)
    assert key(expires_unix_s=10.0).is_expired(10.0)
    assert not key().is_expired(1e12)


def test_keys_are_random_and_only_their_hash_is_needed() -> None:
    made = [make_key() for _ in range(100)]
    assert len({each for each, _ in made}) == len({digest for _, digest in made}) == 100
    assert all(each.startswith(KEY_PREFIX) and len(each) >= 47 for each, _ in made)


def test_salts_differ_in_every_part_and_with_the_secret() -> None:
    names, epochs, groups, clients = ("a", "ab", "a-b"), (0, 1, 11), ("", "b", "b.1"), (None, "", "b", "\0", "\ud800")
    made = [
        make_salt(secret, Namespace(name, epoch), group, client)
        for secret in (SECRET, SECRET[::-1])
        for name, epoch, group, client in itertools.product(names, epochs, groups, clients)
    ]
    assert len(set(made)) == len(made)
    assert {len(each) for each in made} == {64}


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=2, max_size=2, unique=True))
def test_parts_never_run_into_each_other(pairs: list[tuple[str, str]]) -> None:
    first, second = (make_salt(SECRET, Namespace("a"), group, client) for group, client in pairs)
    assert first != second


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32"):
        make_salt(SECRET[:31], Namespace("a"))


def test_a_pool_that_could_be_called_default_is_still_read() -> None:
    record = TenantRecord(name="acme", pool="default")
    assert records.decode("acme", records.encode(record)) == record
