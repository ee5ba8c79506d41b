"""Changes of tenants by several administrators, on the twin and on a real etcd."""

from __future__ import annotations

import asyncio
import hashlib
import math

import pytest
from msgspec.structs import replace

from contract.test_record_contract import Site, server, site  # noqa: F401
from kvferry.errors import ConfigError, UnavailableError
from kvferry.tenancy import records
from kvferry.tenancy.namespace import MAX_EPOCH
from kvferry.tenancy.records import MAX_KEYS, KeyRecord, TenantRecord
from kvferry.tenancy.terms import CLASSES, TierTerms
from kvferry_sim.membership import MemoryMembership, MemoryRecords, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin

NOW_S = 1_000.0
FIRST_EPOCH = 1_000_000  # the time in ms


def admin_of(site: Site) -> TenantAdmin:  # noqa: F811
    return TenantAdmin(site.membership(), now_unix_s=lambda: NOW_S)


def wanted_key(name: str, number: int, **fields: object) -> KeyRecord:
    return KeyRecord(**({"name": name, "sha256": f"{number:064x}"} | fields))  # type: ignore[arg-type]


async def test_a_tenant_and_its_keys(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.create("acme")
    key = await admin.add_key("acme", "ci", expires_unix_s=NOW_S + 60, operator=True, group="web")
    digest = hashlib.sha256(key.encode()).hexdigest()
    expected = KeyRecord(
        name="ci", sha256=digest, created_unix_s=NOW_S, expires_unix_s=NOW_S + 60, operator=True, group="web"
    )
    assert (await admin.get("acme")).keys == (expected,)
    await admin.revoke_key("acme", "ci")
    assert (await admin.get("acme")).keys == ()


@pytest.mark.parametrize("name", ["", "Acme", "a_b", "../etc", "a" * 64, "a/b", "ä"])
async def test_names_that_are_no_tenants_are_refused(site: Site, name: str) -> None:  # noqa: F811
    admin = admin_of(site)
    with pytest.raises(ConfigError):
        await admin.create(name)
    assert (await admin.tenants()).records == {}


async def test_the_name_of_the_sum_of_others_is_refused(site: Site) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="tenant 'other': metrics"):
        await admin_of(site).create("other")
    with pytest.raises(ConfigError, match="tenant 'other': metrics"):
        await admin_of(site).apply([TenantRecord(name="other")], prune=False)


