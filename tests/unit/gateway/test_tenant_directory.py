"""The tenants that a gateway knows."""

from __future__ import annotations

import asyncio
import gc
import hashlib

import pytest

from kvferry.errors import NotReady, Unauthenticated
from kvferry.gateway.identity import tenant_directory
from kvferry.gateway.identity.tenant_directory import TenantDirectory
from kvferry.gateway.identity.tenant_requests import TenantRequests
from kvferry.gateway.identity.tenants import SECRET_RECORD, keep_secret, shared_secret
from kvferry.membership.base import RecordChange, RecordChanged, Records
from kvferry.tenancy import records
from kvferry.tenancy.limits import Limits
from kvferry.tenancy.records import KeyRecord, TenantRecord
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.waiting import SOON_S, until


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def record(name: str, *keys: KeyRecord, **fields: object) -> bytes:
    return records.encode(TenantRecord(name=name, keys=keys, **fields))  # type: ignore[arg-type]


def key_record(key: str, name: str = "k", **fields: object) -> KeyRecord:
    return KeyRecord(name=name, sha256=digest(key).hex(), **fields)  # type: ignore[arg-type]


def directory_at(now_s: list[float], ended: list[str]) -> TenantDirectory:
    store = MemoryMembership(MemoryRegistry()).records
    return TenantDirectory(store, on_ended=ended.append, now_unix_s=lambda: now_s[0])


async def test_keys_are_found_until_they_expire_or_are_revoked() -> None:
    now_s, ended = [100.0], []
    directory = directory_at(now_s, ended)
    assert directory.is_known is False
    await directory.follower.take(
        Records({"acme": record("acme", key_record("a", expires_unix_s=200.0), key_record("b", "l"))})
    )
    assert directory.is_known
    found = directory.find(digest("a"))
    assert found is not None
    assert found[0] == "acme"
    now_s[0] = 200.0
    assert directory.find(digest("a")) is None
    assert directory.find(digest("b")) is not None
    await directory.follower.take(RecordChanged("acme", record("acme")))
    assert directory.find(digest("b")) is None
    assert ended == [], "a revoked key ends no request that it began"


async def test_a_deleted_tenant_is_none_of_the_cluster() -> None:
    directory = directory_at([0.0], [])
    limits = Limits(max_choices=7)
    await directory.follower.take(
        Records({"acme": record("acme", limits=limits), "gone": record("gone", is_deleted=True)})
    )
    assert directory.names() == ["acme"]
    assert [directory.has(name) for name in ("acme", "gone", "never there")] == [True, False, False]
    assert [directory.limits(name) for name in ("acme", "never there")] == [limits, None]


async def test_the_garbage_collector_passes_keys_over() -> None:
    """Each pass through 640,000 keys would hold up the event loop."""
    directory = directory_at([0.0], [])
    await directory.follower.take(Records({"acme": record("acme", key_record("a", expires_unix_s=5.0))}))
    assert not gc.is_tracked(directory._by_digest[digest("a")])


async def test_a_key_of_two_tenants_is_nobodys(caplog: pytest.LogCaptureFixture) -> None:
    directory = directory_at([0.0], [])
    await directory.follower.take(
        Records(
            {"beta": record("beta", key_record("a"), key_record("b", "l")), "acme": record("acme", key_record("a"))}
        )
    )
    assert directory.find(digest("a")) is None
    (message,) = caplog.messages
    assert "the tenants acme, beta is the same" in message
    await directory.follower.take(RecordChanged("beta", record("beta")))
    found = directory.find(digest("a"))
    assert found is not None
    assert found[0] == "acme"


async def test_a_tenant_ends_when_it_is_deleted_in_any_way_and_not_with_an_epoch() -> None:
    ended: list[str] = []
    directory = directory_at([0.0], ended)
    await directory.follower.take(Records({name: record(name) for name in ("a", "b", "c", "d")}))
    await directory.follower.take(RecordChanged("a", record("a", epoch=1)))
    assert ended == []
    await directory.follower.take(RecordChanged("a", record("a", epoch=2, is_deleted=True)))
    await directory.follower.take(RecordChanged("b", None))
    await directory.follower.take(
        RecordChanged("c", record("c", epoch=1, first_epoch=1))
    )  # deleted and made again, seen at once
    assert ended == ["a", "b", "c"]
    await directory.follower.take(Records({}))
    assert sorted(ended[3:]) == ["c", "d"], "deleted ones do not end again"


