"""Who gets in as whom."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import GatewayConfig, ServerTlsConfig
from kvferry.errors import ConfigError, NotReady, PermissionDenied, Unauthenticated
from kvferry.gateway.identity.access import Access
from kvferry.gateway.identity.key_file import KeyFile, new_key
from kvferry.gateway.identity.tenant_directory import TenantDirectory
from kvferry.gateway.identity.tenants import DEFAULT_TENANT, Tenant, Tenants
from kvferry.membership.base import RecordChanged, Records
from kvferry.router.request import Contract
from kvferry.tenancy.namespace import Namespace
from kvferry.tenancy.records import KeyRecord, TenantRecord, encode
from kvferry_sim.membership import MemoryMembership, MemoryRegistry

SECRET = b"a secret of all gateways, 32 bytes"
JWT = {"issuer": "https://issuer", "audience": "kvferry", "jwks_url": "https://issuer/keys"}
CERTIFICATES = ServerTlsConfig(cert_file=Path("c"), key_file=Path("k"), client_ca_file=Path("ca"))


def test_where_nobody_has_to_say_who_they_are_everybody_is_the_default_tenant() -> None:
    access = Access(GatewayConfig(), Tenants(SECRET))
    assert access.is_open
    access.require_metrics(None, None)
    assert access.identify(None, None) is DEFAULT_TENANT
    assert (DEFAULT_TENANT.cache_salt, DEFAULT_TENANT.contract) == ("", Contract())


def test_a_key_names_its_tenant(tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys.yaml", "acme", "ci")
    access = Access(GatewayConfig(keys_file=tmp_path / "keys.yaml"), Tenants(SECRET))
    for shown in (f"Bearer {key}", f"bearer {key}", f"Bearer   {key} "):
        assert access.identify(shown, None) == Tenant("acme", secret=SECRET)


@pytest.mark.parametrize(
    "shown", [None, "", "Bearer", "Bearer ", "Bearer kvf_wrong-secret", "Basic wrong-secret", "kvf"]
)
def test_whoever_shows_no_key_is_refused_and_what_was_shown_is_not_repeated(tmp_path: Path, shown: str | None) -> None:
    new_key(tmp_path / "keys.yaml", "acme", "ci")
    access = Access(GatewayConfig(keys_file=tmp_path / "keys.yaml"), Tenants(SECRET))
    with pytest.raises(Unauthenticated) as refused:
        access.identify(shown, None)
    assert "secret" not in refused.value.message


def test_a_certificate_names_its_tenant_where_there_are_no_keys() -> None:
    access = Access(GatewayConfig(tls=CERTIFICATES), Tenants(SECRET))
    assert access.identify(None, "acme") == Tenant("acme", secret=SECRET)
    with pytest.raises(Unauthenticated, match="client certificate"):
        access.identify("Bearer x", None)
    for name in ("", "Acme Corp", "../etc", "other", "default"):
        with pytest.raises(PermissionDenied, match=f"no tenant: tenant {name!r}"):
            access.identify(None, name)


async def test_names_with_a_meaning_of_their_own_are_not_for_everybody(tmp_path: Path) -> None:
    """`other` is a sum of metrics, and `default` the tenant of clients that nobody identifies."""
    file = tmp_path / "keys.yaml"
    with pytest.raises(ConfigError, match="tenant 'other': metrics have the sum"):
        new_key(file, "other", "ci")
    key = new_key(file, "default", "ci")  # as the chart's first one
    access = Access(GatewayConfig(keys_file=file), Tenants(SECRET), tokens=_TokenOf("default"))  # type: ignore[arg-type]
    assert access.identify(f"Bearer {key}", None).name == "default"
    for name in ("other", "default"):
        access = Access(GatewayConfig(keys_file=file), Tenants(SECRET), tokens=_TokenOf(name))  # type: ignore[arg-type]
        with pytest.raises(PermissionDenied, match=f"no tenant: tenant '{name}'"):
            access.identify("Bearer a.b.c", None)
    file.write_text(file.read_text().replace("'default'", "'other'"))
    with pytest.raises(ConfigError, match="entry 1: tenant 'other'"):
        KeyFile(file)
    # A tenant of that name that an operator created is as any other one.
    directory = TenantDirectory(MemoryMembership(MemoryRegistry()).records)
    await directory.follower.take(Records({}))
    await directory.follower.take(RecordChanged("default", encode(TenantRecord(name="default", epoch=7))))
    config = GatewayConfig(tls=CERTIFICATES, tenants_in_etcd=False)
    created = Access(config, Tenants(SECRET), directory).identify(None, "default")
    assert created.cache_salt not in ("", DEFAULT_TENANT.cache_salt)


def test_with_both_both_are_needed_and_the_key_names_the_tenant(tmp_path: Path) -> None:
    key = new_key(tmp_path / "keys.yaml", "acme", "ci")
    access = Access(GatewayConfig(tls=CERTIFICATES, keys_file=tmp_path / "keys.yaml"), Tenants(SECRET))
    assert access.identify(f"Bearer {key}", "Somebody Else") == Tenant("acme", secret=SECRET)
    with pytest.raises(Unauthenticated):
        access.identify(f"Bearer {key}", None)
    with pytest.raises(Unauthenticated):
        access.identify(None, "acme")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_what_is_of_all_tenants_is_for_operators_wherever_keys_exist(tmp_path: Path, host: str) -> None:
    """A proxy in front of loopback passes on what the network asks, and so does a browser for a page (rebinding)."""
    file = tmp_path / "keys.yaml"
    key, operators = new_key(file, "acme", "ci"), new_key(file, "acme", "ops", operator=True)
    access = Access(GatewayConfig(host=host, keys_file=file), Tenants(SECRET))
    access.require_metrics(f"Bearer {operators}", None)
    with pytest.raises(PermissionDenied, match="operator: true"):
        access.require_metrics(f"Bearer {key}", None)
    with pytest.raises(Unauthenticated):
        access.require_metrics(None, None)
    by_certificate = Access(GatewayConfig(host=host, tls=CERTIFICATES), Tenants(SECRET))
    with pytest.raises(PermissionDenied):
        by_certificate.require_metrics(None, "acme")


def test_a_key_for_metrics_is_no_tenant_s(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = f"Bearer {new_key(file, 'acme', 'prometheus', metrics=True)}"
    access = Access(GatewayConfig(host="10.0.0.1", keys_file=file), Tenants(SECRET))
    access.require_metrics(key, None)
    assert not access.is_operator(key, None)
    with pytest.raises(PermissionDenied, match="this key reads metrics and targets, and nothing else"):
        access.identify(key, None)


def test_two_tenants_share_neither_salt_nor_folder() -> None:
    acme, beta = Tenant("acme", secret=SECRET), Tenant("beta", secret=SECRET)
    assert len({acme.cache_salt, beta.cache_salt, DEFAULT_TENANT.cache_salt}) == 3
    assert acme.contract.namespace == Namespace("acme")
    assert acme.contract.namespace != beta.contract.namespace


def test_a_clients_salt_parts_its_own_pages_and_reaches_no_others() -> None:
    acme, beta = Tenant("acme", secret=SECRET), Tenant("beta", secret=SECRET)
    plain = {acme.cache_salt, beta.cache_salt, DEFAULT_TENANT.cache_salt}
    clients = ["a", "b", "ab", beta.cache_salt, acme.salt_of("a"), "\0", "\ud800", "x" * 256]
    salted = {tenant.salt_of(salt) for tenant in (acme, beta, DEFAULT_TENANT) for salt in clients}
    assert len(salted) == 3 * len(clients)
    assert not salted & plain
    assert acme.salt_of("a") == Tenant("acme", secret=SECRET).salt_of("a"), "the same on every gateway"


def test_with_shares_the_default_tenant_waits_for_its_turn_too() -> None:
    secret = bytes(32)
    assert Tenants(secret).named("default").contract.turn is None
    turn = Tenants(secret, have_turns=True).named("default", share=1.0).contract.turn
    assert turn is not None
    assert (turn.tenant, turn.share) == ("default", 1.0)
    assert Tenants(secret, have_turns=True).named("default").cache_salt == ""


async def test_the_pool_of_a_tenant_is_that_of_its_record_or_of_the_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    keys = {tenant: new_key(file, tenant, "ci") for tenant in ("acme", "beta")}
    file.write_text(file.read_text().replace("}", ", pool: finance}", 1))
    config = GatewayConfig(keys_file=file, tenants_in_etcd=True)
    assert Access(GatewayConfig(keys_file=file), Tenants(SECRET)).identify(f"Bearer {keys['acme']}", None).pool == (
        "finance"
    )
    directory = TenantDirectory(MemoryMembership(MemoryRegistry()).records)
    await directory.follower.take(Records({}))
    access = Access(config, Tenants(SECRET), directory)
    pools = {tenant: access.identify(f"Bearer {key}", None).pool for tenant, key in keys.items()}
    assert pools == {"acme": "finance", "beta": ""}
    for tenant, pool in (("acme", ""), ("beta", "research")):
        record = encode(TenantRecord(name=tenant, pool=pool))
        await directory.follower.take(RecordChanged(tenant, record))
        assert access.identify(f"Bearer {keys[tenant]}", None).pool == pool, "a record counts before the file"


def test_a_certificate_of_a_tenant_of_the_key_file_has_its_pool_too(tmp_path: Path) -> None:
    """So no way of showing who one is leads around the pool."""
    file = tmp_path / "keys.yaml"
    key = new_key(file, "acme", "ci")
    file.write_text(file.read_text().replace("}", ", pool: finance}"))
    access = Access(GatewayConfig(tls=CERTIFICATES, keys_file=file), Tenants(SECRET), tokens=_Tokens())  # type: ignore[arg-type]
    assert access.identify(f"Bearer {key}", "x").pool == "finance"
    assert access.identify("Bearer a.b.c", "x").pool == "finance"


class _Tokens:
    def tenant_of(self, token: str) -> str:
        return "acme"


class _TokenOf:
    def __init__(self, tenant: str) -> None:
        self._tenant = tenant

    def tenant_of(self, token: str) -> str:
        assert token == "a.b.c"
        return self._tenant


async def directory_with(*records: TenantRecord) -> TenantDirectory:
    directory = TenantDirectory(MemoryMembership(MemoryRegistry()).records)
    await directory.follower.take(Records({record.name: encode(record) for record in records}))
    return directory


async def test_a_token_lets_in_tenants_with_a_record_and_no_others() -> None:
    config = GatewayConfig(tenants_in_etcd=True)
    directory = await directory_with(TenantRecord(name="acme", epoch=3))
    known = Access(config, Tenants(SECRET), directory, tokens=_TokenOf("acme"))  # type: ignore[arg-type]
    tenant = known.identify("Bearer a.b.c", None)
    assert (tenant.name, tenant.epoch) == ("acme", 3)
    unknown = Access(config, Tenants(SECRET), directory, tokens=_TokenOf("evil"))  # type: ignore[arg-type]
    with pytest.raises(PermissionDenied, match="'evil' is no tenant of this cluster"):
        unknown.identify("Bearer a.b.c", None)
    with pytest.raises(PermissionDenied, match="'evil'"):
        unknown.require_metrics("Bearer a.b.c", None)
    long = Access(config, Tenants(SECRET), directory, tokens=_TokenOf("n" * 500))  # type: ignore[arg-type]
    with pytest.raises(PermissionDenied) as refused:
        long.identify("Bearer a.b.c", None)
    assert refused.value.message == f"{'n' * 64!r} is no tenant of this cluster", "an answer has an end"


async def test_a_deleted_tenant_may_do_nothing_with_any_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = new_key(file, "acme", "ops", operator=True)
    directory = await directory_with(TenantRecord(name="acme", is_deleted=True))
    access = Access(GatewayConfig(keys_file=file, tenants_in_etcd=True), Tenants(SECRET), directory)
    for ask in (access.identify, access.require_metrics, access.is_operator):
        with pytest.raises(Unauthenticated, match="this tenant was deleted"):
            ask(f"Bearer {key}", None)


def test_nobody_gets_in_before_the_tenants_are_read(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = new_key(file, "acme", "ops", operator=True)
    directory = TenantDirectory(MemoryMembership(MemoryRegistry()).records)
    access = Access(GatewayConfig(keys_file=file, tenants_in_etcd=True), Tenants(SECRET), directory)
    for shown in (f"Bearer {key}", "Bearer kvf_unknown"):
        for ask in (access.identify, access.require_metrics):
            with pytest.raises(NotReady, match="waits for etcd to read the tenants"):
                ask(shown, None)


async def test_a_key_of_a_record_has_its_group_and_rights_and_its_tenants_share() -> None:
    keys = {
        name: KeyRecord(name=name, sha256=hashlib.sha256(f"kvf_{name}".encode()).hexdigest(), **values)
        for name, values in {"ci": {"group": "g"}, "ops": {"operator": True}}.items()
    }
    record = TenantRecord(name="acme", epoch=3, own_share=7.0, keys=tuple(keys.values()))
    access = Access(GatewayConfig(tenants_in_etcd=True), Tenants(SECRET, have_turns=True), await directory_with(record))
    tenant = access.identify("Bearer kvf_ci", None)
    assert (tenant.name, tenant.epoch, tenant.group) == ("acme", 3, "g")
    assert tenant.contract.turn is not None
    assert tenant.contract.turn.share == 7.0
    assert not access.is_operator("Bearer kvf_ci", None)
    assert access.is_operator("Bearer kvf_ops", None)
    with pytest.raises(PermissionDenied):
        access.require_metrics("Bearer kvf_ci", None)
    access.require_metrics("Bearer kvf_ops", None)


def test_where_nobody_has_to_say_who_they_are_everybody_is_shown_what_operators_are() -> None:
    assert Access(GatewayConfig(), Tenants(SECRET)).is_operator(None, None)


def test_a_key_is_looked_for_as_it_was_sent(tmp_path: Path) -> None:
    """Also one that no text has: a lone surrogate is no fault of the gateway's."""
    new_key(tmp_path / "keys.yaml", "acme", "ci")
    access = Access(GatewayConfig(keys_file=tmp_path / "keys.yaml"), Tenants(SECRET))
    with pytest.raises(Unauthenticated):
        access.identify("Bearer \ud800", None)