async def test_changes_that_make_no_sense_are_refused_by_name(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    for change in (admin.get("acme"), admin.delete("acme"), admin.add_key("acme", "ci"), admin.raise_epoch("acme")):
        with pytest.raises(ConfigError, match="no tenant 'acme'"):
            await change
    await admin.create("acme")
    with pytest.raises(ConfigError, match="a tenant 'acme' already"):
        await admin.create("acme")
    with pytest.raises(ConfigError, match="no key 'ci'"):
        await admin.revoke_key("acme", "ci")
    with pytest.raises(ConfigError, match="no key 'ci'"):
        await admin.rotate_key("acme", "ci", "ci2", 60)
    await admin.add_key("acme", "ci")
    with pytest.raises(ConfigError, match="a key 'ci' already"):
        await admin.add_key("acme", "ci")


async def test_a_rotated_key_works_until_the_overlap_ends(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.create("acme")
    await admin.add_key("acme", "ci", operator=True, group="web")
    await admin.rotate_key("acme", "ci", "ci2", 60)
    old, new = (await admin.get("acme")).keys
    assert (old.name, old.expires_unix_s) == ("ci", NOW_S + 60)
    assert (new.name, new.expires_unix_s, new.operator, new.group) == ("ci2", None, True, "web")
    assert old.sha256 != new.sha256
    with pytest.raises(ConfigError, match="say when the new one does"):
        await admin.rotate_key("acme", "ci", "ci3", 3600)
    await admin.rotate_key("acme", "ci", "ci3", 3600, expires_unix_s=NOW_S + 7200)
    keys = {key.name: key.expires_unix_s for key in (await admin.get("acme")).keys}
    assert keys == {"ci": NOW_S + 60, "ci2": None, "ci3": NOW_S + 7200}, "rotating again gives it no longer life"
    await admin.rotate_key("acme", "ci3", "ci4", 0, expires_unix_s=math.inf)
    assert (await admin.get("acme")).keys[-1].expires_unix_s is None
    with pytest.raises(ConfigError, match="'ci3' of tenant 'acme' has expired"):
        await admin.rotate_key("acme", "ci3", "ci5", 3600, expires_unix_s=math.inf)


@pytest.mark.parametrize("ends_s", [0.0, NOW_S - 1])
async def test_a_key_that_has_expired_is_not_rotated(site: Site, ends_s: float) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.apply([TenantRecord(name="acme", keys=(wanted_key("a", 1, expires_unix_s=ends_s),))], prune=False)
    with pytest.raises(ConfigError, match="has expired"):
        await admin.rotate_key("acme", "a", "b", 60)
    assert [key.name for key in (await admin.get("acme")).keys] == ["a"]


async def test_a_deleted_tenants_name_comes_back_with_a_new_epoch_and_no_keys(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.create("acme")
    await admin.add_key("acme", "ci")
    assert (await admin.raise_epoch("acme")).epoch == FIRST_EPOCH + 1
    assert (await admin.delete("acme")).epoch == FIRST_EPOCH + 2
    with pytest.raises(ConfigError, match="no tenant"):
        await admin.get("acme")
    again = await admin.create("acme")
    assert (again.epoch, again.first_epoch, again.keys) == (FIRST_EPOCH + 2, FIRST_EPOCH + 2, ())


async def test_a_name_whose_record_was_lost_gets_an_epoch_that_it_never_had(site: Site) -> None:  # noqa: F811
    membership = site.membership()
    assert (await TenantAdmin(membership, now_unix_s=lambda: NOW_S).create("acme")).epoch == FIRST_EPOCH
    found = await membership.records.read("tenants/acme")
    assert found is not None
    assert await membership.records.write("tenants/acme", None, found.revision), "by hand"
    again = await TenantAdmin(membership, now_unix_s=lambda: NOW_S + 0.001).create("acme")
    assert (again.epoch, again.first_epoch) == (FIRST_EPOCH + 1, FIRST_EPOCH + 1)


async def test_epochs_end_at_the_largest_number(site: Site) -> None:  # noqa: F811
    membership = site.membership()
    admin = TenantAdmin(membership, now_unix_s=lambda: NOW_S)
    await membership.records.write("tenants/acme", records.encode(TenantRecord(name="acme", epoch=MAX_EPOCH)), 0)
    with pytest.raises(ConfigError, match="no epoch left"):
        await admin.raise_epoch("acme")
    assert (await admin.delete("acme")).is_deleted
    with pytest.raises(ConfigError, match="no epoch left"):
        await admin.create("acme")


@pytest.mark.parametrize("value", [b"{", b"[" * 4000, b'{"name": "acme", "later": ' + b"[" * 4000, b"\xff"])
async def test_a_record_that_cannot_be_read_stops_no_other_and_can_be_deleted(
    site: Site,  # noqa: F811
    value: bytes,
) -> None:
    membership = site.membership()
    admin = TenantAdmin(membership, now_unix_s=lambda: NOW_S)
    await admin.create("beta")
    await membership.records.write("tenants/acme", value, 0)
    tenants = await admin.tenants()
    assert (list(tenants.records), list(tenants.faults)) == (["beta"], ["acme"])
    for change in (admin.get("acme"), admin.create("acme"), admin.add_key("acme", "ci")):
        with pytest.raises(ConfigError, match="'acme' cannot be read"):
            await change
    await admin.set_tier("beta", "volume", {"floor": 0.1})
    assert await admin.apply([TenantRecord(name="gamma")], prune=False)
    assert await admin.exists("acme")
    assert (await admin.delete("acme")).epoch >= FIRST_EPOCH
    assert not await admin.exists("acme")
    assert (await admin.create("acme")).epoch >= FIRST_EPOCH


async def test_a_file_replaces_a_record_that_cannot_be_read_and_prunes_one(site: Site) -> None:  # noqa: F811
    membership = site.membership()
    admin = TenantAdmin(membership, now_unix_s=lambda: NOW_S)
    for name in ("acme", "torn"):
        await membership.records.write(f"tenants/{name}", b"{", 0)
    changes = await admin.apply([TenantRecord(name="acme", keys=(wanted_key("a", 1),))], prune=True)
    assert [f"{change.tenant}: {change.line}" for change in changes] == [
        "acme: + tenant", "acme: + key a", "torn: - tenant",
    ]  # fmt: skip
    tenants = await admin.tenants()
    assert tenants.faults == {}
    assert tenants.records["torn"].is_deleted
    assert tenants.records["acme"].first_epoch == FIRST_EPOCH


async def test_the_limit_of_tenants_holds_for_files_and_deleted_ones_can_be_forgotten(
    site: Site,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(records, "MAX_TENANTS", 3)
    admin = admin_of(site)
    await admin.apply([TenantRecord(name=name) for name in ("a", "b", "c")], prune=False)
    with pytest.raises(ConfigError, match="5 tenants, with deleted ones: 3 is the limit"):
        await admin.apply([TenantRecord(name=name) for name in ("d", "e")], prune=False)
    assert await admin.apply([TenantRecord(name="a", class_name="basic")], prune=False)
    with pytest.raises(ConfigError, match="is not deleted"):
        await admin.forget("a")
    await admin.delete("a")
    with pytest.raises(ConfigError, match="3 is the limit"):
        await admin.create("d")
    store = site.membership().records
    await store.write("purges/a/k1.v1", b"{", 0)
    await admin.forget("a")
    assert list(await store.read_all("purges/a")) == []
    assert list((await admin.tenants()).records) == ["b", "c"]
    await admin.create("d")
    with pytest.raises(ConfigError, match="no tenant"):
        await admin.forget("a")


async def test_a_contract_has_a_class_and_perhaps_a_share_of_its_own(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    assert (await admin.create("acme")).share == CLASSES["standard"].share
    assert (await admin.set_contract("acme", class_name="premium")).share == CLASSES["premium"].share
    assert (await admin.set_contract("acme", share=2.5)).share == 2.5
    assert (await admin.set_contract("acme", class_name="basic")).share == 2.5
    assert (await admin.set_contract("acme", keeps_share=False)).share == CLASSES["basic"].share
    for fields in ({"class_name": "gold"}, {"share": 0.0}, {"share": -1.0}, {"share": float("nan")}, {"share": 1e9}):
        with pytest.raises(ConfigError):
            await admin.set_contract("acme", **fields)  # type: ignore[arg-type]
    wanted = TenantRecord(name="acme", class_name="standard", own_share=3.0)
    changes = await admin.apply([wanted], prune=False)
    assert [change.line for change in changes] == ["~ class: basic -> standard", "~ share: of its class -> 3.0"]
    assert (await admin.get("acme")).share == 3.0


async def test_terms_of_a_tier_change_field_by_field(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.create("acme")
    of_class = CLASSES["standard"].tiers["volume"]
    assert (await admin.set_tier("acme", "volume", {"floor": 0.3})).tiers["volume"] == replace(of_class, floor=0.3)
    assert (await admin.set_tier("acme", "volume", {"ttl_s": None})).tiers["volume"].floor == 0.3
    await admin.create("beta")
    assert (await admin.set_tier("beta", "volume", {"floor": 0.7, "cap": 1.0})).tiers["volume"].floor == 0.7
    with pytest.raises(ConfigError, match=r"floors in the volume tier sum to 110\.0%"):
        await admin.set_tier("acme", "volume", {"floor": 0.4})
    with pytest.raises(ConfigError, match="below the floor"):
        await admin.set_tier("beta", "volume", {"cap": 0.5})
    with pytest.raises(ConfigError, match="tier 'tape': one of"):
        await admin.set_tier("beta", "tape", {"cap": 0.5})
    assert (await admin.set_tier("beta", "volume", None)).tiers["volume"] == of_class
    await admin.delete("beta")
    wanted = TenantRecord(name="acme", own_tiers={"volume": TierTerms(floor=0.5)})
    changes = await admin.apply([wanted], prune=False)
    assert [change.line for change in changes] == [
        "~ volume tier: floor 0.3, cap 0.5, borrows, ttl no end -> floor 0.5, cap 0.5, borrows, ttl no end"
    ]
    full = TenantRecord(name="gamma", own_tiers={"volume": TierTerms(floor=0.6, cap=0.6)})
    with pytest.raises(ConfigError, match="sum to 110"):
        await admin.apply([full], prune=False)
    assert [change.line for change in await admin.differences([full], prune=True)] == ["+ tenant", "- tenant"]


async def test_no_change_is_lost_among_administrators_at_once(site: Site) -> None:  # noqa: F811
    admins = [admin_of(site) for _ in range(4)]
    await admins[0].create("acme")
    names = [f"k{number}" for number in range(12)]
    await asyncio.gather(*(admins[i % 4].add_key("acme", name) for i, name in enumerate(names)))
    assert sorted(key.name for key in (await admins[0].get("acme")).keys) == sorted(names)


async def test_a_file_of_tenants_is_applied_and_says_each_change(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.create("old")
    wanted = [
        TenantRecord(name="acme", keys=(wanted_key("a", 1), wanted_key("b", 2))),
        TenantRecord(name="beta"),
    ]
    dry = await admin.differences(wanted, prune=False)
    assert [f"{change.tenant}: {change.line}" for change in dry] == [
        "acme: + tenant", "acme: + key a", "acme: + key b", "beta: + tenant",
    ]  # fmt: skip
    assert list((await admin.tenants()).records) == ["old"], "a dry run changes nothing"
    assert await admin.apply(wanted, prune=False) == dry
    assert await admin.apply(wanted, prune=False) == []
    await admin.raise_epoch("acme")
    changed = [TenantRecord(name="acme", keys=(wanted_key("b", 2, operator=True), wanted_key("c", 3)))]
    assert [f"{change.tenant}: {change.line}" for change in await admin.apply(changed, prune=True)] == [
        "acme: - key a", "acme: ~ key b: operator", "acme: + key c", "beta: - tenant", "old: - tenant",
    ]  # fmt: skip
    assert (await admin.get("acme")).epoch == FIRST_EPOCH + 1, "applying a file makes no pages unreadable"
    assert [name for name, record in (await admin.tenants()).records.items() if not record.is_deleted] == ["acme"]


async def test_a_key_of_two_tenants_is_refused(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    await admin.apply([TenantRecord(name="acme", keys=(wanted_key("a", 1),))], prune=False)
    with pytest.raises(ConfigError, match="also one of 'acme'"):
        await admin.apply([TenantRecord(name="beta", keys=(wanted_key("b", 1),))], prune=False)
    moved = [TenantRecord(name="acme"), TenantRecord(name="beta", keys=(wanted_key("b", 1),))]
    assert await admin.apply(moved, prune=False)


async def test_one_key_under_two_names_is_refused(site: Site) -> None:  # noqa: F811
    twice = TenantRecord(name="acme", keys=(wanted_key("a", 1), wanted_key("b", 1)))
    with pytest.raises(ConfigError, match="one key under two names"):
        await admin_of(site).apply([twice], prune=False)


async def test_the_limit_of_keys_holds_in_etcd(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    keys = tuple(wanted_key(f"k{number}", number) for number in range(MAX_KEYS))
    await admin.apply([TenantRecord(name="acme", keys=keys)], prune=False)
    with pytest.raises(ConfigError, match=f"{MAX_KEYS} is the limit"):
        await admin.add_key("acme", "one-more")


async def test_during_an_outage_a_change_fails_with_its_reason(site: Site) -> None:  # noqa: F811
    admin = admin_of(site)
    async with site.outage():
        with pytest.raises(UnavailableError):
            await admin.create("acme")


async def test_a_change_whose_answer_is_lost_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    membership = MemoryMembership(MemoryRegistry())
    admin = TenantAdmin(membership, now_unix_s=lambda: NOW_S)
    await admin.create("acme")
    write, lost = MemoryRecords.write, [True, False, True]

    async def write_and_lose(self: MemoryRecords, name: str, value: bytes | None, revision: int) -> bool:
        written = await write(self, name, value, revision)
        if lost and lost.pop(0):
            raise UnavailableError("the answer was lost")
        return written

    monkeypatch.setattr(MemoryRecords, "write", write_and_lose)
    key = await admin.add_key("acme", "ci")
    (record,) = (await admin.get("acme")).keys
    assert record.sha256 == hashlib.sha256(key.encode()).hexdigest()
    await admin.raise_epoch("acme")
    assert (await admin.raise_epoch("acme")).epoch == FIRST_EPOCH + 2
    assert not lost