async def test_a_record_that_cannot_be_read_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    directory = directory_at([0.0], ended)
    await directory.follower.take(Records({"acme": record("acme", key_record("a"))}))
    await directory.follower.take(RecordChanged("acme", b"{"))
    nested = b'{"name": "acme", "later": ' + b"[" * 4000
    await directory.follower.take(
        Records({"acme": nested, "beta": record("other"), "gamma": record("gamma", key_record("g"))})
    )
    assert directory.find(digest("a")) is not None
    with pytest.raises(NotReady, match="cannot read the record"):
        directory.record("beta")
    assert directory.find(digest("g")) is not None, "one record stops no other"
    assert ended == []
    assert "acme" in caplog.text
    assert "beta" in caplog.text


async def test_a_tenant_whose_record_is_gone_is_refused_unless_it_was_deleted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A key file would serve it by default, in another pool and with pages of an earlier epoch."""
    directory = directory_at([0.0], [])
    await directory.follower.take(Records({name: record(name, epoch=7) for name in ("lost", "gone", "forgotten")}))
    await directory.follower.take(RecordChanged("forgotten", record("forgotten", epoch=8, is_deleted=True)))
    await directory.follower.take(RecordChanged("forgotten", None))
    await directory.follower.take(RecordChanged("lost", None))
    await directory.follower.take(Records({}))
    assert directory.record("forgotten") is None
    assert directory.record("never there") is None
    for name in ("lost", "gone"):
        with pytest.raises(NotReady):
            directory.record(name)
        assert f"the record of tenant {name} is gone, which was not deleted" in caplog.text
    assert "forgotten" not in caplog.text
    await directory.follower.take(RecordChanged("lost", record("lost", epoch=9)))
    found = directory.record("lost")
    assert found is not None
    assert found.epoch == 9


@pytest.mark.parametrize("change", [Records({}), RecordChanged("acme", None)], ids=["snapshot", "event"])
async def test_a_tenant_whose_record_was_never_readable_is_refused_when_it_is_gone(change: RecordChange) -> None:
    directory = directory_at([0.0], [])
    await directory.follower.take(Records({"acme": b"{"}))
    await directory.follower.take(change)
    with pytest.raises(NotReady):
        directory.record("acme")
    await directory.follower.take(RecordChanged("acme", record("acme", is_deleted=True)))
    await directory.follower.take(RecordChanged("acme", None))
    assert directory.record("acme") is None


async def test_beyond_the_limit_of_unknown_records_all_tenants_without_a_record_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenant_directory, "MAX_WITHHELD", 3)
    directory = directory_at([0.0], [])
    await directory.follower.take(Records({"acme": record("acme"), **{f"t{number}": b"{" for number in range(3)}}))
    await directory.follower.take(RecordChanged("t0", b"["))
    assert directory.record("in the key file only") is None
    await directory.follower.take(Records({"acme": record("acme"), **{f"u{number}": b"{" for number in range(9)}}))
    assert len(directory._withheld) == 3
    for name in ("t0", "u8", "in the key file only"):
        with pytest.raises(NotReady):
            directory.record(name)
    assert directory.record("acme") is not None
    assert caplog.text.count("the records of 3 tenants cannot be read or are gone, the limit") == 1


async def test_a_record_with_one_key_under_two_names_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ended: list[str] = []
    directory = directory_at([0.0], ended)
    await directory.follower.take(Records({"acme": record("acme", key_record("a"))}))
    twice = record("acme", key_record("a"), key_record("b", "l")).replace(
        digest("b").hex().encode(), digest("a").hex().encode()
    )
    await directory.follower.take(RecordChanged("acme", twice))
    assert "one key under two names" in caplog.text
    assert directory.find(digest("a")) is not None
    await directory.follower.take(RecordChanged("acme", None))
    assert (directory.find(digest("a")), ended) == (None, ["acme"])


async def test_an_older_epoch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    directory = directory_at([0.0], [])
    await directory.follower.take(Records({"acme": record("acme", epoch=7)}))
    await directory.follower.take(RecordChanged("acme", record("acme", key_record("a"), epoch=7)))
    assert not caplog.records
    await directory.follower.take(RecordChanged("acme", record("acme", epoch=6)))
    assert "the record of tenant acme went back from epoch 7 to 6" in caplog.text


async def test_tenants_are_limited_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tenant_directory, "MAX_KNOWN", 3)
    directory = directory_at([0.0], [])
    await directory.follower.take(Records({f"t{number}": record(f"t{number}") for number in range(5)}))
    assert directory.names() == ["t0", "t1", "t2"]
    for name in ("t3", "t4"):
        assert f"tenant {name!r} is left out: there are 3, the limit" in caplog.text
        with pytest.raises(NotReady):
            directory.record(name)
    await directory.follower.take(RecordChanged("t0", record("t0", key_record("a"))))
    assert directory.find(digest("a")) is not None


async def test_changes_arrive_and_stay_during_an_outage() -> None:
    registry = MemoryRegistry()
    admin = TenantAdmin(MemoryMembership(registry))
    await admin.create("acme")
    key = await admin.add_key("acme", "ci")
    changed = asyncio.Event()
    directory = TenantDirectory(MemoryMembership(registry).records, on_change=changed.set)
    directory.follower.start()
    async with asyncio.timeout(SOON_S):
        await changed.wait()
        assert directory.find(digest(key)) is not None
        with registry.outage():
            await asyncio.sleep(0)
            assert directory.find(digest(key)) is not None
        changed.clear()
        await admin.revoke_key("acme", "ci")
        while directory.find(digest(key)) is not None:
            await changed.wait()
            changed.clear()
    await directory.follower.close()


async def test_all_gateways_have_one_secret() -> None:
    registry = MemoryRegistry()
    secrets = await asyncio.gather(*(shared_secret(MemoryMembership(registry).records) for _ in range(8)))
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 64
    waited = asyncio.Event()
    with registry.outage():
        reading = asyncio.create_task(shared_secret(MemoryMembership(registry).records, waited.set))
        await waited.wait()
        assert not reading.done()
    assert await reading == secrets[0]


async def test_a_lost_secret_is_written_again_and_another_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryMembership(MemoryRegistry()).records
    secret = await shared_secret(store)
    keeping = asyncio.create_task(keep_secret(store, secret, check_s=0.001))
    try:
        found = await store.read(SECRET_RECORD)
        assert found is not None
        await store.write(SECRET_RECORD, None, found.revision)
        async with asyncio.timeout(SOON_S):
            while (found := await store.read(SECRET_RECORD)) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert found.value == secret
        await store.write(SECRET_RECORD, b"x" * 64, found.revision)
        await until(lambda: "has changed" in caplog.text)
        assert secret.decode() not in caplog.text
    finally:
        keeping.cancel()


async def test_a_secret_that_is_too_short_is_made_anew() -> None:
    store = MemoryMembership(MemoryRegistry()).records
    await store.write(SECRET_RECORD, b"short", 0)
    assert len(await shared_secret(store)) == 64


def test_requests_are_ended_by_tenant() -> None:
    class Request:
        def __init__(self) -> None:
            self.tenant = ""
            self.errors: list[BaseException] = []

        def end(self, error: BaseException) -> None:
            self.errors.append(error)

    requests = TenantRequests()
    mine, other = Request(), Request()
    requests.add(mine, "acme")
    requests.add(other, "beta")
    gone = Unauthenticated("this tenant was deleted")
    assert requests.end("acme", gone) == 1
    assert (mine.errors, other.errors) == ([gone], [])
    requests.remove(mine)
    assert requests.end("acme", gone) == 0
    requests.remove(other)
    assert not requests._by_tenant
