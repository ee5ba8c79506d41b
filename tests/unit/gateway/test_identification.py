"""What a gateway reads and keeps running to know its clients."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from kvferry.config import GatewayConfig, JwtConfig
from kvferry.errors import ConfigError, KvferryError, NotReady, TenantLimited, Unauthenticated
from kvferry.gateway.identity import identification as identification_module
from kvferry.gateway.identity import tenants
from kvferry.gateway.identity.identification import Identification
from kvferry.gateway.identity.key_file import new_key
from kvferry.gateway.identity.tenants import DEFAULT_TENANT, SECRET_RECORD, Tenant
from kvferry.membership.base import RecordStore
from kvferry.tenancy.limits import Limits
from kvferry_sim.membership import MemoryMembership, MemoryRegistry
from kvferry_tenants.admin import TenantAdmin
from support.waiting import until, until_async

SECRET = b"a secret of all gateways, 32 bytes"
URL = JwtConfig(issuer="https://issuer", audience="kvferry", jwks_url="http://127.0.0.1:1/keys")  # nobody answers


class Request:
    def __init__(self) -> None:
        self.tenant = ""
        self.errors: list[KvferryError] = []

    def end(self, error: KvferryError) -> None:
        self.errors.append(error)


@asynccontextmanager
async def started(
    config: GatewayConfig, records: RecordStore, on_change: Callable[[], None] = lambda: None
) -> AsyncIterator[Identification]:
    tasks = asyncio.all_tasks()
    identification = Identification(config, records, on_change)
    identification.start()
    try:
        yield identification
    finally:
        await identification.close()
    assert asyncio.all_tasks() == tasks, "what was started has ended"


@pytest.fixture
def registry() -> MemoryRegistry:
    return MemoryRegistry()


@pytest.fixture
def records(registry: MemoryRegistry) -> RecordStore:
    return MemoryMembership(registry).records


def in_etcd(tmp_path: Path) -> GatewayConfig:
    """Return a configuration with a secret in a file: of etcd only the tenants are missing."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    return GatewayConfig(tenants_in_etcd=True, salt_secret_file=file)


async def test_where_everybody_is_the_default_tenant_nothing_is_read(records: RecordStore) -> None:
    async with started(GatewayConfig(), records) as identification:
        assert identification.missing() == []
        assert identification.access.identify(None, None) is DEFAULT_TENANT
        assert (identification.directory, identification.limits, identification.requests) == (None, None, None)
        for _ in range(10):
            await asyncio.sleep(0)
    assert await records.read(SECRET_RECORD) is None


async def test_with_a_key_file_clients_are_known_once_the_secret_of_salts_is_read(
    tmp_path: Path, registry: MemoryRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenants, "RETRY_S", 0.001)
    key = new_key(tmp_path / "keys.yaml", "acme", "ci")
    config = GatewayConfig(keys_file=tmp_path / "keys.yaml")
    salts = set()
    changed: list[bool] = []
    for _ in range(2):
        records = MemoryMembership(registry).records
        registry.begin_outage()
        async with started(config, records, lambda: changed.append(True)) as identification:
            await asyncio.sleep(0)
            assert identification.missing() == ["secret of tenants' salts"]
            with pytest.raises(NotReady, match="secret of tenants' salts"):
                identification.access.identify(f"Bearer {key}", None)
            assert not changed
            registry.end_outage()
            await until(lambda: bool(changed))  # so that this gateway is ready at once
            changed.clear()
            assert identification.missing() == []
            tenant = identification.access.identify(f"Bearer {key}", None)
            salts.add(tenant.cache_salt)
            found = await records.read(SECRET_RECORD)
            assert found is not None
            assert tenant == Tenant("acme", secret=found.value)
    assert len(salts) == 1, "gateways share pages"


async def test_the_secret_of_salts_is_kept_while_a_gateway_runs(
    tmp_path: Path, records: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        identification_module, "keep_secret", functools.partial(identification_module.keep_secret, check_s=0.001)
    )
    new_key(tmp_path / "keys.yaml", "acme", "ci")
    async with started(GatewayConfig(keys_file=tmp_path / "keys.yaml"), records) as identification:
        await until(lambda: not identification.missing())
        before = await records.read(SECRET_RECORD)
        assert before is not None
        await records.write(SECRET_RECORD, None, before.revision)

        async def is_back() -> bool:
            found = await records.read(SECRET_RECORD)
            return found is not None and found.value == before.value

        await until_async(is_back)