@pytest.mark.parametrize(
    ("config", "has_directory", "wanted"),
    [
        ({"keys_file": "keys.yaml"}, False, "an API key is required: authorization: Bearer KEY"),
        ({"tenants_in_etcd": True}, True, "an API key is required: authorization: Bearer KEY"),
        ({"jwt": JWT}, False, "a token is required: authorization: Bearer TOKEN"),
    ],
)
async def test_whoever_shows_nothing_is_told_what_to_show(
    tmp_path: Path, config: dict[str, Any], has_directory: bool, wanted: str
) -> None:
    new_key(tmp_path / "keys.yaml", "acme", "ci")
    if "keys_file" in config:
        config = {"keys_file": tmp_path / "keys.yaml"}
    access = Access(GatewayConfig(**config), Tenants(SECRET), await directory_with() if has_directory else None)
    with pytest.raises(Unauthenticated) as refused:
        access.identify(None, None)
    assert refused.value.message == wanted


@pytest.mark.parametrize(
    ("config", "checks"),
    [
        ({}, True),
        ({"host": "10.0.0.1"}, False),
        ({"tls": CERTIFICATES}, False),
        ({"host": "0.0.0.0", "tls": CERTIFICATES}, False),
    ],
)
def test_pages_are_checked_where_any_browser_may_ask(config: dict[str, Any], checks: bool) -> None:
    assert Access(GatewayConfig(**config), Tenants(SECRET)).checks_pages is checks


def test_an_operators_key_needs_the_certificate_too(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    key = f"Bearer {new_key(file, 'acme', 'ops', operator=True)}"
    access = Access(GatewayConfig(tls=CERTIFICATES, keys_file=file), Tenants(SECRET))
    assert access.is_operator(key, "somebody")
    with pytest.raises(Unauthenticated, match="client certificate"):
        access.is_operator(key, None)