async def test_a_secret_in_a_file_is_the_one_of_salts_and_none_is_read_from_etcd(
    tmp_path: Path, records: RecordStore
) -> None:
    key = new_key(tmp_path / "keys.yaml", "acme", "ci")
    config = GatewayConfig(keys_file=tmp_path / "keys.yaml", salt_secret_file=tmp_path / "secret")
    with pytest.raises(ConfigError, match="salt_secret_file"):
        Identification(config, records, lambda: None)
    (tmp_path / "secret").write_bytes(SECRET)
    async with started(config, records) as identification:
        assert identification.missing() == []
        assert identification.access.identify(f"Bearer {key}", None) == Tenant("acme", secret=SECRET)
        for _ in range(10):
            await asyncio.sleep(0)
    assert await records.read(SECRET_RECORD) is None


async def test_tenants_of_etcd_are_followed_with_their_keys_and_limits(
    tmp_path: Path, registry: MemoryRegistry, records: RecordStore
) -> None:
    admin = TenantAdmin(MemoryMembership(registry))
    for name in ("acme", "default"):
        await admin.create(name)
    key, of_default = await admin.add_key("acme", "ci"), await admin.add_key("default", "ci")
    changed: list[bool] = []
    async with started(in_etcd(tmp_path), records, lambda: changed.append(True)) as identification:
        assert identification.missing() == ["tenants"]
        with pytest.raises(NotReady, match="read the tenants"):
            identification.access.identify(f"Bearer {key}", None)
        await until(lambda: bool(changed))
        assert identification.missing() == []
        assert identification.access.identify(f"Bearer {key}", None).name == "acme"
        assert identification.access.identify(f"Bearer {of_default}", None).contract.turn is not None, (
            "it has a share, too"
        )
        assert identification.limits is not None
        assert not identification.limits.admit("acme", num_choices=9, num_tokens=1)
        await admin.set_limits("acme", {"max_choices": 1})
        directory = identification.directory
        assert directory is not None
        await until(lambda: directory.limits("acme") == Limits(max_choices=1))
        assert identification.limits.admit("acme", num_choices=1, num_tokens=1)
        with pytest.raises(TenantLimited):
            identification.limits.admit("acme", num_choices=1, num_tokens=1)


async def test_without_tenants_in_etcd_the_default_tenant_has_no_turn(tmp_path: Path, records: RecordStore) -> None:
    key = new_key(tmp_path / "keys.yaml", "default", "ci")
    async with started(GatewayConfig(keys_file=tmp_path / "keys.yaml"), records) as identification:
        await until(lambda: not identification.missing())
        assert identification.access.identify(f"Bearer {key}", None).contract.turn is None


async def test_requests_of_a_tenant_end_when_it_is_deleted(
    tmp_path: Path, registry: MemoryRegistry, records: RecordStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    admin = TenantAdmin(MemoryMembership(registry))
    for name in ("acme", "beta", "idle"):
        await admin.create(name)
    async with started(in_etcd(tmp_path), records) as identification:
        await until(lambda: not identification.missing())
        directory, requests = identification.directory, identification.requests
        assert directory is not None
        assert requests is not None
        mine, other = Request(), Request()
        requests.add(mine, "acme")
        requests.add(other, "beta")
        for name in ("acme", "idle"):
            await admin.delete(name)
            await until(lambda name=name: not directory.has(name))  # type: ignore[misc]
    (error,) = mine.errors
    assert isinstance(error, Unauthenticated)
    assert error.message == "this tenant was deleted"
    assert not other.errors
    ended = [record.getMessage() for record in caplog.records if "ended" in record.getMessage()]
    assert ended == ["ended 1 requests of the tenant acme, which was deleted"]


async def test_tokens_are_taken_where_they_are_configured(tmp_path: Path, records: RecordStore) -> None:
    key = ed25519.Ed25519PrivateKey.generate()
    public = jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [public]}))
    (tmp_path / "secret").write_bytes(SECRET)
    claims = {"iss": "https://issuer", "aud": "kvferry", "exp": 1 << 40, "sub": "acme"}
    config = GatewayConfig(
        jwt=JwtConfig(issuer="https://issuer", audience="kvferry", jwks_file=tmp_path / "jwks.json"),
        salt_secret_file=tmp_path / "secret",
    )
    async with started(config, records) as identification:
        assert identification.missing() == []
        shown = f"Bearer {jwt.encode(claims, key, 'EdDSA')}"
        assert identification.access.identify(shown, None) == Tenant("acme", secret=SECRET)


async def test_a_gateway_waits_for_the_issuers_keys_only_where_clients_have_no_other_ones(
    tmp_path: Path, records: RecordStore
) -> None:
    (tmp_path / "secret").write_bytes(SECRET)
    new_key(tmp_path / "keys.yaml", "acme", "ci")
    config = GatewayConfig(jwt=URL, salt_secret_file=tmp_path / "secret")
    async with started(config, records) as identification:
        assert identification.missing() == ["keys of the tokens' issuer"]
    config = GatewayConfig(jwt=URL, salt_secret_file=tmp_path / "secret", keys_file=tmp_path / "keys.yaml")
    async with started(config, records) as identification:
        assert identification.missing() == []
